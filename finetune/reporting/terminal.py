"""Print the plan at the start of a run and the result at its end."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from finetune.autoconfig.batch_size import short_of_peak
from finetune.core import formatting
from finetune.core.formatting import is_share, labelled
from finetune.evaluation import verdicts
from finetune.recipe import adapter_types
from finetune.run_folder import run_folder

if TYPE_CHECKING:
    from finetune.core.console import Console
    from finetune.core.run_checks import RunChecks
    from finetune.data.audit import Report
    from finetune.recipe.schema import Recipe
    from finetune.run_folder.run_folder import RunFolder


def show_plan(
    screen: Console, recipe: Recipe, chosen: run_folder.Choices, data: dict[str, Report], notes: list[str]
) -> None:
    """Print one table with the planned settings and their reasons, then the notes."""
    train, held_out = data["train"], data["validation"]
    rows = [
        ("model", recipe.model.name, ""),
        ("adapter", recipe.adapter.type, _options(recipe)),
        (
            "data",
            f"{train.kept} rows, {train.trained_tokens:,} tokens with loss of {train.tokens:,}",
            f"{train.dropped} of {train.rows} left out",
        ),
        (
            "held out",
            f"{held_out.kept} rows",
            "" if held_out.rows else "no data.validation: nothing to evaluate on",
        ),
        (
            "learning rate",
            f"{recipe.train.learning_rate:g}",
            recipe.origin.set_by.get("train.learning_rate", "default"),
        ),
    ]
    paths = run_folder.local_paths(recipe)
    rows += [(key.partition(".")[2], value, why) for key, (value, why) in chosen.items() if key not in paths]
    screen.table("plan", ("what", "value", "why"), rows)
    held = [f"held out: {remark}" for remark in held_out.remarks()]
    for notice in [*train.remarks(), *held, *recipe.origin.notices, *notes]:
        screen.say(f"note: {notice}")
    for line in [*adapter_types.advice(recipe), *short_of_peak(recipe.train, chosen["train.steps"][0])]:
        screen.say(labelled(line))
    screen.say("")


def show_result(screen: Console, folder: RunFolder, ledger: RunChecks, result: dict[str, Any]) -> None:
    """Print run checks, base model against fine-tuned model, samples and the next commands."""
    receipts = [(r.option, "yes" if r.passed else "NO", r.expected, r.actual) for r in ledger.receipts]
    screen.table("run checks", ("option", "passed", "expected", "actual"), receipts)
    show_scores(screen, result)
    show_next(screen, folder)


def show_scores(screen: Console, result: dict[str, Any]) -> None:
    """Print the scores of base model and fine-tuned model, and samples of both."""
    rows = [
        _score_row(name, key, result)
        for key, name in (
            ("loss", "validation loss"),
            ("exact_match", "exact match"),
            ("ended", "stopped by itself"),
        )
        if result["base"].get(key) is not None
    ]
    if len(result["sources"]) > 1:
        rows += [_score_row(f"loss of {source['source']}", "loss", source) for source in result["sources"]]
    for name, task in result["tasks"].items():
        rows += [_score_row(f"{name} {metric}", metric, task) for metric in task["higher_is_better"]]
    if rows:
        screen.table("result", ("", "base", "tuned", "difference, 95 %", ""), rows)
    screen.say(verdicts.sentence(result["verdict"]), style="bold")
    for note in result["settings"]["notes"]:
        screen.say(f"note: {note}")
    for sample in result["samples"]:
        prompt = sample["prompt"] if isinstance(sample["prompt"], str) else sample["prompt"][-1]["content"]
        rows = [
            ("asked", prompt),
            *((name, sample[name][:400]) for name in ("reference", "base", "tuned")),
        ]
        screen.table("", ("", ""), [line for name, text in rows for line in _lines_of(name, text)])


def _lines_of(name: str, text: str) -> list[tuple[str, str]]:
    """Return a text as table rows, with its name next to the first line and a mark next to the others."""
    lines = text.split("\n")
    return list(zip((name, *["|"] * len(lines)), lines, strict=False))


def _score_row(name: str, key: str, scores: dict[str, Any]) -> tuple[str, ...]:
    """Return a metric of the base model and the fine-tuned model, with the difference."""
    share = is_share(key, scores["base"], scores["tuned"])
    base, tuned = (formatting.number(scores[side][key], share=share) for side in ("base", "tuned"))
    found = scores["difference"].get(key)
    if found is None:
        return name, base, tuned, "", ""
    low, value, high = (formatting.number(found[part], share=share) for part in ("low", "value", "high"))
    return name, base, tuned, f"{value} ({low} to {high})", found.get("verdict", "")


def show_next(screen: Console, folder: RunFolder) -> None:
    path = shlex.quote(str(folder.path))
    screen.say("")
    screen.say(f"the run is in {folder.path}", style="bold")
    screen.say("next:")
    screen.say(f"  open {path}/report.html in a browser")
    screen.say(f"  finetune evaluate {path}")
    screen.say(f"  finetune chat {path}")
    screen.say(f"  less {path}/log.txt")


def _options(recipe: Recipe) -> str:
    return ", ".join(f"{key} {value}" for key, value in recipe.adapter.options().items())
