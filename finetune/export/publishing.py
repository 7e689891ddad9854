"""Upload a run to the Hub: `finetune publish RUN`. The repository is private by default.

Only files on an allow list are uploaded. A temporary folder first collects them: links to the weights, text
files without the paths of this machine, and the model card. The run folder is not changed.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.core import progress
from finetune.core.command_lines import command
from finetune.core.console import Console
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.run_checks import RunChecks
from finetune.export import base_model, model_card, published_text, staged_files
from finetune.hub import client
from finetune.models import base_identity
from finetune.preflight import publish_target
from finetune.recipe.schema import Publish, Recipe
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder


def run(
    path: str | Path,
    screen: Console | None = None,
    overrides: Sequence[str] = (),
    *,
    merged: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Publish a run, or show the files that would be uploaded.

    Args:
        screen: where to print; `None` prints nothing.
        overrides: overrides of the run's recipe, such as `publish.repo=organization/name`.
        merged: publish the result of `finetune merge` instead of the adapter.

    Returns:
        The content of publish.json; for a dry run, the files and the repository.

    Raises:
        UserError: there is no repository, a file contains a secret, or a link leads outside the run (exit 2).
            The repository exists and is public although private was requested, or the token, the network or
            the Hub fails (exit 3). The uploaded files differ (exit 4).
    """
    folder, screen = run_folder.open_run(path), screen or Console(quiet=True)
    recipe = run_folder.recipe_of(folder, overrides, files=False)
    section = recipe.publish
    publish_target.check_names(section)
    if not dry_run and publish_target.of_file(recipe):
        raise UserError(
            publish_target.problem(
                recipe,
                f"name your own --repo; to publish to this one, run: {format_command(folder, section)}",
            )
        )
    if section.repo is None and not dry_run:
        raise UserError(
            Problem(
                "no repository to publish to",
                "publish.repo",
                found="null",
                fix="--repo ORGANIZATION/NAME, or --dry-run",
                code="publish-target",
            )
        )
    kind, weights = staged_files.find_weights(folder, merged)
    config = RunFolder(weights).found("adapter_config.json")
    base = base_model.find(recipe.model, section, config, online=not dry_run)
    changed = _changes(folder, recipe)
    with staged_files.staging_folder(kept=dry_run) as staged:
        files = staged_files.stage(folder, recipe, kind, weights, base, staged)
        published_text.refuse_secrets(files)
        repo, notes = section.repo, list(changed)
        if repo and not dry_run:
            repo, said = client.prepare(repo, private=section.private, revision=section.revision)
            notes += said
        name = repo or f"organization/{folder.path.resolve().name}"
        written = model_card.make(
            staged, recipe, base, kind, name, staged_files.merge_report(folder, weights)
        )
        written.save(staged / "README.md")
        files["README.md"] = staged / "README.md"
        published_text.refuse_secrets({"README.md": staged / "README.md"})
        for note in [*notes, *staged_files.say_of(base, files)]:
            screen.say(f"note: {note}")
        # Once more: another program may have replaced a file meanwhile
        staged_files.check_merged(folder, weights) if merged else folder.check_weights()
        if dry_run or not repo:
            return show(screen, folder, files, section, staged)
        return push(folder, recipe, repo, files, screen)


def _changes(folder: RunFolder, recipe: Recipe) -> list[str]:
    """Return notes on a base model that the run was not trained on.

    Raises:
        UserError: an override names it (exit 2).
    """
    named = {"model.name", "model.revision"} & {
        key for key, who in recipe.origin.set_by.items() if who == "override"
    }
    changed = base_identity.notes(recipe.model, folder) if named or Path(recipe.model.name).is_dir() else []
    if named and any(note.startswith(base_identity.CHANGED) for note in changed):
        raise UserError(
            Problem(
                "this is not the base model of the run",
                "model.name",
                found=changed[0],
                fix="name the base model that the run was trained on, or remove the override",
                why="the published files would name it as the base model of the adapter",
                code="adapter-files",
            )
        )
    return changed


def target_overrides(section: Publish) -> list[str]:
    """Return the repository, its visibility and its branch as overrides."""
    named = {"repo": section.repo, "private": section.private, "revision": section.revision}
    return [f"publish.{key}={json.dumps(value)}" for key, value in named.items()]


def format_command(folder: RunFolder, section: Publish) -> str:
    """Return the command that publishes a run to the repository in `section`."""
    words = ["finetune", "publish", str(folder.path), "--repo", section.repo or "organization/name"]
    words += [] if section.private else ["--public"]
    return shlex.join([*words, *([f"publish.revision={section.revision}"] if section.revision else [])])


def show(
    screen: Console, folder: RunFolder, files: dict[str, Path], section: Publish, staged: Path
) -> dict[str, Any]:
    """Print and return the files of a dry run, the repository and the folder that contains the files."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    rows = [(name, f"{size:,}") for name, size in sizes.items()]
    where = f"{section.repo or 'a repository'} ({'private' if section.private else 'public'})"
    screen.table(f"files for {where}", ("file", "bytes"), rows)
    screen.say("", f"these files and the model card are in {staged}", "finetune uploaded nothing")
    if section.repo:
        screen.say(f"next: {format_command(folder, section)}")
    else:
        screen.say("to upload them, replace --dry-run with --repo ORGANIZATION/NAME")
    return {
        "repo": section.repo,
        "revision": section.revision,
        "private": section.private,
        "folder": str(staged),
        "files": {name: {"bytes": size} for name, size in sizes.items()},
    }


def push(
    folder: RunFolder, recipe: Recipe, repo: str, files: dict[str, Path], screen: Console
) -> dict[str, Any]:
    """Upload the missing files, verify them with the Hub's file list, and write publish.json."""
    section, checks = recipe.publish, RunChecks()
    with progress.phase(screen, f"uploading {len(files)} files"):
        message = f"finetune: {folder.path.absolute().name}"
        done = client.upload(repo, files, message, section.revision, private=section.private)
    right = [name for name, path in files.items() if client.same(path, done.listed.get(name))]
    how, code = f"sizes and hashes in the Hub's listing of {done.commit}", Exit.ARTIFACT
    checks.add("published files", f"all {len(files)}", f"all {len(right)}", how, code=code)
    checks.check()
    others = sorted(done.listed.keys() - files.keys() - {".gitattributes"})
    if others:
        screen.say(f"note: the repository also has other files, which are unchanged: {', '.join(others)}")
    url = f"{client.endpoint()}/{repo}/tree/{done.commit}"
    report = {
        "repo": repo,
        "commit": done.commit,
        "url": url,
        "revision": section.revision,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": {n: {"bytes": done.listed[n].size, "hash": done.listed[n].digest} for n in files},
        "receipts": checks.as_json(),
    }
    folder.write("publish.json", report)
    sent = f"uploaded {len(done.sent)} of {len(files)} files" if done.sent else "the repository is up to date"
    screen.say("", f"{sent}: {url}", "next:", f"  {command('evaluate', f'{repo}@{done.commit}')}")
    return report
