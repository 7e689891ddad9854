"""Read a search space from strict YAML, draw values, and convert them to recipe overrides.

    search: {pruner: median, evaluations: 4}
    space:
      adapter.type: {choices: [lora, qlora]}
      train.learning_rate: {low: 0.1, high: 10, log: true, times: train.learning_rate}

`adapter.type` is drawn first. Keys that the drawn type does not have are not drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from finetune.autoconfig.batch_size import count_steps, split_batch, steps_between
from finetune.core import paths, strict_yaml
from finetune.core.errors import Problem, UserError, nearest, raise_if_any
from finetune.experiments.runner import kept_runs, varied_keys
from finetune.models import base_identity
from finetune.recipe import build, recipe_errors
from finetune.recipe.recipe_errors import Where
from finetune.recipe.schema import Recipe, Section

TYPE = "adapter.type"
# Keys of digests in a study's identity
ROWS, BASE = "rows of the data", "the files of the base model"
REFUSED = {  # keys and sections that a search cannot vary
    **varied_keys.FIXED,
    "speed.compile": "trials don't compile, and the final run uses the recipe's value",
}
# Overrides that switch off what trials do not need. They follow the user's overrides, also in a W&B sweep.
IN_TRIALS = [
    "speed.compile=false",
    "train.save_strategy=no",
    "publish.repo=null",
    "eval.tasks=[]",
    "eval.forgetting=false",
    "eval.generate=false",
]
MOST_CORNERS = 200  # choices and ends of ranges of a space: each is checked as a recipe
MOST_STEPS = 10_000  # of a range
WHOLE = 1e-8  # tolerance for a number of steps to count as an integer
LARGEST = 1e15  # of a range, and of a choice that is multiplied
Number = Annotated[int | float, Field(allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]


class Search(Section):
    sampler: Literal["tpe", "random"] = "tpe"
    """How values are proposed: by Optuna's TPE sampler or at random."""
    pruner: Literal["median", "hyperband", "none"] = "median"
    """How a trial ends early: below the median of earlier evaluations, by Hyperband, or not at all."""
    startup_trials: int = Field(default=6, ge=1)
    """Trials that are drawn at random and finish before the median pruner can end a trial."""
    evaluations: int = Field(default=4, ge=1)
    """Number of evenly spaced evaluations in a trial, if the recipe does not set `eval.eval_steps`."""


class Parameter(Section):
    """The range or the choices of one recipe key."""

    low: Number | None = None
    high: Number | None = None
    """Ends of the range, both included. If both are integers, the values are integers."""
    log: bool = False
    """Draw uniformly on a log scale."""
    step: Number | None = Field(default=None, gt=0)
    """Difference between neighboring values of the range."""
    choices: list[Any] | None = Field(default=None, min_length=1)
    """The values, of any type."""
    times: str | None = None
    """Multiply the drawn value by the value of this key. For the key itself, use the recipe's value."""

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def corners(self) -> list[tuple[Any, tuple[str, ...]]]:
        """All choices or the two ends of the range, each with its position under the key."""
        if self.choices is not None:
            return [(value, ("choices", str(index))) for index, value in enumerate(self.choices)]
        return [(self.low, ("low",)), (self.high, ("high",))]


@dataclass(frozen=True)
class Space:
    path: Path
    search: Search
    parameters: dict[str, Parameter]
    """Parameters in the order in which they are drawn."""
    where: dict[tuple[str, ...], str] = field(default_factory=dict)


def read(path: Path) -> Space:
    """Read a space.

    Raises:
        UserError: the space has problems. The error lists all of them (exit 2).
    """
    space, problems = parse(path)
    raise_if_any(problems)
    return space


def parse(path: Path) -> tuple[Space, list[Problem]]:
    """Read a space, and return the valid parameters and all problems with their positions.

    Raises:
        UserError: the file does not exist, or it contains no space (exit 2).
    """
    try:
        document = strict_yaml.parse(strict_yaml.text_of(path, "the space"), str(path))
    except OSError as error:
        raise UserError(
            Problem(
                "finetune can't read the search space",
                where=str(path),
                found=str(error.strerror),
                fix=paths.similar_files(path) or "remove --space to use the shipped search space",
                code="search-space",
            )
        ) from None
    raw, where, problems = document.value, document.where, list(document.problems)
    if not isinstance(raw, dict) or not isinstance(raw.get("space"), dict) or not raw["space"]:
        raise UserError(
            *problems,
            Problem(
                "the file has no search space",
                where=where.get(("space",), str(path)),
                expected="`space:` with recipe keys and their ranges or choices",
                fix="space: {adapter.r: {low: 4, high: 64}}",
                code="search-space",
            ),
        )
    for name in [name for name in raw if name not in ("search", "space")]:
        near = nearest(name, ["search", "space"])
        problems.append(
            Problem(
                "unknown section",
                name,
                where=where[(name,)],
                expected="" if near else "search, space",
                fix=near,
                code="unknown-key",
            )
        )
    search = _validated(Search, raw.get("search") or {}, ("search",), raw, where, problems)
    parameters = {}
    for key, given in raw["space"].items():
        wrong = _key_problems(key, where[("space", key)])
        found = _validated(Parameter, given, ("space", key), raw, where, problems)
        wrong += _parameter_problems(key, found, raw["space"], where) if found else []
        problems += wrong
        if found and not wrong:
            parameters[key] = found
    if (count := sum(len(one.corners) for one in parameters.values())) > MOST_CORNERS:
        problems.append(
            Problem(
                "the search space has too many choices",
                where=where[("space",)],
                found=f"{count:,}",
                expected=f"at most {MOST_CORNERS}",
                fix="use a range (low and high) in place of a long list of choices",
                why="finetune checks each choice as a recipe before the first trial",
                code="search-space",
            )
        )
        parameters.clear()
    return Space(path, search or Search(), _ordered(parameters), where), problems


def _validated(
    kind: type[BaseModel],
    given: object,
    under: tuple[str, ...],
    raw: dict[str, Any],
    where: Where,
    problems: list[Problem],
) -> Any:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        known = {".".join(under): frozenset(kind.model_fields)}
        problems += recipe_errors.explain(error, raw, where, known, under)
        return None


def _key_problems(key: str, at: str) -> list[Problem]:
    section, dot, name = key.partition(".")
    if not (dot and name):
        return [
            Problem(
                "recipes have no such key",
                where=at,
                found=key,
                expected="a key such as adapter.r",
                fix=f"write the section and the key: SECTION.{name or key}",
                code="unknown-key",
            )
        ]
    why = REFUSED.get(section) or REFUSED.get(key) or ""
    if not why:
        return []
    return [
        Problem(
            "a sweep can't search this key",
            key,
            where=at,
            fix=f"remove `{key}:`",
            why=why,
            code="search-space",
        )
    ]


def _parameter_problems(
    key: str, one: Parameter, all_of_them: Mapping[str, object], where: Where
) -> list[Problem]:
    """Return conflicts within one range or list of choices."""
    at, found = where[("space", key)], []

    def problem(what: str, part: str = "", **texts: str) -> None:
        found.append(
            Problem(what, key, where.get(("space", key, *part.split(".")), at), **texts, code="search-space")
        )

    ranged = one.low is not None and one.high is not None
    if ranged == (one.choices is not None) or (
        one.choices is not None and (one.low, one.high) != (None, None)
    ):
        problem("the key needs either a range (low and high) or choices", fix=f"{key}: {{low: 1, high: 8}}")
        return found
    if ranged and one.low >= one.high:  # type: ignore[operator] (both are numbers)
        problem(
            "`low` is not below `high`",
            "low",
            found=f"low {one.low}, high {one.high}",
            fix="swap the two values",
        )
    elif one.log and (not ranged or one.low <= 0):  # type: ignore[operator] (both are numbers)
        shown = f"low {one.low}" if ranged else f"choices {one.choices}"
        problem("a log scale needs a range above 0", "log", found=shown, fix="log: false")
    if one.log and one.step is not None:
        problem("`step` and `log` exclude each other", "step", fix="remove `step:` or `log:`")
    if one.step is not None and (not ranged or (one.whole and not isinstance(one.step, int))):
        problem(
            "the step does not fit the values",
            "step",
            found=str(one.step),
            expected="an integer" if ranged else "`step` only with low and high",
        )
    elif fix := _unreached(one):
        problem(
            "the steps do not reach `high`",
            "step",
            found=f"low {one.low}, high {one.high}, step {one.step}",
            fix=fix,
        )
    if (count := _count_steps(one)) > MOST_STEPS:
        problem(
            "the range has too many steps",
            "step",
            found=f"{count:,.0f}",
            expected=f"at most {MOST_STEPS:,}",
            fix="use a larger step, or `log: true` without a step",
        )
    labels = [varied_keys.text_of(value) for value in one.choices or ()]
    seen = set[str]()
    for index, label in enumerate(labels):
        if label in seen:
            problem("a choice is listed twice", f"choices.{index}", found=label, fix="remove one of them")
        seen.add(label)
    target = one.times
    if target is None:
        return found
    if not all(_is_factor(value) for value, _ in one.corners):
        problem("`times` needs numbers as choices", "times", found=", ".join(labels), fix="remove `times:`")
    other = all_of_them.get(target) if target != key else None
    if isinstance(other, dict) and other.get("times") not in (None, target):
        problem(
            f"`{target}` is itself a multiple of `{other['times']}`",
            "times",
            found=target,
            fix=f"times: {other['times']}",
        )
    return found


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _count_steps(one: Parameter) -> float:
    """Return the number of steps in a range whose values are listed for W&B, or 0."""
    step = one.step or (1 if one.whole and one.times is not None and not one.log else None)
    return 0 if step is None or one.low is None or one.high is None else (one.high - one.low) / step


def _unreached(one: Parameter) -> str:
    """Return advice if the steps of a range do not reach `high`, else an empty string."""
    if one.step is None or one.low is None or one.high is None or one.low >= one.high:
        return ""
    places = (one.high - one.low) / one.step
    if abs(places - round(places)) < WHOLE:
        return ""
    ends = [f"{one.low + count * one.step:.10g}" for count in (int(places), int(places) + 1) if count]
    return f"high: {' or '.join(ends)}"


def _ordered(parameters: dict[str, Parameter]) -> dict[str, Parameter]:
    """Order the parameters: the adapter type, then keys that others are multiples of, then the multiples."""

    def rank(key: str) -> int:
        return 0 if key == TYPE else 2 if parameters[key].times not in (None, key) else 1

    return {key: parameters[key] for key in sorted(parameters, key=rank)}


def has_key(kind: str, key: str) -> bool:
    """Return whether a recipe of this adapter type has the key."""
    section, _, name = key.partition(".")
    return section != "adapter" or name.split(".")[0] in build.sections(kind)["adapter"].model_fields


def own_value(recipe: Recipe, key: str) -> Any:
    """Return the recipe's own value of a key, or `None` if it has none."""
    section, _, name = key.partition(".")
    value = getattr(recipe, section, None)
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def multiplied(key: str, drawn: Any, parameter: Parameter, values: dict[str, Any], recipe: Recipe) -> Any:
    """Convert a drawn value to a recipe value. With `times`, multiply it by another key's value."""
    if parameter.times is None:
        return drawn
    base = own_value(recipe, key) if parameter.times == key else values.get(parameter.times)
    base = own_value(recipe, parameter.times) if base is None else base
    product = drawn * base
    return int(product) if isinstance(base, int) and float(product).is_integer() else product


def grid(one: Parameter) -> list[Any] | None:
    """Return all values that can be drawn, before `times` applies.

    `None` means a continuous range or log scale.
    """
    if one.choices is not None:
        return one.choices
    step = one.step or (1 if one.whole else None)
    if step is None or one.log:
        return None
    assert one.low is not None and one.high is not None
    places = range(round((one.high - one.low) / step) + 1)
    return [one.low + at * step if one.whole else min(float(one.low + at * step), one.high) for at in places]


def draw(trial: Any, space: Space, recipe: Recipe, without: Collection[str] = ()) -> dict[str, Any]:
    """Draw the values of a trial by key, with `times` applied.

    Args:
        trial: an Optuna trial, whose parameters have the keys as names.
        without: keys that keep the recipe's values.

    Raises:
        ValueError, TypeError, LookupError: the study has queued a value that is not in the space.
    """
    values: dict[str, Any] = {}
    for key, one in space.parameters.items():
        if key in without or not has_key(values.get(TYPE, recipe.adapter.type), key):
            continue
        if one.choices is not None:
            by_label = {varied_keys.text_of(value): value for value in one.choices}
            drawn = by_label[trial.suggest_categorical(key, list(by_label))]
        elif one.whole:
            drawn = trial.suggest_int(key, one.low, one.high, log=one.log, step=one.step or 1)
        else:
            drawn = trial.suggest_float(key, one.low, one.high, log=one.log, step=one.step)
        if one.choices is None and not one.low <= drawn <= one.high:
            raise ValueError(f"{key}: {drawn!r} is outside of the space")
        values[key] = multiplied(key, drawn, one, values, recipe)
    return values


def own_draw(space: Space, recipe: Recipe, unsaid: dict[str, Any]) -> dict[str, Any]:
    """Return the draw that gives the recipe's own values, for the keys whose range contains them.

    Args:
        unsaid: values of keys that the recipe does not state.
    """
    found: dict[str, Any] = {}
    for key, one in space.parameters.items():
        value = own_value(recipe, key)
        value = unsaid.get(key) if value is None else value
        if one.times is not None and isinstance(value, int | float):
            base = value if one.times == key else own_value(recipe, one.times)
            value = value / base if base else None
        if one.choices is not None:
            labels = [varied_keys.text_of(choice) for choice in one.choices if choice == value]
            found |= {key: labels[0]} if labels else {}
        elif isinstance(value, int | float) and _within(one, value):
            found[key] = value
    return found


def _within(one: Parameter, value: float) -> bool:
    """Return whether a range contains a value.

    Optuna would change a value between two steps or two integers.
    """
    assert one.low is not None and one.high is not None
    step = one.step or (1 if one.whole else None)
    places = (value - one.low) / step if step else 0.0
    return one.low <= value <= one.high and abs(places - round(places)) < WHOLE


def overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={varied_keys.text_of(value)}" for key, value in values.items()]


def identity(recipe: Recipe, space: Space, content: str) -> dict[str, str]:
    """Return the facts that all workers of a study must share.

    Args:
        content: a digest of the data of all trials.
    """
    found = varied_keys.values_of(recipe) | ({ROWS: content} if content else {})
    found[BASE] = base_identity.digest(recipe.model)
    found |= {f"file of {name}": digest for name, digest in kept_runs.named_files(recipe).items()}
    for choice in choices_of(space, "adapter.init_from"):
        varied = recipe.adapter.model_copy(update={"init_from": choice})
        for name, digest in kept_runs.named_files(recipe.model_copy(update={"adapter": varied})).items():
            if name.startswith("adapter.init_from"):
                found[f"file of {name} of {choice}"] = digest
    for key, one in space.parameters.items():
        found[f"space.{key}"] = varied_keys.text_of(one.model_dump(exclude_defaults=True))
    return found | {f"search.{key}": str(value) for key, value in space.search.model_dump().items()}


def choices_of(space: Space, key: str) -> list[Any]:
    """Return the values that a space lists for a key, without null."""
    one = space.parameters.get(key)
    return [choice for choice in (one and one.choices) or () if choice]


def every(recipe: Recipe, search: Search, rows: int | None) -> int:
    """Return the number of steps between two evaluations of a trial."""
    stated = recipe.eval.eval_steps
    if isinstance(stated, int):
        return stated
    steps = count_steps(recipe.train, rows, split_batch(recipe.train, 1), 1)
    return steps_between(stated, steps) if stated else -(-steps // search.evaluations)
