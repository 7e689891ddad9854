"""Prepare the results in eval.json for a page. Evaluations that did not run are skipped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core import formatting
from finetune.core.formatting import figure, percent, points
from finetune.evaluation import verdicts

if TYPE_CHECKING:
    from collections.abc import Callable

ERROR = " \N{PLUS-MINUS SIGN} "  # stands before a standard error
NAMES = {"loss": "validation loss", "exact_match": "exact match", "ended": "emitted the end of turn"}
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


class Row(NamedTuple):
    """One metric of the base model and the fine-tuned model."""

    name: str
    base: str
    tuned: str
    change: str
    """Difference from the base model, with its sign."""
    interval: str
    verdict: str
    """A word of `evaluation.verdicts`, or an empty string if the difference was not tested."""
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
        base, tuned = (side.partition(ERROR)[0] for side in (row.base, row.tuned))
        change = f"change {row.change}, {row.interval}" if row.interval else ""
        unit = ", nats per token" if row.name == NAMES["loss"] else ""
        large.append((f"{row.name}{unit}", f"{base} \N{RIGHTWARDS ARROW} {tuned}", change))
    return large


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
        rows.append(_row(name, "loss", base, tuned, change, note))
    return rows


def _held_out(found: dict[str, Any]) -> list[Row]:
    base, tuned, change = (found.get(key) or {} for key in ("base", "tuned", "difference"))
    known = [key for key in NAMES if base.get(key) is not None and tuned.get(key) is not None]
    rows = (found.get("settings") or {}).get("rows")
    note = f"{rows:,} examples" if rows else ""
    return [_row(NAMES[key], key, base, tuned, change.get(key), note) for key in known]


def _task(name: str, task: dict[str, Any]) -> list[Row]:
    """Return the metrics of a task, with its main metric first."""
    base, tuned, change = (task.get(key) or {} for key in ("base", "tuned", "difference"))
    main = task.get("main")
    metrics = [key for key in base if key in tuned and not key.endswith("_stderr") and base[key] is not None]
    metrics.sort(key=lambda key: key != main)
    rows = f"{task['rows']:,} examples" if task.get("rows") else ""
    better = task.get("higher_is_better") or {}
    found = []
    for key in metrics:
        way = "" if key not in better else "higher is better" if better[key] else "lower is better"
        note = ", ".join(part for part in (rows, way) if part)
        found.append(_row(f"{verdicts.titled(name)}: {key}", key, base, tuned, change.get(key), note))
    return found


def _row(
    name: str,
    key: str,
    base: dict[str, Any],
    tuned: dict[str, Any],
    change: dict[str, Any] | None,
    note: str,
) -> Row:
    text, by, unit = figure, figure, ""
    if formatting.is_share(key, base, tuned):
        text, by, unit = percent, points, " points"

    def side(scores: dict[str, Any]) -> str:
        error = scores.get(f"{key}_stderr")
        said = "-" if scores.get(key) is None else text(scores[key])
        return f"{said}{ERROR}{percent(error) if unit else figure(error, 2)}" if error else said

    if change:
        interval = f"95% CI {signed(change['low'], by)} to {signed(change['high'], by)}"
        value = signed(change["value"], by) + unit
        word = verdicts.current_word(str(change.get("verdict", "")))
        return Row(name, side(base), side(tuned), value, interval, word, note)
    known = base.get(key) is not None and tuned.get(key) is not None
    value = signed(tuned[key] - base[key], by) + unit if known else ""
    return Row(name, side(base), side(tuned), value, "", "", note)


def signed(value: float, text: Callable[[float], str]) -> str:
    """Format a value with a plus or a typographic minus sign."""
    return ("+" if value >= 0 else "\N{MINUS SIGN}") + text(abs(value)) if math.isfinite(value) else "?"
