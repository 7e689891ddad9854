"""What eval.json says: base and tuned, their differences with intervals, the worst rows, and one verdict."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState

from finetune.core import formatting
from finetune.evaluation import lm_eval_harness, paired_bootstrap, scoring, tasks
from finetune.hub import client

if TYPE_CHECKING:
    from finetune.data.preparation import HeldOut
    from finetune.evaluation.scoring import Score
    from finetune.recipe.schema import Eval

GENERAL = "general_text"
WORST = 20


@dataclass
class Measured:
    """What one model, base or tuned, did on everything it was asked."""

    held_out: Score | None
    general: Score | None
    tasks: dict[str, Any]
    seconds: float


def content(
    rows: list[HeldOut], before: Measured, after: Measured, settings: Eval, notes: list[str]
) -> dict[str, Any]:
    """The content of eval.json, less its verdict."""
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
        asked = [index for index, row in enumerate(rows) if scoring.asks(row)]
        shown = asked[: settings.samples if settings.generate else 0]
        result["samples"] = [_sample(rows, base, tuned, index) for index in shown]
        result["worst"] = worst(rows, base, tuned)
        for row in result["worst"] if not settings.generate else ():
            del row["base"], row["tuned"]  # they were not asked
    if before.general and after.general:
        result["tasks"][GENERAL] = _general(before.general, after.general)
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
        "general": settings.forgetting,
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
        "loss": paired_bootstrap.difference(
            base.losses, tuned.losses, higher_is_better=False, weights=base.tokens
        )
    }
    hits = [[hit for hit in side.hits or () if hit is not None] for side in (base, tuned)]
    if hits[0]:
        found["exact_match"] = paired_bootstrap.difference(*hits, higher_is_better=True)
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
    found = paired_bootstrap.difference(
        base.losses, tuned.losses, higher_is_better=False, weights=base.tokens
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


def files_hashed(settings: Eval) -> dict[str, str]:
    """Hash of what each local task and the general text was, by task: runs with other ones don't compare."""
    found = {}
    for name in filter(tasks.is_file, settings.tasks):
        task, digest = tasks.read(name), client.sha256(tasks.file(name))
        rows = client.sha256(tasks.rows_file(task, name)) if task else ""
        found[task.task if task else name] = f"{digest[:32]}{rows[:32]}"
    if isinstance(settings.forgetting, str):
        found[GENERAL] = client.sha256(Path(settings.forgetting))
    return found


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """One word for the whole, with the numbers, and which general abilities got worse.

    Answers to the validation set count before its loss, and that before tasks. Tasks that were asked for,
    each at 95 % on its own, must not contradict it. Subtasks and tasks of forgetting do not decide.
    """
    said, words = [], []
    for metric, name in (("exact_match", "exact match"), ("loss", "validation loss")):
        if metric in result["difference"]:
            words.append(result["difference"][metric]["verdict"])
            said.append(_said(name, metric, result))
    asked: list[str] = []
    forgot = []
    for name, task in result["tasks"].items():
        found = task["difference"].get(task["main"])
        if task["forgetting"]:
            forgot += [name] if found and found["verdict"] == "worse" else []
        elif task.get("asked", True) and task["main"]:
            asked += [found["verdict"]] if found else []
            said.append(_said(f"{name} {task['main']}", task["main"], task))
    told = [word for word in (*words, *asked) if word != paired_bootstrap.TOO_FEW]
    decided = [word for word in told if word != "same"]
    word = decided[0] if decided else ("same" if told else "unknown")
    if {"better", "worse"} <= {word, *asked}:
        word = "mixed"
    why = ", ".join(said) or "nothing was held out: data.validation or eval.tasks"
    if word == "unknown" and paired_bootstrap.TOO_FEW in (*words, *asked):
        fewest = paired_bootstrap.FEWEST
        why += f"; no difference over fewer than {fewest} rows can be told from chance: hold more out"
    return {"word": word, "why": why, "forgot": forgot}


def _said(name: str, metric: str, scores: dict[str, Any]) -> str:
    share = formatting.is_share(metric, scores["base"], scores["tuned"])
    numbers = [formatting.number(scores[side][metric], share=share) for side in ("base", "tuned")]
    found = scores["difference"].get(metric)
    return f"{name} {numbers[0]} -> {numbers[1]}" + (f" ({found['verdict']})" if found else "")
