"""Find the checkpoint to resume from, and prepare the run folder for a resumed or a new run.

`resume_contract.py` decides which settings may differ from the checkpoint's.
"""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.checkpointing import checkpoints, resume_contract
from finetune.core import command_lines, safe_files
from finetune.core.errors import Problem, UserError
from finetune.distributed import launch_environment
from finetune.hub import client
from finetune.recipe import renames
from finetune.recipe.schema import Source
from finetune.run_folder import lock, run_folder
from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from finetune.checkpointing.checkpoints import VerifiedCheckpoint
    from finetune.core.console import Console

OURS = {  # files and folders that a stopped run may leave in its folder
    "adapter",
    "adapter.unverified",
    "checkpoints",
    "data_report.json",
    "environment.json",
    "validation.jsonl",
    "log.txt",
    "metrics.jsonl",
    "model",
    "model.unverified",
    "checks.json",
    "recipe.resolved.yaml",
    "report.html",
    "tensorboard",
    "wandb",
    lock.LOCK,
    *renames.FILES.values(),
}
# Unfinished files, and steps with NaN or Inf that were saved for inspection.
BESIDE = (".*.tmp", "nonfinite-step-*")
# Names that only finetune uses. A killed run leaves its lock file.
MARKS = {"recipe.resolved.yaml", "checks.json", renames.FILES["checks.json"], lock.LOCK}


def check_folder(output_dir: str | None, requested: str | None, recipe: dict[str, Any]) -> bool:
    """Check the folder of a run, and return whether the run to resume is finished. Nothing is loaded.

    Args:
        requested: the value of --resume; `None`: a new run, which needs a free folder.

    Raises:
        UserError: the folder belongs to something else, has no checkpoint, or has weights that were not
            evaluated (exit 2). The run is finished and has another recipe (exit 4).
    """
    if requested is None:
        lock.check_free(output_dir)
        return False
    if output_dir is None:
        raise UserError(
            Problem(
                "--resume needs the folder of the run",
                "train.output_dir",
                found="null",
                fix="train.output_dir=RUN",
                why="a run without this key gets a new folder, which has no checkpoints",
                code="missing-key",
            )
        )
    folder = RunFolder(Path(output_dir))
    run_folder.refuse_links(folder.path)
    if folder.finished:
        if (folder.checkpoints / checkpoints.CONTRACT).exists():
            contract = {**checkpoints.read_contract(folder.checkpoints), "facts": {}}
            now, asked_at = (
                resume_contract.keys(recipe),
                recipe["model"].get("revision") or "main",
            )
            if not client.COMMIT.fullmatch(asked_at):  # a branch: the run keeps the commit of its start
                now["model.revision"] = contract["recipe"].get("model.revision")
            if "data.template_date" in contract["recipe"]:  # a resumed run keeps its first day
                now.setdefault("data.template_date", contract["recipe"]["data.template_date"])
            now |= {key: was for key, was in contract["recipe"].items() if _same_file(key, was, now.get(key))}
            resume_contract.compare(
                contract, {"recipe": now, "facts": {}}, folder.path, ("data.cache_dir", "train.output_dir")
            )
        return True
    if checkpoints.published(folder.checkpoints):
        return False
    if _saved(folder):
        evaluate = command_lines.command("evaluate", str(folder.path))
        raise UserError(
            Problem(
                "the run is trained and saved, but not evaluated",
                "train.output_dir",
                found=output_dir,
                fix=f"{evaluate}, or choose a new train.output_dir to train again",
                code="run-folder",
            )
        )
    if requested != "auto":
        what, fix = (
            "the run has no checkpoint to resume from",
            "use --resume=auto to start from the beginning",
        )
        if not launch_environment.is_main():
            fix += "; if rank 0 has a checkpoint, use a train.output_dir on a disk that all machines share"
        raise UserError(Problem(what, "train.output_dir", found=output_dir, fix=fix, code="checkpoint"))
    entries = {entry.name for entry in folder.path.iterdir()} if folder.path.exists() else set[str]()
    entries = {name for name in entries if not any(fnmatch(name, kind) for kind in BESIDE)}
    if not entries <= OURS or (entries and not entries & MARKS):
        lock.check_free(output_dir)
    return False


def _same_file(key: str, *written: object) -> bool:
    """Return whether all values name the same files, by any path, with the same other keys."""
    names, taken = zip(*map(_named, written), strict=True)
    return key in resume_contract.IGNORED and taken[0] == taken[1] and all(map(_at_one_place, *names))


def _named(written: object) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the names in a path or a list of sources, and the other keys of each source.

    A path alone has the default keys.
    """
    items = written if isinstance(written, list) else [written]
    sources = [{**Source(name="").model_dump(), **(i if isinstance(i, dict) else {"name": i})} for i in items]
    return [source.pop("name") for source in sources], sources


def _at_one_place(*paths: Any) -> bool:
    there = all(isinstance(path, str) and os.path.exists(path) for path in paths)
    return paths[0] == paths[1] or (there and os.path.samefile(*paths))


def _saved(folder: RunFolder) -> bool:
    """Return whether a run has saved its weights completely. A new start would delete them."""
    whole = (folder.weights / "tokenizer_config.json").exists() and folder.recipe.exists()
    return whole and (folder.checkpoints / checkpoints.CONTRACT).exists()


def find_in(where: str | None, requested: str | None) -> VerifiedCheckpoint | None:
    """Return the verified checkpoint to resume from in this folder, as `find` does."""
    return find(RunFolder(Path(where)), requested) if where else None


def find(folder: RunFolder, requested: str | None) -> VerifiedCheckpoint | None:
    """Return the verified checkpoint to resume from; `None` for a new run.

    Raises:
        UserError: there is no checkpoint of that name (exit 2), or it does not verify (exit 4).
    """
    if requested is None:
        return None
    by_name = requested.startswith("step-")
    return (
        checkpoints.named(folder.checkpoints, requested)
        if by_name
        else checkpoints.newest(folder.checkpoints)
    )


def begin(
    folder: RunFolder,
    checkpoint: VerifiedCheckpoint | None,
    contract: dict[str, Any],
    screen: Console,
) -> None:
    """Bring the run folder to the state of the checkpoint, or to the start of a new run."""
    step = checkpoint.step if checkpoint else 0
    for half in folder.path.glob(".*.tmp"):  # unfinished files of a killed process
        safe_files.remove(folder.path, half.name)
    later = checkpoints.begin(folder.checkpoints, step)
    removed = rewind(folder, step)
    differing = resume_contract.chosen_anew(checkpoint.contract, contract) if checkpoint else []
    checkpoints.write_contract(folder.checkpoints, contract)
    if not checkpoint:
        forget(folder, screen)
        return
    for name in renames.FILES.values():  # files of format 1: this run writes them under today's names
        safe_files.remove(folder.path, name)
    screen.say(f"resuming after step {step} from {checkpoint.path}")
    notes = [*checkpoint.notes, *differing, *later]
    notes += [f"finetune removed {removed:,} lines of later steps from metrics.jsonl"] if removed else []
    for note in notes:
        screen.say(f"note: {note}")


def forget(folder: RunFolder, screen: Console) -> None:
    """Remove files of an earlier start, perhaps with another recipe, that this run would take for its own.

    `check_folder` has checked that the folder belongs to finetune.
    """
    for path in (folder.file(run_folder.HELD_OUT), folder.adapter, folder.model):
        if path.exists():
            safe_files.remove(folder.path, path.name)
            screen.say(f"note: finetune removed {path.name} of an earlier start of this run")


def rewind(folder: RunFolder, step: int) -> int:
    """Remove an incomplete last line and all lines after `step` from metrics.jsonl. Return their number."""
    path = folder.path / "metrics.jsonl"
    content = safe_files.read_bytes(folder.path, path.name) if path.exists() else b""
    lines = content.decode("utf-8", "replace").splitlines()
    lines_before = [line for line in lines if _step_of(line) <= step]
    if path.exists():
        folder.write_text("metrics.jsonl", "".join(f"{line}\n" for line in lines_before))
    return len(lines) - len(lines_before)


def _step_of(line: str) -> float:
    """Return the step of a line of metrics.jsonl; infinity for a damaged line."""
    try:
        return run_folder.read_step(line)["step"]
    except ValueError:
        return float("inf")
