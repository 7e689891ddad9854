"""Look for examples that a run was trained on in the validation set of an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.core.errors import Problem, UserError
from finetune.data import source_loading
from finetune.data.examples import Example
from finetune.run_folder import run_folder

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe
    from finetune.run_folder.run_folder import RunFolder

LARGEST = 2**30  # bytes of training data that an evaluation reads to compare examples
NAMES = ("data.validation", "data.name", "data.subset", "data.split")  # overrides that name other examples
PLAIN = (".jsonl", ".json", ".csv", ".txt", ".md")  # other files are compressed


def notes(folder: RunFolder, recipe: Recipe, examples: list[Example]) -> list[str]:
    """Return a note on the examples of an overridden validation set that the run was trained on.

    Raises:
        UserError: they are more than `data.expect.in_validation` allows (exit 2).
    """
    if not any(recipe.origin.set_by.get(key) == "override" for key in NAMES):
        return []
    if not examples:
        return []
    own = run_folder.own_recipe(folder)
    found = _shared(own, {example.digest() for example in examples})
    if isinstance(found, str):
        return [f"finetune does not look for training examples in the validation set: {found}"]
    shared = sum(example.digest() in found for example in examples)
    said = f"the run was trained on {shared} of {len(examples)} examples of the validation set"
    if shared > recipe.data.expect.in_validation * len(examples):
        raise UserError(
            Problem(
                said,
                "data.validation" if recipe.data.validation else "data.name",
                found=", ".join([one.where for one in examples if one.digest() in found][:3]),
                fix="data.validation=FILE with other examples, or data.expect.in_validation=1 to allow these",
                why="the scores would be too good",
                code="data-expect",
            )
        )
    return [said] if shared else []


def _shared(own: Recipe, wanted: set[int]) -> set[int] | str:
    """Return the digests of `wanted` that are in the training data, or why finetune can't read this data."""
    data, found, size = own.data, set[int](), 0
    try:
        for source in source_loading.sources(data):
            files = source_loading.files_of(source, "data.name")
            if files is None:
                return "the training data is on the Hub"
            size += sum(path.stat().st_size * (1 if path.suffix in PLAIN else 5) for path in files)
        if size > LARGEST:
            return f"the training data is larger than {LARGEST / 2**30:.0f} GiB"
        drawn = source_loading.draw_held_out(data, own.train.seed)
        for source in source_loading.sources(data):
            rows = source_loading.training(data, source, drawn, own.train.seed)
            examples = source_loading.examples(rows, data, source_loading.title(source), {}, {})
            digests = (one.digest() for one in examples if isinstance(one, Example))
            found.update(wanted.intersection(digests))
    except (UserError, OSError):
        return "the training data can't be read here"
    return found
