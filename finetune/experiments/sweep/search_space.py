"""A space of recipes: read from YAML as strictly as a recipe is, and what its values are as overrides.

    search: {pruner: median, evaluations: 4}
    space:
      adapter.type: {choices: [lora, qlora]}
      train.learning_rate: {low: 0.1, high: 10, log: true, times: train.learning_rate}

`adapter.type` is drawn first; a key that the drawn type does not have is not drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError

from finetune.autoconfig.batch_size import count_steps, split_batch
from finetune.core import paths, strict_yaml
from finetune.core.errors import Problem, UserError, nearest
from finetune.experiments.runner import varied_keys
from finetune.recipe import build, recipe_errors
from finetune.recipe.schema import Section

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from finetune.recipe.schema import Recipe

TYPE = "adapter.type"
ROWS = "rows of the data"  # in a study's identity
REFUSED = {  # keys, or sections, that a search can't change
    **varied_keys.FIXED,
    "speed.compile": "off in trials, and as the recipe has it in the final run",
}
# What a trial is not made for, whatever the recipe says: after what the user gave, in a sweep too
IN_TRIALS = ["speed.compile=false", "train.save_strategy=no", "publish.repo=null"]
IN_TRIALS += ["eval.tasks=[]", "eval.forgetting=false", "eval.generate=false"]
WHOLE = 1e-8  # how far from a whole number a count of steps may be
Number = Annotated[int | float, Field(allow_inf_nan=False)]


class Search(Section):
    sampler: Literal["tpe", "random"] = "tpe"
    """What proposes values: Optuna's TPE, or chance."""
    pruner: Literal["median", "hyperband", "none"] = "median"
    """What ends a trial early: an evaluation worse than the median of those before, Hyperband, nothing."""
    startup_trials: int = Field(default=6, ge=1)
    """Trials drawn by chance, and finished before the median ends any."""
    evaluations: int = Field(default=4, ge=1)
    """Evaluations in a trial, evenly spread, where the recipe has no `eval.eval_steps`."""


class Parameter(Section):
    """A range or choices, of one recipe key."""

    low: Number | None = None
    high: Number | None = None
    """The range's ends, both within it; whole numbers mean whole numbers."""
    log: bool = False
    """Drawn evenly on a log scale."""
    step: Number | None = Field(default=None, gt=0)
    """From one value of the range to the next."""
    choices: list[Any] | None = Field(default=None, min_length=1)
    """The values themselves, of any kind."""
    times: str | None = None
    """What is drawn is multiplied by this key's value; by the recipe's own, if it is the key itself."""

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def corners(self) -> list[tuple[Any, tuple[str, ...]]]:
        """Every choice, or the two ends; each with where it stands under the key."""
        if self.choices is not None:
            return [(value, ("choices", str(index))) for index, value in enumerate(self.choices)]
        return [(self.low, ("low",)), (self.high, ("high",))]


@dataclass(frozen=True)
class Space:
    path: Path
    search: Search
    parameters: dict[str, Parameter]
    """In the order in which they are drawn."""
    where: dict[tuple[str, ...], str] = field(default_factory=dict)


def read(path: Path) -> Space:
    """Read a space.

    Raises:
        UserError: as `parse`, and with every problem that it found (exit 2).
    """
    space, problems = parse(path)
    if problems:
        raise UserError(*problems)
    return space


def parse(path: Path) -> tuple[Space, list[Problem]]:
    """A space as far as it can be read, and every problem found, each with its place.

    Raises:
        UserError: no file, or nothing in it that is a space (exit 2).
    """
    try:
        document = strict_yaml.parse(strict_yaml.text_of(path, "the space"), str(path))
    except OSError as error:
        what = f"can't read the space: {error.strerror}"
        fix = paths.similar_files(path) or "the shipped one: leave --space out"
        raise UserError(Problem(what, where=str(path), fix=fix)) from None
    raw, where, problems = document.value, document.where, list(document.problems)
    if not isinstance(raw, dict) or not isinstance(raw.get("space"), dict) or not raw["space"]:
        what = "a space maps keys of a recipe to ranges or choices"
        fix = "space: {adapter.r: {low: 4, high: 64}}"
        raise UserError(*problems, Problem(what, where=where.get(("space",), str(path)), fix=fix))
    for name in [name for name in raw if name not in ("search", "space")]:
        near = nearest(name, ["search", "space"])
        problems.append(Problem("unknown section", name, where[(name,)], expected="search, space", fix=near))
    search = _validated(Search, raw.get("search") or {}, ("search",), raw, where, problems)
    parameters = {}
    for key, given in raw["space"].items():
        wrong = _key_problems(key, where[("space", key)])
        found = _validated(Parameter, given, ("space", key), raw, where, problems)
        wrong += _parameter_problems(key, found, raw["space"], where) if found else []
        problems += wrong
        if found and not wrong:
            parameters[key] = found
    return Space(path, search or Search(), _ordered(parameters), where), problems


def _validated(
    kind: Any, given: Any, under: tuple[str, ...], raw: Any, where: Any, problems: list[Problem]
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
            Problem("not a key of a recipe", where=at, found=key, expected="section.key, such as adapter.r")
        ]
    why = REFUSED.get(section) or REFUSED.get(key)
    return [Problem(f"is not searched: {why}", key, at)] if why else []


def _parameter_problems(key: str, one: Parameter, all_of_them: Any, where: Any) -> list[Problem]:
    """What does not go together in one range or list of choices."""
    at, found = where[("space", key)], []

    def problem(what: str, part: str = "", **texts: str) -> None:
        place = where.get(("space", key, *part.split(".")), at)
        found.append(Problem(what, key, place, **texts))

    ranged = one.low is not None and one.high is not None
    if ranged == (one.choices is not None) or (
        one.choices is not None and (one.low, one.high) != (None, None)
    ):
        problem("needs either low and high, or choices", fix=f"{key}: {{low: 1, high: 8}}")
        return found
    if ranged and one.low >= one.high:  # type: ignore[operator] (both are numbers)
        problem("low must be below high", "low", found=f"{one.low} and {one.high}")
    elif one.log and (not ranged or one.low <= 0):  # type: ignore[operator] (both are numbers)
        problem("a log scale is for ranges above 0", "log", found=str(one.low if ranged else one.choices))
    if one.log and one.step is not None:
        problem("excludes log", "step", fix="drop one of the two")
    if one.step is not None and (not ranged or (one.whole and not isinstance(one.step, int))):
        problem("does not suit the values", "step", found=str(one.step))
    elif fix := _unreached(one):
        problem("the steps do not reach high", "step", found=f"{one.low}, {one.high}, {one.step}", fix=fix)
    labels = [varied_keys.text_of(value) for value in one.choices or ()]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            problem("the same choice twice", f"choices.{index}", found=label)
    target = one.times
    if target is None:
        return found
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value, _ in one.corners):
        problem("only numbers can be multiplied", "times", found=", ".join(labels))
    other = all_of_them.get(target) if target != key else None
    if isinstance(other, dict) and other.get("times") not in (None, target):
        problem(f"{target} is itself a multiple of {other['times']}", "times")
    return found


def _unreached(one: Parameter) -> str:
    """What would be reached by a range's steps, where its `high` is not; empty: it is."""
    if one.step is None or one.low is None or one.high is None or one.low >= one.high:
        return ""
    places = (one.high - one.low) / one.step
    if abs(places - round(places)) < WHOLE:
        return ""
    ends = [f"{one.low + count * one.step:.10g}" for count in (int(places), int(places) + 1) if count]
    return f"high: {' or '.join(ends)}"


def _ordered(parameters: dict[str, Parameter]) -> dict[str, Parameter]:
    """The type first, for it decides which keys there are; then what is multiplied, then its multiples."""

    def rank(key: str) -> int:
        return 0 if key == TYPE else 2 if parameters[key].times not in (None, key) else 1

    return {key: parameters[key] for key in sorted(parameters, key=rank)}


def has_key(kind: str, key: str) -> bool:
    """Whether a recipe of that adapter type has the key."""
    section, _, name = key.partition(".")
    return section != "adapter" or name.split(".")[0] in build.sections(kind)["adapter"].model_fields


def own_value(recipe: Recipe, key: str) -> Any:
    """What the recipe itself has for a key; `None` if nothing."""
    section, _, name = key.partition(".")
    value = getattr(recipe, section, None)
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def multiplied(key: str, drawn: Any, parameter: Parameter, values: dict[str, Any], recipe: Recipe) -> Any:
    """What a drawn value means: itself, or that many times another key's value."""
    if parameter.times is None:
        return drawn
    base = own_value(recipe, key) if parameter.times == key else values.get(parameter.times)
    base = own_value(recipe, parameter.times) if base is None else base
    product = drawn * base
    return int(product) if isinstance(base, int) and float(product).is_integer() else product


def grid(one: Parameter) -> list[Any] | None:
    """All that can be drawn, before `times`; `None`: any number of a range, or of a log scale."""
    if one.choices is not None:
        return one.choices
    step = one.step or (1 if one.whole else None)
    if step is None or one.log:
        return None
    assert one.low is not None and one.high is not None
    places = range(round((one.high - one.low) / step) + 1)
    return [one.low + at * step if one.whole else min(float(one.low + at * step), one.high) for at in places]


def draw(trial: Any, space: Space, recipe: Recipe, without: Collection[str] = ()) -> dict[str, Any]:
    """The values of a trial by key, `times` applied.

    Args:
        trial: Optuna's, which is asked for each parameter under its key.
        without: keys that stay as the recipe has them.
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
        values[key] = multiplied(key, drawn, one, values, recipe)
    return values


def own_draw(space: Space, recipe: Recipe, unsaid: dict[str, Any]) -> dict[str, Any]:
    """What would have to be drawn for the recipe's own values, as far as the space has them.

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
    """Whether a range has a value: Optuna takes another one from between two steps, or two whole numbers."""
    assert one.low is not None and one.high is not None
    step = one.step or (1 if one.whole else None)
    places = (value - one.low) / step if step else 0.0
    return one.low <= value <= one.high and abs(places - round(places)) < WHOLE


def overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={varied_keys.text_of(value)}" for key, value in values.items()]


def identity(recipe: Recipe, space: Space, content: str) -> dict[str, str]:
    """What all workers of a study must have in common; `content`: a digest of the rows."""
    found = varied_keys.values_of(recipe) | ({ROWS: content} if content else {})
    for key, one in space.parameters.items():
        found[f"space.{key}"] = varied_keys.text_of(one.model_dump(exclude_defaults=True))
    return found | {f"search.{key}": str(value) for key, value in space.search.model_dump().items()}


def steps_of(recipe: Recipe, rows: int | None) -> int:
    """Optimizer steps of a trial, in one process."""
    return count_steps(recipe.train, rows, split_batch(recipe.train, 1), 1)


def every(recipe: Recipe, search: Search, rows: int | None) -> int:
    """Steps from one evaluation of a trial to the next."""
    return recipe.eval.eval_steps or -(-steps_of(recipe, rows) // search.evaluations)
