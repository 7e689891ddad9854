"""Publish a run as its recipe asks, once it is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from finetune.core import safe_files, standard_streams
from finetune.core.console import Console
from finetune.core.errors import UserError
from finetune.core.paths import local_path
from finetune.core.privacy import masked
from finetune.core.visible_text import visible
from finetune.export import publishing, staged_files
from finetune.hub import client
from finetune.preflight import publish_target
from finetune.recipe.schema import Publish
from finetune.run_folder.run_folder import RunFolder


def check(section: Publish, model: str) -> list[str]:
    """Check before training that the run can be published: name, token and permissions.

    The check creates a missing repository (private by default), which proves that the token can write.

    Returns:
        Notes.

    Raises:
        UserError: the name is not valid (exit 2). The repository exists and is public although private was
            requested, the token is missing or cannot write there, or the network fails (exit 3).
    """
    if section.repo is None:
        return []
    publish_target.check_names(section)
    try:
        repo, notes = client.prepare(section.repo, private=section.private, revision=section.revision)
    except UserError as error:
        later = "; or set publish.repo=null and run `finetune publish` later"
        problems = [replace(problem, fix=problem.fix + later) for problem in error.problems]
        raise UserError(*problems, code=error.code) from error
    notes.append(f"finetune will publish the run to {repo} ({'private' if section.private else 'public'})")
    if local_path(model) and not section.base_model:
        notes.append(staged_files.unnamed_base(Path(model).name))
    return notes


def publish_run(section: Publish, folder: RunFolder, screen: Console) -> None:
    """Publish a finished run if the recipe says so. An error here does not make the run fail."""
    if section.repo is None:
        return
    try:
        publishing.run(folder.path, screen, publishing.target_overrides(section))
    except Exception as error:  # the run itself is complete, so report any error and continue
        again = publishing.format_command(folder, section)
        why = "\n".join(map(str, error.problems)) if isinstance(error, UserError) else visible(error)
        head = f"warning: finetune did not publish the run: {why}"
        said = [*head.split("\n"), "the run itself is complete; to publish it, run:", f"  {again}"]
        standard_streams.say(*said, error=True)
        with safe_files.open_append(folder.path, "log.txt") as log:
            log.writelines(f"{visible(masked(line))}\n" for line in said)
