"""Build the content of eval.json: scores of both models, their differences, and the worst examples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import PartialState

from finetune.checkpointing.resume_contract import METRIC_FILES
from finetune.data.examples import Example, file_of
from finetune.data.preparation import HeldOut
from finetune.evaluation import (
    lm_eval_harness,
    lm_eval_tasks,
    paired_differences,
    tasks,
    validation_set,
)
from finetune.evaluation.scoring import Score
from finetune.hub import client
from finetune.models import base_identity
from finetune.recipe.schema import Eval, Recipe
from finetune.run_folder import comparability, run_folder
from finetune.run_folder.run_folder import RunFolder

WORST = 20
# For other examples than the run's validation set, or for another base model
OTHER = "eval.other.json"


@dataclass
class Measured:
    """The results of one model, base or fine-tuned."""

    held_out: Score | None
    general: Score | None
    tasks: dict[str, Any]
    seconds: float


def content(
    rows: list[HeldOut],
    before: Measured,
    after: Measured,
    settings: Eval,
    notes: list[str],
    texts: list[str] | None = None,
) -> dict[str, Any]:
    """Return the content of eval.json without its verdict.

    Args:
        texts: the general texts for measuring forgetting.
    """
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
        groups = equal_examples(rows)
        result |= {"base": base.as_json(), "tuned": tuned.as_json()}
        result["difference"] = differences(base, tuned, groups)
        result["examples"] = per_example(base, tuned, groups)
        result["sources"] = by_source(rows, base, tuned)
        with_prompt = [index for index, row in enumerate(rows) if row.example.asks]
        shown = with_prompt[: settings.samples if settings.generate else 0]
        result["samples"] = [_sample(rows, base, tuned, index) for index in shown]
        result["worst"] = worst(rows, base, tuned)
        for row in result["worst"] if not settings.generate else ():
            del row["base"], row["tuned"]  # no answers were generated
    if before.general and after.general:
        result["tasks"][tasks.GENERAL] = _general(before.general, after.general, texts)
    forgetting = {
        task.task
        for task in map(tasks.read, filter(tasks.is_file, settings.tasks))
        if task and task.forgetting
    }
    result["tasks"] |= lm_eval_harness.compare(before.tasks, after.tasks, forgetting)
    result["settings"] = {
        "rows": len(rows),
        "batch_size": settings.batch_size,
        "max_new_tokens": settings.max_new_tokens,
        "min_loss_difference": settings.min_loss_difference,
        "min_score_difference": settings.min_score_difference,
        "general": settings.forgetting,
        "data": files_hashed(settings),
        "lm_eval": version("lm-eval") if settings.tasks else None,
        "processes": PartialState().num_processes,
        "seconds": {"base": before.seconds, "tuned": after.seconds},
        "notes": notes,
    }
    return result


def equal_examples(rows: list[HeldOut]) -> list[int]:
    """Return a group number for each example.

    Examples with the same prompt, or the same text, share a group.

    They carry no new evidence. If all prompts are equal, the whole example counts.
    """

    def prompt(example: Example) -> Any:
        turns = example.messages[:-1] if example.messages else None
        return repr(
            [turns, example.tools, example.prompt, "" if turns or example.prompt else example.completion]
        )

    found = [prompt(row.example) for row in rows]
    keys = found if len(set(found)) > 1 else [row.example.digest() for row in rows]
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def differences(base: Score, tuned: Score, groups: Sequence[int] | None = None) -> dict[str, Any]:
    """Return tuned - base of loss (nats per token) and exact match, paired by example.

    Args:
        groups: equal examples have the same number. `None` means that all examples differ.
    """
    loss = paired_differences.difference(
        base.losses, tuned.losses, higher_is_better=False, weights=base.tokens, groups=groups
    )
    found = {"loss": loss}
    answered = [index for index, hit in enumerate(base.hits or ()) if hit is not None]
    if answered and base.hits and tuned.hits:
        before, after = ([float(bool(side[index])) for index in answered] for side in (base.hits, tuned.hits))
        those = [groups[index] for index in answered] if groups else None
        found["exact_match"] = paired_differences.difference(
            before, after, higher_is_better=True, groups=those
        )
    return found


def per_example(base: Score, tuned: Score, groups: list[int]) -> dict[str, Any]:
    """Return values per example for comparing runs: loss sum in nats, tokens, correct answer, group."""
    found: dict[str, Any] = {"group": groups, "tokens": base.tokens}
    for name, score in (("base", base), ("tuned", tuned)):
        found[name] = {"loss": score.losses} | ({"exact_match": score.hits} if score.hits else {})
    return found


def by_source(rows: list[HeldOut], base: Score, tuned: Score) -> list[dict[str, Any]]:
    """Return scores and differences for the examples of each file or Hub dataset."""
    sources: dict[str, list[int]] = {}
    groups = equal_examples(rows)
    for index, row in enumerate(rows):
        sources.setdefault(file_of(row.example.where), []).append(index)
    found = []
    for name, indices in sources.items():
        pair = base.part(indices), tuned.part(indices)
        change = differences(*pair, [groups[index] for index in indices])
        scores = {"base": pair[0].as_json(), "tuned": pair[1].as_json(), "difference": change}
        found.append({"source": name, "rows": len(indices), **scores})
    return found


def worst(rows: list[HeldOut], base: Score, tuned: Score) -> list[dict[str, Any]]:
    """Return the examples with the highest loss per token of the fine-tuned model."""

    def loss(score: Score, index: int) -> float:
        return score.losses[index] / (score.tokens[index] or 1)

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
    """Return an example with the answers of both models."""
    row = rows[index].example
    prompt = row.messages[:-1] if row.messages else row.prompt or ""
    reference = tuned.references[index] if tuned.references else None
    reference = row.answer if reference is None else reference
    answers = {"reference": reference, "base": base.answers[index], "tuned": tuned.answers[index]}
    return {"prompt": prompt, **answers}


def _general(base: Score, tuned: Score, texts: list[str] | None) -> dict[str, Any]:
    found = paired_differences.difference(
        base.losses, tuned.losses, higher_is_better=False, weights=base.tokens, groups=texts
    )
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


def metric_files(settings: Eval) -> dict[str, str]:
    """Return the hashes of the task files that define `eval.metric_for_best_model`, by the name of a fact."""
    task = settings.metric_for_best_model.rpartition("/")[0]
    if not task or settings.eval_steps is None:
        return {}
    chosen = lm_eval_harness.of_task(settings, task).model_copy(update={"forgetting": False})
    return {f"{METRIC_FILES}{name}": digest for name, digest in files_hashed(chosen).items()}


def files_hashed(settings: Eval) -> dict[str, str]:
    """Return a hash of each local task and of the general texts.

    Runs with different hashes are not comparable.
    """
    found = {}
    for name in filter(tasks.is_file, settings.tasks):
        task, digest = tasks.read(name), client.sha256(tasks.file(name))
        rows = client.sha256(tasks.rows_file(task, name)) if task else lm_eval_tasks.digest(tasks.file(name))
        found[task.task if task else name] = f"{digest[:32]}{rows[:32]}"
    if isinstance(settings.forgetting, str):
        found[tasks.GENERAL] = client.sha256(Path(settings.forgetting))
    return found


def content_hashes(rows: list[HeldOut], texts: list[str], settings: Eval) -> dict[str, str]:
    """Return a hash of everything that an evaluation reads, by name. All processes must read the same."""
    examples = hashlib.sha256(str([row.example.digest() for row in rows]).encode()).hexdigest()
    general = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    named = {f"eval.tasks {name}": digest for name, digest in files_hashed(settings).items()}
    return {"validation examples": examples, "general texts": general, **named}


def differences_from_run(folder: RunFolder, recipe: Recipe, result: dict[str, Any]) -> list[str]:
    """Return why this result is not about the run's own weights.

    The base model can be stored in another format than in training, or its files have changed. Or the
    overrides name another base model, which its validation loss shows.
    """
    origin, now = recipe.origin.set_by, result["settings"]["storage"]
    found = base_identity.notes(recipe.model, folder)
    if was := comparability.other_storage(folder, recipe, now):
        return [f"this evaluation stores the base model in {now}, but {was}", *found]
    if origin.get("speed.qat") == "override" and run_folder.own_recipe(folder).speed.qat != recipe.speed.qat:
        return ["this evaluation rounds the weights by another `speed.qat` than the run", *found]
    is_changed = any(note.startswith(base_identity.CHANGED) for note in found)
    is_other = any(who == "override" and key.startswith("model.") for key, who in origin.items())
    if is_changed or not is_other or validation_set.overridden(recipe):
        return found
    earlier = folder.found("eval.json")
    same = _same_base(earlier, result)
    if same is not False:  # the loss shows that a model of another name is the same
        return [] if same else found
    losses = [one["base"]["loss"] for one in (result, earlier)]
    text = "this is not the base model of the run: the validation loss is {:.4f} in place of {:.4f}"
    return [text.format(*losses)]


def _same_base(earlier: dict[str, Any], now: dict[str, Any]) -> bool | None:
    """Return whether two evaluations have the same base model, by its validation loss.

    `None` if not known.
    """
    losses = [one.get("base", {}).get("loss") for one in (earlier, now)]
    rows = [one.get("settings", {}).get("rows") for one in (earlier, now)]
    return None if None in losses or rows[0] != rows[1] else comparability.near(*losses)


def keep_earlier_tasks(folder: RunFolder, name: str, now: dict[str, Any]) -> None:
    """Add the tasks of an earlier evaluation that were not repeated now, with the hashes of their files."""
    earlier = folder.found(name)
    kept = _earlier_tasks(earlier, now, strict=name == OTHER)
    now["tasks"] = {**kept, **now["tasks"]}
    hashes = earlier.get("settings", {}).get("data", {}) if kept else {}
    now["settings"]["data"] = {
        **{of: digest for of, digest in hashes.items() if of != tasks.GENERAL},
        **now["settings"]["data"],
    }


def _earlier_tasks(earlier: dict[str, Any], now: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return the tasks of an earlier evaluation on the same base model that were not repeated now.

    Args:
        strict: whether the base model is not the run's, whose name is not sufficient.
    """
    was, same = earlier.get("settings", {}), _same_base(earlier, now)
    keys = ("model", "storage") if strict else ("model",)
    alike = all(was.get(key) == now["settings"][key] for key in keys)
    if not alike or not (same if strict else same is not False):
        return {}
    gone = {*now["tasks"], tasks.GENERAL}  # the general texts are evaluated each time, or are not wanted
    return {name: _tested(task) for name, task in earlier.get("tasks", {}).items() if name not in gone}


def _tested(task: dict[str, Any]) -> dict[str, Any]:
    """Remove the verdict of an older evaluation's task if it has no p-value."""
    for change in task.get("difference", {}).values():
        if "p" not in change:
            change.pop("verdict", None)
    return task
