"""What a run says: the plan at its start, the result at its end, and the files that hold both."""

from __future__ import annotations

import glob
import os
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from finetune import adapter_types, adapters, optimizers, run_folder
from finetune.batch import short_of_peak
from finetune.recipe import load as load_recipe
from finetune.report_scores import is_share
from finetune.sections import Source

if TYPE_CHECKING:
    from finetune.data.audit import Report
    from finetune.hardware import Choice, Setup
    from finetune.receipts import Ledger
    from finetune.recipe import Recipe
    from finetune.run_folder import RunFolder
    from finetune.screen import Screen

Choices = dict[str, tuple[Any, str]]  # dotted key -> (value, who chose it and why)


def choices(
    recipe: Recipe,
    setup: Setup,
    batch: Any,
    steps: int,
    adapted: Any,
    fast: dict[str, Choice],
    folder: RunFolder,
) -> Choices:
    """Every value that was not simply read from the recipe, with who set it and why."""
    launch, set_by = setup.launch, recipe.origin.set_by
    derived = adapters.derived(adapted, recipe.adapter)
    how = "asked for" if recipe.train.max_steps else f"{recipe.train.num_train_epochs or 3.0:g} epochs"
    factors = f"{batch.per_device} x {launch.processes} processes x {batch.accumulation} accumulated"
    split = f"{batch.effective} = {factors}"

    def by(key: str, who: str, choice: Choice) -> str:
        return set_by.get(key, "recipe") if choice.reason == "asked for" else f"{who}: {choice.reason}"

    storage, parts = setup.storage, optimizers.unsaved(recipe.train, launch.keeper)
    compile, recompute, fused = fast["speed.compile"], fast["speed.recompute"], fast["speed.fused"]
    mode = recipe.speed.compile if recipe.speed.compile not in ("auto", True) else compile.value == "on"
    graphs = fast["CUDA graphs"]
    offload, asked = fast["speed.offload"], set_by.get("speed.offload", "default")
    count, _, total = recompute.value.partition(" of ")  # "none", "cheap", or "6 of 32"
    recomputed = count if not total else "all" if count == total else int(count)
    per_device = set_by.get("train.per_device_train_batch_size", f"default: {split}")
    return {
        **{key: (path, set_by[key]) for key, path in local_paths(recipe).items()},
        **{f"adapter.{key}": (value, "default: made for this run") for key, value in derived.items()},
        "model.attention": (setup.attention.value, by("model.attention", "hardware", setup.attention)),
        **({"speed.base": ("fp8", by("speed.base", "hardware", storage))} if storage.value == "fp8" else {}),
        "speed.storage": (storage.value, by("speed.base", "launch", storage)),
        "speed.fused": (fused.value == "on", by("speed.fused", "hardware", fused)),
        "speed.compile": (mode, by("speed.compile", "default", compile)),
        "speed.graphs": (graphs.value, by("speed.compile", "hardware", graphs)),
        "speed.recompute": (recomputed, by("speed.recompute", "hardware", recompute)),
        "speed.offload": (offload.value, by("speed.offload", asked, offload)),
        "speed.loss": (fast["speed.loss"].value, by("speed.loss", "default", fast["speed.loss"])),
        **(
            {
                "train.save_strategy": (
                    "no",
                    f"launch: {parts} keeps state that no checkpoint holds: a stop loses the run",
                )
            }
            if parts
            else {}
        ),
        "train.output_dir": (str(folder.path), set_by.get("train.output_dir", "default")),
        "train.per_device_train_batch_size": (batch.per_device, per_device),
        "train.gradient_accumulation_steps": (batch.accumulation, f"default: {split}"),
        "train.steps": (steps, how),
        "train.precision": (launch.precision, f"{launch.precision_by}: {launch.precision_reason}"),
    }


def write_start(
    folder: RunFolder,
    recipe: Recipe,
    chosen: Choices,
    data: dict[str, Report],
    setup: Setup,
    arguments: Any,
) -> None:
    """recipe.resolved.yaml, data_report.json and environment.json."""
    folder.write_text(folder.recipe.name, run_folder.resolved_yaml(recipe, chosen))
    load_recipe(folder.recipe)  # what later commands read must load: better to know now
    folder.write("data_report.json", {name: asdict(split) for name, split in data.items()})
    environment = run_folder.environment(setup.hardware, setup.launch)
    folder.write("environment.json", {**environment, "sft_config": arguments.to_sanitized_dict()})


def show_plan(
    screen: Screen, recipe: Recipe, chosen: Choices, data: dict[str, Report], notes: list[str]
) -> None:
    """One table: what will happen, and why so; and notes."""
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
    paths = local_paths(recipe)
    rows += [(key.partition(".")[2], value, why) for key, (value, why) in chosen.items() if key not in paths]
    screen.table("plan", ("what", "value", "why"), rows)
    held = [f"held out: {remark}" for remark in held_out.remarks()]
    for notice in [*train.remarks(), *held, *recipe.origin.notices, *notes]:
        screen.say(f"note: {notice}")
    kind, rate = recipe.adapter.type, recipe.train.learning_rate
    advice = adapter_types.advice(kind, rate, recipe.adapter.options())
    for line in [*advice, *short_of_peak(recipe.train, chosen["train.steps"][0])]:
        screen.say(f"note: {line}")
    screen.say("")


def show_result(screen: Screen, folder: RunFolder, ledger: Ledger, result: dict[str, Any]) -> None:
    """Receipts, base against tuned, samples side by side, and what to do next."""
    receipts = [(r.option, "yes" if r.ok else "NO", r.asked, r.got) for r in ledger.receipts]
    screen.table("receipts", ("what", "true", "asked", "got"), receipts)
    show_scores(screen, result)
    show_next(screen, folder)


def show_scores(screen: Screen, result: dict[str, Any]) -> None:
    """Base against tuned, and samples side by side."""
    rows = [
        _score_row(name, key, result)
        for key, name in (
            ("loss", "held-out loss"),
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
    said = result["verdict"]
    forgot = f"; forgot: {', '.join(said['forgot'])}" if said["forgot"] else ""
    screen.say(Text(f"{said['word']}: {said['why']}{forgot}", style="bold"))
    for note in result["settings"]["notes"]:
        screen.say(f"note: {note}")
    for sample in result["samples"]:
        prompt = sample["prompt"] if isinstance(sample["prompt"], str) else sample["prompt"][-1]["content"]
        rows = [
            ("asked", prompt),
            *((name, sample[name][:400]) for name in ("reference", "base", "tuned")),
        ]
        screen.table("", ("", ""), rows)


def number(value: float, *, share: bool) -> str:
    """A score as it is said: a share in per cent, all else (losses, perplexities, BLEU) as it is."""
    return f"{value:.1%}" if share else f"{value:.4f}"


def _score_row(name: str, key: str, scores: dict[str, Any]) -> tuple[str, ...]:
    """A metric's base, tuned and difference."""
    share = is_share(key, scores["base"], scores["tuned"])
    base, tuned = (number(scores[side][key], share=share) for side in ("base", "tuned"))
    found = scores["difference"].get(key)
    if found is None:
        return name, base, tuned, "", ""
    low, value, high = (number(found[part], share=share) for part in ("low", "value", "high"))
    return name, base, tuned, f"{value} ({low} to {high})", found["verdict"]


def show_next(screen: Screen, folder: RunFolder) -> None:
    path = shlex.quote(str(folder.path))
    screen.say("", Text(f"the run is in {folder.path}", style="bold"), "next:")
    screen.say(f"  open {path}/report.html in a browser")
    screen.say(f"  finetune evaluate {path}")
    screen.say(f"  finetune chat {path}")
    screen.say(f"  less {path}/log.txt")


def local_paths(recipe: Recipe) -> dict[str, Any]:
    """The recipe's files and folders on this machine, as absolute paths."""
    named = {
        "model.name": recipe.model.name,
        "data.name": recipe.data.name,
        "data.validation": recipe.data.validation,
        "data.chat_template": recipe.data.chat_template,
        "data.cache": recipe.data.cache,
    }
    found = {key: _absolute(name) for key, name in named.items()}
    named |= {"eval.tasks": recipe.eval.tasks, "eval.general": recipe.eval.general}
    is_file = [name.endswith((".yaml", ".yml")) for name in recipe.eval.tasks]
    tasks = zip(recipe.eval.tasks, is_file, strict=True)
    found["eval.tasks"] = [_absolute(name) if file else name for name, file in tasks]
    found["eval.general"] = _absolute(recipe.eval.general)
    return {key: path for key, path in found.items() if path != named[key]}


def _absolute(name: Any) -> Any:
    if isinstance(name, list):
        return [_absolute(item) for item in name]
    if isinstance(name, Source):
        return name.model_copy(update={"name": _absolute(name.name)})
    if isinstance(name, str) and (os.path.exists(name) or glob.glob(name)):
        return os.path.abspath(name)
    return name


def _options(recipe: Recipe) -> str:
    return ", ".join(f"{key} {value}" for key, value in recipe.adapter.options().items())
