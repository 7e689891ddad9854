"""Read the files of a run folder for the report."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from finetune.checkpointing import checkpoints
from finetune.core import safe_files, strict_yaml
from finetune.core.errors import Problem, UserError
from finetune.data.audit import Report
from finetune.recipe import renames
from finetune.run_folder import file_shapes, run_folder, settings_text
from finetune.run_folder.run_folder import RunFolder

FILES = {  # files of a run folder, and the content that is missing without them
    "recipe.resolved.yaml": "the settings",
    "environment.json": "versions and hardware",
    "data_report.json": "the figures of the data",
    "metrics.jsonl": "the training curves",
    "checks.json": "the run checks",
    "eval.json": "the evaluation (run `finetune evaluate`)",
}
LONGEST = 2000  # limit of displayed characters of a text


@dataclass
class Run:
    """The content of a run folder, as far as it is available."""

    path: Path
    missing: list[str] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    settings: list[settings_text.Setting] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Report] = field(default_factory=dict)
    run_checks: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Logged training steps."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    """Evaluations during training."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    exports: dict[str, Any] = field(default_factory=dict)
    """Folder of an export -> its report."""
    saved: bool = True
    kept: int = 0
    """Step of the newest checkpoint, or 0 if there is none."""
    error: str = ""
    """The error that ended a run without weights."""

    def get(self, key: str, default: object = None) -> Any:
        """Return a recipe value by its dotted key."""
        section, _, name = key.partition(".")
        return (self.recipe.get(section) or {}).get(name, default)


def read(path: Path) -> Run:
    """Read all available files. `missing` names files that do not exist or cannot be read."""
    if not any(RunFolder(path).file(name).exists() for name in FILES):
        raise UserError(
            Problem(
                "the path is not a run folder",
                "",
                str(path),
                "no file of a run",
                f"one of {', '.join(FILES)}",
                "name the folder that `finetune train` wrote",
                code="run-folder",
            )
        )
    found, folder = Run(path), RunFolder(path)
    readers = {
        "recipe.resolved.yaml": _read_recipe,
        "environment.json": lambda run, folder: run.environment.update(folder.read("environment.json")),
        "data_report.json": _read_data,
        "metrics.jsonl": _read_metrics,
        "checks.json": lambda run, folder: run.run_checks.extend(folder.read("checks.json")),
        "eval.json": lambda run, folder: run.evaluation.update(folder.read("eval.json")),
        "export.json": lambda run, folder: run.exports.update(folder.read("export.json")),
    }
    for name, reader in readers.items():
        if not os.path.lexists(folder.file(name)):
            if name not in FILES:
                continue
            found.missing.append(f"{name} is missing, so the report can't show {FILES[name]}")
            continue
        try:
            reader(found, folder)
        except (OSError, ValueError, UserError) as error:
            lost = f"so the report can't show {FILES.get(name, 'the exports')}"
            found.missing.append(f"finetune can't read {name} ({_one_line(error)}), {lost}")
    found.saved = (path / "adapter").exists() or (path / "model").exists()
    if not found.saved:
        found.missing.append("adapter/ and model/ are missing, so the run has no trained weights")
        found.kept = max(map(checkpoints.step_of, checkpoints.published(path / "checkpoints")), default=0)
        try:
            found.error = _last_error(folder)
        except (OSError, UserError) as error:
            lost = "so the report can't show why the run ended"
            found.missing.append(f"finetune can't read log.txt ({_one_line(error)}), {lost}")
    return found


def _one_line(error: Exception) -> str:
    """Describe in short why a file cannot be read."""
    if isinstance(error, UserError):
        said = "; ".join(": ".join(filter(None, (p.what, p.found))) for p in error.problems[:3])
        return said[:200]
    return " ".join(str(error).split())[:120]


def _read_recipe(found: Run, folder: RunFolder) -> None:
    text = folder.read_text("recipe.resolved.yaml")
    version = folder.format_version
    raw = strict_yaml.parse(text, "recipe.resolved.yaml").value
    recipe = renames.current_recipe(raw) if version == 1 else raw
    file_shapes.check(folder.recipe.name, recipe)
    for mark in ("# ignored: ", "# left out: "):  # the second one is of earlier versions
        found.notices += [line.removeprefix(mark) for line in text.split("\n") if line.startswith(mark)]
    found.settings += settings_text.settings(text, version)
    found.recipe.update(recipe)


def _read_data(found: Run, folder: RunFolder) -> None:
    known, content = {each.name for each in fields(Report)}, folder.read("data_report.json")
    for split in ("train", "validation"):
        values = {key: value for key, value in (content.get(split) or {}).items() if key in known}
        report = Report(**values)
        for name, columns in report.unused.items():
            if isinstance(columns, list):  # format 1 stores lists
                report.unused[name] = dict.fromkeys(columns, report.read.get(name, 0))
        found.data[split] = report


def _read_metrics(found: Run, folder: RunFolder) -> None:
    """Read training steps and evaluations. NaN and Inf are stored as text."""
    torn = 0
    for line in folder.read_text("metrics.jsonl").splitlines():
        try:
            record = {key: _float(value) for key, value in run_folder.read_step(line).items()}
        except ValueError:
            torn += 1
            continue
        (found.steps if "loss" in record else found.checks).append(record)
    if torn:
        found.missing.append(f"finetune can't read {torn:,} lines of metrics.jsonl; the report skips them")


def _float(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def _last_error(folder: RunFolder) -> str:
    """Return the last error in the log with its lines, or an empty string if the run continued after it."""
    if not os.path.lexists(folder.path / "log.txt"):
        return ""
    text = safe_files.read_bytes(folder.path, "log.txt").decode("utf-8", "replace")
    _, mark, said = ("\n" + text).rpartition("\nerror: ")
    return (mark + said).strip()[:LONGEST] if mark and "\nstep " not in said else ""
