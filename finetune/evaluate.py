"""Base against tuned on every held-out row, from the run folder alone: `finetune evaluate RUN`.

Loss is the sum of token negative log-likelihoods over the number of tokens with loss, on unpacked rows.
Exact match generates greedily from all but the last turn and compares the text with the last turn.
"""

from __future__ import annotations

import contextlib
import gc
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig

from finetune import hardware, model, qat, run_folder
from finetune.data import chat, load, prepare
from finetune.errors import Exit, Problem, UserError
from finetune.recipe import load as load_recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.data.chat import Encoded, Encoder
    from finetune.data.formats import Example
    from finetune.data.prepare import HeldOut
    from finetune.recipe import Recipe
    from finetune.run_folder import RunFolder
    from finetune.sections import Eval

ANSWER_MARGIN = 16  # tokens generated beyond the longest reference answer
MAX_TOKENS = 16384  # in one forward: logits of 128k words take 4 GiB in bf16


@dataclass(frozen=True)
class Score:
    """What one model did on the held-out rows; `answers` is in the rows' order."""

    loss: float
    exact_match: float | None
    """Share of the answers that are the reference; `None` for plain text, which asks nothing."""
    ended: float | None
    """Share of the answers that end by themselves, not at `eval.max_new_tokens`."""
    answers: list[str]

    def as_json(self) -> dict[str, float | None]:
        return {"loss": self.loss, "exact_match": self.exact_match, "ended": self.ended}


def run(path: str | Path, *, inspect: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Reopen a run folder cold, evaluate base and tuned, and write eval.json.

    Args:
        path: the run folder.
        inspect: called with the reopened model before it is evaluated; may raise.

    Returns:
        The content of eval.json; without held-out rows `base` and `tuned` are empty.
    """
    folder = run_folder.open_run(path)
    recipe = load_recipe(folder.recipe)
    tuned: Any = reopen(folder, recipe)
    if inspect:
        inspect(tuned)
    tokenizer = model.load_tokenizer(_saved(folder))
    check_unchanged(load.fingerprints(recipe.data, held_out=True), folder)
    rows = prepare.held_out(recipe.data, tokenizer, recipe.train.seed)
    result: dict[str, Any] = {"base": {}, "tuned": {}, "tasks": {}, "samples": []}
    if rows:
        after = score(tuned, tokenizer, rows, recipe)
        if base_stands(tuned):
            with tuned.disable_adapter():
                before = score(tuned, tokenizer, rows, recipe)
        else:
            del tuned
            release()
            before = score(open_base(recipe), tokenizer, rows, recipe)
        result |= {"base": before.as_json(), "tuned": after.as_json()}
        result["samples"] = samples(rows, before, after, recipe.eval.samples)
    if PartialState().is_main_process:
        folder.write("eval.json", result)
    return result


def base_stands(tuned: Any) -> bool:
    """Whether the base is the tuned model with its adapter off; PEFT trains biases in place."""
    config = getattr(tuned, "peft_config", {}).get("default")
    return config is not None and getattr(config, "bias", "none") in (None, "none")


def check_unchanged(hashes: dict[str, str], folder: RunFolder) -> None:
    """Held-out rows must be those of the run; a changed file may mix them with rows that were trained on."""
    recorded = folder.read("data_report.json")["train"]["sources"]
    changed = [path for path, digest in hashes.items() if recorded.get(path, digest) != digest]
    if changed:
        what, fix = "the data changed since the run", "put the file back as it was"
        raise UserError(*(Problem(what, where=path, fix=fix) for path in changed))


def open_base(recipe: Recipe, name: str | None = None) -> PreTrainedModel:
    """The base of a recipe, loaded afresh as training loads it (`name`: other weights in the same way)."""
    section = (
        recipe.model
        if name is None
        else recipe.model.model_copy(update={"name": name, "revision": None, "add_tokens": []})
    )
    setup = hardware.choose(
        attention=recipe.model.attention, base=recipe.speed.base, adapter_type=recipe.adapter.type
    )
    state = PartialState(cpu=setup.hardware.device == "cpu")
    return qat.prepare(model.load(section, setup, str(state.device)).eval(), recipe.speed.qat).eval()


def reopen(folder: RunFolder, recipe: Recipe) -> PreTrainedModel:
    """What was trained, cold from disk: the base as it was loaded, the adapter by plain PEFT."""
    if folder.weights == folder.model:
        return open_base(recipe, str(folder.model))
    from peft import PeftModel

    base: Any = open_base(recipe)
    tuned: Any = qat.follow(PeftModel.from_pretrained(base, str(folder.adapter)))
    return tuned.eval()


def release() -> None:
    """Give back the memory of models that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def score(tuned: Any, tokenizer: PreTrainedTokenizerBase, rows: list[HeldOut], recipe: Recipe) -> Score:
    """Loss and exact match of a model on `rows`, the rows spread over all processes."""
    state = PartialState()
    mine = list(range(state.process_index, len(rows), state.num_processes))
    own = [rows[index] for index in mine]
    asked = any(row.example.messages or row.example.prompt is not None for row in rows)
    encoder = chat.make_encoder(tokenizer, recipe.data, any(row.example.messages for row in rows))
    references = [reference(row, tokenizer, recipe.data.train_on) for row in rows]
    longest = max(len(tokens) for _, tokens in references)
    with inference(tuned):
        documents = [document for row in own for document in row.documents]
        losses = token_losses(tuned, documents, tokenizer.pad_token_id, recipe.eval.batch_size)
        examples = [row.example for row in own]
        answers = [("", False)] * len(own)
        if asked:
            answers = generate(tuned, encoder, examples, longest, recipe.eval)
    gathered = gather_object([(losses, list(zip(mine, answers, strict=True)))])
    total = sum(loss for (loss, _), _ in gathered)
    count = sum(tokens for (_, tokens), _ in gathered)
    by_index = dict(pair for _, pairs in gathered for pair in pairs)
    ordered = [by_index[index] for index in range(len(rows))]
    texts = [text for text, _ in ordered]
    hits = sum(answer == wanted for answer, (wanted, _) in zip(texts, references, strict=True))
    ends = sum(ended for _, ended in ordered)
    shares = (hits / len(rows), ends / len(rows)) if asked else (None, None)
    return Score(total / max(count, 1), *shares, texts)


def reference(row: HeldOut, tokenizer: PreTrainedTokenizerBase, train_on: str) -> tuple[str, list[int]]:
    """What should be answered, as it is compared with what was, and its tokens with calls and reasoning."""
    said = row.example.answer
    tokens = tokenizer(said)["input_ids"] if train_on == "all" else row.last_turn()
    if row.example.messages and row.example.messages[-1].get("tool_calls") and train_on != "all":
        said = str(tokenizer.decode(tokens, skip_special_tokens=True))
    return without_thinking(said), tokens


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Out of GPU memory is the user's to mend: say how."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        fix = (
            "train.per_device_train_batch_size=1, speed.recompute=all, eval.batch_size=4, adapter.type=qlora"
        )
        problem = Problem("out of GPU memory", found=str(error).splitlines()[0], fix=fix)
        raise UserError(problem, code=Exit.TRAINING) from error


@contextlib.contextmanager
def inference(tuned: Any) -> Any:
    """Evaluation mode, no gradients, and the launch's precision where the weights are not already in it."""
    precision = hardware.launch(hardware.detect()).precision
    dtype = getattr(torch, hardware.DTYPES[precision])
    tuned.eval()
    with (
        torch.inference_mode(),
        torch.autocast(tuned.device.type, dtype, enabled=precision != "no"),
    ):
        yield


def token_losses(tuned: Any, documents: list[Encoded], pad: Any, batch_size: int) -> tuple[float, int]:
    """Sum of the negative log-likelihoods (fp32, summed in fp64) and number of tokens that carry loss."""
    total, count = 0.0, 0
    encoded = [(document.ids, document.labels()) for document in documents]
    for indices in batches([len(ids) for ids, _ in encoded], batch_size):
        batch = [encoded[index] for index in indices]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in batch], device=tuned.device)
        labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in batch], device=tuned.device)
        mask = torch.tensor(
            [[1] * len(row) + [0] * (width - len(row)) for row, _ in batch], device=tuned.device
        )
        logits = tuned(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits = logits[:, -width:-1]  # without those of trained prompt vectors, which stand before the row
        targets = labels[:, 1:]
        chosen = targets != -100
        losses = cross_entropy(logits[chosen].float(), targets[chosen], reduction="none")
        total += losses.double().sum().item()
        count += int(chosen.sum())
    return total, count


def batches(lengths: list[int], batch_size: int) -> Iterator[list[int]]:
    """Indices of rows of similar length together: at most `batch_size` of them, and MAX_TOKENS tokens."""
    order = sorted(
        range(len(lengths)), key=lambda index: -lengths[index]
    )  # the longest first: it fits or it fails
    while order:
        size = max(1, min(batch_size, MAX_TOKENS // max(1, lengths[order[0]])))
        yield order[:size]
        order = order[size:]


def without_thinking(text: str) -> str:
    """An answer without the reasoning that some templates put before it, stripped."""
    return re.sub(r"^\s*<think>.*?</think>", "", text, flags=re.DOTALL).strip()


def generate(
    tuned: Any, encoder: Encoder, rows: list[Example], longest: int, settings: Eval
) -> list[tuple[str, bool]]:
    """The greedy answer to each row, stripped, and whether it ended by itself; padded on the left."""
    tokenizer = encoder.tokenizer
    prompts = encoder.prompts(rows)
    pad: Any = tokenizer.pad_token_id
    declared = tuned.generation_config.eos_token_id  # the model may stop on more than the tokenizer knows
    stops = chat.stop_ids(tokenizer) | set(declared if isinstance(declared, list) else [declared]) - {None}
    greedy = GenerationConfig(
        max_new_tokens=settings.max_new_tokens or longest + ANSWER_MARGIN,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,  # the model's own generation_config may hold another
        no_repeat_ngram_size=0,
        eos_token_id=sorted(stops),
        pad_token_id=pad,
    )
    answers = [("", False)] * len(rows)
    for batch in batches([len(prompt) for prompt in prompts], settings.batch_size):
        width = max(len(prompts[index]) for index in batch)
        ids = torch.full((len(batch), width), pad)
        mask = torch.zeros_like(ids)
        for position, index in enumerate(batch):
            ids[position, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[position, width - len(prompts[index]) :] = 1
        output = tuned.generate(
            input_ids=ids.to(tuned.device),
            attention_mask=mask.to(tuned.device),
            generation_config=greedy,
        )
        for position, index in enumerate(batch):
            new = output[position, width:]
            text = tokenizer.decode(new, skip_special_tokens=True)
            answers[index] = without_thinking(str(text)), not stops.isdisjoint(new.tolist())
    return answers


def logits(tuned: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    """Logits of each row of ids alone, (length, vocabulary) on the CPU: what a saved model must reproduce."""
    with inference(tuned):
        return [
            tuned(input_ids=torch.tensor([ids], device=tuned.device)).logits[0].float().cpu() for ids in rows
        ]


def samples(rows: list[HeldOut], before: Score, after: Score, count: int) -> list[dict[str, Any]]:
    """The first `count` held-out rows with what base and tuned answered."""
    found = []
    for index in range(min(count, len(rows))):
        row = rows[index].example
        prompt = row.messages[:-1] if row.messages else row.prompt or ""
        answers = {
            "reference": row.answer,
            "base": before.answers[index],
            "tuned": after.answers[index],
        }
        found.append({"prompt": prompt, **answers})
    return found


def _saved(folder: RunFolder) -> Any:
    """The tokenizer that was saved with the weights."""
    from finetune.sections import Model

    return Model(name=str(folder.weights))
