"""Print the plan at the start of a run and the result at its end."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from finetune.autoconfig.batch_size import few_steps, short_of_peak
from finetune.core import formatting
from finetune.core.command_lines import command
from finetune.core.formatting import is_share
from finetune.core.privacy import masked
from finetune.evaluation import tasks, verdicts
from finetune.recipe import adapter_types
from finetune.reporting import scores
from finetune.run_folder import run_folder, settings_text

if TYPE_CHECKING:
    from finetune.core.console import Console
    from finetune.core.run_checks import RunChecks
    from finetune.data.audit import Report
    from finetune.recipe.schema import Recipe
    from finetune.run_folder.run_folder import RunFolder


LABELS = {
    "model.storage": "base model weights",
    "speed.graphs": "CUDA graphs",
    "speed.fused": "fused adapters",
}
SHOWN = 2  # samples on the terminal, so that a result fits on one screen; the report shows all
SAMPLE = {
    "reference": "reference",
    "base model": "base",
    "fine-tuned": "tuned",
}  # shown name -> key in eval.json


def show_plan(
    screen: Console, recipe: Recipe, chosen: settings_text.Choices, data: dict[str, Report], notes: list[str]
) -> None:
    """Print one table with the planned settings, who set each and why, then the notes."""
    train, validation, set_by = data["train"], data["validation"], recipe.origin.set_by
    tokens = f"{train.tokens:,}, of which {train.trained_tokens:,} contribute to the loss"
    no_validation = "none: data.validation is not set, so nothing is evaluated"
    equal = train.counts.get("in_validation", 0)
    among = f"{equal:,} of them also in the training set" if equal else "none in the training set"
    among += f" (only its first {train.seen:,} examples are known)" if train.seen else ""
    validated = f"{validation.kept:,} examples, {among}" if validation.rows else no_validation
    rate, default = recipe.train.learning_rate, "default"
    rows = [
        ("model", recipe.model.name, set_by.get("model.name", default)),
        ("adapter", f"{recipe.adapter.type}{_options(recipe)}", set_by.get("adapter.type", default)),
        ("training set", f"{train.kept:,} examples, {train.dropped:,} skipped", ""),
        ("training tokens", tokens, ""),
        ("validation set", validated, ""),
        ("learning_rate", f"{rate:g}", set_by.get("train.learning_rate", default)),
    ]
    unshown = {*run_folder.local_paths(recipe)}
    if chosen["model.storage"][0] == chosen["train.precision"][0]:
        unshown.add("model.storage")
    if not chosen["speed.compile"][0]:
        unshown.add("speed.graphs")  # graphs need compiled layers
    rows += [
        (LABELS.get(key, key.partition(".")[2]), formatting.as_yaml(value), why)
        for key, (value, why) in chosen.items()
        if key not in unshown
    ]
    screen.table("plan", ("setting", "value", "set by"), rows, wide=("set by",))
    of_validation = [f"validation set: {remark}" for remark in validation.remarks()]
    for notice in [*train.remarks(), *of_validation, *recipe.origin.notices, *notes]:
        screen.say(f"note: {notice}")
    train_keys, steps = recipe.train, chosen["train.steps"][0]
    screen.note(
        *adapter_types.advice(recipe), *short_of_peak(train_keys, steps), *few_steps(train_keys, steps)
    )
    screen.say("")


def show_result(screen: Console, folder: RunFolder, checks: RunChecks, result: dict[str, Any]) -> None:
    """Print the scores, samples, the number of run checks that passed, and the next commands."""
    train = folder.read("data_report.json").get("train") or {}
    show_scores(screen, result, scores.overlap(train))
    show_checks(screen, checks)
    show_next(screen, folder)


def show_checks(screen: Console, checks: RunChecks) -> None:
    """Print how many run checks passed. Print the table if one failed, or with `--verbose`."""
    passed, total = sum(check.passed for check in checks.entries), len(checks.entries)
    if screen.verbose or passed < total:
        rows = [(c.option, "passed" if c.passed else "FAILED", c.expected, c.actual) for c in checks.entries]
        screen.table("run checks", ("setting", "result", "expected", "actual"), rows)
    meaning = ": the settings printed before training are those that ran" if passed == total else ""
    screen.say("", f"{passed} of {total} run checks passed{meaning}")


def show_scores(screen: Console, result: dict[str, Any], overlap: str = "") -> None:
    """Print the scores of base model and fine-tuned model, and samples of both.

    Args:
        overlap: how many validation examples are also in the training set.
    """
    rows = [
        _score_row(name, key, result)
        for key, name in (
            ("loss", "validation loss"),
            ("exact_match", "exact match"),
            ("ended", "ended its answer itself"),
        )
        if result["base"].get(key) is not None
    ]
    if len(result["sources"]) > 1:
        rows += [_score_row(f"loss of {source['source']}", "loss", source) for source in result["sources"]]
    for name, task in result["tasks"].items():
        rows += [
            _score_row(verdicts.titled(f"{name} {metric}"), metric, task)
            for metric in task["higher_is_better"]
        ]
    if rows:
        columns = ("measure", "base model", "fine-tuned", "change (95% CI)", "verdict")
        screen.table("result", columns, rows, wide=("verdict",))
        general = verdicts.GENERAL_LEGEND if tasks.GENERAL in result["tasks"] else ""
        _say_wrapped(screen, " ".join(filter(None, [verdicts.LEGEND, overlap, general])))
    screen.say(verdicts.title(result["verdict"]), style="bold")
    _say_wrapped(screen, result["verdict"]["why"])
    for note in result["settings"]["notes"]:
        screen.say(f"note: {note}")
    count = len(result["samples"])
    for number, sample in enumerate(result["samples"][:SHOWN], 1):
        prompt = sample["prompt"] if isinstance(sample["prompt"], str) else sample["prompt"][-1]["content"]
        right = sample["tuned"] == sample["reference"]
        # Masked before the texts are cut or divided into lines, because a key can have several lines
        texts = {name: masked(sample[key])[:400] for name, key in SAMPLE.items()}
        rows = [
            ("prompt", masked(prompt)),
            *(texts | ({"fine-tuned": "equals the reference"} if right else {})).items(),
        ]
        screen.table(
            f"validation example {number} of the {count} in the report",
            ("", ""),
            [line for name, text in rows for line in _lines_of(name, text)],
        )


def _say_wrapped(screen: Console, text: str) -> None:
    """Print a text in lines that end between words."""
    screen.say(*textwrap.wrap(text, screen.console.width, break_long_words=False, break_on_hyphens=False))


def _lines_of(name: str, text: str) -> list[tuple[str, str]]:
    """Return a text as table rows, with its name next to the first line and a mark next to the others."""
    lines = text.split("\n")
    return list(zip((name, *["|"] * len(lines)), lines, strict=False))


def _score_row(name: str, key: str, scores: dict[str, Any]) -> tuple[str, ...]:
    """Return a metric of the base model and the fine-tuned model, with the difference."""
    share = is_share(key, scores["base"], scores["tuned"])
    base, tuned = (formatting.number(scores[side][key], share=share) for side in ("base", "tuned"))
    found = scores["difference"].get(key)
    text, unit = (formatting.points, " points") if share else (formatting.figure, "")
    if found is None:
        numbers = [scores[side][key] for side in ("base", "tuned")]
        known = all(isinstance(one, int | float) for one in numbers)
        value = f"{formatting.signed(numbers[1] - numbers[0], text)}{unit}" if known else ""
        return name, base, tuned, value, "for information"
    low, value, high = (formatting.signed(found[part], text) for part in ("low", "value", "high"))
    word = verdicts.shown_word(found, key, forgetting=bool(scores.get("forgetting"))) or "for information"
    return name, base, tuned, f"{value}{unit} ({low} to {high})", word


def show_next(screen: Console, folder: RunFolder) -> None:
    """Print the commands that continue from a finished run, each as it can be pasted."""
    path = str(folder.path)
    screen.say("", f"saved in {path}; open {path}/report.html", style="bold")
    steps = {"chat with it": command("chat", path)}
    if folder.adapter.exists():
        steps["merge the adapter"] = command("merge", path)
        steps["serve it with vLLM"] = command("export", path, "--to", "vllm")
    steps["preview an upload"] = command("publish", path, "--dry-run")
    screen.say("next, each on its own:", *(f"  {purpose + ':':<20}{text}" for purpose, text in steps.items()))


def _options(recipe: Recipe) -> str:
    options = ", ".join(f"{key} {value}" for key, value in recipe.adapter.options().items())
    return f": {options}" if options else ""
