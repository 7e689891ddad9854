"""Write `recipe.resolved.yaml`, `data_report.json` and `environment.json` when a run starts."""

from __future__ import annotations

from dataclasses import asdict

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from finetune.adapters import peft_configs
from finetune.autoconfig import optimizer_choice
from finetune.core import formatting
from finetune.core.run_checks import Choice
from finetune.data.audit import Report
from finetune.models import base_identity
from finetune.recipe import adapter_types
from finetune.recipe.loader import load as load_recipe
from finetune.recipe.schema import Recipe, Train
from finetune.run_folder import run_folder, settings_text
from finetune.training import environment_of_run
from finetune.training.auto_correction import MICRO_BATCH, SET_BY
from finetune.training.run_context import RunContext, StepPlan


def choices(run: RunContext, plan: StepPlan, adapted: PreTrainedModel | PeftModel) -> settings_text.Choices:
    """Return every value that the recipe does not set, with who set it and why."""
    recipe, setup, correction = run.recipe, run.setup, run.correction
    batch, fast = plan.batch, plan.choices
    launch, set_by = setup.launch, recipe.origin.set_by
    derived = peft_configs.derived(adapted, recipe.adapter)
    epochs = recipe.train.epochs
    how = f"{epochs:g} epoch{'s' * (epochs != 1)}"
    how = f"{set_by.get('train.max_steps', 'recipe')}: max_steps" if recipe.train.max_steps else how
    processes = f"{launch.processes} process{'es' * (launch.processes > 1)}"
    factors = f"micro-batch {batch.per_device} x {batch.accumulation} accumulation x {processes}"
    split = f"effective batch size {batch.effective} = {factors}"

    def by(key: str, who: str, choice: Choice) -> str:
        if choice.reason.startswith(SET_BY):
            return choice.reason
        if choice.reason == "asked for":
            return set_by.get(key, "recipe")
        return f"{who}: {choice.reason.removeprefix('auto: ')}"

    stored = setup.storage.value if setup.storage.value in adapter_types.QUANTIZED else "none"
    storage, parts = setup.storage, optimizer_choice.unsaved(recipe.train, launch.keeper)
    compile, fused = fast["speed.compile"], fast["speed.fused"]
    checkpointing = fast["speed.activation_checkpointing"]
    mode = recipe.speed.compile if recipe.speed.compile not in ("auto", True) else compile.value == "on"
    graphs = fast["CUDA graphs"]
    offload, offload_source = fast["speed.offload"], set_by.get("speed.offload", "default")
    date, day = recipe.data.template_date, "default: the day on which this run started"
    per_device = set_by.get("train.per_device_train_batch_size", f"default: {split}")
    if smaller := correction.choice(MICRO_BATCH):
        per_device = f"{smaller.reason}: {split}"
    return {
        **{key: (path, set_by[key]) for key, path in run_folder.local_paths(recipe).items()},
        **{f"adapter.{key}": (value, "default: made for this run") for key, value in derived.items()},
        **({"data.template_date": (date, set_by.get("data.template_date", day))} if date else {}),
        "model.attention": (setup.attention.value, by("model.attention", "hardware", setup.attention)),
        "model.quantization": (stored, by("model.quantization", "hardware", storage)),
        "model.storage": (storage.value, by("model.quantization", "launch", storage)),
        "speed.fused": (fused.value == "on", by("speed.fused", "hardware", fused)),
        "speed.compile": (mode, by("speed.compile", "default", compile)),
        "speed.graphs": (graphs.value, by("speed.compile", "hardware", graphs)),
        "speed.activation_checkpointing": (
            checkpointing.value,
            by("speed.activation_checkpointing", "hardware", checkpointing),
        ),
        "speed.offload": (offload.value, by("speed.offload", offload_source, offload)),
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
        "train.output_dir": (str(run.folder.path), set_by.get("train.output_dir", "default")),
        "train.per_device_train_batch_size": (batch.per_device, per_device),
        "train.gradient_accumulation_steps": (
            batch.accumulation,
            f"default: {batch.effective} / ({batch.per_device} x {processes})",
        ),
        "train.steps": (plan.steps, how),
        "train.precision": (
            formatting.precision(launch.precision),
            f"{launch.precision_by}: {launch.precision_reason}",
        ),
    }


def library_defaults(
    recipe: Recipe, adapted: nn.Module, arguments: TrainingArguments
) -> settings_text.Choices:
    """Return the values of recipe keys that neither the recipe nor finetune sets: SFTConfig's and PEFT's."""
    values = {"train": arguments.to_sanitized_dict()}
    if configs := getattr(adapted, "peft_config", None):
        values["adapter"] = configs["default"].to_dict()
    defaults: settings_text.Choices = {}
    for section, upstream in values.items():
        content = getattr(recipe, section)
        shown = content.model_fields_set | Train.model_fields.keys()
        for key in (type(content).model_fields.keys() & upstream.keys()) - shown:
            if upstream[key] is not None:
                defaults[f"{section}.{key}"] = upstream[key], settings_text.LIBRARY
    return dict(sorted(defaults.items()))


def write_start(
    run: RunContext,
    chosen: settings_text.Choices,
    reports: dict[str, Report],
    adapted: nn.Module,
    arguments: TrainingArguments,
) -> None:
    """Write recipe.resolved.yaml, data_report.json and environment.json."""
    folder = run.folder
    values = {**library_defaults(run.recipe, adapted, arguments), **chosen}
    folder.write_text(folder.recipe.name, settings_text.resolved_yaml(run.recipe, values))
    load_recipe(folder.recipe)  # later commands read this file, so check now that it loads
    folder.write("data_report.json", {name: asdict(split) for name, split in reports.items()})
    environment = environment_of_run.describe(run.setup.hardware, run.setup.launch)
    environment["base_model"] = base_identity.describe(run.recipe.model)
    folder.write("environment.json", {**environment, "sft_config": arguments.to_sanitized_dict()})
