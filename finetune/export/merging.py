"""Merge the adapter into its base model, and verify that nothing was lost: `finetune merge RUN`.

merge.run("runs/quickstart") writes runs/quickstart/merged, which Transformers loads without PEFT.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.core import command_lines, progress, safe_files
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.core.paths import free_name, writing
from finetune.evaluation import reopen, scoring, validation_set
from finetune.export import merged_files, plain_base, shared_weights, verify_merge
from finetune.quantization import qat
from finetune.run_folder import run_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.recipe.schema import Recipe
    from finetune.run_folder.run_folder import RunFolder


def run(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    dtype: str = "bfloat16",
    quantized: str | None = None,
    output: str | None = None,
) -> dict[str, Any]:
    """Merge a run's adapter, verify the saved weights, and publish the folder with its report in merge.json.

    Args:
        path: the run folder.
        overrides: overrides of the run's recipe, such as `model.name=...` on another machine.
        dtype: dtype of the saved weights (bfloat16, float32). With `quantized`, the dtype of the other
            weights.
        quantized: int8 | int4 | fp8, or `None`.
        output: the new folder. `None` means merged, merged-int8 and so on in the run folder.

    Returns:
        The report: figures, sizes in bytes, seconds.

    Raises:
        UserError: there is nothing to merge, PEFT cannot merge the adapter type, or the target is not empty
            (exit 2). A package or memory is missing (exit 3). The saved weights differ from the trained
            weights (exit 4). No files are left behind.
    """
    started = time.monotonic()
    folder = run_folder.open_run(path)
    folder.found("merge.json")  # a damaged file ends the command before a model is loaded
    recipe = run_folder.recipe_of(folder, overrides)
    setup = reopen.setup_of(recipe)
    merged_files.check_asked(folder, setup, quantized, recipe.speed.qat)
    shared_weights.check(folder, recipe)
    target = free_target(folder.path, f"merged-{quantized}" if quantized else "merged", output)
    tokenizer = reopen.tokenizer_of(folder)
    held_out, _ = validation_set.held_out(folder, recipe, tokenizer)
    rows, origin = verify_merge.probes(recipe, tokenizer, held_out)
    score = partial(scores, tokenizer, held_out if quantized else [], recipe)
    report: dict[str, Any] = {"path": str(target), "dtype": dtype, "quantized": quantized}
    report |= {"rows": {"from": origin, "rows": len(rows), "tokens": sum(map(len, rows))}, "scores": {}}
    trained_for, plain = recipe.speed.qat, plain_base.unrounded(recipe)
    report |= {"trained_for": qat.describe(trained_for)} if trained_for else {}
    changed = plain_base.changes(folder, recipe)
    left = [*changed, *merged_files.note_interrupted(target, "merge")]
    with staging(target) as (whole, packed), located(folder, packed.parent, target):
        # Apply the rounding of QAT if the weights will be stored in that format
        opened_recipe = recipe if quantized else plain
        is_adapter, again = folder.weights == folder.adapter, bool(trained_for and quantized)
        progress.expect(1 + again + 2 * is_adapter + 2 * bool(quantized))
        with progress.part("running the fine-tuned model"):
            tuned, base, report["scores"]["tuned"] = verify_merge.trained(folder, opened_recipe, rows, score)
        merged, base_merged = tuned, base
        if again:
            with progress.part("running the fine-tuned model without rounding"):
                unrounded = verify_merge.trained(
                    folder, plain, rows, (lambda _: None) if is_adapter else score
                )
            merged, base_merged, report["scores"]["unrounded"] = unrounded
        source = folder.model
        if is_adapter:
            source, to = whole, getattr(torch, dtype)
            with progress.part("merging the adapter"):
                report |= merged_files.write_merged(folder, plain, setup, to, tokenizer, whole)
            wanted = merged
            with progress.part("verifying the merged weights"):
                merged, report["scores"]["merged"] = verify_merge.reopened(whole, setup, rows, score)
            report["against_tuned"] = verify_merge.agreement(wanted, base_merged, merged)
            verify_merge.refuse_lost(report, folder)
        report["bytes"] = merged_files.size(source)
        if quantized:
            report |= {"bytes_before": merged_files.size(source)}
            wanted_form = merged_files.Target(quantized, getattr(torch, dtype), trained_for)
            with progress.part("quantizing the weights"):
                report |= merged_files.write_quantized(source, wanted_form, setup, tokenizer, packed)
            with progress.part("verifying the quantized weights"):
                logits, report["scores"]["quantized"] = verify_merge.reopened(packed, setup, rows, score)
            report["against_tuned"] = verify_merge.agreement(tuned, base, logits)
            report["against_merged"] = verify_merge.agreement(merged, base, logits)
            report["bytes"] = merged_files.size(packed)
            verify_merge.refuse_drowned(report, folder)
        plain_base.check_unchanged(folder, recipe, changed)
        report["scores"] = {name: found for name, found in report["scores"].items() if found}
        if notes := [*left, *report.get("notes", [])]:
            report["notes"] = notes
        report["seconds"] = round(time.monotonic() - started, 1)
        publish(packed if quantized else whole, target, folder, report)
    return report


def scores(
    tokenizer: PreTrainedTokenizerBase,
    rows: Any,
    recipe: Recipe,
    opened: PreTrainedModel | PeftModel,
) -> dict[str, Any] | None:
    """Score the model on the validation set, for a quantized merge only. Other merges compare logits."""
    return scoring.score(opened, tokenizer, rows, recipe.data, recipe.eval).as_json() if rows else None


def free_target(run: Path, name: str, output: str | None) -> Path:
    """Return the target folder: `output`, or `name` in the run folder.

    Raises:
        UserError: the target is not empty, or its parent folder does not exist (exit 2).
    """
    target = Path(output) if output else run / name
    if target.is_symlink() and not target.exists():
        raise UserError(
            Problem(
                "the output folder is a link that leads nowhere",
                "",
                str(target),
                f"a link to {target.readlink()}",
                fix=f"--output {free_name(target)}",
                why="finetune follows no such link",
                code="unsafe-file",
            )
        )
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(
            Problem(
                "the output folder is not empty",
                where=str(target),
                found=", ".join(sorted(entry.name for entry in target.iterdir())[:6])
                if target.is_dir()
                else "a file",
                fix=f"--output {free_name(target)}",
                why="finetune overwrites no files",
                code="merge",
            )
        )
    if not target.absolute().parent.is_dir():
        raise UserError(
            Problem(
                "the folder of the output does not exist",
                where=str(target.parent),
                fix=f"mkdir -p {target.parent}",
                code="path",
            )
        )
    return target


def publish(
    staged: Path, target: Path, folder: RunFolder, report: dict[str, Any], reports: str = "merge.json"
) -> None:
    """Rename the verified folder to its final name, and add its report to the run's `reports`."""
    with writing(target):  # another command may have written the folder in the meantime
        where = target.absolute().parent
        # the reports resolve relative names against the run folder
        name = target.name if where == folder.path.absolute() else str(target.absolute())
        safe_files.apply_umask(staged)
        if reports == "merge.json":
            report["files"] = run_folder.described(staged)
        # Write the report first, so that a killed merge leaves no weights without a report
        before = folder.found(reports)
        if not folder.is_plain_adapter:
            folder.write(reports, {**before, name: report})
        try:
            # Rename also replaces an empty folder
            safe_files.rename(where, str(staged.relative_to(where)), target.name)
        except OSError:  # the report belongs to the folder that another command has written
            if not folder.is_plain_adapter:
                folder.write(reports, before)
            raise


@contextlib.contextmanager
def staging(target: Path) -> Iterator[tuple[Path, Path]]:
    """Create two staging folders next to the target. At the end they are deleted unless published."""
    where = target.absolute().parent
    with contextlib.ExitStack() as stack:
        with writing(target):
            private = stack.enter_context(safe_files.private_folder(where, target.name))
            safe_files.make_folder(where, f"{private.name}/whole")
        yield where / private.name / "whole", where / private.name / "packed"


@contextlib.contextmanager
def located(folder: RunFolder, staged: Path, target: Path) -> Iterator[None]:
    """Add the run to errors, and explain that fp32 weights need more memory than bf16 weights.

    Args:
        staged: the folder that holds the staging folders. It is deleted, so errors name the target instead.
    """
    try:
        yield
    except UserError as error:
        inside = re.compile(rf"{re.escape(str(staged))}(/whole|/packed)?")

        def named(text: str) -> str:
            return inside.sub(lambda _: str(target), text)

        problems = [
            replace(
                one, where=named(one.where) or str(folder.path), found=named(one.found), fix=named(one.fix)
            )
            for one in error.problems
        ]
        raise UserError(*problems, code=error.code) from error
    except torch.OutOfMemoryError as error:
        raise UserError(
            Problem(
                "the GPU has too little memory for the merge",
                found=first_line(error),
                fix=f"ACCELERATE_USE_CPU=true {command_lines.command('merge', str(folder.path))}",
                why="a merge needs the weights in fp32",
                code="out-of-memory",
            ),
            code=Exit.ENVIRONMENT,
        ) from error
