"""Read a run's validation set and verify that it has not changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import PartialState

from finetune.core.errors import Exit, Problem, UserError, raise_if_any
from finetune.core.verified_files import Damaged
from finetune.data import audit, preparation, source_loading
from finetune.data.examples import Example
from finetune.models import model_files, token_limits, tokenizer_setup
from finetune.run_folder import run_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.preparation import HeldOut
    from finetune.recipe.schema import Recipe
    from finetune.run_folder.run_folder import RunFolder

# Keys that decide which examples `validation_fraction` draws from the same data
DRAWS = ("data.validation_fraction", "data.revision", "data.format", "data.columns", "data.role_map")
CHOSEN = (
    "the validation set also selected the best checkpoint (eval.eval_steps), so its scores are slightly "
    "optimistic"
)


def held_out(
    folder: RunFolder, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[HeldOut], list[str]]:
    """Return the validation set from the run folder.

    The first time, or with an override, it comes from the data.

    Returns:
        The examples, and notes on them.

    Raises:
        UserError: the data can't be used (exit 2).
    """
    kept, other = folder.file(run_folder.HELD_OUT), overridden(recipe)
    config = model_files.read_config(recipe.model)
    ends = tokenizer_setup.declared_ends(recipe.model, config)
    vocabulary = tokenizer_setup.vocabulary(recipe.model, tokenizer, config)
    token_limits.apply(tokenizer, config, vocabulary)
    chosen = (
        recipe.eval.eval_steps
        and recipe.eval.load_best_model_at_end
        and "/" not in recipe.eval.metric_for_best_model
    )
    notes = [CHOSEN] if chosen and not other else []
    if kept.exists() and not other:
        try:
            return read_kept(folder, recipe, tokenizer), notes
        except Damaged as damage:
            check_present(recipe, damage, kept)
            notes.append(f"{damage}: finetune reads the validation set from the data again")
    before = source_loading.file_states(recipe.data, held_out=True)
    notes += check_unchanged(source_loading.fingerprints(recipe.data, held_out=True), folder, other)
    examples, remarks = preparation.held_out(recipe.data, tokenizer, recipe.train.seed, ends, vocabulary)
    notes += [f"validation set: {remark}" for remark in remarks] if other else []
    if not other and differs(examples, folder):
        raise UserError(
            Problem(
                "the validation examples in the data are not those of the run",
                "data.validation" if recipe.data.validation else "data.name",
                where=recipe.data.validation or "",
                found="other token ids than in training",
                fix="restore the data and the run's tokenizer and chat template, or add data.validation=PATH",
                why="the run may have been trained on these examples",
                code="resume-mismatch",
            )
        )
    source_loading.check_unchanged(before, source_loading.file_states(recipe.data, held_out=True))
    if PartialState().is_main_process and not other:
        lines = [json.dumps(row.example.as_json(), ensure_ascii=False) for row in examples]
        folder.write_text(run_folder.HELD_OUT, "".join(f"{line}\n" for line in lines))
    return examples, notes


def read_kept(folder: RunFolder, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[HeldOut]:
    """Return the validation set in a run folder, after comparing its token ids with the run's.

    Raises:
        Damaged: it cannot be read, or its token ids differ.
    """
    name, ends = run_folder.HELD_OUT, tokenizer_setup.declared_ends(recipe.model)
    try:
        lines = folder.read_text(name).split("\n")  # splitlines would also split at U+2028
        kept = [json.loads(line) for line in lines if line]
        examples = [Example.from_json(row) for row in kept]
        rows = preparation.encode_held_out(examples, recipe.data, tokenizer, ends)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Damaged(f"finetune can't read {name} ({type(error).__name__})") from None
    except UserError as error:
        raise Damaged(f"finetune can't use {name} ({error.problems[0].what})") from None
    if differs(rows, folder):
        raise Damaged(f"the token ids of {name} differ from those in training")
    return rows


def differs(rows: list[HeldOut], folder: RunFolder) -> bool:
    """Return whether validation examples have other token ids than in training, as far as the run says."""
    found = audit.new_token_hash()
    for document in (document for row in rows for document in row.documents):
        audit.add_tokens(found, document)
    report = folder.found("data_report.json")
    stated = (report.get("validation") or {}).get("token_ids") if isinstance(report, dict) else None
    return bool(stated) and stated != found.hexdigest()


def check_present(recipe: Recipe, damage: Damaged, kept: Path) -> None:
    """Raise a UserError if a damaged validation set cannot be read from the data again (exit 4)."""
    try:
        source_loading.fingerprints(recipe.data, held_out=True)
    except UserError as error:
        raise UserError(
            Problem(
                "the stored validation set is damaged, and its data is missing",
                where=str(kept),
                found=str(damage),
                fix="restore the file from a copy, or add data.validation=PATH",
                code="run-damaged",
            ),
            *error.problems,
            code=Exit.ARTIFACT,
        ) from None


def check_not_drawn_again(recipe: Recipe) -> None:
    """Refuse an override that draws other validation examples from the run's training data (exit 2)."""
    if recipe.origin.set_by.get("data.name") == "override":
        return
    if recipe.data.validation_fraction is None or recipe.data.validation is not None:
        return
    raise_if_any(
        Problem(
            "an evaluation can't draw other validation examples from the training data",
            key,
            fix="remove the override, or name a file of other examples: data.validation=FILE",
            why="the run was trained on these examples",
            code="command-line",
        )
        for key in DRAWS
        if recipe.origin.set_by.get(key) == "override"
    )


def overridden(recipe: Recipe) -> bool:
    """Return whether an override names other data than the run's own."""
    return any(who == "override" and key.startswith("data.") for key, who in recipe.origin.set_by.items())


def check_unchanged(hashes: dict[str, str], folder: RunFolder, overridden: bool) -> list[str]:
    """Check that the validation set is the run's own. A changed file could contain training examples.

    Args:
        hashes: the hash of each file that the validation set is read from.
        overridden: whether an override names other data than the run's own.

    Returns:
        Notes on files that the run's recipe did not name.

    Raises:
        UserError: a file has changed since the run (exit 2).
    """
    recorded = folder.read("data_report.json")["train"]["sources"]
    other = [path for path, digest in hashes.items() if digest not in recorded.values()]
    if other and not overridden:
        raise UserError(
            *(
                Problem(
                    "the data changed since the run",
                    where=path,
                    fix="restore the file, or add data.validation=PATH",
                    why="a changed file can contain training examples",
                    code="resume-mismatch",
                )
                for path in other
            )
        )
    return [f"{path} is not the validation set of the run" for path in other]
