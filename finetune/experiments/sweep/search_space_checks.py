"""Check the corners of a space before the first trial. Each must be a valid recipe on this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from finetune.core import signals
from finetune.core.console import quieten_libraries
from finetune.core.errors import Exit, Problem, UserError, nearest, raise_if_any
from finetune.data import preparation
from finetune.experiments.runner import kept_runs, varied_keys
from finetune.experiments.runner.varied_keys import text_of
from finetune.experiments.sweep.search_space import (
    TYPE,
    Space,
    choices_of,
    has_key,
    multiplied,
    overrides,
    own_value,
    parse,
)
from finetune.preflight import checker, choice_checks, token_checks
from finetune.recipe import adapter_types, build, loader
from finetune.recipe.schema import Recipe
from finetune.training import load_data


class SweepRequest(NamedTuple):
    """The arguments of a sweep."""

    path: str
    overrides: list[str]
    space: Path
    folder: Path
    trials: int | None
    seconds: float | None
    """Time limit of this process. `None` means no limit."""
    url: str
    accelerate: str | None = None
    final: bool = False


class Looked(NamedTuple):
    """Results of the checks before the first trial."""

    space: Space
    """The space without the choices that this machine cannot run."""
    notes: list[str]
    device: str
    """cuda or cpu."""
    unsaid: dict[str, Any]
    """SFTConfig's values of the space's keys that the recipe does not state."""
    rows: int | None
    """Number of training sequences. `None` if the data is streamed."""
    content: str = ""
    """Digest of the training data and validation set. Empty if the data is streamed."""
    date: str | None = None
    """The date that the chat template gets today. `None` if it asks for none."""


def prepare(requested: SweepRequest) -> tuple[Recipe, Looked]:
    """Return the recipe and the space after checking its corners.

    A child process does the part that needs torch.
    """
    recipe, (space, wrong) = (
        loader.load(requested.path, requested.overrides),
        parse(requested.space),
    )
    comparable(recipe)
    where = {key: space.where.get(("space", key), "") for key in space.parameters}
    wrong = [*wrong, *varied_keys.drawn_problems(recipe, where)]
    try:
        found = signals.in_new_process(_look, requested.path, requested.overrides, space, bool(wrong))
    except UserError as error:
        raise UserError(*wrong, *error.problems, code=Exit.INPUT if wrong else error.code) from None
    raise_if_any(wrong)
    choice_checks.pinned(recipe)
    return recipe, found


def _look(path: str, overrides: list[str], space: Space, refused: bool) -> Looked:
    quieten_libraries()
    return look(path, overrides, space, refused=refused)


def look(path: str, given: list[str], space: Space, *, refused: bool = False) -> Looked:
    """Check every corner of a space against the recipe and this machine, and count the training examples.

    This function imports torch and initializes the GPU, so a process that only waits for trials calls it in a
    child process.

    Args:
        refused: the space has errors already, so check only the corners.

    Raises:
        UserError: no recipe can have a value; each error names its position in the space (exit 2). This
            machine can run none of the choices of a key (exit 3).
    """
    recipe = loader.load(path, given)
    checked = checker.check_without_examples(recipe)
    notes = [*recipe.origin.notices, *checked, *adapter_types.advice(recipe)]
    device = choice_checks.setup_of(recipe).hardware.device
    lacking = corners(path, given, recipe, space)
    if refused:
        return Looked(space, notes, device, {}, None)
    kept = dict(space.parameters)
    for key, gone in lacking.items():
        notes += [f"{key}: the sweep skips {label}: {why}" for label, why in gone.items()]
        left = [value for value in kept[key].choices or () if text_of(value) not in gone]
        if not left:
            raise UserError(
                Problem(
                    "this machine can run none of the choices",
                    key,
                    found="; ".join(gone.values()),
                    fix="add a choice that this machine can run",
                    code="hardware",
                ),
                code=Exit.ENVIRONMENT,
            )
        kept[key] = kept[key].model_copy(update={"choices": left})
    if recipe.train.max_steps is None and not recipe.data.streaming:
        changing = [key for key in space.parameters if key.startswith("data.")]
        if changing:
            raise UserError(
                Problem(
                    "a searched key changes the number of steps",
                    where=str(space.path),
                    found=", ".join(changing),
                    fix="add train.max_steps=N",
                    why="trials need equally many steps",
                    code="search-space",
                )
            )
    rows, content = rows_of(recipe)
    for choice in choices_of(space, "data.name"):
        named = loader.load(path, [*given, f"data.name={json.dumps(choice)}"])
        content = _digest([content, *kept_runs.contents(named.data).values()])
    left = dataclasses.replace(space, parameters=kept)
    silent = [key for key in kept if key.startswith("train.") and own_value(recipe, key) is None]
    date = preparation.dated(recipe.data, token_checks.load_with_template(recipe)).template_date
    return Looked(left, notes, device, unsaid(silent) if silent else {}, rows, content, date)


def comparable(recipe: Recipe) -> None:
    """Check that trials of a recipe can be compared by their evaluation.

    Raises:
        UserError: there is no validation set, or the metric is neither loss nor exact match (exit 2).
    """
    if recipe.data.validation is None and recipe.data.validation_fraction is None:
        raise UserError(
            Problem(
                "a sweep needs a validation set",
                "data.validation",
                fix="data.validation_fraction=0.05, or data.validation=FILE",
                why="it compares trials by their validation score",
                code="missing-key",
            )
        )
    best = recipe.eval.metric_for_best_model
    if best not in ("loss", "exact_match"):
        raise UserError(
            Problem(
                "a sweep can't compare trials by this metric",
                "eval.metric_for_best_model",
                found=best,
                expected="loss or exact_match",
                fix="eval.metric_for_best_model=loss",
                code="eval-setting",
            )
        )


def corners(path: str, given: list[str], recipe: Recipe, space: Space) -> dict[str, dict[str, str]]:
    """Check every corner of a space.

    Return the choices that this machine cannot run: key -> value -> reason.

    Raises:
        UserError: no recipe can have a value. Each error names its position in the space (exit 2).
    """
    problems: dict[str, Problem] = {}
    lacking: dict[str, dict[str, str]] = {}
    for key, one in space.parameters.items():
        of_key = space.where.get(("space", key), "")
        if one.times is not None and not isinstance(own_value(recipe, one.times), int | float):
            what, fix = f"the recipe has no number for `{one.times}`", _likely(one.times)
            why = f"the search multiplies its values by `{one.times}`"
            kind, (section, _, name) = recipe.adapter.type, one.times.partition(".")
            if section == "adapter" and fix.startswith("set") and not _has(kind, one.times):
                why = f"the adapter type {kind} has no {name}"
                fix = "adapter.type=lora, or another search space with --space FILE"
            problem = Problem(
                what,
                key,
                where=space.where.get(("space", key, "times"), of_key),
                fix=fix,
                why=why,
                code="search-space",
            )
            problems[str(problem)] = problem
            continue
        for value, part in one.corners:
            found = _try(path, given, recipe, space, key, value)
            at = space.where.get(("space", key, *part), of_key)
            if found and found.code == Exit.ENVIRONMENT and one.choices is not None:
                lacking.setdefault(key, {})[text_of(value)] = "; ".join(p.what for p in found.problems)
            elif found:
                placed = [_placed(p, at, of_key) for p in found.problems]
                if one.times and own_value(recipe, one.times) is not None:
                    placed = [_of_a_product(p, value, one.times, recipe) for p in placed]
                problems |= {str(p): p for p in placed}
    if problems:
        raise UserError(*problems.values())
    return lacking


def rows_of(recipe: Recipe) -> tuple[int | None, str]:
    """Return the number of training sequences and a digest of the data. It fills the cache for all trials.

    The number is `None` if the data is streamed.
    """
    if recipe.data.streaming:
        return None, _digest(list(kept_runs.contents(recipe.data).values()))
    prepared: Any = load_data.prepare_data(recipe)[1]
    return len(prepared.train), _digest(prepared.content)


def _digest(content: list[Any]) -> str:
    return sha256(json.dumps(content).encode()).hexdigest()[:16]


def unsaid(keys: Iterable[str]) -> dict[str, Any]:
    """Return SFTConfig's defaults of `train.` keys that the recipe does not state."""
    from trl.trainer.sft_config import SFTConfig

    fields = {f"train.{field.name}": field.default for field in dataclasses.fields(SFTConfig)}
    found = {
        key: fields[key] for key in keys if fields.get(key, dataclasses.MISSING) is not dataclasses.MISSING
    }
    return {key: getattr(value, "value", value) for key, value in found.items()}


def _try(
    path: str, given: list[str], recipe: Recipe, space: Space, key: str, value: object
) -> UserError | None:
    """Return the error of a recipe with this value, under an adapter type that has the key."""
    kinds = space.parameters[TYPE].choices if TYPE in space.parameters else None
    kinds = [kind for kind in kinds or [recipe.adapter.type] if key == TYPE or _has(kind, key)]
    # The recipe's type first, because this machine may not support the others
    kinds.sort(key=lambda kind: kind != recipe.adapter.type)
    requested: list[str] = (
        [] if key == TYPE or TYPE not in space.parameters or not kinds else [f"{TYPE}={kinds[0]}"]
    )
    one = space.parameters[key]
    try:
        value = multiplied(key, value, one, {}, recipe)
        tried = loader.load(path, [*given, *requested, *overrides({key: value})])
        if one.choices is not None:
            checker.check_without_examples(tried)
            choice_checks.setup_of(tried)
    except UserError as error:
        return error
    return None


def _likely(key: str) -> str:
    """Return advice for a key without a value: the recipe does not set it, or its name is misspelled."""
    of = build.known_keys().items()  # keys such as `adapter.lora`, each with its own keys
    known = sorted({f"{section.partition('.')[0]}.{name}" for section, names in of for name in names})
    if key in known:
        return f"set {key} in the recipe"
    return nearest(key, known) or f"set {key} in the recipe"


def _has(kind: object, key: str) -> bool:
    """Return `has_key`, or false for what is no adapter type, which other checks report."""
    try:
        return isinstance(kind, str) and has_key(kind, key)
    except (KeyError, UserError):
        return False


def _of_a_product(problem: Problem, value: object, times: str, recipe: Recipe) -> Problem:
    """Explain that the problematic value is a product of a drawn value and the recipe's own."""
    if not problem.found:
        return problem
    return dataclasses.replace(
        problem,
        found=f"{problem.found} = {value} x {times} ({own_value(recipe, times)})",
        fix=f"change {times}, or choose another search space with --space FILE",
    )


def _placed(problem: Problem, at: str, of_key: str) -> Problem:
    """Move a problem of an override to the line of the space. A problem of the recipe keeps its position."""
    if problem.code in ("unknown-key", "renamed-key"):  # the key itself is wrong, for any value
        return dataclasses.replace(problem, where=of_key, found="")
    elsewhere = problem.where and not problem.where.startswith("override")
    return problem if elsewhere else dataclasses.replace(problem, where=at)
