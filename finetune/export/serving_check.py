"""The serving check: an exported model must read and answer prompts as finetune's evaluation does.

The exported files are read by a program that is not part of finetune. It turns up to 50 validation chats into
token ids, answers 5 of them with greedy search, and computes the loss of validation examples. Each result is
compared with the fine-tuned model.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.core import model_config, safe_files, shipped_files
from finetune.core.errors import Exit, Problem, UserError, first_line, raise_if_any
from finetune.core.privacy import masked_json
from finetune.data import encoding
from finetune.data.encoding import Encoded
from finetune.data.examples import Example
from finetune.evaluation import scoring, tasks, validation_set
from finetune.export import verify_merge
from finetune.export.export_source import Source
from finetune.recipe.schema import Recipe

CHATS, ANSWERS, ROOM = 50, 5, 24
LOSS_TOKENS = 512
"""Tokens whose loss is compared. A server computes one token for each request."""
LIKELIEST = 10
"""Tokens of each step whose log-probabilities are compared."""
TOLERANCES = {
    "f32": 0.01,
    "f16": 0.02,
    "bf16": 0.1,
    "q8_0": 0.5,
    "fp8": 1.5,
    "int8": 0.4,
    "q6_k": 0.6,
    "q5_k_m": 0.8,
    "q4_k_m": 1.5,
    "q3_k_m": 2.5,
    "q2_k": 6.0,
}
"""Allowed difference of a log-probability, in standard deviations of the logits."""
WITH_EXPERTS = 4.0
"""The least tolerance of quantized experts: rounding can send a token to another expert."""
LOSS_SHARE = 0.25
"""Allowed difference of the loss, as a share of the allowed difference of a log-probability."""


class AnswerToken(NamedTuple):
    """One token of a greedy answer."""

    token: int
    likeliest: dict[int, float]
    """Token id -> log-probability, for the likeliest tokens."""


@dataclass(frozen=True)
class Reader:
    """A program that is not part of finetune and reads an exported model."""

    name: str
    prompt_ids: Callable[[list[Example]], list[list[int]]] | None
    """Return the token ids of prompts. `None`: it can't read the tokenizer, and `without_ids` says why."""
    answer: Callable[[list[int], int], list[AnswerToken]] | None
    """Return the greedy answer to a prompt. `None`: it can't run it, and `without_answers` says why."""
    stop_ids: Callable[[], set[int]] | None = None
    """Return the tokens at which it ends an answer."""
    losses: Callable[[Sequence[Encoded]], list[tuple[float, float]]] | None = None
    """Return the sum of the losses of each document's tokens, and their number or sum of weights."""
    without_ids: str = ""
    without_answers: str = ""


class Texts(NamedTuple):
    """The texts on which finetune compares the exported model with the fine-tuned model."""

    rows: list[list[int]]
    """Token ids, to verify the merge."""
    examples: list[Example]
    """Examples with a prompt."""
    documents: list[Encoded]
    """Examples with the tokens that contribute to the loss."""


class Expected(NamedTuple):
    """What finetune's evaluation reads and answers."""

    examples: list[Example]
    prompts: list[list[int]]
    answers: list[list[int]]
    """The greedy answers to the first prompts, each up to its end-of-turn token."""
    logits: list[torch.Tensor]
    """(tokens of the answer, vocabulary) for each answer. Without prompts, the logits of one text."""
    stops: list[int]
    documents: Sequence[Encoded] = ()
    """Examples with the tokens that contribute to the loss."""
    loss: float | None = None
    """Loss per token of the fine-tuned model on `documents`."""
    has_experts: bool = False
    rounding: float = 0.0
    """Largest difference of a log-probability that the dtype of the merged weights makes by itself."""

    def spread(self) -> float:
        """Return the standard deviation of the logits, which sets the scale of a tolerance."""
        return float(torch.stack([row.std() for answer in self.logits for row in answer]).mean())

    def tolerance(self, kind: str) -> float:
        """Return the allowed difference of a log-probability for weights that are stored as `kind`."""
        quantized = self.has_experts and kind not in ("f32", "f16", "bf16")
        share = max(TOLERANCES[kind], WITH_EXPERTS if quantized else 0.0)
        return share * self.spread() + self.rounding


def expected_of(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, texts: Texts
) -> Expected:
    """Return the prompts and answers of the evaluation. A template that asks for the date gets today's."""
    stops = scoring.stop_ids(model, tokenizer)
    loss = mean(losses_of(model, texts.documents)) if texts.documents else None
    routed = model_config.experts(model.config.get_text_config()) > 1
    if not texts.examples:
        first = [text_logits(model, document.ids) for document in texts.documents[:1]]
        return Expected([], [], [], first, stops, texts.documents, loss, routed)
    data = recipe.data.model_copy(update={"template_date": None})
    encoder = encoding.make_encoder(tokenizer, data, any(example.messages for example in texts.examples))
    prompts = encoder.prompts(texts.examples)
    answered, logits = answers(model, prompts[:ANSWERS], stops)
    return Expected(texts.examples, prompts, answered, logits, stops, texts.documents, loss, routed)


def with_rounding(expected: list[Expected], merged: PreTrainedModel) -> None:
    """Add to the only item of `expected` by how much the merged weights change the log-probabilities.

    A merge in bf16 rounds the weights. Most differences are small, but a single token can differ by more than
    the tolerance. The merged model reads the prompts with the expected answers and computes in fp32.
    """
    verify_merge.in_fp32(merged.eval())
    (wanted,) = expected
    largest = 0.0
    for prompt, answer, logits in zip(wanted.prompts, wanted.answers, wanted.logits, strict=False):
        found = text_logits(merged, [*prompt, *answer])[len(prompt) - 1 : -1].log_softmax(-1)
        values, ids = found.topk(min(LIKELIEST, found.shape[-1]))
        shifts = (values - logits.log_softmax(-1).gather(1, ids)).abs()
        largest = max(largest, float(shifts.max()) if len(answer) else 0.0)
    expected[:] = [wanted._replace(rounding=largest)]


def text_logits(model: PreTrainedModel | PeftModel, ids: list[int]) -> torch.Tensor:
    """Return the logits of a text: (tokens, vocabulary)."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids], device=model.device)).logits[0].float().cpu()


def losses_of(model: PreTrainedModel | PeftModel, documents: Sequence[Encoded]) -> list[tuple[float, float]]:
    """Return the sum of a transformers model's losses on each document, and the number of tokens or the sum
    of their weights.
    """
    with torch.no_grad():
        return scoring.token_losses(model, list(documents), 0, 1)


def mean(losses: list[tuple[float, float]]) -> float:
    """Return the loss per token."""
    return sum(loss for loss, _ in losses) / (sum(count for _, count in losses) or 1)


def answers(
    model: Any, prompts: Sequence[list[int]], stops: list[int], room: int = ROOM
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return the greedy answer of a transformers model to each prompt, and the logits of its tokens."""
    found, logits = [], []
    options: Any = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    greedy = GenerationConfig(max_new_tokens=room, eos_token_id=stops, pad_token_id=stops[0], **options)
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
            done = scoring.run_generate(model, greedy, ids)
            found.append(done.sequences[0, len(prompt) :].tolist())
            logits.append(torch.cat([step[:1] for step in done.logits]).float().cpu())
    return found, logits


def steps(tokens: list[int], logits: torch.Tensor) -> list[AnswerToken]:
    """Return an answer with the log-probabilities of the likeliest tokens."""
    values, ids = logits.log_softmax(-1).topk(min(LIKELIEST, logits.shape[-1]))
    pairs = zip(tokens, ids.tolist(), values.tolist(), strict=True)
    return [AnswerToken(token, dict(zip(row, held, strict=True))) for token, row, held in pairs]


def run(reader: Reader | None, expected: Expected, kind: str, why: str = "") -> dict[str, Any]:
    """Return the result of the serving check: each comparison, or why it was not run.

    Args:
        kind: how the weights are stored, which sets the tolerance.
        why: why there is no reader.
    """
    if reader is None:
        return {"reader": None, "not_run": why}
    found: dict[str, Any] = {"reader": reader.name}
    if not expected.examples:
        found["token_ids"] = {"not_run": "the run has no validation set"}
    elif reader.prompt_ids is None:
        found["token_ids"] = {"not_run": reader.without_ids}
    else:
        found["token_ids"] = compare_ids(expected.prompts, reader.prompt_ids(expected.examples))
    if reader.stop_ids is None:
        why = reader.without_ids or f"{reader.name} does not list its stop tokens"
        found["stop_tokens"] = {"not_run": why}
    else:
        lacks = sorted(set(expected.stops) - reader.stop_ids())
        found["stop_tokens"] = {"expected": expected.stops, "missing": lacks}
    if reader.answer is None or not expected.answers:
        found["answers"] = {"not_run": reader.without_answers or "the run has no prompts"}
    else:
        # One token more than expected, to see whether the reader stops
        pairs = zip(expected.prompts, expected.answers, strict=False)
        got = [reader.answer(prompt, len(answer) + 1) for prompt, answer in pairs]
        found["answers"] = compare_answers(expected, got, kind)
    found["loss"] = compare_losses(reader, expected, kind)
    return found


def compare_losses(reader: Reader, expected: Expected, kind: str) -> dict[str, Any]:
    """Return the loss of the reader next to the loss of the fine-tuned model, both in nats per token."""
    if reader.losses is None or expected.loss is None or not expected.logits:
        return {"not_run": reader.without_answers or "there are no texts to compare the loss on"}
    losses = reader.losses(expected.documents)
    found, tolerance = mean(losses), LOSS_SHARE * TOLERANCES[kind] * expected.spread()
    return {
        "tokens": round(sum(count for _, count in losses)),
        "finetune": expected.loss,
        "runtime": found,
        "tolerance": tolerance,
        "agree": abs(found - expected.loss) <= tolerance,
    }


def compare_ids(wanted: list[list[int]], got: list[list[int]]) -> dict[str, Any]:
    """Return how many prompts have other token ids, and the first token that differs."""
    different = [index for index, pair in enumerate(zip(wanted, got, strict=True)) if pair[0] != pair[1]]
    found: dict[str, Any] = {"prompts": len(wanted), "different": len(different)}
    if different:
        left, right = wanted[different[0]], got[different[0]]
        shared = (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1])
        place = next(shared, min(len(left), len(right)))
        found["first"] = {
            "prompt": different[0],
            "position": place,
            "expected": left[place : place + 5],
            "found": right[place : place + 5],
        }
    return found


def compare_answers(expected: Expected, got: list[list[AnswerToken]], kind: str) -> dict[str, Any]:
    """Compare greedy answers up to the first token whose two best logits are closer than the tolerance."""
    tolerance = expected.tolerance(kind)
    compared, largest, first = 0, 0.0, None
    for index, answer in enumerate(got):
        logits = expected.logits[index].log_softmax(-1)
        for place, token in enumerate(expected.answers[index]):
            if place >= len(answer):
                first = first or {"prompt": index, "position": place, "expected": token, "found": None}
                break
            step, best = answer[place], logits[place].topk(2).values
            shifts = [abs(value - float(logits[place][id])) for id, value in step.likeliest.items()]
            largest = max([largest, *shifts])
            compared += 1
            if step.token != token:
                if float(best[0] - best[1]) >= tolerance:
                    texts = {"prompt": index, "position": place, "expected": token, "found": step.token}
                    first = first or texts
                break
        else:
            wanted = expected.answers[index]
            if wanted and wanted[-1] in expected.stops and len(answer) > len(wanted):
                extra = answer[len(wanted)].token
                first = first or {"prompt": index, "position": len(wanted), "expected": None, "found": extra}
    return {
        "prompts": len(got),
        "tokens": compared,
        "first_difference": first,
        "largest_difference": largest,
        "tolerance": tolerance,
        "agree": first is None and largest <= tolerance,
    }


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert an error of a reader that can't open or run the exported model to a UserError (exit 4)."""
    try:
        yield
    except (RuntimeError, ValueError, OSError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(
            Problem(
                "a reader of the exported model can't open or run it",
                where=str(path),
                found=first_line(error),
                fix="--to vllm",
                code="export",
            ),
            code=Exit.ARTIFACT,
        ) from error


def refuse_different(found: dict[str, Any], path: Path) -> None:
    """Raise a UserError if the exported model reads or answers a prompt differently (exit 4)."""
    problems, where = [], str(path)
    ids, stops, said, loss = (found.get(key) or {} for key in ("token_ids", "stop_tokens", "answers", "loss"))
    if ids.get("different"):
        first = ids["first"]
        problems.append(
            Problem(
                f"{ids['different']} of {ids['prompts']} prompts have other token ids after the export",
                where=where,
                found=f"prompt {first['prompt']}, token {first['position']}: {first['found']}",
                expected=f"{first['expected']}, as in finetune's evaluation",
                fix="--to vllm",
                code="export",
            )
        )
    if stops.get("missing"):
        problems.append(
            Problem(
                "the exported model does not stop at each token that ends a turn",
                where=where,
                found=f"missing: {stops['missing']}",
                expected=f"{stops['expected']}",
                fix="--to vllm",
                code="export",
            )
        )
    if said.get("agree") is False:
        different = f"largest difference of a log-probability: {said['largest_difference']:.3g}"
        if first := said["first_difference"]:
            different += f"; prompt {first['prompt']}, token {first['position']}: {first['found']}"
            different += f" in place of {first['expected']}"
        problems.append(
            Problem(
                "the exported model answers differently",
                where=where,
                found=different,
                expected=f"at most {said['tolerance']:.3g}",
                fix="--quantize f16",
                code="export",
            )
        )
    if loss.get("agree") is False:
        problems.append(
            Problem(
                "the exported model has another loss",
                where=where,
                found=f"{loss['runtime']:.4f} nats per token",
                expected=f"{loss['finetune']:.4f}, at most {loss['tolerance']:.3g} away",
                fix="--quantize f16",
                code="export",
            )
        )
    raise_if_any(problems, code=Exit.ARTIFACT)


def write_report(folder: Path, name: str, report: dict[str, Any]) -> None:
    """Write the report of an export, with the serving check, into its folder. Secrets are masked."""
    safe_files.write_text(folder, name, masked_json(report, indent=1) + "\n")


def texts_of(source: Source, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """Return the validation set of a run. For an adapter without a run, return texts that finetune ships."""
    if not source.has_run:
        return _shipped(recipe, tokenizer)
    held_out, _ = validation_set.held_out(source.folder, recipe, tokenizer)
    rows, _ = verify_merge.probes(recipe, tokenizer, held_out)
    examples = [row.example for row in held_out if row.example.asks][:CHATS]
    return Texts(rows, examples, first_of([document for row in held_out for document in row.documents]))


def first_of(documents: list[Encoded]) -> list[Encoded]:
    """Return the first documents, with about as many trained tokens as the check compares losses of."""
    counts = [sum(end - start for start, end in document.trained) for document in documents]
    before = [0, *accumulate(counts)]
    return [one for one, total in zip(documents, before, strict=False) if total < LOSS_TOKENS]


def _shipped(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """Return questions and texts that finetune ships, as chats if the tokenizer has a template."""
    path = shipped_files.folder("examples") / "general" / "knowledge.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    examples = [_asked(row["question"], tokenizer) for row in rows[:CHATS]]
    texts = tasks.general_texts(recipe.eval.model_copy(update={"forgetting": True}))[
        : verify_merge.PROBE_ROWS
    ]
    ids = [tokenizer(text)["input_ids"][: verify_merge.PROBE_TOKENS] for text in texts]
    return Texts(ids, examples, first_of([Encoded(row, [(0, len(row))]) for row in ids]))


def _asked(question: str, tokenizer: PreTrainedTokenizerBase) -> Example:
    if not tokenizer.chat_template:
        return Example("shipped", prompt=question)
    answer = {"role": "assistant", "content": "Yes."}
    return Example("shipped", messages=[{"role": "user", "content": question}, answer], trained=(True,))
