"""Find the problems of a recipe and its data before any weight is loaded: `finetune check`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from finetune.adapters import continue_from, expert_targets, target_modules
from finetune.autoconfig import (
    batch_size,
    compilation,
    data_loader,
    delta_net_kernels,
    loss_support,
    optimizer_choice,
    packing_support,
)
from finetune.core.error_codes import SECRET_IN_RECIPE
from finetune.core.errors import Exit, Problem, UserError, raise_if_any
from finetune.core.model_config import ModelConfig
from finetune.core.paths import on_the_hub
from finetune.core.privacy import masked
from finetune.data import chat_templates, example_errors, prepared_cache, source_loading
from finetune.distributed import launch_environment
from finetune.hub import client
from finetune.models import (
    architecture,
    base_identity,
    checkpoint_headers,
    generation_config,
    model_files,
    module_lists,
    router_loss,
    token_limits,
    tokenizer_setup,
)
from finetune.preflight import (
    adapter_names,
    adapter_trial,
    choice_checks,
    model_checks,
    package_checks,
    publish_target,
    token_checks,
    tracker_checks,
)
from finetune.quantization import four_bit_state, qat, stored_weights
from finetune.quantization.stored_tensors import PACKED
from finetune.recipe import adapter_types
from finetune.recipe.schema import Model, Recipe
from finetune.run_folder import lock, run_folder
from finetune.run_folder.run_folder import RunFolder

IA3_RATE = 1e-2  # learning rate at which IA3's factors change by more than the rounding of bf16


@source_loading.listed_once()
def check_without_examples(recipe: Recipe, *, with_weights: bool = True) -> list[str]:
    """Check the files, packages and module names of a valid recipe, in under a second and without torch.

    Args:
        with_weights: refuse a model folder without weights.

    Returns:
        Notes on parts that could not be checked here.

    Raises:
        UserError: every problem found; exit 2, or 3 if only packages are missing.
    """
    source_loading.check_number_of_files(recipe.data)  # the other checks would take minutes
    config, errors = _config(recipe.model), list[UserError]()
    notes = _collect(
        errors,
        partial(_paths, recipe),
        partial(_model, recipe),
        *([partial(model_files.check_weights, recipe.model)] if with_weights else []),
        partial(_data, recipe),
        partial(_steps, recipe),
        partial(_packing, recipe, config),
        partial(_adapter, recipe, config),
        partial(_router_loss, recipe, config),
        partial(_tasks, recipe, config),
        partial(tracker_checks.check, recipe),
        partial(publish_target.check_names, recipe.publish),
        partial(_settings, recipe, config),
        partial(_packages, recipe),
    )
    _raise_all(errors)
    return [*notes, *rounded(recipe)]


@source_loading.listed_once()
def check(recipe: Recipe) -> list[str]:
    """`finetune check`: also check the first examples and the output folder.

    Raises:
        UserError: every problem found; exit 2, or 3 if only the environment is wrong.
    """
    source_loading.check_number_of_files(recipe.data)
    errors = list[UserError]()
    first = partial(check_without_examples, recipe), partial(publish_target.check_recipe, recipe)
    notes = [*recipe.origin.notices, *_collect(errors, *first), *adapter_types.advice(recipe)]
    wrong = (problem for error in errors if error.code != Exit.ENVIRONMENT for problem in error.problems)
    is_refused = any(problem.key == "model.name" for problem in wrong)
    notes += _collect(
        errors,
        # Refused files of a tokenizer would be refused again
        partial(_first_examples if is_refused else _encoded_examples, recipe),
        partial(_cache_folder, recipe),
        partial(_output_folder, recipe),
    )
    _raise_all(errors)
    return [*notes, *_trial(recipe), *_machine(recipe)]


def _collect(errors: list[UserError], *checks: Callable[[], list[str] | None]) -> list[str]:
    """Run all checks and return their notes. Collect the errors that they raise in `errors`."""
    notes = []
    for check in checks:
        try:
            notes += check() or []
        except UserError as error:
            errors.append(error)
    return notes


def _raise_all(errors: list[UserError]) -> None:
    """Raise all problems of some errors together: exit 2, or 3 if only the environment is wrong."""
    errors = sorted(errors, key=lambda error: error.code == Exit.ENVIRONMENT)
    problems = dict.fromkeys(problem for error in errors for problem in error.problems)
    is_environment = all(error.code == Exit.ENVIRONMENT for error in errors)
    raise_if_any(problems, code=Exit.ENVIRONMENT if is_environment else Exit.INPUT)


def _first_examples(recipe: Recipe) -> list[str]:
    notes = source_loading.notes_on_folders(recipe.data)
    counts_exactly = Path(recipe.model.name).is_dir() or recipe.data.streaming
    at_least = 0 if counts_exactly else recipe.train.effective_batch_size
    return notes + example_errors.first_rows(recipe.data, at_least)


def _encoded_examples(recipe: Recipe) -> list[str]:
    return _first_examples(recipe) + token_checks.check(recipe)


def _paths(recipe: Recipe) -> None:
    """Refuse paths that contain a secret, such as a password that is also the name of a folder."""
    paths = {key: str(path) for key, path in run_folder.local_paths(recipe).items()}
    raise_if_any(
        Problem(
            "the path contains the value of a secret",
            key,
            found=masked(path),
            fix="rename the folder, or unset the variable of the environment",
            why="the run folder records the path",
            code=SECRET_IN_RECIPE,
        )
        for key, path in paths.items()
        if masked(path) != path
    )


def _cache_folder(recipe: Recipe) -> None:
    if not recipe.data.streaming:
        prepared_cache.check_makeable(recipe.data)


def _output_folder(recipe: Recipe) -> list[str]:
    """Check that a new run may start in `train.output_dir`. For a folder with a run, return a note."""
    where = recipe.train.output_dir
    try:
        lock.check_free(where)
    except UserError as error:
        if RunFolder(Path(str(where))).recipe.is_file():
            return [f"train.output_dir: {error.problems[0].what}; {error.problems[0].fix}"]
        raise
    if where:
        lock.check_makeable(where)
    return []


def _trial(recipe: Recipe) -> list[str]:
    """Let PEFT check the options that finetune does not check. A run does so when it attaches the adapter."""
    folder = Path(recipe.model.name)
    if not folder.is_dir() or not adapter_trial.is_needed(recipe):
        return []
    problems = adapter_trial.check_on_meta(recipe, folder)
    raise_if_any(problems or [])
    if problems is None:
        return ["adapter: PEFT checks the adapter only on real weights, so only the run can check it"]
    return ["adapter: PEFT accepts the adapter on the model without weights"]


def _machine(recipe: Recipe) -> list[str]:
    """Return notes on settings that `train` would refuse on this machine or under this launch.

    They are notes because the run may be meant for another machine. Only settings other than `auto` can be
    refused, so most recipes need no torch here.
    """
    model, speed, given = recipe.model, recipe.speed, recipe.train.passed_on()
    try:
        launch_environment.check_launcher()
    except UserError as error:
        return refused_here(error)
    config = _config(model)
    needs_machine = (
        model.attention not in ("auto", "sdpa", "eager"),
        model.quantization not in ("auto", "none"),
        "use_dora" in adapter_types.find(recipe.adapter.type).sets and stored_weights.read(config),
        config and model_checks.partial_blocks(recipe, config),
        config and delta_net_kernels.uses_package(config),
        "paged" in optimizer_choice.asked(recipe.train),
        speed.offload not in ("auto", "none"),
        speed.compile not in ("auto", False),
        speed.loss in loss_support.CHUNKED,
        *(given.get(name) for name in ("tf32", *data_loader.OF_WORKERS)),
    )
    if not any(needs_machine) or not Path(model.name).is_dir():
        return []
    from finetune.core.console import quieten_libraries  # which imports rich

    quieten_libraries()
    try:
        choice_checks.setup_of(recipe)
    except UserError as error:
        return refused_here(error)
    return []


def refused_here(error: UserError) -> list[str]:
    """Return notes on the problems for which `train` would stop here."""
    place = "on this machine" if error.code == Exit.ENVIRONMENT else "under this launch"
    shown = [(one.key, f"{one.what} ({one.why or one.found or one.fix})") for one in error.problems]
    return [f"train would stop {place}: {': '.join(filter(None, texts))}" for texts in shown]


def rounded(recipe: Recipe) -> list[str]:
    """Return a warning if this launch rounds IA3's factors by more than the learning rate changes them."""
    kind, rate = recipe.adapter.type, recipe.train.learning_rate
    splitter, precision = launch_environment.splitter(), launch_environment.said("ACCELERATE_MIXED_PRECISION")
    as_stored = (
        splitter == "FSDP" and recipe.model.quantization in adapter_types.FOUR_BIT
    )  # four_bit.fsdp_policy
    if kind != "ia3" or not splitter or as_stored or precision not in ("bf16", "fp16") or rate >= IA3_RATE:
        return []
    step = "1/256" if precision == "bf16" else "1/2048"
    why = f"{splitter} rounds IA3's factors to {precision} in each forward pass, in steps of {step}"
    return [f"train.learning_rate: {rate:g} is too small, because {why}; try {IA3_RATE:g}"]


def _model(recipe: Recipe) -> list[str]:
    model_files.check_folder(recipe.model)
    if Path(recipe.model.name).exists():
        config = architecture.config_in(Path(recipe.model.name) / "config.json")
        stored = model_checks.check_stored(recipe, config)
        generation_config.check(Path(recipe.model.name))
        if stored and (slow := stored_weights.slow_pattern(config, lambda: _modules(recipe.model, config))):
            raise UserError(*slow)
        said = [f"model.name: {stored_weights.describe(stored, recipe)}"] if stored else []
        return [*said, *tokenizer_setup.check(recipe.model)]
    return [
        f"model.name: {on_the_hub(recipe.model.name)}; finetune checks its modules when it loads the model"
    ]


def _modules(section: Model, config: ModelConfig) -> list[str]:
    names = module_lists.read(Path(section.name) / "config.json", config).names
    return [*names.kinds, *names.tower_kinds]


def _data(recipe: Recipe) -> list[str]:
    data = recipe.data
    notes = []
    named = source_loading.named(data)
    if not data.name or not all(source.name for source, _ in named):
        raise UserError(
            Problem(
                "a source has no name",
                "data.name",
                fix="set `data.name` to a file, a folder or a dataset on the Hub",
                code="missing-key",
            )
        )
    for source, key in named:
        if source_loading.files_of(source, key) is None:
            pinned = client.COMMIT.fullmatch(source.revision or "")
            pin = (
                "" if pinned else "; set `data.revision` to a commit, or a later run may read other examples"
            )
            notes.append(
                f"{key}: {source.name} is on the Hub; finetune checks its examples when it loads{pin}"
            )
    source_loading.check_disjoint(data)
    source_loading.check_of_the_hub(data)
    if data.chat_template:
        chat_templates.read_template(data.chat_template)
    return notes


def _steps(recipe: Recipe) -> None:
    """Check the number of steps. For a stream of examples, only the recipe gives it."""
    batch_size.check_warm_up(recipe.train, recipe.train.max_steps)
    if recipe.data.streaming:
        from finetune.data import streaming  # imports numpy, which takes 0.1 s

        batch_size.steps_of_stream(recipe.train)
        streaming.check(recipe.data)


def _packing(recipe: Recipe, config: ModelConfig | None) -> None:
    """Check that the model supports packed examples."""
    if config:
        packing_support.check(config, recipe.data, recipe.train, recipe.model.attention)


def _router_loss(recipe: Recipe, config: ModelConfig | None) -> list[str]:
    """Check the auxiliary loss of the routers. Return a note if the model has no router."""
    if not config:
        return []
    coefficient, routers = recipe.train.passed_on().get(router_loss.COEFFICIENT), None
    if hasattr(config.get_text_config(), "output_router_logits") and Path(recipe.model.name).is_dir():
        with contextlib.suppress(UserError):  # `_adapter` raises it
            names = module_lists.read(Path(recipe.model.name) / "config.json", config).names
            routers = len(names.routers)
    note = router_loss.check(config, coefficient, recipe.adapter.type, routers)
    return [note] if note else []


def _tasks(recipe: Recipe, config: ModelConfig | None) -> None:
    """Check the files, packages and metrics of the evaluation."""
    if recipe.eval.tasks:
        from finetune.evaluation import tasks  # imports for 0.1 s, and most recipes have no tasks

        longest = token_limits.positions(config) if config else None
        tasks.check_metric(recipe.eval, tasks.check(recipe.eval, longest))
        tasks.check_names(recipe.eval)
    if isinstance(recipe.eval.forgetting, str):
        from finetune.evaluation import tasks

        tasks.general_texts(recipe.eval)


def _settings(recipe: Recipe, config: ModelConfig | None) -> None:
    """Check settings of the optimizer, CUDA graphs and the loss."""
    speed = recipe.speed
    graphs = compilation.check_cuda_graphs(speed.compile, speed.activation_checkpointing, speed.offload)
    rates = adapter_types.find(recipe.adapter.type).learning_rate
    wrong = [
        *optimizer_choice.check_settings(recipe.train, rates),
        graphs,
        *loss_support.check_recipe(recipe, config),
    ]
    raise_if_any(wrong)


def _packages(recipe: Recipe) -> None:
    raise_if_any(package_checks.missing_packages(recipe), code=Exit.ENVIRONMENT)


def _config(section: Model) -> Any:
    """Return the config of a local model; `None` for a model on the Hub or a config that `_model` refuses."""
    with contextlib.suppress(UserError):
        return architecture.config_in(Path(section.name) / "config.json")


def _adapter(recipe: Recipe, config: ModelConfig | None) -> list[str]:
    """Check `adapter.init_from`, and compare the names in `adapter:` with the modules of a local model."""
    folder = Path(recipe.model.name)
    notes = continue_from.check(recipe.adapter, recipe.model.name, recipe.model.revision)
    source = continue_from.source_folder(recipe.adapter.source) if recipe.adapter.source else None
    if source:
        run_folder.check_adapter(source)
    if source and not recipe.adapter.ours("from_other_base"):
        base_identity.check_adapter(source, recipe.model)
    notes += _tokens_of_source(recipe, config)
    if not folder.is_dir() or config is None:
        return notes
    listed = _module_list(recipe.model, config)
    if listed is None or not adapter_types.find(recipe.adapter.type).peft:
        return [*notes, *filter(None, (listed and listed.note,))]
    if recipe.speed.qat:
        layers = {**listed.names.linear_shapes, **listed.names.tower_linear_shapes}
        widths = {name: inputs for name, (_, inputs) in layers.items()}
        qat.check_group_size(recipe.speed.qat, widths)
    raise_if_any(adapter_names.check_names(recipe, listed.names, config))
    kind = adapter_types.find(recipe.adapter.type)
    options = {**recipe.adapter.options(), **kind.sets}
    resolved = expert_targets.resolve(options, listed.names, kind.peft)
    uneven = target_modules.uneven(resolved.modules, listed.names)
    storage = adapter_types.base_storage(recipe.adapter.type, recipe.model.quantization)
    stays = expert_targets.storage_note(listed.names, config, storage) if storage else ""
    return [
        *notes,
        *filter(None, (listed.note, uneven, stays and f"model.quantization: {stays}")),
        *expert_targets.notes(options, listed.names, kind.peft),
    ]


def _tokens_of_source(recipe: Recipe, config: ModelConfig | None) -> list[str]:
    """Compare the added tokens of a local adapter to continue from with the tokens of a local base model."""
    source = recipe.adapter.source
    if not (source and Path(source).exists() and config):
        return []
    known = tokenizer_setup.read_vocabulary(recipe.model)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if known is None or rows is None:
        return []
    return continue_from.check_tokens(recipe.adapter, recipe.model.add_tokens, known, rows)


def _module_list(section: Model, config: ModelConfig) -> module_lists.ModuleList | None:
    """Return the names of a local model's modules; `None` if `_model` refuses the model.

    Raises:
        UserError: the model's files are damaged, or weights are missing (exit 2).
    """
    folder, quantized = Path(section.name), stored_weights.read(config)
    try:
        model_files.check_folder(section)
    except UserError:
        return None
    if quantized and not quantized.trains:
        return None
    listed = module_lists.read(folder / "config.json", config)
    declared = stored_weights.declaration(config)
    stored = checkpoint_headers.check_tensors(folder, declared)
    if stored:
        checkpoint_headers.check_size(stored, listed.names, declared)
    same_names = module_lists.has_names_of_files(listed.names)
    if missing := checkpoint_headers.lacks(stored, listed.names, same_names=same_names and not declared):
        raise UserError(checkpoint_headers.missing_weights(missing))
    checkpoint_headers.check_used(stored, listed.names.every_shape, same_names=same_names)
    whole = {
        name: four_bit_state.shape_of(name, stored)
        for name, tensor in stored.items()
        if tensor.dtype not in PACKED or f"{name}.absmax" in stored
    }
    checkpoint_headers.check_shapes(whole, listed.names.shapes)
    checkpoint_headers.check_experts(stored, listed.names)
    return listed
