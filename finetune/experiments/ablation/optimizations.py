"""Read the optimizations from `recipes/ablation.yaml`: what each one sets, needs and costs.

`measure:` says how runs are made and judged. `baseline:` holds the settings with all optimizations off.
`optimizations:` lists the optimizations in the order in which they are stacked.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, PrivateAttr, ValidationError

from finetune.core import paths, shipped_files, strict_yaml
from finetune.core.errors import Problem, UserError, nearest, raise_if_any
from finetune.core.packages import installed
from finetune.experiments.runner import varied_keys
from finetune.launch import accelerate_config, launcher
from finetune.preflight import checker, choice_checks
from finetune.recipe import build, loader, recipe_errors
from finetune.recipe.schema import Section

if TYPE_CHECKING:
    from collections.abc import Mapping

    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Recipe


# A value that removes the baseline's value, so that the value of the recipe, `auto` or `measure` applies
OURS = "default"
BATCH = ("train.effective_batch_size", "train.per_device_train_batch_size")
PRECISION = Literal["no", "bf16", "fp16"]
MEASURED = {  # keys that the ablation itself sets, besides varied_keys.FIXED
    "data.name": "all runs use the same examples",
    "train.max_steps": "all runs train measure.steps",
    "train.num_train_epochs": "all runs train measure.steps",
    "train.warmup_steps": "all runs use measure.warm_up",
    "train.logging_steps": "the runs log each step",
    "train.save_strategy": "the runs save no checkpoints",
    "train.report_to": "the runs report to no tracker",
}
TAKEN = ("baseline", "aside", "recipe")  # result folders that do not belong to an optimization


class Measure(Section):
    """How the ablation makes runs and judges them."""

    steps: int = Field(default=20, ge=2)
    """Optimizer steps of each run."""
    warm_up: int = Field(default=2, ge=1)
    """First steps, which do not count."""
    repeats: int = Field(default=2, ge=1)
    """Runs of each variant, interleaved with those of the other variants."""
    min_gain: float = Field(default=0.01, ge=0)
    """Smallest relative gain that counts, even if the noise is lower."""
    loss_band: float = Field(default=0.02, gt=0)
    """Largest distance of a loss curve from the baseline's: mean distance divided by mean loss."""
    held_out_band: float = Field(default=0.01, gt=0)
    """Largest relative increase of the validation loss.

    An optimization is kept only if the 95 % interval of its cost stays below this value.
    """
    held_out_rows: int = Field(default=200, ge=0)
    """Examples of `data.validation` on which the first run of a variant is evaluated."""
    validation_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the examples for evaluating the first run of a variant, if `data.validation` is not set."""
    accelerate: str | None = None
    """Accelerate config for the runs: a file, or the name of a shipped config."""


class Needs(Section):
    """Requirements on the machine."""

    device: Literal["cpu", "cuda"] | None = None
    capability: float | None = None
    """Minimum compute capability of the GPU, such as 8.9 for Ada."""
    instructions: list[str] = Field(default_factory=list)
    """CPU features, named as in torch.cpu.get_capabilities(). The CPU needs one of them."""
    package: str | None = None
    why: str = ""
    """Explanation that follows the missing requirement."""


class Gpu(Section):
    """Two rows of benchmarks/gpu.json that differ only in this optimization."""

    on: str
    off: str


class Full(Section):
    """Values of an optimization that differ for full fine-tuning (`adapter.type: full`)."""

    what: str = ""
    cost: str = ""
    off: str = ""
    set: dict[str, Any] = Field(default_factory=dict)
    needs: Needs = Needs()
    noop: str = ""
    elsewhere: str = ""


class Optimization(Section):
    name: str = Field(pattern=r"^[a-z0-9_]+$")
    kind: str = Field(pattern=r"^[a-z]+$")
    """Folder of its runs: DIR/<kind>/<name>_rank<r>."""
    what: str
    """What the optimization does, in one sentence."""
    cost: str = ""
    off: str = ""
    """How to switch it off."""
    source: str = ""
    set: dict[str, Any] = Field(default_factory=dict)
    """Recipe keys. `default` removes the baseline's value."""
    mixed_precision: PRECISION | None = None
    """Mixed precision of the launch."""
    accelerate: str | None = None
    """Accelerate config of the launch. `default` means the config of `measure`."""
    same_tokens: bool = False
    """Set the batch size so that a step of full sequences has the baseline's number of tokens."""
    on: list[str] = Field(default_factory=list)
    """Optimizations that it builds on. It is first measured on top of these."""
    needs: Needs = Needs()
    gain: Literal["speed", "memory"] = "speed"
    """The purpose.

    An optimization for memory is kept if it lowers the peak without lowering tokens/s beyond noise.
    """
    gate: Literal["curve", "held_out"] = "curve"
    """What to compare with the baseline: losses step by step, or validation losses if batches differ."""
    noop: str = ""
    """Why it changes nothing today or is not available. It is listed but not measured."""
    elsewhere: str = ""
    """Why it is not measured here although a switch exists, and where it is measured."""
    full: Full | None = None
    gpu: Gpu | None = None

    @property
    def unmeasured(self) -> tuple[str, str]:
        """Status and reason if the optimization is listed but not measured, else two empty strings."""
        named = (("no-op", self.noop), ("elsewhere", self.elsewhere))
        return next((one for one in named if one[1]), ("", ""))


class Baseline(Section):
    mixed_precision: PRECISION | None = None
    accelerate: str | None = None
    set: dict[str, Any] = Field(default_factory=dict)


class AblationFile(Section):
    measure: Measure = Measure()
    baseline: Baseline
    optimizations: list[Optimization]
    _where: dict[tuple[str, ...], str] = PrivateAttr(default_factory=dict)

    def place(self, *path: str) -> str:
        """Return the position of an entry in the file."""
        return recipe_errors.place_of(path, self._where)

    def optimization(self, name: str) -> Optimization:
        return next(optimization for optimization in self.optimizations if optimization.name == name)


class Variant(NamedTuple):
    """A set of values on top of the recipe: the baseline and some optimizations."""

    mixed_precision: str | None
    values: dict[str, Any]
    """Values by dotted key."""
    accelerate: str | None = None
    """`None` means the config of `measure`, if it has one."""

    @property
    def overrides(self) -> list[str]:
        return varied_keys.overrides(self.values)


def read(path: Path) -> AblationFile:
    """Read an ablation file.

    Raises:
        UserError: the file cannot be read or has errors. Each error names its position (exit 2).
    """
    try:
        text = strict_yaml.text_of(path, "the ablation file")
    except OSError as error:
        fix = paths.similar_files(path)
        raise UserError(
            Problem(
                "finetune can't read the ablation file",
                "",
                str(path),
                error.strerror or "",
                fix=fix or "finetune ablate RECIPE",
                code="ablation-file",
            )
        ) from None
    document = strict_yaml.parse(text, str(path))
    if not isinstance(document.value, dict) or document.problems:
        wrong = document.problems or [
            Problem(
                "the ablation file has no list of optimizations",
                where=str(path),
                found=recipe_errors.show(document.value),
                expected="a mapping with the key `optimizations`",
                fix=(
                    "optimizations: "
                    "[{name: packing, kind: data, what: packed examples, set: {data.packing: true}}]"
                ),
                why="finetune measures each optimization of this list",
                code="ablation-file",
            )
        ]
        raise UserError(*wrong)
    try:
        file = AblationFile.model_validate(document.value)
    except ValidationError as error:
        known = _known_keys(document.value.get("optimizations"))
        raise UserError(*recipe_errors.explain(error, document.value, document.where, known)) from None
    file._where = document.where
    raise_if_any(_measure_problems(file) + _set_problems(file) + _order_problems(file))
    return file


def _known_keys(optimizations: object) -> dict[str, frozenset[str]]:
    """Return the keys that an ablation file can have, by their section."""
    kinds: dict[str, type[Section]] = {
        "measure": Measure,
        "baseline": Baseline,
        "optimizations": Optimization,
    }
    for index in range(len(optimizations) if isinstance(optimizations, list) else 0):
        here = f"optimizations.{index}"
        kinds |= {here: Optimization, f"{here}.needs": Needs, f"{here}.gpu": Gpu, f"{here}.full": Full}
    return {name: frozenset(kind.model_fields) for name, kind in kinds.items()}


def _measure_problems(file: AblationFile) -> list[Problem]:
    one = file.measure
    if one.warm_up < one.steps:
        return []
    return [
        Problem(
            "the warm-up leaves no step to measure",
            "measure.warm_up",
            where=file.place("measure", "warm_up" if "warm_up" in one.model_fields_set else "steps"),
            found=f"warm_up {one.warm_up}, steps {one.steps}",
            expected=f"warm_up below {one.steps}",
            fix=f"steps: {one.warm_up + 10}",
            code="value-range",
        )
    ]


def _sets(file: AblationFile) -> list[tuple[str, Any, str]]:
    """Return each recipe key under `set`, its value and its position in the file."""
    places: list[tuple[tuple[str, ...], dict[str, Any]]] = [(("baseline", "set"), file.baseline.set)]
    for index, optimization in enumerate(file.optimizations):
        places.append((("optimizations", str(index), "set"), optimization.set))
        places.append(
            (("optimizations", str(index), "full", "set"), optimization.full.set if optimization.full else {})
        )
    return [(key, value, file.place(*path, key)) for path, values in places for key, value in values.items()]


def _set_problems(file: AblationFile) -> list[Problem]:
    """Return the problems of keys under `set` that no recipe has, or that must be equal in all runs."""
    problems = list(filter(None, (varied_keys.key_problem(*each) for each in _sets(file))))
    for key, _, at in _sets(file):
        if why := varied_keys.FIXED.get(key.partition(".")[0]) or {
            **varied_keys.FIXED,
            **MEASURED,
        }.get(key):
            problems.append(
                Problem(
                    "an optimization can't set this key",
                    key,
                    where=at,
                    fix=f"remove `{key}:`",
                    why=why,
                    code="ablation-file",
                )
            )
    return problems


def check_rows(file: AblationFile, recipe: Recipe) -> None:
    """Refuse optimizations that would change a validation set drawn from the training data (exit 2)."""
    raise_if_any(varied_keys.drawn_problems(recipe, {key: at for key, _, at in _sets(file)}))


def check_values(file: AblationFile, kind: str) -> None:
    """Check the values that the optimizations set, for one adapter type.

    A value that only conflicts with the rest of a recipe is not an error here. It becomes the status of its
    optimization.

    Raises:
        UserError: no recipe of this type can have a value. Each error names its position (exit 2).
    """
    problems, models = list[Problem](), build.sections(kind)
    for key, value, at in _sets(file):
        section, *names = path = key.split(".")
        of_another = section == "adapter" and names[0] not in models["adapter"].model_fields
        if value == OURS or of_another or key == "adapter.type":
            continue
        raw = varied_keys.under(path, value)
        try:
            models["recipe"].model_validate(raw)
        except ValidationError as error:
            said = recipe_errors.explain(error, raw, {tuple(path): at}, build.known_keys())
            problems += [one for one in said if f"{one.key}.".startswith(f"{key}.")]
    raise_if_any(problems)


def _order_problems(file: AblationFile) -> list[Problem]:
    """Return the problems of duplicate names, reserved names, and `on` without an earlier optimization."""
    known, problems = set[str](), list[Problem]()
    for index, optimization in enumerate(file.optimizations):
        here = ("optimizations", str(index))
        for number, below in enumerate(optimization.on):
            if below not in known:
                problems.append(
                    Problem(
                        f"`on` of the optimization {optimization.name} names no earlier optimization",
                        where=file.place(*here, "on", str(number)),
                        found=below,
                        fix=nearest(below, known) or "name an optimization that is earlier in the file",
                        why="an optimization can stand only on a measured one",
                        code="ablation-file",
                    )
                )
        if optimization.name in known:
            problems.append(
                Problem(
                    "two optimizations have the same name",
                    where=file.place(*here, "name"),
                    found=optimization.name,
                    fix="rename one of them",
                    code="ablation-file",
                )
            )
        if optimization.kind in TAKEN:
            problems.append(
                Problem(
                    "this name is reserved",
                    "kind",
                    where=file.place(*here, "kind"),
                    found=optimization.kind,
                    fix=f"kind: {optimization.kind}_2",
                    why="finetune stores other results under it",
                    code="ablation-file",
                )
            )
        known.add(optimization.name)
    return problems


def of_type(file: AblationFile, kind: str) -> AblationFile:
    """Return the optimizations for an adapter type.

    For `full`, the values under `full` replace the others.
    """
    if kind != "full":
        return file
    optimizations = []
    for optimization in file.optimizations:
        other = optimization.full
        changed = {name: getattr(other, name) for name in other.model_fields_set} if other else {}
        optimizations.append(optimization.model_copy(update=changed))
    return file.model_copy(update={"optimizations": optimizations})


def baseline(file: AblationFile) -> Variant:
    """Return the variant with all optimizations off."""
    one = file.baseline
    return Variant(one.mixed_precision, dict(one.set), one.accelerate)


def add(variant: Variant, optimization: Optimization, rows: int | None = None) -> Variant:
    """Return a variant with one more optimization.

    Args:
        rows: number of sequences per step for `same_tokens`. The micro-batch size of the recipe need not
            divide it.
    """
    same = dict(zip(BATCH, (rows, None), strict=True)) if optimization.same_tokens and rows else {}
    values = {**variant.values, **same, **optimization.set}
    values = {key: value for key, value in values.items() if value != OURS}
    config = optimization.accelerate or variant.accelerate
    precision = optimization.mixed_precision or variant.mixed_precision
    return Variant(precision, values, None if config == OURS else config)


def configs(file: AblationFile) -> list[str]:
    """Return the Accelerate configs that the file names."""
    named = [
        file.measure.accelerate,
        file.baseline.accelerate,
        *(one.accelerate for one in file.optimizations),
    ]
    return [one for one in dict.fromkeys(named) if one and one != OURS]


def check_configs(file: AblationFile) -> None:
    """Check the Accelerate configs that the file names.

    Raises:
        UserError: a config does not exist, has errors, or is for several machines (exit 2).
    """
    for config in map(launcher.find, configs(file)):
        launcher.check(config)
        accelerate_config.check_one_machine(config)


def keys(optimization: Optimization) -> list[str]:
    """Return all recipe keys that an optimization sets."""
    return [*optimization.set, *(BATCH if optimization.same_tokens else ())]


def below(file: AblationFile, optimization: Optimization, rows: int | None = None) -> Variant:
    """Return the variant that an optimization is compared with: the baseline and what it builds on.

    Args:
        rows: see `add`.
    """
    variant = baseline(file)
    for one in stands_on(file, optimization):
        variant = add(variant, one, rows)
    return variant


def stands_on(file: AblationFile, optimization: Optimization) -> list[Optimization]:
    """Return the optimizations that one builds on, directly or indirectly."""
    names = set(optimization.on)
    for one in reversed(file.optimizations):  # an optimization builds only on earlier ones
        names |= set(one.on) if one.name in names else set()
    return [one for one in file.optimizations if one.name in names]


def missing(needs: Needs, machine: Hardware) -> str:
    """Return the requirement that the machine does not meet, or an empty string."""
    found, (major, minor) = "", machine.capability
    if needs.device == "cuda" and machine.device == "cpu":
        found = "this machine has no GPU"
    elif needs.device == "cpu" and machine.device != "cpu":
        found = "the optimization is for CPUs only"
    elif needs.capability and machine.device == "cuda" and major + minor / 10 < needs.capability:
        found = f"it needs compute capability {needs.capability:g}; {machine.name} has {major}.{minor}"
    elif needs.instructions and machine.device == "cpu" and not any(map(_cpu().get, needs.instructions)):
        found = f"this CPU has none of {', '.join(needs.instructions)}"
    elif needs.package and not installed(needs.package):
        found = f"{needs.package} is not installed"
    return f"{found}: {needs.why}" if found and needs.why else found


def _cpu() -> Mapping[str, Any]:
    import torch

    return torch.cpu.get_capabilities()


def default_optimizations() -> Path:
    return shipped_files.folder("recipes") / "ablation.yaml"


def check_baseline(own: Recipe, path: str, overrides: list[str], steps: AblationFile) -> None:
    """Check the baseline as `finetune check` does, and pin the commits of the recipe.

    An error names the position in the ablation file.
    """
    choice_checks.pinned(own)
    baseline = varied_keys.overrides(steps.baseline.set)
    try:
        for look in (checker.check_without_examples, choice_checks.setup_of):
            look(loader.load(path, [*overrides, *baseline]))
    except UserError as error:
        places = {key: steps.place("baseline", "set", key) for key in steps.baseline.set}
        found = [dataclasses.replace(one, where=places.get(one.key, one.where)) for one in error.problems]
        raise UserError(*found, code=error.code) from None
