"""Score a model on the validation set: loss per token, and greedy answers compared with the references.

The loss is the sum of token negative log-likelihoods divided by the number of tokens that contribute to the
loss, without packing. Exact match generates greedily from all turns before the last one, and compares the
text with the last turn.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from peft import PeftModel, PeftType
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.autoconfig import launch_settings, mixed_precision
from finetune.autoconfig.memory_estimate import EVALUATED_TOKENS, LARGEST_BATCH
from finetune.core import progress
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.data import encoding
from finetune.data.encoding import Encoded
from finetune.data.preparation import HeldOut
from finetune.models import token_limits
from finetune.models.generation_config import declared_stops
from finetune.recipe.schema import Data, Eval
from finetune.speed import packing_isolation

ANSWER_MARGIN = 16  # tokens generated beyond the longest reference answer
READ_PADDING = frozenset({"deepseek_v32", "deepseek_v4", "glm_moe_dsa", "recurrent_gemma", "rwkv", "trocr"})
"""Model types whose layers read padding on the left, although the attention mask hides it.

RWKV also mixes the prompts of a batch when it generates (transformers 5.22).
"""
LESS_MEMORY = (
    "train.per_device_train_batch_size=1, speed.activation_checkpointing=full, eval.batch_size=4, "
    "adapter.type=qlora"
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Score:
    """The results of one model for each example, in order."""

    losses: list[float]
    """Sum of the negative log-likelihoods of each example's tokens, in nats, times their weights."""
    tokens: Sequence[float]
    """Number of each example's tokens that contribute to the loss, or the sum of their weights."""
    answers: list[str]
    hits: list[bool | None] | None = None
    """Whether the answer equals the reference. `None` for plain text, which has no prompt."""
    ends: list[bool | None] | None = None
    """Whether the answer emitted the end-of-turn token before `eval.max_new_tokens`."""
    references: list[str | None] | None = None
    """The text that a right answer equals. `None` for examples without an answer."""

    @property
    def loss(self) -> float:
        """Loss in nats per token, or per unit of weight."""
        return sum(self.losses) / (sum(self.tokens) or 1)

    def as_json(self) -> dict[str, float | None]:
        """Return the metrics with their standard errors from sampling the examples."""
        known_values = [[one for one in of or () if one is not None] for of in (self.hits, self.ends)]
        shares = [sum(of) / len(of) if of else None for of in known_values]
        found = {"loss": self.loss, "exact_match": shares[0], "ended": shares[1]}
        rows = len(self.losses)
        if rows > 1:  # ratio of sums: Cochran, Sampling Techniques, 1977, equation 2.45
            beside = sum(
                (loss - self.loss * n) ** 2 for loss, n in zip(self.losses, self.tokens, strict=True)
            )
            found["loss_stderr"] = math.sqrt(beside * rows / (rows - 1)) / (sum(self.tokens) or 1)
        if len(known_values[0]) > 1 and shares[0] is not None:
            found["exact_match_stderr"] = math.sqrt(shares[0] * (1 - shares[0]) / (len(known_values[0]) - 1))
        return found

    def part(self, indices: list[int]) -> Score:
        """Return the score of some of the examples."""

        def taken(values: Sequence[object] | None) -> Any:
            return None if values is None else [values[index] for index in indices]

        return Score(
            *map(taken, (self.losses, self.tokens, self.answers, self.hits, self.ends, self.references))
        )


def score(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[HeldOut],
    data: Data,
    settings: Eval,
    *,
    answers: bool = True,
) -> Score:
    """Return losses and greedy answers of a model. The examples are distributed over all processes.

    Args:
        answers: whether to generate answers. `False` computes only losses.
    """
    encoder = encoding.make_encoder(tokenizer, data, any(row.example.messages for row in rows))
    with_prompt = [index for index, row in enumerate(rows) if answers and row.example.asks]
    wanted = dict(
        zip(
            with_prompt,
            references([rows[index] for index in with_prompt], tokenizer, data, stop_ids(model, tokenizer)),
            strict=True,
        )
    )
    mine, own = _own(range(len(rows))), _own(with_prompt)
    # Each process renders all prompts, so that an error in one prompt stops all processes
    prompts = dict(
        zip(with_prompt, encoder.prompts([rows[index].example for index in with_prompt]), strict=True)
    )
    positions = token_limits.positions(model.config)
    token_limits.room_for_answer(max(map(len, prompts.values()), default=0), positions, settings)
    with inference(model):
        losses = row_losses(
            model, [rows[index].documents for index in mine], tokenizer.pad_token_id, settings
        )
        said: list[tuple[str, bool]] = []
        if with_prompt:
            longest = max(len(tokens) for _, tokens in wanted.values())
            said = generate(model, tokenizer, [prompts[index] for index in own], longest, settings)
    found, answered = _of_all(mine, losses), _of_all(own, said)
    order = range(len(rows))
    texts = [answered[index][0] if index in answered else "" for index in order]
    hits = [texts[index] == wanted[index][0] if index in answered else None for index in order]
    ends = [answered[index][1] if index in answered else None for index in order]
    sums, counts = [loss for loss, _ in found.values()], [count for _, count in found.values()]
    right = [wanted[index][0] if index in wanted else None for index in order]
    return Score(sums, counts, texts, *((hits, ends, right) if with_prompt else (None, None, None)))


def score_texts(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], settings: Eval
) -> Score:
    """Return the losses of a model on plain texts. All tokens count, and all processes share the work."""
    mine = _own(range(len(texts)))
    longest = token_limits.text_limit(model.config)  # `text_limits.check` reports the number of longer texts
    ids = [tokenizer(texts[index])["input_ids"][:longest] for index in mine]
    documents = [[Encoded(row, [(0, len(row))])] for row in ids]
    with inference(model):
        losses = row_losses(model, documents, tokenizer.pad_token_id, settings)
    found = _of_all(mine, losses).values()
    return Score([loss for loss, _ in found], [count for _, count in found], [""] * len(texts))


def _own(indices: Sequence[int]) -> Sequence[int]:
    """Return this process's share of some indices."""
    state = PartialState()
    return indices[state.process_index :: state.num_processes]


def _of_all(own: Sequence[int], found: list[Result]) -> dict[int, Result]:
    """Gather the results of all processes, in the order of the examples."""
    return dict(sorted(gather_object(list(zip(own, found, strict=True)))))


def references(
    rows: list[HeldOut], tokenizer: PreTrainedTokenizerBase, data: Data, stops: Collection[int] = ()
) -> list[tuple[str, list[int]]]:
    """Return the reference answer of each example as text and as tokens.

    The reference is the trained part of the last turn, decoded like a generated answer. So both contain the
    text that a template adds to an answer.
    """
    found = [row.last_turn() for row in rows]
    # if all tokens are trained, or a part of the last turn is not, encode the last turn separately
    other = [
        i
        for i, row in enumerate(rows)
        if data.train_on == "all" or not all(row.example.trained[-1:]) or row.example.weights
    ]
    if other:
        examples = [rows[index].example for index in other]
        examples = [replace(one, trained=(True,) * len(one.trained), weights=()) for one in examples]
        chats, last = any(e.messages for e in examples), data.model_copy(update={"train_on": "last_turn"})
        turns = encoding.make_encoder(tokenizer, last, chats)(examples)
        for index, turn in zip(other, turns, strict=True):
            if isinstance(turn, Encoded) and turn.trained:
                found[index] = HeldOut(rows[index].example, [turn]).last_turn()
            else:  # the template's turns cannot be separated, so use the original text
                found[index] = tokenizer(rows[index].example.answer, add_special_tokens=False)["input_ids"]
    texts = [answer_text(tokenizer, ids, stops) for ids in found]
    return list(zip(map(encoding.without_thinking, texts), found, strict=True))


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stops: Collection[int]) -> str:
    """Return the text of an answer before the first token that ends it.

    This token may be no special token of the tokenizer, for example a token of `model.add_tokens`.
    """
    end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
    return str(tokenizer.decode(list(ids[:end]), skip_special_tokens=True))


@contextlib.contextmanager
def memory_errors(fix: str = LESS_MEMORY, code: Exit = Exit.TRAINING) -> Iterator[None]:
    """Convert an out-of-memory error of the GPU to a UserError with suggestions."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            Problem("the GPU has too little memory", found=first_line(error), fix=fix, code="out-of-memory"),
            code=code,
        ) from error


@contextlib.contextmanager
def inference(model: PreTrainedModel | PeftModel) -> Any:
    """Prepare a model for inference: eval mode, no gradients, attention with masks, and autocast."""
    precision = launch_settings.read().precision
    model.eval()
    with (
        torch.no_grad(),  # not inference_mode, in which torchao 0.18 cannot cast fp8 layers
        mixed_precision.autocast(model.device.type, precision),
        packing_isolation.masked(model),
    ):
        yield


def fitting(run: Callable[[int], Result], batch_size: int | str) -> Result:
    """Return `run(batch_size)`. `auto` starts with LARGEST_BATCH and halves it when memory runs out."""
    if isinstance(batch_size, int):
        return run(batch_size)
    size = LARGEST_BATCH
    while True:
        try:
            return run(size)
        except RuntimeError as error:  # older kernels raise RuntimeError instead of torch.OutOfMemoryError
            if size == 1 or not should_reduce_batch_size(error):
                raise
        clear_device_cache(garbage_collection=True)
        size //= 2


def row_losses(
    model: PreTrainedModel | PeftModel, rows: list[list[Encoded]], pad: Any, settings: Eval
) -> list[tuple[float, float]]:
    """Return (loss sum, number of tokens) for each example. The loss is fp32, summed in fp64.

    If a token has a weight between 0 and 1, the loss is weighted, and the number is the sum of the weights.
    """
    documents = [document for row in rows for document in row]
    run = partial(token_losses, model, documents, pad)
    losses = iter(fitting(run, settings.batch_size) if documents else [])
    pairs = [[next(losses) for _ in row] for row in rows]
    return [(sum(loss for loss, _ in row), sum(count for _, count in row)) for row in pairs]


def token_losses(
    model: PreTrainedModel | PeftModel, documents: list[Encoded], pad: int, batch_size: int
) -> list[tuple[float, float]]:
    """Return (loss sum, number of tokens or sum of their weights) for each document."""
    found: list[tuple[float, float]] = [(0.0, 0)] * len(documents)
    encoded = [(document.ids, document.labels()) for document in documents]
    lengths = [len(ids) for ids, _ in encoded]
    alone = batch_limit(model)
    for indices in progress.track(batches(lengths, batch_size, alone=alone), len(encoded)):
        batch = [encoded[index] for index in indices]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in batch], device=model.device)
        labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in batch], device=model.device)
        mask = torch.tensor(
            [[1] * len(row) + [0] * (width - len(row)) for row, _ in batch], device=model.device
        )
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits = logits[:, -width:-1]  # drops the logits of trained prompt vectors before the text
        targets = labels[:, 1:]
        chosen = targets != -100
        losses = torch.zeros(targets.shape, dtype=torch.float64, device=model.device)
        losses[chosen] = cross_entropy(logits[chosen].float(), targets[chosen], reduction="none").double()
        counted: torch.Tensor = chosen
        if any(documents[index].weights for index in indices):
            counted = chosen * _weights([documents[index] for index in indices], width).to(model.device)
            losses *= counted
        sums, counts = losses.sum(dim=1).tolist(), counted.sum(dim=1).tolist()
        for index, pair in zip(indices, zip(sums, counts, strict=True), strict=True):
            found[index] = pair
    return found


def _weights(documents: list[Encoded], width: int) -> torch.Tensor:
    """Return the weights of the loss of the tokens 1 to `width`, in fp64, padded with zeros."""
    rows = [document.token_weights() for document in documents]
    return torch.tensor([[*row, *[0.0] * (width - len(row))][1:] for row in rows], dtype=torch.float64)


def reads_padding(model: PreTrainedModel | PeftModel) -> bool:
    """Return whether padding on the left changes the answers of a model.

    For prompt tuning, PEFT puts the padding between the trained vectors and the prompt. The mask of Mamba
    and of short convolutions sets the input of padding to 0, but a bias of the input projection follows.
    """
    adds_bias = any(
        getattr(getattr(module, "in_proj", None), "bias", None) is not None
        for module in model.modules()
        if hasattr(module, "conv1d") or hasattr(module, "conv")
    )
    listed = model.config.get_text_config().model_type in READ_PADDING
    return adds_bias or listed or trained_vectors(model) > 0


def trained_vectors(model: PreTrainedModel | PeftModel) -> int:
    """Return how many vectors of prompt tuning or P-tuning stand before each text."""
    kind: Any = model.active_peft_config if isinstance(model, PeftModel) else None
    if kind is None or not kind.is_prompt_learning or kind.peft_type == PeftType.PREFIX_TUNING:
        return 0
    return int(kind.num_virtual_tokens)


def batch_limit(model: PreTrainedModel | PeftModel) -> int | None:
    """Return the length of a text, in tokens, beyond which it changes the others of its batch, or `None`."""
    limit = token_limits.batch_limit(model.config)
    return limit and max(1, limit - trained_vectors(model))


def batches(
    lengths: list[int], batch_size: int, room: int = 0, *, alone: int | None = None
) -> Iterator[list[int]]:
    """Yield indices of examples with similar lengths: at most `batch_size`, and EVALUATED_TOKENS tokens.

    Args:
        room: tokens that are generated after each example.
        alone: an example that is longer than this with its room gets its own batch. `None` means no limit.
    """
    order = sorted(
        range(len(lengths)), key=lambda index: -lengths[index]
    )  # longest first, so that memory errors appear early
    while order:
        size = max(1, min(batch_size, EVALUATED_TOKENS // max(1, lengths[order[0]])))
        size = 1 if alone and lengths[order[0]] + room > alone else size
        yield order[:size]
        order = order[size:]


def stop_ids(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer in training, and the tokens that the model declares."""
    return sorted(encoding.ends_of_answer(tokenizer) | declared_stops(model.generation_config))


def stops(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Return the tokens that end an answer of an evaluation, and the tokens that the model declares."""
    return {"answers": stop_ids(model, tokenizer), "model": sorted(declared_stops(model.generation_config))}


def generate(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    longest: int,
    settings: Eval,
) -> list[tuple[str, bool]]:
    """Return the greedy answer to each prompt, stripped, and whether it emitted the end-of-turn token.

    Args:
        longest: number of tokens of the longest reference answer.
    """
    room = settings.max_new_tokens or longest + ANSWER_MARGIN
    run = partial(greedy_answers, model, tokenizer, prompts, room)
    return fitting(run, settings.batch_size) if prompts else []


def greedy_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    room: int,
    batch_size: int,
) -> list[tuple[str, bool]]:
    """Generate at most `room` tokens after each prompt. Prompts are padded on the left.

    A model for which `reads_padding` holds gets one prompt at a time.

    Returns:
        (stripped text, whether the end-of-turn token was emitted) for each prompt.
    """
    pad: Any = tokenizer.pad_token_id
    stops = stop_ids(model, tokenizer)
    answers, positions = [("", False)] * len(prompts), token_limits.positions(model.config)
    lengths = [len(prompt) for prompt in prompts]
    size = 1 if reads_padding(model) else batch_size
    # A prompt that leaves less room must not cut other answers short, and a long one must not change them
    limits = [limit for limit in (positions, batch_limit(model)) if limit]
    alone = min(limits, default=None)
    for batch in progress.track(batches(lengths, size, room, alone=alone), len(prompts)):
        width = max(len(prompts[index]) for index in batch)
        greedy = GenerationConfig(
            max_new_tokens=max(1, min(room, positions - width)) if positions else room,
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=pad,
        )
        ids = torch.full((len(batch), width), pad)
        mask = torch.zeros_like(ids)
        for position, index in enumerate(batch):
            ids[position, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[position, width - len(prompts[index]) :] = 1
        output = run_generate(model, greedy, ids.to(model.device), mask.to(model.device))
        for position, index in enumerate(batch):
            new = output[position, width:].tolist()
            text = answer_text(tokenizer, new, stops)
            answers[index] = encoding.without_thinking(text), not set(stops).isdisjoint(new)
    return answers


@contextlib.contextmanager
def generating_with(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Let a model generate with `config` alone, without its own generation_config.json.

    transformers takes each value that a config leaves open from the model's own. This can change greedy
    answers, for example by `suppress_tokens` or `max_time`.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    own, base.generation_config = base.generation_config, config
    try:
        yield
    finally:
        base.generation_config = own


def run_generate(
    model: Any, config: GenerationConfig, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
) -> Any:
    """Generate with `config` alone.

    Args:
        ids: token ids of the prompts, (batch, length).
        mask: 1 for tokens, and 0 for padding; `None`: no padding.
        options: further arguments of `generate`.

    Returns:
        What `generate` returns.
    """
    mask = torch.ones_like(ids) if mask is None else mask
    with generating_with(model, config):
        return model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **options)


def logits(model: PreTrainedModel | PeftModel, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of each example: (length, vocabulary) on the CPU.

    A saved model must reproduce them.
    """
    with inference(model):
        return [
            model(input_ids=torch.tensor([ids], device=model.device)).logits[0].float().cpu() for ids in rows
        ]
