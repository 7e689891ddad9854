"""Decide whether a recipe's choices work on this machine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from finetune.adapters import continue_from, name_problems
from finetune.autoconfig import (
    attention_choice,
    base_quantization,
    compilation,
    data_loader,
    machine_setup,
    mixed_precision,
    optimizer_choice,
    packing_support,
)
from finetune.core.errors import Exit, Problem, UserError
from finetune.distributed import launch_environment
from finetune.hardware import detection
from finetune.models import architecture, model_class, model_files, module_names, tokenizer_setup
from finetune.preflight import launch_conflicts
from finetune.quantization import stored_weights
from finetune.recipe import adapter_rules, adapter_types
from finetune.recipe.schema import Model, Speed

ONLY_LINEAR = ("fp8", "torchao_int8")  # bitsandbytes stores GPT-2's Conv1D layers too

if TYPE_CHECKING:
    from finetune.autoconfig.machine_setup import Setup
    from finetune.core.model_config import ModelConfig
    from finetune.models.module_names import Names
    from finetune.quantization.stored_weights import Stored
    from finetune.recipe.schema import Recipe


def setup_of(recipe: Recipe) -> Setup:
    """Choose how this machine trains a recipe.

    Raises:
        UserError: the recipe contradicts the launch (exit 2), or this machine can't train it (exit 3).
    """
    config = model_files.read_config(recipe.model)
    stored = check_stored(recipe, config)
    model = recipe.model
    if stored and stored.stays:  # the launch has to support the quantization of the checkpoint
        model = model.model_copy(update={"quantization": stored.storage})
    asked = recipe.adapter, model, recipe.data, recipe.speed, recipe.eval.eval_steps
    launch_conflicts.check(detection.detect(), *asked)
    launch_conflicts.against_launch(recipe)
    flat = recipe.data.packing or recipe.data.padding_free
    prompt = adapter_types.find(recipe.adapter.type).prompt
    model_class.check(config)
    setup = machine_setup.choose(
        attention=recipe.model.attention,
        base=recipe.model.quantization,
        adapter_type=recipe.adapter.type,
        attends=attention_choice.read(config),
        rows=attention_choice.Rows(flat, recipe.data.max_length, prompt),
        weights=machine_setup.Weights(stored, partial(against_fp8, recipe)),
    )
    packing_support.check(config, recipe.data, recipe.train, setup.attention.value, setup.launch.rows_apart)
    optimizer_choice.check(recipe.train, recipe.speed, setup)
    compilation.check_compile(recipe.speed.compile, setup.hardware)
    given = recipe.train.passed_on()
    data_loader.loader(setup.hardware, int(launch_environment.said("LOCAL_WORLD_SIZE", "1")), given)
    mixed_precision.check_tf32(given.get("tf32"), setup.hardware)
    return setup


def check_model(recipe: Recipe) -> None:
    """Refuse a model whose architecture or quantization finetune does not support (exit 2)."""
    path = model_files.file_on_disk(recipe.model, "config.json")
    if path is None:  # `architecture.read` reads it from the Hub, or refuses the folder
        return
    config = architecture.config_in(path)
    model_class.check(config)
    stored = stored_weights.read(config)
    if stored and (found := stored_weights.conflicts(stored, recipe)):
        raise UserError(*found)


def check_stored(recipe: Recipe, config: ModelConfig) -> Stored | None:
    """Return the quantization of a checkpoint; `None` if it is not quantized or its config is not known.

    Raises:
        UserError: the recipe can't train on this quantization (exit 2), or a package is missing (exit 3).
    """
    stored = stored_weights.read(config)
    if stored is None:
        return None
    if found := stored_weights.conflicts(stored, recipe):
        raise UserError(*found)
    if stored.stays and (missing := base_quantization.missing_package(stored.storage)):
        raise UserError(missing, code=Exit.ENVIRONMENT)
    return stored


def allows(recipe: Recipe, setup: Setup, change: str) -> bool:
    """Return whether this machine would run the recipe with another value.

    Args:
        change: such as `speed.activation_checkpointing=full` or `adapter.type=lora`.
    """
    key, _, value = change.partition("=")
    section, _, name = key.partition(".")
    raw = recipe.model_dump(exclude_unset=True)
    if section not in ("model", "speed", "adapter") or not value:
        return True
    raw[section] = {**raw.get(section, {}), name: value}
    kind, speed = raw["adapter"]["type"], Speed.model_validate(raw.get("speed", {}))
    model = Model.model_validate(raw["model"])
    by_launch = launch_conflicts.problems(setup.hardware, kind, model, recipe.data, speed)
    again = speed.activation_checkpointing
    graphs = compilation.against_graphs(speed.compile, again, speed.offload, setup.launch.sharded)
    if (
        by_launch
        or graphs
        or adapter_rules.conflicts(raw)
        or base_quantization.missing_package(model.quantization)
    ):
        return False
    try:
        optimizer_choice.check(recipe.train, speed, setup)
    except UserError:
        return False
    return True


def against_names(recipe: Recipe, names: Names) -> list[Problem]:
    """Return the problems of a recipe's adapter with the names of a model's modules.

    An adapter to continue from has the names of the model that it was trained on.
    """
    kind, options = adapter_types.find(recipe.adapter.type), recipe.adapter.options()
    if recipe.adapter.source:
        return continue_from.slow_patterns(recipe.adapter, names)
    if not kind.peft:
        return []
    added = tokenizer_setup.read_added_tokens(recipe.model)
    if added is None:  # only the run knows the ids of the new tokens
        options = {key: value for key, value in options.items() if key != "trainable_token_indices"}
    elif added:
        names = names.with_rows(max(added) + 1)
    found = name_problems.problems({**options, **kind.sets}, names, kind.peft)
    return found + against_rows(recipe, names) + against_storage(recipe.model.quantization, names)


def against_storage(storage: str, names: Names) -> list[Problem]:
    """Return a problem if a model has no nn.Linear layer to quantize; GPT-2 has only Conv1D layers."""
    stored = [name for name in names.linear if names.kinds[name] == "Linear"]
    if storage not in ONLY_LINEAR or stored:
        return []
    what = f"{storage} quantizes only nn.Linear layers, and the layers of {names.family} are Conv1D"
    fix = "set `model.quantization: nf4`, or none"
    return [Problem(what, "model.quantization", found=storage, fix=fix, code="quantization")]


def against_rows(recipe: Recipe, names: Names) -> list[Problem]:
    """Return the problems of training rows of an embedding that another option trains as a whole."""
    ends = module_names.short(names.embedding), module_names.short(names.head)
    given = recipe.adapter.options(), names.tied, bool(recipe.model.add_tokens), *ends
    found = adapter_rules.rows_beside(*given)
    return [Problem(what, key, **{"code": "recipe-conflict", **texts}) for key, what, texts in found]


def pinned(recipe: Recipe) -> Recipe:
    """Return the recipe with the current commit of `model.revision`.

    Every process then reads every file of the base model at this commit (`hub.client.commit`).
    """
    asked, section = recipe.model.revision, model_files.pinned(recipe.model)
    if section.revision == asked:
        return recipe
    recipe.origin.set_by["model.revision"] = f"hub: the commit of {asked or 'main'}"
    return recipe.model_copy(update={"model": section})


def against_fp8(recipe: Recipe, config: ModelConfig | None = None) -> str:
    """Return why `model.quantization: auto` does not use fp8 for this recipe; the empty string if it may.

    Args:
        config: the config of the model, if it has been read already.
    """
    by_recipe = adapter_rules.against_fp8(recipe.adapter, recipe.speed, recipe.eval)
    return by_recipe or (config_against_fp8(config) if config else model_against_fp8(recipe.model))


FP8_WIDTH = 2048  # smallest hidden size for which `model.quantization: auto` uses fp8


def model_against_fp8(model: Model) -> str:
    """Return why `model.quantization: auto` does not use fp8 for this model; the empty string if it may."""
    return config_against_fp8(model_files.read_config(model))


def config_against_fp8(config: ModelConfig) -> str:
    """Return why `model.quantization: auto` does not use fp8 for this config; the empty string if it may."""
    width = getattr(config.get_text_config(), "hidden_size", 0)
    if width < FP8_WIDTH:
        return f"layers of width {width} are too small to be faster in fp8 (the smallest is {FP8_WIDTH})"
    if count := architecture.experts(config.get_text_config()):
        return f"the model's {count} experts are no linear layers, so most of the model would stay in bf16"
    stored = stored_weights.read(config)
    if stored and stored.storage != "fp8":
        return f"the checkpoint is stored in {stored}, which fp8 can't represent exactly"
    return ""
