"""Token ids and labels of the prompt formats of axolotl and LLaMA-Factory, as their documentation has them.

`verify` compares them with finetune's. TRL is installed with finetune, so its ids come from TRL itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.data.chat_texts import render_chat
from finetune.data.loss_mask import IGNORED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from finetune.data.examples import Example, Row

BOS, EOS = "{bos}", "{eos}"  # stand for the tokenizer's own tokens
CHATML = ("<|im_start|>system\n{}<|im_end|>\n", "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n")
FARTHEST = 3  # tokens from the end of a turn to the token that ends it
ALPACA = "Below is an instruction that describes a task"
ALPACA_END = "Write a response that appropriately completes the request."


class Tokens(NamedTuple):
    """The token ids of an example, and the labels of its tokens."""

    ids: list[int]
    labels: list[int]


class NotCompared(Exception):
    """The reason why finetune does not know the tool's token ids of an example."""


class Template(NamedTuple):
    """A template of LLaMA-Factory. `{}` stands for the content of a message."""

    system: str
    user: str
    assistant: str
    prefix: str = ""
    default_system: str = ""
    in_first_turn: bool = False
    """Whether the system message is a part of the first user message."""


TEMPLATES = {  # src/llamafactory/data/template.py (August 2026)
    "default": Template("System: {}{eos}\n", "Human: {}{eos}\nAssistant:", "{}{eos}\n"),
    "alpaca": Template(
        "{}",
        "### Instruction:\n{}\n\n### Response:\n",
        "{}{eos}\n\n",
        default_system=f"{ALPACA}. {ALPACA_END}\n\n",
    ),
    "chatml": Template(*CHATML, "{}<|im_end|>\n"),
    "qwen": Template(
        *CHATML,
        "{}<|im_end|>\n",
        default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    ),
    "llama3": Template(
        "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{}<|eot_id|>",
        prefix=BOS,
    ),
    "mistral": Template("{}\n\n", "[INST] {}[/INST]", " {}{eos}", prefix=BOS, in_first_turn=True),
    "gemma": Template(
        "{}\n\n",
        "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
        "{}<end_of_turn>\n",
        prefix=BOS,
        in_first_turn=True,
    ),
    "phi": Template("<|system|>\n{}<|end|>\n", "<|user|>\n{}<|end|>\n<|assistant|>\n", "{}<|end|>\n"),
}
TEMPLATES["gemma3"] = TEMPLATES["gemma"]


def of_llamafactory(
    example: Example, tokenizer: PreTrainedTokenizerBase, template: str, *, on_prompt: bool, last_turn: bool
) -> Tokens:
    """Return ids and labels of an example in a template of LLaMA-Factory. It encodes each message by itself.

    Raises:
        NotCompared: the template is not known here, or the chat has tools.
    """
    if template not in TEMPLATES:
        named = (
            f"LLaMA-Factory's template {template}"
            if template
            else "the template, because the config names none"
        )
        raise NotCompared(f"finetune does not know {named}")
    messages, known = list(example.messages or ()), TEMPLATES[template]
    if not messages or example.tools or any(turn["role"] == "tool" for turn in messages):
        raise NotCompared("finetune does not know how LLaMA-Factory writes this example")
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else known.default_system
    before = known.system.replace("{}", system) if system else ""
    ids, labels = list[int](), list[int]()
    for number, turn in enumerate(messages):
        is_answer = turn["role"] == "assistant"
        content = turn["content"]
        if number == 0 and known.in_first_turn:
            content, before = before + content, ""
        text = (known.assistant if is_answer else known.user).replace("{}", content)
        own = _encode(known.prefix + before + text if number == 0 else text, tokenizer)
        trains = on_prompt or (is_answer and (not last_turn or number == len(messages) - 1))
        ids += own
        labels += own if trains else [IGNORED] * len(own)
    return Tokens(ids, labels)


def _encode(text: str, tokenizer: Any) -> list[int]:
    """Encode a text whose special tokens are written as `BOS` and `EOS`."""
    text = text.replace(BOS, tokenizer.bos_token or "").replace(EOS, tokenizer.eos_token or "")
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def of_axolotl(
    example: Example,
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    *,
    on_prompt: bool,
    ends: Sequence[str] = (),
) -> Tokens:
    """Return ids and labels of an example for the `type` of an axolotl dataset.

    Args:
        ends: the config's `eot_tokens`.

    Raises:
        NotCompared: the type is not known here.
    """
    if kind in ("chat_template", "sharegpt") and example.messages:
        return _chat_of_axolotl(example, tokenizer, ends, on_prompt=on_prompt)
    if kind == "completion":
        ids = [*tokenizer(example.completion)["input_ids"], tokenizer.eos_token_id]
        return Tokens(ids, list(ids))
    if kind != "alpaca" or "instruction" not in row.value:
        raise NotCompared(f"finetune does not know axolotl's type {kind}")
    given, more = row.value, row.value.get("input") or ""
    paired = ", paired with an input that provides further context" if more else ""
    middle = f"\n\n### Input:\n{more}" if more else ""
    head = f"{ALPACA}{paired}. {ALPACA_END}\n\n### Instruction:\n{given['instruction']}{middle}"
    prompt = tokenizer(f"{head}\n\n### Response:\n")["input_ids"]
    answer = [*tokenizer(given["output"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return Tokens(prompt + answer, (prompt if on_prompt else [IGNORED] * len(prompt)) + answer)


def _chat_of_axolotl(
    example: Example, tokenizer: PreTrainedTokenizerBase, ends: Sequence[str], *, on_prompt: bool
) -> Tokens:
    """The rendered chat. The content of each answer trains, and the EOS token or an EOT token near it."""
    eos: set[Any] = {int(token) for token in [tokenizer.eos_token_id] if isinstance(token, int)}
    stops = {token for word in ends if isinstance(token := tokenizer.convert_tokens_to_ids(word), int)}
    try:
        text = render_chat(tokenizer, example.messages or [], example.tools, prompt=False)
    except ValueError as error:
        raise NotCompared(f"the chat template does not render the example: {error}") from None
    messages = list(example.messages or ())
    for number, turn in enumerate(messages[:-1], 1):
        if turn["role"] == "assistant" and not text.startswith(
            render_chat(tokenizer, messages[:number], example.tools, prompt=False).rstrip()
        ):
            raise NotCompared("the chat template changes earlier turns, where axolotl trains on other tokens")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    labels, place = [IGNORED] * len(ids), 0
    for turn in example.messages or ():
        content = turn["content"].strip()
        start = text.find(content, place)
        if start < 0:
            raise NotCompared("the chat template changes the content of a message")
        place = start + len(content)
        if turn["role"] == "assistant":
            inside = [n for n, (low, high) in enumerate(offsets) if low < place and high > start]
            end = max(inside, default=len(ids)) + 1
            for kind in (stops or eos, eos):
                after = next((n for n in range(end, len(ids)) if ids[n] in kind), end + FARTHEST + 1)
                inside += [after] if after <= end + FARTHEST else []
            for number in inside:
                labels[number] = ids[number]
    return Tokens(ids, list(ids) if on_prompt else labels)
