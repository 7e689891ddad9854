"""What can be said about a recipe before any weight is loaded: `finetune check`, and its data, prepared."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import (
    adapter_conflicts,
    adapter_source,
    adapter_types,
    architecture,
    attention_choice,
    batch,
    estimate,
    hardware,
    hub,
    launch_conflicts,
    launch_env,
    model,
    modules,
    optimizers,
    qat,
    run_folder,
    upstream,
)
from finetune.data import bundled, load
from finetune.errors import Exit, Problem, UserError, nearest
from finetune.recipe_errors import on_the_hub
from finetune.sections import Speed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.prepare import Prepared
    from finetune.hardware import Setup
    from finetune.recipe import Recipe
    from finetune.sections import Model, Train

IA3_RATE = 1e-2  # at which its factors move by more than bf16 tells apart
TRACKERS = {  # name in train.report_to -> module, package; of others both are called as it is
    "azure_ml": ("azureml", "azureml-core"),
    "comet_ml": ("comet_ml", "comet-ml"),
    "flyte": ("flytekit", "flytekit"),
    "kubeflow": ("transformers", "transformers"),  # needs none: it is a server that the job runs under
}


def run(recipe: Recipe) -> list[str]:
    """Look at the files, packages and module names a valid recipe names, in under a second and without torch.

    Returns:
        Notes: what could not be looked at here, and advice.

    Raises:
        UserError: every problem found; exit 2, or 3 if all that is wrong is a missing package.
    """
    notes = list(recipe.origin.notices)
    problems: list[Problem] = []
    packages: list[Problem] = []
    for look in (_model, _data, _steps, _adapter, _tasks, _trackers, _publish):
        try:
            notes += look(recipe)
        except UserError as error:
            (packages if error.code == Exit.ENVIRONMENT else problems).extend(error.problems)
    kind = adapter_types.find(recipe.adapter.type)
    problems += optimizers.problems(recipe.train, kind.learning_rate)
    asked = recipe.speed.base if recipe.speed.base != "auto" else kind.storage
    missing = hardware.missing_package(asked)
    optimizer = optimizers.missing_packages(optimizers.asked(recipe.train), recipe.speed)
    lacking = (missing, recipe.speed.qat and qat.missing(), *optimizer)
    packages += [problem for problem in lacking if problem]
    graphs = estimate.against_graphs(recipe.speed.compile, recipe.speed.recompute, recipe.speed.offload)
    problems += [graphs] if graphs else []
    if problems or packages:
        raise UserError(*problems, *packages, code=Exit.INPUT if problems else Exit.ENVIRONMENT)
    return [*notes, *advice(recipe), *rounded(recipe)]


def setup_of(recipe: Recipe) -> Setup:
    """How this machine trains a recipe.

    Raises:
        UserError: what contradicts the launch (exit 2), what can't be done here (exit 3).
    """
    asked = recipe.adapter, recipe.model, recipe.data, recipe.speed, recipe.eval.every
    launch_conflicts.check(hardware.detect(), *asked)
    against_launch(recipe)
    flat = recipe.data.packing or recipe.data.padding_free
    prompt = adapter_types.find(recipe.adapter.type).prompt
    setup = hardware.choose(
        attention=recipe.model.attention,
        base=recipe.speed.base,
        adapter_type=recipe.adapter.type,
        attends=attention_choice.read(model.read_config(recipe.model)),
        rows=attention_choice.Rows(flat, recipe.data.max_length, prompt),
        against_fp8=partial(against_fp8, recipe),
    )
    optimizers.check(recipe.train, recipe.speed, setup)
    estimate.choose_compile(recipe.speed.compile, None, setup.hardware)  # refuses what no CPU can do
    return setup


def allows(recipe: Recipe, setup: Setup, change: str) -> bool:
    """Whether a run of this recipe with another value, `speed.recompute=all` or `adapter.type=lora`, is not
    refused here."""
    key, _, value = change.partition("=")
    section, _, name = key.partition(".")
    raw = recipe.model_dump(exclude_unset=True)
    if section not in ("speed", "adapter") or not value:
        return True
    raw[section] = {**raw.get(section, {}), name: value}
    kind, speed = raw["adapter"]["type"], Speed.model_validate(raw.get("speed", {}))
    by_launch = launch_conflicts.problems(setup.hardware, kind, recipe.model, recipe.data, speed)
    graphs = estimate.against_graphs(speed.compile, speed.recompute, speed.offload, setup.launch.sharded)
    if by_launch or graphs or adapter_conflicts.conflicts(raw) or hardware.missing_package(speed.base):
        return False
    try:
        optimizers.check(recipe.train, speed, setup)
    except UserError:
        return False
    return True


def deepspeed_values(train: Train, processes: int) -> list[Problem]:
    """What a `deepspeed_config` says of what the recipe decides, and says otherwise."""
    if launch_env.splitter() != "DeepSpeed":
        return []
    clipping = train.passed_on().get("max_grad_norm", 1.0)  # TrainingArguments' own
    decided = {
        "gradient_clipping": ("max_grad_norm", lambda: clipping),
        "gradient_accumulation_steps": (
            "effective_batch_size",
            lambda: batch.split_batch(train, processes).accumulation,
        ),
    }
    found = list[Problem]()
    for name, (key, decide) in decided.items():
        number = launch_env.said(f"ACCELERATE_{name.upper()}").replace("auto", "")
        if number and float(number) != (value := decide()):
            what = f"{name} of the {launch_env.CONFIG} is what train.{key} decides"
            fix = "drop it from deepspeed_config"
            found.append(Problem(what, f"train.{key}", found=number, expected=f"{value:g}", fix=fix))
    return found


def against_launch(recipe: Recipe) -> None:
    """Refuse a search for a batch where weights are split, a sliding window where rows are, and under an fp8
    launch what a recipe with `speed.base: fp8` is refused for (exit 2)."""
    by, key = launch_env.sharded(), "train.per_device_train_batch_size"
    if by and recipe.train.per_device_train_batch_size == "auto":
        what = f"can't be searched: {by} of the {launch_env.CONFIG} splits the weights only later"
        raise UserError(Problem(what, key, found="auto", fix="a number"))
    processes = hardware.launch(hardware.detect()).processes
    if problems := deepspeed_values(recipe.train, processes):
        raise UserError(*problems)
    if recipe.eval.engine == "vllm" and recipe.eval.tasks and processes > 1:
        what = f"vLLM is one process, and a launch of {processes} would start it in each"
        fix = "eval.engine: hf; or after training, in one process: finetune evaluate RUN eval.engine=vllm"
        raise UserError(Problem(what, "eval.engine", found="vllm", fix=fix))
    if launch_env.parallel("CP") > 1:
        against_window(model.read_config(recipe.model))
    if not launch_env.means_fp8(recipe.speed):
        return
    raw = {
        "adapter": {"type": recipe.adapter.type, **recipe.adapter.options()},
        "speed": {**recipe.speed.model_dump(include={"qat"}), "base": "fp8"},
        "model": {"add_tokens": recipe.model.add_tokens},
    }
    by = f"mixed_precision: fp8 of the {launch_env.CONFIG} means a frozen fp8 base: "
    found = [*adapter_conflicts.conflicts(raw), *qat.conflicts(raw)]
    if found:
        raise UserError(*(Problem(by + what, key, **texts) for key, what, texts in found))


def against_window(config: Any) -> None:
    """Refuse a model whose sliding window context parallelism would cut through (exit 2)."""
    if (window := attention_choice.read(config).window) is not None:
        what = f"parallelism_config_cp_size of the {launch_env.CONFIG} cuts through a sliding window"
        fix = "accelerate_configs/fsdp2_8.yaml, or a model without one"
        raise UserError(Problem(what, "model.name", found=f"a window of {window} tokens", fix=fix))


def against_rows(recipe: Recipe, config: Any) -> list[Problem]:
    """Why rows of the embeddings can't train beside what trains as a whole, by the model's config. Of a model
    inside another transformers alone knows whose head is tied."""
    if config is None or recipe.adapter.source or config.get_text_config() is not config:
        return []
    given = recipe.adapter.options(), config.tie_word_embeddings, bool(recipe.model.add_tokens)
    return [Problem(what, key, **texts) for key, what, texts in adapter_conflicts.rows_beside(*given)]


def pinned(recipe: Recipe) -> Recipe:
    """The same with the commit that `model.revision` is now: every file of the base is read at it, also
    by processes that are started after this (`hub.commit`)."""
    asked, section = recipe.model.revision, model.pinned(recipe.model)
    if section.revision == asked:
        return recipe
    recipe.origin.set_by["model.revision"] = f"hub: the commit of {asked or 'main'}"
    return recipe.model_copy(update={"model": section})


def facts(recipe: Recipe, setup: Setup) -> dict[str, str]:
    """What all processes of a launch must have alike: recipe, versions, precision, ways to split, storage."""
    own = ("output_dir", "cache")  # places of a machine
    found = run_folder.environment(setup.hardware, setup.launch)
    held = {name: str(found[name]) for name in ("python", "git")} | {"base": setup.storage.value}
    held |= {name: str(number) for name, number in found["packages"].items()}
    asked = ("precision", "sharded", "splitter", "sharing", "fp8")
    held |= {f"launch.{key}": str(getattr(setup.launch, key)) for key in asked} | launch_env.ways()
    for section in type(recipe).model_fields:
        values = getattr(recipe, section).model_dump()
        held |= {f"{section}.{key}": str(value) for key, value in values.items() if key not in own}
    return held


def against_fp8(recipe: Recipe, config: Any = None) -> str:
    """Why `speed.base: auto` does not store the base in fp8, by recipe and model; empty: it may.

    Args:
        config: the model's, where it has been read already.
    """
    by_recipe = adapter_conflicts.against_fp8(recipe.adapter, recipe.speed, recipe.eval)
    return by_recipe or (model.config_against_fp8(config) if config else model.against_fp8(recipe.model))


def advice(recipe: Recipe) -> list[str]:
    """What is worth knowing of the adapter as the recipe has it."""
    kind, rate = recipe.adapter.type, recipe.train.learning_rate
    return adapter_types.advice(kind, rate, recipe.adapter.options())


def rounded(recipe: Recipe) -> list[str]:
    """What is worth knowing of the adapter under this launch."""
    kind, rate = recipe.adapter.type, recipe.train.learning_rate
    splitter, precision = launch_env.splitter(), launch_env.said("ACCELERATE_MIXED_PRECISION")
    as_stored = splitter == "FSDP" and recipe.speed.base in adapter_types.FOUR_BIT  # exchange.fsdp_policy
    if kind != "ia3" or not splitter or as_stored or precision not in ("bf16", "fp16") or rate >= IA3_RATE:
        return []
    steps = "1/256" if precision == "bf16" else "1/2048"
    said = f"train.learning_rate: {rate:g} is little under {splitter}, which rounds IA3's factors, about 1, "
    return [f"{said}to {precision} in each pass: they move in steps of {steps}; try {IA3_RATE:g}"]


def prepare_data(recipe: Recipe) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """The tokenizer, and the rows as it encodes them."""
    from finetune.data import prepare, stream

    template = bundled.read_template(recipe.data.chat_template) if recipe.data.chat_template else None
    tokenizer = model.load_tokenizer(recipe.model, template)
    adapter_source.check_tokens(recipe.adapter, recipe.model.add_tokens, tokenizer)
    build = stream.stream if recipe.data.streaming else prepare.prepare
    rows, ends = model.vocabulary(recipe.model, tokenizer), model.declared_ends(recipe.model)
    return tokenizer, build(recipe.data, tokenizer, recipe.train.seed, rows, ends)


def _model(recipe: Recipe) -> list[str]:
    model.check_folder(recipe.model)
    if Path(recipe.model.name).exists():
        if recipe.model.revision:
            what, found = "is for a model on the Hub: a folder has none", recipe.model.revision
            raise UserError(Problem(what, "model.revision", found=found, fix="drop it"))
        architecture.config_in(Path(recipe.model.name) / "config.json")
        return []
    return [f"model.name: {on_the_hub(recipe.model.name)}; its modules are checked when it loads"]


def _data(recipe: Recipe) -> list[str]:
    data = recipe.data
    notes = []
    named = load.named(data)
    if not data.name or not all(source.name for source, _ in named):
        raise UserError(Problem("is empty", "data.name"))
    for source, key in named:
        if load.files(source.name, key) is None:
            pinned = hub.COMMIT.fullmatch(source.revision or "")
            pin = "" if pinned else "; pin data.revision to a commit, or tomorrow's run may see other rows"
            notes.append(f"{key}: {source.name} is on the Hub; its rows are checked when it loads{pin}")
    load.check_disjoint(data)
    load.check_of_the_hub(data)
    if data.chat_template:
        bundled.read_template(data.chat_template)
    return notes


def _steps(recipe: Recipe) -> list[str]:
    """Of rows that are streamed the recipe alone says how many steps they make."""
    if recipe.data.streaming:
        batch.steps_of_stream(recipe.train)
    return []


def _tasks(recipe: Recipe) -> list[str]:
    """The files and packages of `eval.tasks`."""
    if recipe.eval.tasks:
        from finetune import tasks  # most recipes have none, and its imports take a tenth of a second

        config = _config(recipe.model)
        longest = getattr(config.get_text_config(), "max_position_embeddings", None) if config else None
        tasks.check(recipe.eval, longest)
        tasks.check_names(recipe.eval)
    if isinstance(recipe.eval.general, str) and not Path(recipe.eval.general).is_file():
        raise UserError(Problem("no such file", "eval.general", found=recipe.eval.general))
    return []


def _config(section: Model) -> Any:
    """config.json of a local model, completed; `None`: it is on the Hub, or `_model` says what is wrong."""
    with contextlib.suppress(UserError):
        return architecture.config_in(Path(section.name) / "config.json")


def _trackers(recipe: Recipe) -> list[str]:
    """What `train.report_to` names must exist and be installed."""
    key, asked = "train.report_to", recipe.train.passed_on().get("report_to", "none")
    asked = asked if isinstance(asked, list) else [asked]
    if asked in (["none"], []):
        return []
    known = upstream.trackers()
    if asked == ["all"]:
        found = sorted(name for name in known if name != "kubeflow" and _tracker_installed(name))
        return [f"{key}: all that are installed: {', '.join(found) or 'none'}"]
    unknown = [str(name) for name in asked if name not in known]
    if unknown:
        expected = f"none, all, {', '.join(sorted(known))}"
        texts = [{"found": name, "expected": expected, "fix": nearest(name, known)} for name in unknown]
        raise UserError(*(Problem("no such tracker", key, **said) for said in texts))
    missing = [name for name in asked if not _tracker_installed(name)]
    if missing:
        packages = " ".join(TRACKERS.get(name, (name, name))[1] for name in missing)
        problem = Problem("not installed", key, found=", ".join(missing), fix=f"pip install {packages}")
        raise UserError(problem, code=Exit.ENVIRONMENT)
    return []


def _tracker_installed(name: str) -> bool:
    return upstream.installed(TRACKERS.get(name, (name, name))[0])


def _adapter(recipe: Recipe) -> list[str]:
    """Names in the adapter's section against the safetensors headers of a local model; `adapter.from`."""
    folder, options = Path(recipe.model.name), recipe.adapter.options()
    notes = adapter_source.check(recipe.adapter, recipe.model.name, recipe.model.revision)
    names = modules.in_folder(folder) if folder.is_dir() else None
    problems = against_rows(recipe, _config(recipe.model))
    if names and names.modules:
        kind = adapter_types.find(recipe.adapter.type)
        problems += modules.problems(options, names, any_module=kind.peft in adapter_types.NOT_LINEAR)
        uneven = modules.uneven(options.get("target_modules"), names)
        notes += [uneven] if uneven else []
    if problems:
        raise UserError(*problems)
    return notes


def _publish(recipe: Recipe) -> list[str]:
    hub.check_names(recipe.publish)
    return []
