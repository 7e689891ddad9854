"""What an answer is compared with: the reference and what was said, both by way of tokens."""

from __future__ import annotations

import re
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from finetune.autoconfig import memory_estimate
from finetune.core.errors import UserError
from finetune.data import chat_templates, encoding
from finetune.data.examples import Row
from finetune.data.formats import convert
from finetune.data.preparation import HeldOut
from finetune.evaluation import chat_session, results, scoring, tasks
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe.schema import Data, Eval, Model
from support import architectures
from support.paths import MODEL

USER = {"role": "user", "content": "Hi there"}
HELLO = {"role": "assistant", "content": "Hello you"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def tokenizer_with(template: str) -> Any:
    """The embedded tokenizer with a bundled template, and the special tokens that it names."""
    tokenizer: Any = load_tokenizer(Model(name=str(MODEL)), chat_templates.read_template(template))
    tokenizer.add_tokens(
        sorted(set(re.findall(r"<\|[a-z_]+\|>", tokenizer.chat_template))), special_tokens=True
    )
    return tokenizer


def held_out(tokenizer: Any, messages: list[Any], data: Data) -> tuple[encoding.Encoder, HeldOut]:
    example = convert(Row({"messages": messages}, "a:1"), data, "messages")
    encoder = encoding.make_encoder(tokenizer, data, chats=True)
    (encoded,) = encoder([example])
    assert isinstance(encoded, encoding.Encoded), encoded
    return encoder, HeldOut(example, [encoded])


def test_reasoning_before_an_answer_is_not_compared() -> None:
    assert encoding.without_thinking("<think>\n\n</think>\n\n{}") == "{}"
    assert encoding.without_thinking("hm\n</think>\n\n{}\n") == "{}", "its prompt began it"
    assert encoding.without_thinking(" a <think>b</think>") == "a <think>b</think>"
    task = tasks.Task(task="t", data="d", kind="exact_match", prompt="")
    assert tasks.right(task, "hm\n</think>\n\nyes", "yes") == 1.0


@pytest.mark.parametrize(
    "template", ["qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8", "gptoss", "muse_glimmer"]
)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_perfect_answer_is_the_reference(template: str, train_on: Any) -> None:
    """Some templates begin the reasoning in the prompt, or write a channel or a name before the answer."""
    tokenizer, data = tokenizer_with(template), Data(name="-", train_on=train_on)
    encoder, row = held_out(tokenizer, [USER, HELLO], data)
    ((wanted, tokens),) = scoring.references([row], tokenizer, data)
    (prompt,) = encoder.prompts([row.example])
    answer = row.documents[0].ids[len(prompt) :]
    assert row.documents[0].ids[: len(prompt)] == prompt and answer[: len(tokens)] == tokens
    said = tokenizer.decode(answer, skip_special_tokens=True)
    assert encoding.without_thinking(said) == wanted and wanted.endswith("Hello you")


@pytest.mark.parametrize("is_special", [True, False])
def test_token_that_ends_an_answer_is_no_part_of_it(is_special: bool) -> None:
    """Tokens of `model.add_tokens` are not special, and a decoder writes them."""
    tokenizer, data = tokenizer_with("qwen2_5"), Data(name="-")
    end = tokenizer.eos_token_id
    if not is_special:
        end = tokenizer.convert_tokens_to_ids("you")
    _, row = held_out(tokenizer, [USER, HELLO], data)
    ((wanted, tokens),) = scoring.references([row], tokenizer, data, [end])
    assert end in tokens and wanted == ("Hello you" if is_special else "Hello")
    listener = chat_session.Listener(tokenizer, lambda _: None, [end])
    for part in ([1, 2], tokens, [end, 5]):
        listener.put(torch.tensor(part))
    assert listener.text == wanted == scoring.answer_text(tokenizer, tokens, [end]).strip()


@pytest.mark.parametrize(
    ("messages", "train_on"),
    [
        ([USER, CALL], "assistant"),
        ([USER, CALL], "all"),
        ([USER, HELLO, USER, {**CALL, "weight": 0}], "assistant"),
    ],
)
def test_a_call_is_wanted_whether_it_is_trained_or_not(messages: list[Any], train_on: Any) -> None:
    tokenizer, data = tokenizer_with("qwen2_5"), Data(name="-", train_on=train_on)
    _, row = held_out(tokenizer, messages, data)
    ((wanted, tokens),) = scoring.references([row], tokenizer, data)
    assert wanted == CALLED and tokens[-1] == tokenizer.eos_token_id


def test_sample_shows_the_reference_that_exact_match_compares() -> None:
    """The content of a message has no tool calls, and still has the reasoning."""
    tokenizer, data = tokenizer_with("qwen2_5"), Data(name="-")
    _, row = held_out(tokenizer, [USER, CALL], data)
    found = scoring.Score([1.0], [2], [CALLED], [True], [True], [CALLED])
    sample = results._sample([row], found, found, 0)
    assert sample["reference"] == sample["tuned"] == CALLED
    assert found.part([0]).references == [CALLED]
    plain = scoring.Score([1.0], [2], [""])
    assert results._sample([row], plain, plain, 0)["reference"] == ""


def test_what_ends_an_answer_is_what_was_taught_and_what_the_model_declares() -> None:
    """And no other family's end of turn: gpt-oss ends its reasoning, not its answer, with <|end|>."""
    tokenizer, opened = tokenizer_with("qwen2_5"), SimpleNamespace(generation_config=GenerationConfig())
    tokenizer.eos_token, taught = "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]
    tokenizer.add_tokens(["<|end|>"], special_tokens=True)
    assert tokenizer.convert_ids_to_tokens(scoring.stop_ids(opened, tokenizer)) == taught
    opened.generation_config.eos_token_id = [7, 9]
    assert {*scoring.stop_ids(opened, tokenizer)} == {7, 9, *tokenizer.convert_tokens_to_ids(taught)}
    tokenizer.chat_template = None
    assert scoring.stop_ids(opened, tokenizer) == sorted([7, 9, tokenizer.eos_token_id])


def test_batches_hold_each_row_once_and_stay_small() -> None:
    lengths = [5, 20000, 300, 300, 1, 7000]
    batches = list(scoring.batches(lengths, 2))
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    assert all(
        len(b) * max(lengths[i] for i in b) <= memory_estimate.EVALUATED_TOKENS or len(b) == 1
        for b in batches
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_score_prompt_without_room_stops_every_process(rank: int, monkeypatch) -> None:
    """Process 0 alone would answer it. If it stopped alone, the others would wait for it."""
    tokenizer, data = load_tokenizer(Model(name=str(MODEL))), Data(name="-")
    long = {"role": "user", "content": "Who came, and who went? " * 12}
    rows = [held_out(tokenizer, [asked, HELLO], data)[1] for asked in (long, USER)]
    share = SimpleNamespace(process_index=rank, num_processes=2)
    monkeypatch.setattr(scoring, "PartialState", lambda: share)
    monkeypatch.setattr(scoring, "stop_ids", lambda *_: [])
    config = LlamaConfig(max_position_embeddings=64)
    with pytest.raises(UserError, match="leaves no room for an answer"):
        scoring.score(SimpleNamespace(config=config), tokenizer, rows, data, Eval())


class Numbers:
    """A tokenizer whose text is the token ids, and that never ends an answer."""

    pad_token_id, eos_token_id, chat_template, special_tokens_map = 0, None, None, MappingProxyType({})

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


def answers_in_batches(model: Any) -> tuple[list[str], list[str]]:
    """The answers to seven prompts, one by one and in batches."""
    draw = torch.Generator().manual_seed(3)
    lengths = (3, 9, 17, 9, 5, 12, 3)
    prompts = [torch.randint(3, 97, (length,), generator=draw).tolist() for length in lengths]
    tokenizer: Any = Numbers()
    with torch.no_grad():
        alone, together = (
            [text for text, _ in scoring.greedy_answers(model, tokenizer, prompts, 12, size)]
            for size in (1, 8)
        )
    return alone, together


BIASES = {"mamba": {"use_bias": True}, "mamba2": {"use_bias": True}, "bamba": {"mamba_proj_bias": True}}


@pytest.mark.parametrize("family", ["llama", *sorted(scoring.READ_PADDING), *BIASES])
def test_answers_in_a_batch_are_those_of_each_prompt_alone(family: str, monkeypatch) -> None:
    monkeypatch.setattr(scoring, "stop_ids", lambda *_: [])
    torch.manual_seed(0)
    config = architectures.config_of(family)
    config.update(BIASES.get(family, {}))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert scoring.reads_padding(model) is (family != "llama")
    for name, weight in model.named_parameters():
        if (weight.dim() > 1 and "conv" not in name) or name.endswith("in_proj.bias"):
            torch.nn.init.normal_(weight, std=0.3)
    alone, together = answers_in_batches(model)
    assert alone == together
    monkeypatch.setattr(scoring, "reads_padding", lambda _: False)
    assert (alone == answers_in_batches(model)[1]) == (family == "llama")


# generate passes them, and PEFT makes its own
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
@pytest.mark.parametrize(
    ("config", "reads"),
    [
        (PromptTuningConfig(num_virtual_tokens=4), True),
        (PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16), True),
        (PrefixTuningConfig(num_virtual_tokens=4), False),
        (LoraConfig(r=2), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_answers_of_an_adapter_in_a_batch_are_those_of_each_prompt_alone(
    config: Any, reads: bool, monkeypatch
) -> None:
    monkeypatch.setattr(scoring, "stop_ids", lambda *_: [])
    torch.manual_seed(0)
    base: Any = AutoModelForCausalLM.from_config(architectures.config_of("llama"), dtype=torch.float32)
    config.task_type = "CAUSAL_LM"
    model: Any = get_peft_model(base, config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    assert scoring.reads_padding(model) is reads
    model.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 30}
    assert scoring.batch_limit(model) == (26 if reads else 30)
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    alone, together = answers_in_batches(model)
    assert alone == together
