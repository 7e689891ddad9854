"""Stop a run after each of its steps and resume it, with each adapter type and each kind of data loading.

It is a part of `reliability.py`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.experiments.runner import verify_resume

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny_llama"
STEPS = 12
DROPOUT = 0.1
COMMON = (
    f"train.max_steps={STEPS}",
    "train.warmup_steps=3",
    "train.lr_scheduler_type=cosine",
    "train.effective_batch_size=4",
    "train.per_device_train_batch_size=2",
    "train.save_total_limit=null",
    "train.logging_steps=1",
    "data.validation=null",
    f"adapter.lora_dropout={DROPOUT}",
)
ADAPTERS = {
    "lora": ("adapter.r=4",),
    "qlora": ("adapter.r=4",),
    "dora": ("adapter.r=4",),
    "adalora": ("adapter.r=4", "adapter.tinit=2", "adapter.tfinal=3"),
    "ia3": (),
    "full": ("train.learning_rate=1e-3",),
}
DATA = {  # how sequences are loaded -> number of examples, and overrides
    "padded": (18, ()),  # epochs end in half a batch, after steps 5 and 10
    "packed": (40, ("data.packing=true", "data.max_length=192")),
    "streaming": (40, ("data.streaming=true", "data.shuffle_buffer=20")),
}


def run(folder: Path, start: Callable[[list[str]], int]) -> dict[str, Any]:
    """Count the resumed runs that equal the uninterrupted run, for each adapter type and kind of data
    loading.

    Args:
        start: starts `finetune train` in a new process, and returns the process id.
    """
    base, found = small_model(folder), dict[str, Any]()
    for kind, options in ADAPTERS.items():
        for feed, (count, more) in DATA.items():
            rows = folder / f"{feed}.jsonl"
            lines = (EXAMPLE / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
            rows.write_text("".join(lines[:count]), encoding="utf-8")
            given = [f"model.name={base}", f"data.name={rows}", f"data.cache_dir={folder / 'cache'}", *COMMON]
            words = [str(ROOT / "recipes" / "quickstart.yaml"), *given, *more, f"adapter.type={kind}"]
            words += [*options, f"--until={STEPS}"]
            found[f"{kind}, {feed}"] = cell(words, folder / f"{kind}-{feed}", start)
            print(kind, feed, found[f"{kind}, {feed}"], flush=True)
    return {"steps": STEPS, "cells": found}


def cell(words: list[str], folder: Path, start: Callable[[list[str]], int]) -> dict[str, Any]:
    """Train without a stop and save each step. Then resume from each checkpoint to the end."""
    straight, differing, tensors = folder / "straight", dict[str, list[str]](), 0
    wait(start([*words, "train.save_steps=1", f"train.output_dir={straight}"]))
    for step in range(1, STEPS):
        resumed = folder / "resumed"
        shutil.copytree(straight / "checkpoints" / f"step-{step}", resumed / "checkpoints" / f"step-{step}")
        shutil.copy(straight / "metrics.jsonl", resumed)
        wait(start([*words, f"train.save_steps={STEPS}", f"train.output_dir={resumed}", "--resume"]))
        parts = verify_resume.compare(straight, resumed, STEPS)
        tensors = sum(part.tensors for part in parts)
        if wrong := [part.name for part in parts if part.differing]:
            differing[str(step)] = wrong
        shutil.rmtree(resumed)
    shutil.rmtree(folder)
    return {"equal": STEPS - 1 - len(differing), "tensors": tensors, "differing": differing}


def wait(child: int) -> None:
    """Wait until a run has stopped with exit code 75."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 75:
        raise SystemExit(f"a run ends with {code}")


def small_model(folder: Path) -> Path:
    """Return the first two layers of the example model, with attention dropout, which works with every
    adapter type."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = folder / "two_layers"
    model: Any = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model")
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    model.save_pretrained(made)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    (made / "config.json").write_text(json.dumps({**config, "attention_dropout": DROPOUT}), encoding="utf-8")
    AutoTokenizer.from_pretrained(EXAMPLE / "model").save_pretrained(made)
    return made


def page(found: dict[str, Any]) -> str:
    """Return the section of reliability.md."""
    of, cells = found["steps"] - 1, found["cells"]
    equal, runs = sum(one["equal"] for one in cells.values()), of * len(cells)
    lines = [
        "# Resumed after every step",
        "",
        f"`python benchmarks/reliability.py --resume-matrix`: {found['steps']} steps straight through, and",
        f"resumed in a new process after each of steps 1 to {of}: cosine with warm-up, dropout {DROPOUT} in",
        "attention and in adapters that have it, on the CPU, in fp32 (qLoRA's base: NF4). Equal bit for bit",
        "at the end (loss, grad_norm, learning rate, batches, random numbers, parameters, optimizer):",
        f"**{equal} of {runs}** resumed runs.",
        "",
        "| | " + " | ".join(DATA) + " | tensors compared |",
        "|---|" + "---|" * (len(DATA) + 1),
    ]
    for kind in ADAPTERS:
        row = [cells[f"{kind}, {feed}"] for feed in DATA]
        counts = " | ".join(f"{one['equal']} of {of}" for one in row)
        lines.append(f"| {kind} | {counts} | {', '.join(str(one['tensors']) for one in row)} |")
    return "\n".join(lines)
