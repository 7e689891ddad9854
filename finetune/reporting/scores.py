"""Prepare the results in eval.json for a page. Evaluations that did not run are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core import formatting
from finetune.core.formatting import figure, percent, points
from finetune.evaluation import verdicts
from finetune.evaluation.tasks import GENERAL

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = {"loss": "validation loss", "exact_match": "exact match", "ended": "ended its answer itself"}
MEANING = {
    "loss": "on the tokens that count in training",
    "exact_match": "answers equal to the reference",
    "ended": "not cut off at the token limit",
}
KINDS = {
    verdicts.BETTER: "good",
    verdicts.NO_DIFFERENCE: "same",
    verdicts.NEGLIGIBLE: "same",
    verdicts.WORSE: "bad",
    verdicts.MIXED: "mixed",
}


class Verdict(NamedTuple):
    kind: str
    """good | mixed | same | bad | unknown"""
    title: str
    why: str
    doubts: list[str]


class Sides(NamedTuple):
    """Scores of the base model and the fine-tuned model, and the difference of one metric."""

    base: dict[str, Any]
    tuned: dict[str, Any]
    change: dict[str, Any] | None
    forgetting: bool = False


class Row(NamedTuple):
    """One metric of the base model and the fine-tuned model."""

    name: str
    base: str
    tuned: str
    change: str
    """Difference from the base model, with its sign."""
    interval: str
    verdict: str
    """`verdicts.shown_word`, or an empty string if the difference was not tested."""
    note: str = ""


def judge(found: dict[str, Any], held_out: int | None, losses: tuple[float, float] | None) -> Verdict:
    """Return the verdict of eval.json. Without an evaluation, say whether there was a validation set.

    Args:
        held_out: number of validation examples, if it is known.
        losses: training loss at the start and at the end.
    """
    said = found.get("verdict") or {}
    forgot = said.get("forgot") or []
    names = ", ".join(verdicts.titled(str(name)) for name in forgot)
    worse = f"Forgetting check: worse than the base model on {names}"
    doubts = [worse] if forgot else []
    learnt = f" Training loss: {figure(losses[0])} -> {figure(losses[1])}." if losses else ""
    title = verdicts.title(said)
    if said:
        kind = KINDS.get(verdicts.current_word(str(said.get("word"))), "unknown")
        more = f".{learnt}" if kind == "unknown" and learnt else ""
        return Verdict(
            "mixed" if kind == "good" and forgot else kind, title, str(said.get("why", "")) + more, doubts
        )
    if held_out:
        return Verdict("unknown", title, f"The run was trained, but not evaluated.{learnt}", [])
    return Verdict("unknown", title, f"The run has no validation set.{learnt}", [])


def headlines(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return validation loss and exact match, before and after fine-tuning, with the change below."""
    rows = [row for row in _held_out(found) if row.name != NAMES["ended"]]
    large = []
    for row in rows:
        change = f"change {row.change} ({row.interval})" if row.interval else ""
        large.append((row.name, f"{row.base} \N{RIGHTWARDS ARROW} {row.tuned}", change))
    return large


def overlap(train: dict[str, Any]) -> str:
    """Say how many validation examples are also in the training set; empty if that is not known.

    Args:
        train: `Report` of the training set, as data_report.json has it.
    """
    if not train.get("kept"):
        return ""
    equal, seen = (train.get("counts") or {}).get("in_validation", 0), train.get("seen")
    where = f"in the first {seen:,} training examples" if seen else "in the training set"
    if not equal:
        return f"No validation example is {where}."
    return f"{equal:,} validation examples are also {where}."


def table(found: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """Return the results in groups: validation set, tasks, and tasks that measure forgetting."""
    tasks, kept = [], []
    for name, task in (found.get("tasks") or {}).items():
        (kept if task.get("forgetting") else tasks).extend(_task(str(name), task))
    groups = [
        ("Validation set", _held_out(found)),
        ("Tasks", tasks),
        ("Forgetting check", kept),
    ]
    return [(title, rows) for title, rows in groups if rows]


def sources(found: dict[str, Any]) -> list[Row]:
    """Return the validation loss by source, if there are several sources."""
    rows, all_of_them = [], found.get("sources") or []
    for source in all_of_them if len(all_of_them) > 1 else []:
        base, tuned = source.get("base") or {}, source.get("tuned") or {}
        change = (source.get("difference") or {}).get("loss")
        name, note = Path(str(source.get("source"))).name, f"{source.get('rows', 0):,} examples"
        rows.append(_row(name, "loss", Sides(base, tuned, change), note))
    return rows


def _held_out(found: dict[str, Any]) -> list[Row]:
    base, tuned, change = (found.get(key) or {} for key in ("base", "tuned", "difference"))
    known = [key for key in NAMES if base.get(key) is not None and tuned.get(key) is not None]
    rows = (found.get("settings") or {}).get("rows")
    count = f"{rows:,} examples" if rows else ""
    notes = {key: ", ".join(filter(None, [count, MEANING.get(key)])) for key in known}
    return [_row(NAMES[key], key, Sides(base, tuned, change.get(key)), notes[key]) for key in known]


def _task(name: str, task: dict[str, Any]) -> list[Row]:
    """Return the metrics of a task, with its main metric first."""
    base, tuned, change = (task.get(key) or {} for key in ("base", "tuned", "difference"))
    main = task.get("main")
    metrics = [key for key in base if key in tuned and not key.endswith("_stderr") and base[key] is not None]
    metrics.sort(key=lambda key: key != main)
    what = "texts of eval.forgetting" if name == GENERAL else "examples"
    rows = f"{task['rows']:,} {what}" if task.get("rows") else ""
    better = task.get("higher_is_better") or {}
    found = []
    for key in metrics:
        way = "" if key not in better else "higher is better" if better[key] else "lower is better"
        note = ", ".join(part for part in (rows, way) if part)
        title = verdicts.titled(f"{name} {key}") if name == GENERAL else f"{name}: {key}"
        sides = Sides(base, tuned, change.get(key), forgetting=bool(task.get("forgetting")))
        found.append(_row(title, key, sides, note))
    return found


def _row(name: str, key: str, sides: Sides, note: str) -> Row:
    base, tuned, change = sides.base, sides.tuned, sides.change
    text, by, unit = figure, figure, ""
    if formatting.is_share(key, base, tuned):
        text, by, unit = percent, points, " points"
    before, after = ("-" if scores.get(key) is None else text(scores[key]) for scores in (base, tuned))
    if change:
        interval = f"95% CI {_signed(change['low'], by)} to {_signed(change['high'], by)}"
        value = _signed(change["value"], by) + unit
        word = verdicts.shown_word(change, key, forgetting=sides.forgetting)
        return Row(name, before, after, value, interval, word, note)
    known = base.get(key) is not None and tuned.get(key) is not None
    value = _signed(tuned[key] - base[key], by) + unit if known else ""
    return Row(name, before, after, value, "", "", note)


def _signed(value: float, text: Callable[[float], str]) -> str:
    """Format a change with a typographic minus sign."""
    return formatting.signed(value, text).replace("-", "\N{MINUS SIGN}", 1)
