"""`finetune check RECIPE --verify-resume`: that a run of this recipe, stopped and resumed, is the run itself.

Twice as many steps are trained straight through, with a checkpoint in the middle; then a new process goes on
from that checkpoint. What both have at the end is compared bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from finetune.autoconfig.batch_size import most_processes, split_batch
from finetune.checkpointing import checkpoints
from finetune.core.errors import Exit, Problem, UserError
from finetune.hardware import detection
from finetune.preflight import choice_checks
from finetune.recipe import adapter_types

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.core.console import Console
    from finetune.recipe.schema import Recipe

HALF = 3  # steps before the stop, and after it
LOGGED = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens")  # all but how long it took

ALWAYS = (  # saved in the middle, and told to no one
    "train.logging_steps=1",
    "train.save_strategy=steps",
    f"train.save_steps={HALF}",
    "train.save_total_limit=null",
    "train.report_to=none",
    "publish.repo=null",
)


class Part(NamedTuple):
    """One part of what a training is, straight and resumed."""

    name: str
    tensors: int
    values: int
    """Numbers and texts beside the tensors."""
    differing: list[str]
    digest: str
    """sha256 of the straight run's."""


def run(recipe: Recipe, command: list[str], screen: Console) -> None:
    """Prove it for a recipe, and print the certificate.

    Args:
        command: recipe, overrides and launch, as `finetune train` is given them.

    Raises:
        UserError: a part differs, each by its name (exit 4); or a run fails, with its own message; or a
            launcher started this process (exit 2).
    """
    outside_a_launch([*command, "--verify-resume"])
    choice_checks.pinned(recipe)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="finetune-proof-"))
    try:
        straight, resumed = folder / "straight", folder / "resumed"
        shorter = shortened(recipe)
        until = f"--until={2 * HALF}"
        _train([*command, *shorter, f"train.output_dir={straight}", until])
        last = max(map(checkpoints.step_of, checkpoints.published(straight / "checkpoints")))
        if last <= HALF:
            what, fix = f"a run of {last} steps is too short to be stopped", "train.max_steps=12"
            raise UserError(Problem(what, "train.max_steps", fix=fix))
        screen.say(f"{HALF} steps are kept; a new process goes on from there ...")
        for name in (f"checkpoints/step-{HALF}", "metrics.jsonl"):
            source, target = straight / name, resumed / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        _train([*command, *shorter, f"train.output_dir={resumed}", "--resume", until])
        parts = compare(straight, resumed, last)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [(p.name, f"{p.tensors}", f"{p.values}", _verdict(p), p.digest[:16]) for p in parts]
    screen.table("resumed against straight", ("part", "tensors", "values", "", "sha256"), rows)
    own = [text for text in shorter if text not in ALWAYS]
    changed = f" (with {', '.join(own)})" if own else ""
    said = f"{HALF} steps, stopped, and {last - HALF} in a new process, against {last} steps{changed}"
    screen.say("", f"{said}: {time.monotonic() - started:.0f} s")
    refuse(parts, "a resumed run is not the run itself", "please report it, with the recipe")
    screen.say("verified: a run of this recipe can be stopped and resumed; not a bit differs")


def outside_a_launch(words: list[str]) -> None:
    """Refuse a launcher (exit 2): `finetune train` launches the runs that are compared."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        what = f"{words[-1]} starts runs of its own, on all GPUs, and not in each process of a launch"
        raise UserError(Problem(what, fix=f"without a launcher: {shlex.join(['finetune', 'check', *words])}"))


def compare(straight: Path, resumed: Path, step: int) -> list[Part]:
    """Two runs after `step`, part by part, and the lines that both have logged."""
    one, other = (_parts(folder / "checkpoints" / f"step-{step}") for folder in (straight, resumed))
    one["metrics.jsonl"], other["metrics.jsonl"] = _logged(straight), _logged(resumed)
    found = []
    for name in sorted(one.keys() | other.keys()):
        a, b = one.get(name, {}), other.get(name, {})
        differing = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
        tensors = sum(key.endswith(" tensor") for key in a)
        digest = hashlib.sha256(json.dumps(a, sort_keys=True).encode()).hexdigest()
        found.append(Part(name, tensors, len(a) - tensors, differing, digest))
    return found


def _parts(path: Path) -> dict[str, dict[str, str]]:
    """Part of a checkpoint -> every tensor's digest and every other value, by name."""
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
    for name, leaf in found.pop("ranks").items():  # ranks.0.rng.cpu: what each rank has is a part of its own
        found.setdefault(name.split(".")[2].partition(" ")[0], {})[name] = leaf
    return found


def _leaves(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Every number and text, by its name."""
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
    """Every logged number of a run, by step, but for times."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        kept = {k: repr(v) for k, v in record.items() if k in LOGGED or k.startswith("eval_loss")}
        found |= {f"step {record['step']}: {key}": value for key, value in kept.items()}
    return found


def shortened(recipe: Recipe) -> list[str]:
    """Overrides for a check of a minute: the recipe's own steps and rows, no more of them than it takes."""
    overrides = []
    if (
        adapter_types.find(recipe.adapter.type).peft == "adalora"
        and "tinit" not in recipe.adapter.model_fields_set
    ):
        overrides.append(f"train.max_steps={4 * HALF}")  # so that it prunes within the check
    processes, _ = most_processes(recipe.train, detection.detect().count)
    batch = split_batch(recipe.train, processes)
    if batch.accumulation > 2 and recipe.train.per_device_train_batch_size != "auto":
        overrides.append(f"train.effective_batch_size={2 * batch.per_device * processes}")
        overrides.append(f"train.per_device_train_batch_size={batch.per_device}")
    return [*overrides, *ALWAYS]


def refuse(parts: list[Part], what: str, fix: str) -> None:
    """Say which parts differ, if any do (exit 4)."""
    wrong = [f"{part.name}: {', '.join(part.differing[:3])}" for part in parts if part.differing]
    if wrong:
        raise UserError(Problem(what, found="; ".join(wrong), fix=fix), code=Exit.ARTEFACT)


def _train(words: list[str]) -> None:
    """`finetune train` in a process of its own, until it stops as asked."""
    command = [sys.executable, "-m", "finetune", "train", *words, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (Exit.STOPPED, Exit.DONE):
        said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        what, fix = "a run of this check fails", shlex.join(["finetune", *command[3:]])
        head, *more = said[-12:]
        problem = Problem(what, found=head, fix=fix, more="\n".join(more))
        raise UserError(problem, code=Exit.of(done.returncode))


def _verdict(part: Part) -> str:
    return f"{len(part.differing)} differ" if part.differing else "equal, bit for bit"
