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
PLAIN = (".jsonl", ".json", ".csv", ".txt", ".md")  # other files can be compressed
COMPRESSED = 5  # assumed size of a compressed file after it is read, as a multiple


def notes(folder: RunFolder, recipe: Recipe, examples: list[Example]) -> list[str]:
    """Return a note on the examples of an overridden validation set that the run was trained on.

    Equal examples have equal digests of their content (`Example.digest`), in any file and format.

    Raises:
        UserError: they are more than `data.expect.in_validation` allows (exit 2).
    """
    named = any(recipe.origin.set_by.get(key) == "override" for key in NAMES)
    if not named or not examples:
        return []
    own, found = run_folder.own_recipe(folder), set[int]()
    try:
        reason = _unread_reason(own) or _changed(own, folder)
        if not reason:
            found = _shared(own, {example.digest() for example in examples})
    except (UserError, OSError):
        reason = "the training data can't be read here"
    if reason:
        return [f"finetune does not look for training examples in the validation set: {reason}"]
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


def _unread_reason(own: Recipe) -> str:
    """Return why an evaluation does not read the training data; empty if it does."""
    files = [source_loading.files_of(source, "data.name") for source in source_loading.sources(own.data)]
    if None in files:
        return "the training data is on the Hub"
    paths = [path for some in files for path in some or ()]
    size = sum(path.stat().st_size * (1 if path.suffix in PLAIN else COMPRESSED) for path in paths)
    return f"the training data is larger than {LARGEST / 2**30:.0f} GiB" if size > LARGEST else ""


def _changed(own: Recipe, folder: RunFolder) -> str:
    """Return a reason if a file of the training data is not what it was in the run."""
    then = folder.read("data_report.json")["train"]["sources"]
    changed = [
        path
        for path, digest in source_loading.fingerprints(own.data).items()
        if digest not in then.values() or digest != then.get(path, digest)  # moved, or in another's place
    ]
    return f"the training data has changed since the run: {', '.join(changed[:3])}" if changed else ""


def _shared(own: Recipe, wanted: set[int]) -> set[int]:
    """Return the digests of `wanted` that are in the training data."""
    data, seed, found = own.data, own.train.seed, set[int]()
    drawn = source_loading.draw_held_out(data, seed)
    for source in source_loading.sources(data):
        rows = source_loading.training(data, source, drawn, seed)
        examples = source_loading.examples(rows, data, source_loading.title(source), {}, {})
        found.update(wanted.intersection(one.digest() for one in examples if isinstance(one, Example)))
    return found
