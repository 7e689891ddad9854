"""What can be said about a recipe before any weight is loaded: `finetune check`, and its data, prepared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from finetune import adapters, model, modules
from finetune.data import bundled, load
from finetune.errors import Exit, Problem, UserError
from finetune.hardware import FOUR_BIT
from finetune.sections import Source
from finetune.upstream import installed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.prepare import Prepared
    from finetune.recipe import Recipe


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
    for look in (_model, _data, _targets):
        try:
            notes += look(recipe)
        except UserError as error:
            problems += error.problems
    if (recipe.adapter.type in FOUR_BIT or recipe.speed.base == "nf4") and not installed("bitsandbytes"):
        fix = "pip install 'finetune-toolkit[bnb]'"
        packages.append(
            Problem("a 4-bit base needs bitsandbytes, which is not installed", "adapter.type", fix=fix)
        )
    if problems or packages:
        raise UserError(*problems, *packages, code=Exit.INPUT if problems else Exit.ENVIRONMENT)
    advice = adapters.learning_rate_advice(recipe.adapter.type, recipe.train.learning_rate)
    return [*notes, advice] if advice else notes


def prepare_data(recipe: Recipe) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """The tokenizer, and the rows as it encodes them."""
    from finetune.data import prepare, stream

    template = bundled.read_template(recipe.data.chat_template) if recipe.data.chat_template else None
    tokenizer = model.load_tokenizer(recipe.model, template)
    build = stream.stream if recipe.data.streaming else prepare.prepare
    return tokenizer, build(recipe.data, tokenizer, recipe.train.seed, model.vocabulary(recipe.model))


def _model(recipe: Recipe) -> list[str]:
    model.check_exists(recipe.model)
    if Path(recipe.model.name).exists():
        return []
    return [f"model.name: {recipe.model.name} is on the Hub; its modules are checked when it loads"]


def _data(recipe: Recipe) -> list[str]:
    data = recipe.data
    notes = []
    named = [(source, "data.name") for source in load.sources(data)]
    named += [(Source(name=data.validation), "data.validation")] if data.validation is not None else []
    if not data.name or not all(source.name for source, _ in named):
        raise UserError(Problem("is empty", "data.name"))
    for source, key in named:
        if load.files(source.name, key) is None:
            pinned = load.COMMIT.fullmatch(source.revision or "")
            pin = "" if pinned else "; pin data.revision to a commit, or tomorrow's run may see other rows"
            notes.append(f"{key}: {source.name} is on the Hub; its rows are checked when it loads{pin}")
    load.check_disjoint(data)
    if data.chat_template:
        bundled.read_template(data.chat_template)
    return notes


def _targets(recipe: Recipe) -> list[str]:
    """Target modules against the names in the safetensors headers of a local model."""
    targets = recipe.adapter.options().get("target_modules")
    folder = Path(recipe.model.name)
    names = modules.linear_names(folder) if folder.is_dir() else []
    if targets is not None and names:
        problems = modules.unmatched(targets, names)
        if problems:
            raise UserError(*problems)
    return []
