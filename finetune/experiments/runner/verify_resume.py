"""`finetune check RECIPE --verify-resume`: verify that a resumed run equals an uninterrupted run.

One run trains twice HALF steps without interruption and saves a checkpoint in the middle. A new process
resumes from this checkpoint. finetune compares the final states bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from finetune.autoconfig.batch_size import most_processes, split_batch
from finetune.checkpointing import checkpoints
from finetune.core import command_lines, progress, safe_files
from finetune.core.console import Console
from finetune.core.errors import Exit, Problem, UserError
from finetune.distributed import launch_environment
from finetune.experiments.runner import kept_runs
from finetune.hardware import detection
from finetune.preflight import choice_checks
from finetune.recipe import adapter_types
from finetune.recipe.schema import Recipe

HALF = 3  # steps before and after the stop
LOGGED = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens")  # everything except times

ALWAYS = (  # save in the middle, and report to no service
    "train.logging_steps=1",
    "train.save_strategy=steps",
    f"train.save_steps={HALF}",
    "train.save_total_limit=null",
    "train.report_to=none",
    "publish.repo=null",
)


class Part(NamedTuple):
    """One part of the training state, compared between the uninterrupted and the resumed run."""

    name: str
    tensors: int
    values: int
    """Number of values besides the tensors."""
    differing: list[str]


def run(recipe: Recipe, command: list[str], screen: Console) -> None:
    """Verify a recipe and print the result of each part.

    Args:
        command: recipe, overrides and launch, as for `finetune train`.

    Raises:
        UserError: a part differs (exit 4), a run fails (its own exit code), or a launcher started this
            process (exit 2).
    """
    outside_a_launch([*command, "--verify-resume"])
    choice_checks.pinned(recipe)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="finetune-proof-"))
    with progress.phase(screen, "verify-resume", parts=2):
        parts, last, shorter = _both_runs(recipe, command, screen, folder)
    rows = [
        (p.name, f"{p.tensors}", f"{p.values}", f"{len(p.differing)} differ" if p.differing else "equal")
        for p in parts
    ]
    columns = ("part of the checkpoint", "tensors", "other values", "result")
    screen.table("resumed run and run without a stop", columns, rows)
    own = [text for text in shorter if text not in ALWAYS]
    changed = f" (with {', '.join(own)})" if own else ""
    said = f"compared {HALF} + {last - HALF} steps with a resume and {last} steps without a stop{changed}"
    screen.say("", f"{said} in {time.monotonic() - started:.0f} s")
    refuse(parts, "a resumed run differs from a run without a stop", "report this as a bug, with the recipe")
    screen.say("verified: a resumed run of this recipe equals a run without a stop, bit for bit")


def _both_runs(
    recipe: Recipe, command: list[str], screen: Console, folder: Path
) -> tuple[list[Part], int, list[str]]:
    """Train without a stop and with a resume. Return the compared parts, the last step and the overrides."""
    try:
        straight, resumed = folder / "straight", folder / "resumed"
        shorter = shortened(recipe)
        until = f"--until={2 * HALF}"
        with kept_runs.part("without a stop", straight, 2 * HALF):
            _train([*command, *shorter, kept_runs.in_folder(straight), until])
        last = max(map(checkpoints.step_of, checkpoints.published(straight / "checkpoints")))
        if last <= HALF:
            raise UserError(
                Problem(
                    "the run is too short for a stop and a resume",
                    "train.max_steps",
                    found=f"{last} steps",
                    expected=f"more than {HALF} steps",
                    fix="train.max_steps=12",
                    code="value-range",
                )
            )
        screen.say(f"resuming in a new process from step {HALF} ...")
        middle = f"checkpoints/step-{HALF}"
        shutil.copytree(straight / middle, resumed / middle)
        lines = (straight / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        before = [line for line in lines if json.loads(line)["step"] <= HALF]
        safe_files.write_text(resumed, "metrics.jsonl", "".join(before))
        logged = kept_runs.share_of_steps(resumed, 2 * HALF, None)  # starts at the half
        with progress.part("resumed run", lambda: 2 * logged() - 1):
            _train([*command, *shorter, kept_runs.in_folder(resumed), "--resume", until])
        return compare(straight, resumed, last), last, shorter
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def outside_a_launch(words: list[str]) -> None:
    """Raise a UserError under a launcher (exit 2), because `finetune train` launches the compared runs."""
    if launch_environment.processes() > 1:
        raise UserError(
            Problem(
                f"{words[-1]} can't run under a launcher",
                fix=command_lines.command("check", *words),
                why="it starts its own runs on all GPUs",
                code="launch-config",
            )
        )


def compare(straight: Path, resumed: Path, step: int) -> list[Part]:
    """Compare two runs after `step`: each part of the checkpoint, and the logged values."""
    one, other = (_parts(folder / "checkpoints" / f"step-{step}") for folder in (straight, resumed))
    one["metrics.jsonl"], other["metrics.jsonl"] = _logged(straight), _logged(resumed)
    found = []
    for name in sorted(one.keys() | other.keys()):
        a, b = one.get(name, {}), other.get(name, {})
        differing = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
        tensors = sum(key.endswith(" tensor") for key in a)
        found.append(Part(name, tensors, len(a) - tensors, differing))
    return found


def _parts(path: Path) -> dict[str, dict[str, str]]:
    """Return the digest of every tensor and the text of every other value, by part of the checkpoint."""
    import torch

    checkpoints.verify(path)
    structure = checkpoints.read_json(path, "state.json")
    structure["trainer_state"] = {"dict": [*checkpoints.read_json(path, "trainer_state.json").items()]}
    found = {}
    for part, value in structure.items():
        file = f"{part}.safetensors"
        tensors = checkpoints.read_tensors(path, file) if (path / file).exists() else {}
        found[part] = {
            f"{name} tensor": f"{tensor.dtype} {tuple(tensor.shape)} "
            + hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in tensors.items()
        }
        found[part] |= {name: leaf for name, leaf in _leaves(value, part) if ".seconds" not in name}
    # A name is ranks.0.rng.cpu, so group the values of all ranks by kind of state
    for name, leaf in found.pop("ranks").items():
        found.setdefault(name.split(".")[2].partition(" ")[0], {})[name] = leaf
    return found


def _leaves(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Yield every number and text with its name."""
    if isinstance(value, dict) and "dict" in value:
        for key, part in value["dict"]:
            yield from _leaves(part, f"{name}.{key}")
    elif isinstance(value, dict):
        for part in value.values():
            yield from _leaves(part, name) if isinstance(part, (dict, list)) else [(f"{name} is", str(part))]
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{name}.{index}")
    else:
        yield name, repr(value)


def _logged(folder: Path) -> dict[str, str]:
    """Return every logged value of a run by step, except times."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        kept = {k: repr(v) for k, v in record.items() if k in LOGGED or k.startswith("eval_loss")}
        found |= {f"step {record['step']}: {key}": value for key, value in kept.items()}
    return found


def shortened(recipe: Recipe) -> list[str]:
    """Return overrides for a check of about a minute. It keeps the recipe's micro-batch size."""
    overrides = []
    if (
        adapter_types.find(recipe.adapter.type).peft == "adalora"
        and "tinit" not in recipe.adapter.model_fields_set
    ):
        overrides.append(f"train.max_steps={4 * HALF}")  # makes AdaLoRA prune within the check
    processes, _ = most_processes(recipe.train, detection.detect().count)
    batch = split_batch(recipe.train, processes)
    if batch.accumulation > 2 and recipe.train.per_device_train_batch_size != "auto":
        overrides.append(f"train.effective_batch_size={2 * batch.per_device * processes}")
        overrides.append(f"train.per_device_train_batch_size={batch.per_device}")
    return [*overrides, *ALWAYS]


def refuse(parts: list[Part], what: str, fix: str) -> None:
    """Raise a UserError that names the parts that differ (exit 4)."""
    wrong = [f"{part.name}: {', '.join(part.differing[:3])}" for part in parts if part.differing]
    if wrong:
        raise UserError(Problem(what, found="; ".join(wrong), fix=fix, code="run-check"), code=Exit.ARTIFACT)


def _train(words: list[str]) -> None:
    """Run `finetune train` in a separate process until it stops as requested."""
    command = [sys.executable, "-m", "finetune", "train", *words, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (Exit.STOPPED, Exit.DONE):
        raise failed("a training run of this check failed", command[3:], done.returncode, done.stderr)


def failed(what: str, words: list[str], code: int, text: str) -> UserError:
    """Return the error of a command of finetune that failed, with the last lines that it printed."""
    head, *more = text.strip().splitlines()[-12:] or [f"exit {code}"]
    return UserError(
        Problem(what, found=head, fix=command_lines.command(*words), more="\n".join(more), code="run-check"),
        code=Exit.of(code),
    )
