"""Write and verify checkpoints on disk.

    checkpoints/step-40/        *.safetensors, *.json, and manifest.json with their sizes and sha256
    checkpoints/contract.json   the run's recipe and facts, with their sha256
    checkpoints/.staging/       incomplete checkpoints

finetune writes a checkpoint to .staging, hashes it, flushes it, and publishes it by a rename. Only then does
it delete older checkpoints. So at least one valid checkpoint is always on disk after the first one. Tensors
are safetensors and all other data is JSON, so a checkpoint cannot run code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core import safe_files, standard_streams, strict_json, verified_files
from finetune.core.errors import FULL, Exit, Problem, UserError
from finetune.core.verified_files import Damaged
from finetune.hub import client
from finetune.recipe import renames
from finetune.run_folder import file_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from finetune.core.run_checks import RunChecks

    Content = dict[str, Any]  # file name -> tensors by name for *.safetensors, or a value for *.json

FORMAT = 1  # the only checkpoint format that is read
MANIFEST, CONTRACT = "manifest.json", "contract.json"
_NAME = re.compile(r"step-(\d+)")
_ASIDE = re.compile(r"aside-(step-\d+)")  # later checkpoints of a run that resumed from an earlier step
_FILE = re.compile(r"[A-Za-z0-9_-]+\.(safetensors|json)")


class VerifiedCheckpoint(NamedTuple):
    """A checkpoint that verified."""

    path: Path
    step: int
    contract: dict[str, Any]
    notes: list[str]
    """Notes to print: newer checkpoints that do not verify, and differences from the checkpoint's run."""
    states: dict[str, tuple[int, int]]
    """Size and time of the last change of each file, before the files were verified."""

    def check_unchanged(self) -> None:
        """Stop if another program has changed a file since it was verified (exit 4)."""
        states = _states(self.path)
        changed = sorted(name for name, state in self.states.items() if states.get(name) != state)
        if changed:
            raise UserError(
                Problem(
                    "the checkpoint changed while finetune read it",
                    where=str(self.path),
                    found=", ".join(changed[:5]),
                    fix="run the command again when no other program writes to the folder",
                    code="checkpoint",
                ),
                code=Exit.ARTIFACT,
            )


def _states(path: Path) -> dict[str, tuple[int, int]]:
    found = [(entry.name, entry.stat()) for entry in path.iterdir()]
    return {name: (state.st_size, state.st_ctime_ns) for name, state in found}


class Writer:
    """Write one checkpoint at a time in its own thread. The next call raises an error of the thread."""

    def __init__(self, checkpoints: Path, keep: int | None) -> None:
        """Args: keep: the number of published checkpoints to keep; `None` keeps all."""
        self.checkpoints, self.keep = checkpoints, keep
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.running: Future[Path] | None = None
        self.published: Path | None = None
        self.seconds = 0.0  # duration of the last write
        self.written = 0
        self.waited: list[float] = []  # seconds that training paused for each checkpoint

    def start(self, step: int, content: Content, *, here: bool = False) -> None:
        """Start to write `content`, which must not change until the write ends.

        Args:
            here: whether to write in this thread, because the tensors are still trained.
        """
        self.wait()
        if here:
            self.published = self.write(step, content)
        else:
            self.running = self.thread.submit(self.write, step, content)

    def write(self, step: int, content: Content) -> Path:
        started = time.monotonic()
        path = write(self.checkpoints, step, content, self.keep)
        self.seconds = time.monotonic() - started
        self.written += 1
        return path

    def check(self) -> None:
        """Raise the error of a write that has failed. Do not wait for a write that still runs."""
        if self.running is not None and self.running.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the current write is published, and raise its error if it fails."""
        running, self.running = self.running, None
        if running is not None:
            self.published = running.result()

    def add_run_check(self, checks: RunChecks) -> None:
        """Add a run check with the number of written checkpoints and the time that training paused."""
        if self.written:
            checks.add(
                "checkpoints",
                expected=f"{len(self.waited)} written",
                actual=f"{self.written} written; training paused for at most {max(self.waited):.2f} s",
                how="time of each pause; a thread writes the files while training continues",
                ok=self.written == len(self.waited),
            )

    def close(self) -> None:
        """Finish the last write when the run ends for any reason. Print its error instead of raising it."""
        self.thread.shutdown()
        running, self.running = self.running, None
        if running is not None and (error := running.exception()):
            standard_streams.say(*str(error).split("\n"), error=True)


def write(checkpoints: Path, step: int, content: Content, keep: int | None) -> Path:
    """Write a checkpoint to .staging, flush it, publish it, and then delete older checkpoints.

    Raises:
        UserError: the disk is full or fails. Published checkpoints do not change (exit 3).
    """
    root = checkpoints.parent
    staging, to = f"{checkpoints.name}/.staging", f"{checkpoints.name}/step-{step}"
    published = checkpoints / f"step-{step}"
    try:
        safe_files.make_folder(root, staging)
        with safe_files.private_folder(root, f"{staging}/step-{step}") as private:
            _write_files(private.path, step, content)
            safe_files.apply_umask(root / private.name)
            if published.exists():  # it is damaged, or from before the run resumed at an earlier step
                _let_go(published)
            safe_files.rename(root, private.name, to)
        flush(checkpoints)
        if (log := checkpoints.parent / "metrics.jsonl").exists():
            flush(log)  # a resumed run continues its lines
    except UserError:  # the path is a link, or the checkpoint has a newer format
        raise
    except Exception as error:  # safetensors has its own error type for a full disk
        raise UserError(_unwritten(error, checkpoints, step, content), code=Exit.ENVIRONMENT) from error
    try:
        rotate(checkpoints, keep)
    except OSError as error:
        raise UserError(
            Problem(
                f"the checkpoint of step {step} is saved, but finetune can't delete older checkpoints",
                where=str(checkpoints),
                found=str(error),
                fix="delete the older checkpoints, then continue with --resume",
                code="disk",
            ),
            code=Exit.ENVIRONMENT,
        ) from error
    return published


def _write_files(folder: Path, step: int, content: Content) -> None:
    """Write the files of a checkpoint and its manifest, and flush them to the disk."""
    from safetensors.torch import save_file

    files = {}
    for name, value in content.items():
        path = folder / name
        if path.suffix == ".safetensors":
            save_file(value, path)
        else:
            with safe_files.open_new(folder, name) as file:
                file.write(json.dumps(value))
        flush(path)
        files[name] = {"bytes": path.stat().st_size, "sha256": client.sha256(path)}
    with safe_files.open_new(folder, MANIFEST) as file:
        file.write(verified_files.signed({"format": FORMAT, "step": step, "files": files}))
    flush(folder / MANIFEST)
    flush(folder)


def _unwritten(error: Exception, checkpoints: Path, step: int, content: Content) -> Problem:
    """Return the problem of a checkpoint that could not be written. Recognize a full disk."""
    free = shutil.disk_usage(checkpoints).free if checkpoints.exists() else None
    needed = size(content)
    error_number = getattr(error, "errno", None) or re.search(
        r"os error (\d+)", str(error)
    )  # safetensors' error
    number = int(error_number[1]) if isinstance(error_number, re.Match) else error_number
    full = number in FULL or (free is not None and free < needed)
    found = f"{error}; {free or 0:,} bytes free, {needed:,} bytes needed" if full else str(error)
    return Problem(
        f"finetune can't write the checkpoint of step {step}",
        where=str(checkpoints),
        found=found or type(error).__name__,
        fix=f"{'free some space on the disk' if full else 'remove the cause'}, then continue with --resume",
        code="disk",
    )


def rotate(checkpoints: Path, keep: int | None) -> None:
    """Delete all published checkpoints except the newest `keep`, and all checkpoints that were set aside."""
    for path in published(checkpoints)[keep:] if keep else []:
        _let_go(path)
    for path in aside(checkpoints):
        _let_go(path)


def aside(checkpoints: Path) -> list[Path]:
    """Return the checkpoints that were set aside. The next save of the run deletes them.

    They are valid, but later than the step from which the run resumed.
    """
    return [path for path in checkpoints.glob("aside-step-*") if _ASIDE.fullmatch(path.name)]


def begin(checkpoints: Path, step: int) -> list[str]:
    """Prepare the folder for a run that continues after `step`.

    Unfinished checkpoints are deleted. Later checkpoints are set aside until the next save. Checkpoints that
    do not verify are kept as unverified-step-<n>.

    Returns:
        One line per later checkpoint, with its old and its new name.
    """
    root, base = checkpoints.parent, checkpoints.name
    safe_files.make_folder(root, f"{base}/.staging")
    for pattern in ("step-*", ".step-*", "old-*"):
        for path in (checkpoints / ".staging").glob(pattern):
            safe_files.remove(root, f"{base}/.staging/{path.name}")
    said = []
    for path in [path for path in published(checkpoints) if step_of(path) > step]:
        try:
            verify(path)
            target = path.with_name(f"aside-{path.name}")
            safe_files.remove(root, f"{base}/{target.name}")
        except (Damaged, UserError):
            target = path.with_name(f"unverified-{path.name}")
            while target.exists():
                target = target.with_name(f"{target.name}-again")
        safe_files.rename(root, f"{base}/{path.name}", f"{base}/{target.name}")
        said.append(f"finetune renamed the later checkpoint {path.name} to {target.name}")
    return said


def published(checkpoints: Path) -> list[Path]:
    """Return the published checkpoints, the newest first."""
    folders = [path for path in checkpoints.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(folders, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest(checkpoints: Path) -> VerifiedCheckpoint | None:
    """Return the newest checkpoint that verifies, with notes on newer ones; `None` if there is no checkpoint.

    Raises:
        UserError: no checkpoint verifies, or a checkpoint has a newer format (exit 4).
    """
    skipped = []
    for path in published(checkpoints):
        try:
            states = _states(path)
            verify(path)
        except Damaged as damage:
            skipped.append(f"finetune skips the damaged checkpoint {path.name}: {damage}")
            continue
        rest = "is not used, and the next save deletes it. To keep it, give it its old name"
        skipped += [f"{one.name} {rest}" for one in aside(checkpoints)]
        return VerifiedCheckpoint(path, step_of(path), read_contract(path), skipped, states)
    if skipped:
        raise UserError(
            Problem(
                "all checkpoints are damaged",
                where=str(checkpoints),
                found="; ".join(skipped),
                fix="choose a new train.output_dir to start again",
                code="checkpoint",
            ),
            code=Exit.ARTIFACT,
        )
    return None


def named(checkpoints: Path, name: str) -> VerifiedCheckpoint:
    """Return the checkpoint of this name.

    Raises:
        UserError: there is no such checkpoint (exit 2), or it does not verify (exit 4).
    """
    path, offered = checkpoints / name, ", ".join(one.name for one in published(checkpoints))
    if not _NAME.fullmatch(name) or not path.is_dir():
        raise UserError(
            Problem(
                "the checkpoint does not exist",
                where=str(path),
                found="" if offered else "the run has no checkpoint",
                expected=offered,
                fix="--resume=auto",
                code="checkpoint",
            )
        )
    try:
        states = _states(path)
        verify(path)
    except Damaged as damage:
        raise UserError(
            Problem(
                "the checkpoint is damaged",
                where=str(path),
                found=str(damage),
                fix="use --resume to continue from the newest valid checkpoint",
                code="checkpoint",
            ),
            code=Exit.ARTIFACT,
        ) from None
    return VerifiedCheckpoint(path, step_of(path), read_contract(path), [], states)


def verify(path: Path) -> None:
    """Check the size and the sha256 of every file in the manifest, and the manifest's own sha256.

    Raises:
        Damaged: a file differs or can't be read. The error names the first such file.
        UserError: a newer version of finetune wrote the checkpoint (exit 4).
    """
    manifest = verified_files.read_signed(path / MANIFEST)
    try:
        file_shapes.check(MANIFEST, manifest)
    except ValueError as error:
        raise Damaged(f"{MANIFEST} is not a manifest ({error})") from None
    if manifest["format"] != FORMAT:
        raise UserError(
            Problem(
                "a newer version of finetune wrote the checkpoint",
                where=str(path),
                found=f"format {manifest['format']}",
                expected=f"format {FORMAT}",
                fix="install that version",
                code="checkpoint",
            ),
            code=Exit.ARTIFACT,
        )
    if manifest["step"] != step_of(path):
        raise Damaged(f"{MANIFEST} belongs to step {manifest['step']}")
    for name, said in manifest["files"].items():
        try:
            _verify_file(path, name, said)
            if name.endswith(".json"):
                read_json(path, name)
        except OSError as error:
            raise Damaged(f"finetune can't read {name} ({error.strerror})") from None
        except ValueError as error:
            raise Damaged(f"{name} has another structure than finetune writes ({error})") from None


def _verify_file(path: Path, name: str, said: dict[str, Any]) -> None:
    file = path / name
    if not _FILE.fullmatch(name) or file.is_symlink():
        raise Damaged(f"{name} is not a file of a checkpoint")
    if not file.is_file():
        raise Damaged(f"{name} is missing")
    if file.stat().st_size != said["bytes"]:
        raise Damaged(f"{name} has {file.stat().st_size} bytes in place of {said['bytes']}")
    if client.sha256(file) != said["sha256"]:
        raise Damaged(f"the content of {name} changed after it was written")


def write_contract(checkpoints: Path, contract: dict[str, Any]) -> None:
    """Write the contract of a run together with its own digest."""
    text = verified_files.signed(strict_json.spelt(contract))
    safe_files.write_text(checkpoints.parent, f"{checkpoints.name}/{CONTRACT}", text)


def read_contract(path: Path) -> dict[str, Any]:
    """Read the contract in a folder, with today's names of the recipe's keys.

    Raises:
        UserError: the contract is damaged (exit 4).
    """
    try:
        text = safe_files.read_text(path, CONTRACT)
        content = file_shapes.parse(text)
        file_shapes.check(CONTRACT, content)
        signed = content.pop("sha256", None) is not None
        unknown = content.keys() - {"recipe", "facts", "chosen", "base"}
        if (signed and verified_files.signed(content) != text) or (unknown and not signed):
            raise ValueError("the content changed after it was written")
    except (OSError, ValueError) as error:
        last = next(iter(published(path)), None) if path.is_dir() else None
        copy = shlex.join(["cp", str(last / CONTRACT), str(path / CONTRACT)]) if last else ""
        raise UserError(
            Problem(
                f"{CONTRACT} is damaged",
                where=str(path / CONTRACT),
                found=" ".join(str(error).split())[:200],
                fix=copy or "choose a new train.output_dir",
                code="checkpoint",
            ),
            code=Exit.ARTIFACT,
        ) from None
    return renames.current_contract({"recipe": {}, "facts": {}, "chosen": {}, **content})


def read_json(path: Path, name: str) -> Any:
    """Return the content of a JSON file of a checkpoint.

    Raises:
        ValueError: the content does not have the shape of this file.
    """
    content = file_shapes.parse(safe_files.read_text(path, name))
    file_shapes.check(name, content)
    return content


def read_tensors(path: Path, file_name: str, begin: str = "") -> dict[str, Tensor]:
    """Return the tensors of a file on the CPU whose names start with `begin`."""
    from safetensors import safe_open

    with safe_open(path / file_name, "pt") as file:
        names = [name for name in file.keys() if name.startswith(begin)]  # noqa: SIM118 (not a dict)
        return {name: file.get_tensor(name) for name in names}


def size(content: Content) -> int:
    """Return the bytes of all tensors."""
    files = [value for name, value in content.items() if name.endswith(".safetensors")]
    return sum(tensor.nbytes for tensors in files for tensor in tensors.values())


def size_of(path: Path) -> int:
    """Return the bytes of a published checkpoint."""
    return sum(file.stat().st_size for file in path.iterdir())


def check_space(checkpoints: Path, trained: int, checkpoint_bytes: int, keep: int | None) -> None:
    """Check that the disk has room for the checkpoints that a run holds at the same time.

    Args:
        trained: bytes of the trained weights.
        checkpoint_bytes: bytes of a checkpoint with trained weights and optimizer state.
        keep: the number of checkpoints to keep. The run writes one more before it deletes the oldest.

    Raises:
        UserError: the disk has no room (exit 3).
    """
    where = next(path for path in (checkpoints, *checkpoints.parents) if path.exists())
    # The run will delete the checkpoints that exist now.
    here = sum(size_of(path) for path in (*published(checkpoints), *aside(checkpoints)))
    free, needed = shutil.disk_usage(where).free + here, checkpoint_bytes * ((keep or 1) + 1) + trained
    if needed > free:
        raise UserError(
            Problem(
                f"the disk has no room for {(keep or 1) + 1} checkpoints and the final weights",
                "train.output_dir",
                where=str(where.resolve()),
                found=f"{free:,} bytes free",
                expected=f"{needed:,} bytes",
                fix="train.save_strategy=no, a smaller train.save_total_limit, or another train.output_dir",
                code="disk",
            ),
            code=Exit.ENVIRONMENT,
        )


def flush(path: Path) -> None:
    """Flush a file's content or a folder's names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _let_go(path: Path) -> None:
    """Rename a checkpoint and then delete it, so that a published name never has an incomplete checkpoint."""
    root, base = path.parents[1], path.parent.name
    nameless = f"{base}/.staging/old-{path.name}"
    safe_files.make_folder(root, f"{base}/.staging")
    safe_files.remove(root, nameless)
    safe_files.rename(root, f"{base}/{path.name}", nameless)
    with contextlib.suppress(OSError):  # the next start deletes it
        safe_files.remove(root, nameless)
