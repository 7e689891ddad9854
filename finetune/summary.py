"""What a run says: the plan at its start, the result at its end, and the files that hold both."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from finetune import adapters, run_folder

if TYPE_CHECKING:
    from finetune.data.load import Split
    from finetune.hardware import Choice, Setup
    from finetune.receipts import Ledger
    from finetune.recipe import Recipe
    from finetune.run_folder import RunFolder
    from finetune.screen import Screen

Choices = dict[str, tuple[Any, str]]  # dotted key -> (value, who chose it and why)


def choices(
    recipe: Recipe, setup: Setup, batch: Any, steps: int, fast: dict[str, Choice], folder: RunFolder
) -> Choices:
    """Every value that was not simply read from the recipe, with who set it and why."""
    launch, set_by = setup.launch, recipe.origin.set_by
    how = "asked for" if recipe.train.max_steps else f"{recipe.train.num_train_epochs or 3.0:g} epochs"
    split = f"{batch.effective} = {batch.per_device} x {launch.processes} processes x {batch.accumulation} accumulated"
    return {
        "model.attention": _by("hardware", setup.attention),
        "speed.base": (_base_key(setup.storage.value), _by("hardware", setup.storage)[1]),
        "speed.compile": (fast["speed.compile"].value == "on", fast["speed.compile"].reason),
        "speed.recompute": _by("hardware", fast["speed.recompute"]),
        "train.output_dir": (str(folder.path), set_by.get("train.output_dir", "default")),
        "train.per_device_train_batch_size": (batch.per_device, split),
        "train.gradient_accumulation_steps": (batch.accumulation, split),
        "train.steps": (steps, how),
        "train.precision": (launch.precision, launch.precision_reason),
    }


def write_start(
    folder: RunFolder, recipe: Recipe, chosen: Choices, data: dict[str, Split], setup: Setup, arguments: Any
) -> None:
    """recipe.resolved.yaml, data_report.json and environment.json."""
    folder.recipe.write_text(run_folder.resolved_yaml(recipe, chosen), encoding="utf-8")
    folder.write("data_report.json", {name: asdict(split) for name, split in data.items()})
    environment = run_folder.environment(setup.hardware, setup.launch)
    folder.write("environment.json", {**environment, "sft_config": arguments.to_sanitized_dict()})


def show_plan(screen: Screen, recipe: Recipe, chosen: Choices, data: dict[str, Split]) -> None:
    """One table: what will happen, and why so."""
    train, held_out = data["train"], data["validation"]
    rows = [
        ("model", recipe.model.name, ""),
        ("adapter", recipe.adapter.type, _options(recipe)),
        ("data", f"{train.kept} rows, {train.trained_tokens:,} tokens with loss of {train.tokens:,}", _left_out(train)),
        ("held out", f"{held_out.rows} rows", "" if held_out.rows else "no data.validation: nothing to evaluate on"),
        ("learning rate", f"{recipe.train.learning_rate:g}", recipe.origin.set_by.get("train.learning_rate", "default")),
    ]
    rows += [(key.partition(".")[2], value, why) for key, (value, why) in chosen.items()]
    screen.table("plan", ("what", "value", "why"), [tuple(escape(str(cell)) for cell in row) for row in rows])
    for notice in recipe.origin.notices:
        screen.say(f"note: {escape(notice)}")
    advice = adapters.learning_rate_advice(recipe.adapter.type, recipe.train.learning_rate)
    if advice:
        screen.say(f"note: {advice}")
    screen.say("")


def show_result(screen: Screen, recipe: Recipe, folder: RunFolder, ledger: Ledger, result: dict[str, Any]) -> None:
    """Receipts, base against tuned, samples side by side, and what to do next."""
    receipts = [("yes" if r.ok else "NO", r.option, r.asked, r.got) for r in ledger.receipts]
    screen.table("receipts", ("ok", "what", "asked", "got"), [tuple(map(escape, row)) for row in receipts])
    show_scores(screen, result)
    show_next(screen, recipe, folder)


def show_scores(screen: Screen, result: dict[str, Any]) -> None:
    """Base against tuned, and samples side by side."""
    if result["base"]:
        base, tuned = result["base"], result["tuned"]
        rows = [
            ("held-out loss", f"{base['loss']:.4f}", f"{tuned['loss']:.4f}"),
            ("exact match", f"{base['exact_match']:.1%}", f"{tuned['exact_match']:.1%}"),
        ]
        screen.table("result", ("", "base", "tuned"), rows)
    for sample in result["samples"]:
        prompt = sample["prompt"] if isinstance(sample["prompt"], str) else sample["prompt"][-1]["content"]
        rows = [("asked", prompt), *((name, sample[name][:400]) for name in ("reference", "base", "tuned"))]
        screen.table("", ("", ""), [(name, escape(text)) for name, text in rows])


def show_next(screen: Screen, recipe: Recipe, folder: RunFolder) -> None:
    path = shlex.quote(str(folder.path))
    other = "ia3" if recipe.adapter.type != "ia3" else "lora"
    screen.say("", f"[bold]the run is in {escape(str(folder.path))}[/bold]", "next:")
    screen.say(f"  finetune evaluate {escape(path)}")
    screen.say(f"  finetune train {escape(shlex.quote(str(recipe.origin.path)))} adapter.type={other}")
    screen.say(f"  less {escape(path)}/log.txt")


def _base_key(storage: str) -> str:
    """The storage as the recipe's `speed.base` spells it: what `auto` became must load again."""
    return {"nf4": "nf4", "bf16": "bf16"}.get(storage, "auto")


def _by(who: str, choice: Choice) -> tuple[str, str]:
    return choice.value, "recipe" if choice.reason == "asked for" else f"{who}: {choice.reason}"


def _options(recipe: Recipe) -> str:
    return ", ".join(f"{key} {value}" for key, value in recipe.adapter.options().items())


def _left_out(split: Split) -> str:
    parts = []
    if split.too_long:
        parts.append(f"{split.too_long} of {split.rows} dropped as too long (longest {split.longest})")
    if split.nothing_trained:
        parts.append(f"{split.nothing_trained} dropped with nothing to train on")
    return "; ".join(parts) or f"none of {split.rows} left out"
