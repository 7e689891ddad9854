"""Manage the folders of an experiment's runs: which finished runs are kept, and how far a run is."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from finetune.core import progress, safe_files, verified_files
from finetune.core.errors import Exit, Problem, UserError, raise_if_any
from finetune.data import source_loading
from finetune.experiments.runner import varied_keys
from finetune.hub import client
from finetune.models import base_identity
from finetune.recipe import command_line_overrides
from finetune.recipe.schema import Data, Recipe
from finetune.run_folder import lock, run_folder, settings_text
from finetune.run_folder.run_folder import RunFolder

TAIL = 8_192  # bytes at the end of metrics.jsonl, which hold several lines
EPOCHS = 3.0  # the default of train.num_train_epochs


def make_folder(folder: Path, command: str) -> None:
    """Create the folder of an experiment.

    Raises:
        UserError: the folder is a run folder, or has a link to outside, or is not writable (exit 2).
    """
    problem = "a run folder" if (folder / "recipe.resolved.yaml").exists() else ""
    problem = f"a link to {folder.resolve()}" if folder.is_symlink() else problem
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = str(error.strerror or error)
    if problem:
        raise UserError(
            Problem(
                f"`{command}` can't use this folder",
                where=str(folder),
                found=problem,
                expected="a folder of its own that is writable",
                fix=f"--output runs/my-{command}",
                code="experiment",
            )
        )
    run_folder.refuse_links(folder)


def in_folder(folder: Path) -> str:
    """Return the override that gives a run its folder."""
    return command_line_overrides.of_path("train.output_dir", folder)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Lock the folder of an experiment, so that no other command moves its runs aside.

    Raises:
        UserError: another command uses the folder (exit 2).
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock.claimed(str(folder), folder.name))
        except UserError as error:
            if error.code != Exit.INPUT:
                raise
            raise UserError(
                Problem(
                    "another command uses the folder of this experiment",
                    where=str(folder),
                    found=error.problems[0].found,
                    fix="wait until it has ended, or choose another folder with --output",
                    code="experiment",
                )
            ) from None
        yield


def identity(recipe: Recipe, data: list[str], *launch: object) -> str:
    """Return a hash of everything that determines the result of a run, except the machine.

    Args:
        data: hashes of the examples.
        launch: values that the launch sets.
    """
    values = recipe.model_dump(mode="json", exclude_none=True, exclude={"publish": True})
    values["train"].pop("output_dir", None)
    content = [values, *launch, data, base_identity.digest(recipe.model), named_files(recipe)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def contents(data: Data) -> dict[str, str]:
    """Map each local training and validation file to its hash, and each dataset of the Hub to its commit."""
    found = dict[str, str]()
    for source, key in source_loading.named(data):
        paths = source_loading.files_of(source, key)
        if paths is None:
            found[source_loading.hub_name(source)] = source_loading.hub_content(source)
        for path in paths or ():
            found[str(path)] = _content(path, source_loading.state_of(path))
    return found


@functools.cache
def _content(path: Path, state: source_loading.State) -> str:
    return client.sha256(path)


def files_read(recipe: Recipe) -> dict[str, str]:
    """Map each file that the runs of a recipe read to a hash. The base model has one for all its files."""
    paths = {"adapter.init_from": recipe.adapter.source, "data.chat_template": recipe.data.chat_template}
    named = named_files(recipe).items()
    return {
        **contents(recipe.data),
        **{f"{name} {paths.get(name.split()[0]) or ''}".strip(): digest for name, digest in named},
        f"base model {recipe.model.name}": base_identity.digest(recipe.model),
    }


def files_and_recipe(recipe: Recipe) -> dict[str, str]:
    """Return `files_read` with the recipe's own file, which each trial of a sweep reads again."""
    return {f"recipe {recipe.origin.path}": client.sha256(recipe.origin.path), **files_read(recipe)}


def check_unchanged(began: dict[str, str], now: dict[str, str], folder: Path) -> None:
    """Check that no file has changed since the experiment began, or runs would not be comparable.

    Raises:
        UserError: a file changed, is new, or is gone (exit 2).
    """
    raise_if_any(
        Problem(
            "a file that the runs read changed while the experiment ran",
            where=str(folder),
            found=name,
            fix="run the same command again when no other program writes to the file",
            why="the runs would not be comparable",
            code="data-changed",
        )
        for name in varied_keys.differing(began, now)
    )


def named_files(recipe: Recipe) -> dict[str, str]:
    """Return a hash of each file that a recipe names by its path, except the data and the base model.

    For an adapter on the Hub, it is the commit.
    """
    from finetune.adapters import continue_from
    from finetune.evaluation import results

    found = results.files_hashed(recipe.eval)
    template, source = recipe.data.chat_template, recipe.adapter.source
    if template and Path(template).is_file():
        found["data.chat_template"] = client.sha256(Path(template))
    folder = continue_from.source_folder(source) if source else None
    if source and not folder:
        repo, revision = client.split(source)
        found["adapter.init_from"] = client.commit(repo, revision or "main")
    if folder:
        files = (folder / name for name in continue_from.FILES)
        found |= {f"adapter.init_from {file.name}": client.sha256(file) for file in files if file.is_file()}
    return found


def clear_place(folder: RunFolder, mark: str, own: str) -> str | None:
    """Move the content of a run's folder aside, unless it is this run and finished without an error.

    Args:
        mark: the file in a finished run that holds its identity.
        own: the identity of this run.

    Returns:
        A note on the moved content and its new path, an empty string if the folder was empty, or `None` if
        the run is kept.
    """
    path, finished = folder.path, (folder.path / mark).exists()
    if not path.exists() or not any(path.iterdir()):
        return ""
    found = folder.read(mark, "mark") if finished else {}
    if finished and found["identity"] == own and not found.get("failed"):  # a failed run is tried again
        return None
    why = "failed" if found.get("failed") else "has another recipe, base model or data"
    return f"the earlier run {why if finished else 'is not finished'}; finetune moved it to {set_aside(path)}"


def date_of(folder: RunFolder, mark: str, own: str) -> str | None:
    """Return the date that the chat template of a kept run got, or `None`. Arguments as of `clear_place`."""
    if not (folder.path / mark).exists() or folder.read(mark, "mark")["identity"] != own:
        return None
    return run_folder.own_recipe(folder).data.template_date


def set_aside(folder: Path) -> Path:
    """Move the folder of a run to `aside/`, and return its new path."""
    name = aside = f"aside/{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(2):  # two moves in one second, or a clock that was set back
        if not os.path.lexists(folder.parent / aside):
            break
        aside = f"{name}-{number}"
    safe_files.make_folder(folder.parent, "aside")
    safe_files.rename(folder.parent, folder.name, aside)
    return folder.parent / aside


def check_same(began: dict[str, str], now: dict[str, str], folder: Path, fix: str) -> None:
    """Raise a UserError if an experiment was started with other values (exit 2)."""
    if other := varied_keys.differing(began, now):
        found, expected = ("; ".join(str(side.get(key)) for key in other[:5]) for side in (now, began))
        raise UserError(
            Problem(
                f"the folder holds an experiment with other values of {', '.join(other[:5])}",
                where=str(folder),
                found=found,
                expected=expected,
                fix=fix,
                code="experiment",
            )
        )


def write_signed(place: RunFolder, name: str, content: dict[str, Any]) -> None:
    """Write a JSON file with a hash of its content."""
    place.write_text(name, verified_files.signed(content))


def read_signed(place: RunFolder, name: str) -> dict[str, Any]:
    """Return the content of a file of `write_signed`. Empty if the file is missing or damaged.

    Raises:
        UserError: the file has a value of another type (exit 4).
    """
    try:
        content = verified_files.read_signed(place.path / name)
    except verified_files.Damaged:
        return {}
    place.read(name)
    return content


def recipe_file(recipe: Recipe, chosen: dict[str, tuple[Any, str]], head: str) -> str:
    """Return a recipe file that works from any folder of this machine.

    Args:
        chosen: (value, its source) by dotted key.
        head: comment lines at the top.
    """
    paths = {key: (path, "of this machine") for key, path in run_folder.local_paths(recipe).items()}
    return head + settings_text.resolved_yaml(
        recipe, {**paths, **chosen, "train.output_dir": (None, "default")}
    )


def part(
    name: str, folder: Path, max_steps: int | None, epochs: float | None = None
) -> AbstractContextManager[None]:
    """Show a run as a part of the current phase. `share_of_steps` has the meaning of the other arguments."""
    return progress.part(name, share_of_steps(folder, max_steps, epochs))


def share_of_steps(folder: Path, max_steps: int | None, epochs: float | None) -> Callable[[], float]:
    """Return a function that returns the share of a run's training steps that are logged.

    Args:
        folder: the run folder, which may not exist yet.
        max_steps: `train.max_steps` of the run.
        epochs: `train.num_train_epochs` of the run, which counts without `max_steps`.
    """
    key, whole = ("step", max_steps) if max_steps else ("epoch", epochs or EPOCHS)

    def share() -> float:
        with contextlib.suppress(OSError), (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            for line in reversed(file.read().split(b"\n")):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that is being written
                    return float(json.loads(line)[key]) / whole
        return 0.0

    return share
