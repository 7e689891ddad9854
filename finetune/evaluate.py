"""Base against tuned from the run folder alone: `finetune evaluate RUN`.

Held-out rows (loss and greedy answers), a general text (what was forgotten?) and `eval.tasks` by lm-eval, for
base and tuned on the same rows; each difference with its 95 % interval, and one verdict.
"""

from __future__ import annotations

import gc
import json
import re
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from finetune import hardware, harness, model, paired, qat, run_folder, scoring, shipped, tasks
from finetune.data import load, prepare
from finetune.data.formats import Example
from finetune.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from finetune.data.prepare import HeldOut
    from finetune.recipe import Recipe
    from finetune.run_folder import RunFolder
    from finetune.scoring import Score
    from finetune.sections import Eval

GENERAL = "general_text"
WORST = 20


@dataclass
class Measured:
    """What one model, base or tuned, did on everything it was asked."""

    held_out: Score | None
    general: Score | None
    tasks: dict[str, Any]
    seconds: float


def run(
    path: str | Path,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    inspect: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Reopen a run folder cold, evaluate base and tuned, and write eval.json.

    Args:
        path: the run folder.
        overrides: of its recipe: `eval.tasks=[arc_easy]`, `model.name=...` where the base lies elsewhere.
        inspect: called with the reopened model before it is evaluated; may raise.

    Returns:
        The content of eval.json; without held-out rows `base` and `tuned` are empty.
    """
    folder = run_folder.open_run(path)
    recipe = run_folder.recipe_of(folder, overrides)
    tasks.check(recipe.eval)
    texts = general_texts(recipe.eval)
    tuned: Any = reopen(folder, recipe)
    if inspect:
        inspect(tuned)
    tokenizer = model.load_tokenizer(_saved(folder))
    rows, notes = held_out(folder, recipe, tokenizer)

    def measured(asked: Any) -> Measured:
        return measure(asked, tokenizer, rows, texts, recipe)

    after = measured(tuned)
    if base_stands(tuned):
        with tuned.disable_adapter():
            before = measured(tuned)
    else:
        del tuned
        release()
        before = measured(open_base(recipe))
    if recipe.eval.engine == "vllm" and recipe.eval.tasks:
        release()
        before.tasks, after.tasks = by_vllm(folder, recipe, tokenizer)
    result = report(rows, before, after, recipe, notes)
    result["tasks"] = {**_earlier(folder, result["tasks"]), **result["tasks"]}
    result["verdict"] = verdict(result)
    if PartialState().is_main_process:
        folder.write("eval.json", result)
    return result


def measure(asked: Any, tokenizer: Any, rows: list[HeldOut], texts: list[str], recipe: Recipe) -> Measured:
    """Everything one model is asked."""
    started, settings = time.perf_counter(), recipe.eval
    with scoring.memory_errors():
        score = scoring.score(asked, tokenizer, rows, recipe.data, settings) if rows else None
        general = scoring.score_texts(asked, tokenizer, texts, settings) if texts else None
        by_harness = settings.tasks and settings.engine == "hf"
        found = harness.run(asked, tokenizer, settings) if by_harness else {}
    return Measured(score, general, found, time.perf_counter() - started)


def by_vllm(folder: RunFolder, recipe: Recipe, tokenizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`eval.tasks` of base and tuned by vLLM, which serves the adapter as it was saved."""
    rank = getattr(recipe.adapter, "r", None)
    if folder.weights != folder.adapter or recipe.adapter.type not in ("lora", "qlora", "rslora"):
        fix = "eval.engine: hf; or merge it first"
        what = f"vLLM serves LoRA, not {recipe.adapter.type}"
        raise UserError(Problem(what, "eval.engine", fix=fix))
    engine = harness.vllm(recipe.model.name, recipe.model.revision, str(folder.adapter), rank or 8)
    after = harness.run(engine, tokenizer, recipe.eval)
    engine.lora_request = None
    return harness.run(engine, tokenizer, recipe.eval), after


def held_out(folder: RunFolder, recipe: Recipe, tokenizer: Any) -> tuple[list[HeldOut], list[str]]:
    """The held-out rows: from the run's folder; from the data the first time, or where it is overridden.

    Returns:
        The rows, and what is worth knowing of them.
    """
    kept = folder.path / run_folder.HELD_OUT
    overridden = any(
        who == "override" and key.startswith("data.") for key, who in recipe.origin.set_by.items()
    )
    if kept.exists() and not overridden:
        lines = kept.read_text(encoding="utf-8").splitlines()
        examples = [Example(**{**row, "trained": tuple(row["trained"])}) for row in map(json.loads, lines)]
        return prepare.encode_held_out(examples, recipe.data, tokenizer), []
    notes = check_unchanged(load.fingerprints(recipe.data, held_out=True), folder, overridden)
    rows = prepare.held_out(recipe.data, tokenizer, recipe.train.seed)
    if PartialState().is_main_process and not overridden:
        lines = [json.dumps(asdict(row.example), ensure_ascii=False) for row in rows]
        folder.write_text(run_folder.HELD_OUT, "".join(f"{line}\n" for line in lines))
    return rows, notes


def general_texts(settings: Eval) -> list[str]:
    """The texts on which forgetting is measured: `eval.general`."""
    if settings.general is False:
        return []
    path = shipped.folder("examples") / "general" / "text.jsonl"
    name = str(path) if settings.general is True else settings.general
    source = tasks.Task(task=GENERAL, data=name, kind="perplexity", prompt="{{ text }}")
    return [row["prompt"] for row in tasks.documents(source, str(Path(name)))]


def base_stands(tuned: Any) -> bool:
    """Whether the base is the tuned model with its adapter off; PEFT trains biases in place."""
    config = getattr(tuned, "peft_config", {}).get("default")
    return config is not None and getattr(config, "bias", "none") in (None, "none")


def check_unchanged(hashes: dict[str, str], folder: RunFolder, overridden: bool = False) -> list[str]:
    """Held-out rows must be those of the run; a changed file may mix them with rows that were trained on.

    Returns:
        A note on rows that the recipe of the run did not name.
    """
    recorded = folder.read("data_report.json")["train"]["sources"]
    changed = [path for path, digest in hashes.items() if recorded.get(path, digest) != digest]
    if changed and not overridden:
        what, fix = "the data changed since the run", "put the file back as it was"
        raise UserError(*(Problem(what, where=path, fix=fix) for path in changed))
    other = [path for path, digest in hashes.items() if digest not in recorded.values()]
    return [f"{path} is not what the run held out" for path in other if overridden]


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


def report(
    rows: list[HeldOut], before: Measured, after: Measured, recipe: Recipe, notes: list[str]
) -> dict[str, Any]:
    """The content of eval.json, less its verdict."""
    settings = recipe.eval
    result: dict[str, Any] = {
        "base": {},
        "tuned": {},
        "difference": {},
        "tasks": {},
        "sources": [],
        "samples": [],
        "worst": [],
    }
    if before.held_out and after.held_out:
        base, tuned = before.held_out, after.held_out
        result |= {"base": base.as_json(), "tuned": tuned.as_json(), "difference": differences(base, tuned)}
        result["sources"] = by_source(rows, base, tuned)
        result["samples"] = [_sample(rows, base, tuned, i) for i in range(min(settings.samples, len(rows)))]
        result["worst"] = worst(rows, base, tuned)
    if before.general and after.general:
        result["tasks"][GENERAL] = _general(before.general, after.general)
    forgetting = {
        task.task
        for task in map(tasks.read, filter(tasks.is_file, settings.tasks))
        if task and task.forgetting
    }
    result["tasks"] |= harness.compare(before.tasks, after.tasks, forgetting)
    result["settings"] = {
        "rows": len(rows),
        "batch_size": settings.batch_size,
        "max_new_tokens": settings.max_new_tokens,
        "general": settings.general,
        "data": files_hashed(settings),
        "lm_eval": version("lm-eval") if settings.tasks else None,
        "processes": PartialState().num_processes,
        "seconds": {"base": before.seconds, "tuned": after.seconds},
        "notes": notes,
    }
    return result


def differences(base: Score, tuned: Score) -> dict[str, Any]:
    """tuned - base of loss (nats a token) and of exact match, paired by row."""
    found = {
        "loss": paired.difference(base.losses, tuned.losses, higher_is_better=False, weights=base.tokens)
    }
    if base.hits is not None and tuned.hits is not None:
        found["exact_match"] = paired.difference(base.hits, tuned.hits, higher_is_better=True)
    return found


def by_source(rows: list[HeldOut], base: Score, tuned: Score) -> list[dict[str, Any]]:
    """The same for the rows of each file or Hub set."""
    sources: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        name = re.sub(r"(:\d+|\[\d+\]|!.*)$", "", row.example.where)
        sources.setdefault(name, []).append(index)
    found = []
    for name, indices in sources.items():
        pair = base.part(indices), tuned.part(indices)
        scores = {"base": pair[0].as_json(), "tuned": pair[1].as_json(), "difference": differences(*pair)}
        found.append({"source": name, "rows": len(indices), **scores})
    return found


def worst(rows: list[HeldOut], base: Score, tuned: Score) -> list[dict[str, Any]]:
    """The rows on which tuned has the highest loss a token."""

    def loss(score: Score, index: int) -> float:
        return score.losses[index] / max(score.tokens[index], 1)

    order = sorted(range(len(rows)), key=lambda index: -loss(tuned, index))[:WORST]
    return [
        {
            "where": rows[index].example.where,
            **_sample(rows, base, tuned, index),
            "base_loss": loss(base, index),
            "tuned_loss": loss(tuned, index),
        }
        for index in order
    ]


def _sample(rows: list[HeldOut], base: Score, tuned: Score, index: int) -> dict[str, Any]:
    """A row with what base and tuned answered."""
    row = rows[index].example
    prompt = row.messages[:-1] if row.messages else row.prompt or ""
    answers = {"reference": row.answer, "base": base.answers[index], "tuned": tuned.answers[index]}
    return {"prompt": prompt, **answers}


def _general(base: Score, tuned: Score) -> dict[str, Any]:
    found = paired.difference(base.losses, tuned.losses, higher_is_better=False, weights=base.tokens)
    return {
        "base": {"loss": base.loss},
        "tuned": {"loss": tuned.loss},
        "difference": {"loss": found},
        "rows": len(base.losses),
        "higher_is_better": {"loss": False},
        "main": "loss",
        "forgetting": True,
        "settings": {},
    }


def _earlier(folder: RunFolder, now: dict[str, Any]) -> dict[str, Any]:
    """Tasks of an earlier evaluation that were not asked again."""
    try:
        earlier = folder.read("eval.json").get("tasks", {})
    except (OSError, ValueError):
        return {}
    return {name: task for name, task in earlier.items() if name not in now}


def files_hashed(settings: Eval) -> dict[str, str]:
    """Hash of each local file that the evaluation was given, by name: runs with other ones don't compare."""
    named = [str(tasks.SHIPPED.get(name, name)) for name in settings.tasks if tasks.is_file(name)]
    named += [str(Path(name).parent / task.data) for name in named if (task := tasks.read(name)) is not None]
    named += [settings.general] if isinstance(settings.general, str) else []
    return {Path(name).name: load.sha256(Path(name)) for name in named if Path(name).is_file()}


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """One word for the whole, with the numbers, and which general abilities got worse.

    Answers count before loss, held-out rows before tasks; a task of `forgetting` never makes it better.
    """
    said, words = [], []
    names = {"exact_match": "exact match", "loss": "held-out loss"}
    for metric, name in names.items():
        if metric in result["difference"]:
            word = result["difference"][metric]["verdict"]
            words.append(word)
            before, after = result["base"][metric], result["tuned"][metric]
            said.append(f"{name} {_number(metric, before)} -> {_number(metric, after)} ({word})")
    forgot = []
    for name, task in result["tasks"].items():
        metric, found = task["main"], task["difference"].get(task["main"])
        if found is None:
            continue
        if task["forgetting"]:
            forgot += [name] if found["verdict"] == "worse" else []
        else:
            words.append(found["verdict"])
            before, after = task["base"][metric], task["tuned"][metric]
            numbers = f"{_number(metric, before)} -> {_number(metric, after)}"
            said.append(f"{name} {metric} {numbers} ({found['verdict']})")
    decided = [word for word in words if word != "same"]
    word = decided[0] if decided else ("same" if words else "unknown")
    why = ", ".join(said) or "nothing was held out: data.validation or eval.tasks"
    return {"word": word, "why": why, "forgot": forgot}


def _number(metric: str, value: float) -> str:
    """A loss or perplexity as it is, a share in per cent."""
    return (
        f"{value:.3f}" if "loss" in metric or "perplexity" in metric or "bits" in metric else f"{value:.1%}"
    )


def _saved(folder: RunFolder) -> Any:
    """The tokenizer that was saved with the weights."""
    from finetune.sections import Model

    return Model(name=str(folder.weights))
