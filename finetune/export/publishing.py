"""Upload a run to the Hub: `finetune publish RUN`. The repository is private by default.

Only files on an allow list are uploaded. A temporary folder first collects them: links to the weights, text
files without the paths of this machine, and the model card. The run folder is not changed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import tempfile
import time
from dataclasses import replace
from fnmatch import fnmatch
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from finetune.core import safe_files, signals, standard_streams, strict_json, untrusted_files
from finetune.core.command_lines import command
from finetune.core.errors import Exit, Problem, Stopped, UserError
from finetune.core.paths import local_path
from finetune.core.privacy import masked
from finetune.core.run_checks import RunChecks
from finetune.core.visible_text import visible
from finetune.core.weight_files import find_weight_files
from finetune.distributed import recorded_variables
from finetune.export import base_model, model_card
from finetune.hub import client
from finetune.preflight import checker, publish_target
from finetune.recipe import recipe_errors
from finetune.recipe.loader import load as load_recipe
from finetune.recipe.schema import Source
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from finetune.core.console import Console
    from finetune.export.base_model import Base
    from finetune.recipe.schema import Publish, Recipe

# Only these files are uploaded. Checkpoints, logs and training_args.bin never are.
ADAPTER = ("adapter_config.json",)
MODEL = ("model.safetensors.index.json", "config.json", "generation_config.json")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
# Named templates of a tokenizer with several templates
TEMPLATES = "additional_chat_templates/*.jinja"
CONFIGS = ("adapter_config.json", "config.json", "tokenizer_config.json")
NAMES_BASE = ("base_model_name_or_path", "tokenizer_name_or_path", "_name_or_path", "name_or_path")
# Bytes. safetensors does not read a larger header.
LARGEST_HEADER = 100_000_000
# The `/home/a/` of `/home/a/b`
_PATH = re.compile(r"(?<![\w:/.<~])~?/(?:[^\s/\"',;:()<>]+/)+(?=[^\s/])")
# The `a/` of `a/b.jsonl` in a comment
_FILE = re.compile(r"(?:[\w.-]+/)+(?=[\w-]+\.\w)")
# The position of an example in its file
_PLACE = re.compile(r"(:\d+|\[\d+\]|!.*)$")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')


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
    checker.check_names(section)
    try:
        repo, notes = client.prepare(section.repo, private=section.private, revision=section.revision)
    except UserError as error:
        later = "; or set publish.repo=null and run `finetune publish` later"
        problems = [replace(problem, fix=problem.fix + later) for problem in error.problems]
        raise UserError(*problems, code=error.code) from error
    notes.append(f"finetune will publish the run to {repo} ({'private' if section.private else 'public'})")
    if local_path(model) and not section.base_model:
        notes.append(unnamed_base(Path(model).name))
    return notes


def after_training(recipe: Recipe, folder: RunFolder, screen: Console) -> None:
    """Publish a finished run if the recipe says so. An error here does not make the run fail."""
    if recipe.publish.repo is None:
        return
    try:
        run(folder.path, screen, target_overrides(recipe.publish))
    except Exception as error:  # the run itself is complete, so report any error and continue
        again = format_command(folder, recipe.publish)
        why = "\n".join(map(str, error.problems)) if isinstance(error, UserError) else visible(error)
        head = f"warning: finetune did not publish the run: {why}"
        said = [*head.split("\n"), "the run itself is complete; to publish it, run:", f"  {again}"]
        standard_streams.say(*said, error=True)
        with safe_files.open_append(folder.path, "log.txt") as log:
            log.writelines(f"{visible(masked(line))}\n" for line in said)


def run(
    path: str | Path,
    screen: Console,
    overrides: Sequence[str] = (),
    *,
    merged: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Publish a run, or show the files that would be uploaded.

    Args:
        overrides: overrides of the run's recipe, such as `publish.repo=organization/name`.
        merged: publish the result of `finetune merge` instead of the adapter.

    Returns:
        The content of publish.json, empty for a dry run.

    Raises:
        UserError: there is no repository, a file contains a secret, or a link leads outside the run (exit 2).
            The repository exists and is public although private was requested, or the token, the network or
            the Hub fails (exit 3). The uploaded files differ (exit 4).
    """
    folder = run_folder.open_run(path)
    recipe = run_folder.recipe_of(folder, overrides, files=False)
    section = recipe.publish
    checker.check_names(section)
    if not dry_run and publish_target.of_file(recipe):
        fix = f"name your own --repo; to publish to this one, run: {format_command(folder, section)}"
        raise UserError(publish_target.problem(recipe, fix))
    if section.repo is None and not dry_run:
        what, fix = "no repository to publish to", "--repo ORGANIZATION/NAME, or --dry-run"
        raise UserError(Problem(what, "publish.repo", found="null", fix=fix, code="publish-target"))
    kind, weights = find_weights(folder, merged)
    config = RunFolder(weights).found("adapter_config.json")
    base = base_model.find(recipe.model, section, config, online=not dry_run)
    with staging_folder(kept=dry_run) as staged:
        files = stage(folder, recipe, kind, weights, base, staged)
        refuse_secrets(files)
        repo, notes = section.repo, []
        if repo and not dry_run:
            repo, notes = client.prepare(repo, private=section.private, revision=section.revision)
        name = repo or f"organisation/{folder.path.resolve().name}"
        written = model_card.make(staged, recipe, base, kind, name, merge_report(folder, weights))
        written.save(staged / "README.md")
        files["README.md"] = staged / "README.md"
        refuse_secrets({"README.md": staged / "README.md"})
        for note in [*notes, *say_of(base, files)]:
            screen.say(f"note: {note}")
        if dry_run or not repo:
            show(screen, files, section, staged)
            return {}
        return push(folder, recipe, repo, files, screen)


@contextlib.contextmanager
def staging_folder(*, kept: bool) -> Iterator[Path]:
    """Create a temporary folder. Delete it at the end, also if a signal ends the command.

    Args:
        kept: keep the folder if the command succeeds, for the user to look at.
    """
    folder = Path(tempfile.mkdtemp(prefix="finetune-publish-"))
    try:
        with signals.listening(_stop):
            yield folder
    except BaseException:
        kept = False
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _stop(name: str) -> None:
    if name == "SIGINT":
        raise KeyboardInterrupt
    raise Stopped(f"stopped by {name}; the run folder has not changed")


def target_overrides(section: Publish) -> list[str]:
    """Return the repository, its visibility and its branch as overrides."""
    named = {"repo": section.repo, "private": section.private, "revision": section.revision}
    return [f"publish.{key}={json.dumps(value)}" for key, value in named.items()]


def format_command(folder: RunFolder, section: Publish) -> str:
    """Return the command that publishes a run to the repository in `section`."""
    words = ["finetune", "publish", str(folder.path), "--repo", section.repo or "organisation/name"]
    words += [] if section.private else ["--public"]
    return shlex.join([*words, *([f"publish.revision={section.revision}"] if section.revision else [])])


def find_weights(folder: RunFolder, merged: bool) -> tuple[str, Path]:
    """Return the kind of the weights (adapter | model | merged) and their folder.

    Raises:
        UserError: `merged` is set, but the run has no merged weights or several (exit 2).
    """
    if not merged:
        return ("adapter" if folder.weights == folder.adapter else "model"), folder.weights
    merged_to = folder.found("merge.json")
    inside = [name for name in merged_to if name == Path(name).name]
    if merged_to and not inside:  # a run from somebody else could name any folder of this machine
        what, fix = "the merged weights are outside the run folder", command("merge", str(folder.path))
        texts = {"found": ", ".join(merged_to), "fix": fix, "code": "unsafe-file"}
        raise UserError(Problem(what, where=str(folder.path), **texts))
    found = [path for name in inside if (path := folder.path / name).is_dir()]
    plain = [path for path in found if path == folder.path / "merged"] or found
    if len(plain) != 1:
        what = "the run folder has several merged models" if found else "the run folder has no merged model"
        fix = "keep only one of them" if found else command("merge", str(folder.path))
        names = ", ".join(path.name for path in found)
        raise UserError(Problem(what, where=str(folder.path), found=names, fix=fix, code="merge"))
    untrusted_files.check_model(plain[0], "")
    return "merged", plain[0]


def merge_report(folder: RunFolder, weights: Path) -> dict[str, Any]:
    """Return the report in merge.json for these weights, or an empty mapping."""
    reports = folder.found("merge.json")
    return next((report for name, report in reports.items() if folder.path / name == weights), {})


def stage(
    folder: RunFolder, recipe: Recipe, kind: str, weights: Path, base: Base, staged: Path
) -> dict[str, Path]:
    """Collect the files to upload, except the card: links to weights, and copies without local paths."""
    check_shapes(folder)
    known = local_names(folder, recipe, base)
    patterns = (*(ADAPTER if kind == "adapter" else MODEL), *TOKENIZER)
    names = [file.name for name in run_folder.PUBLISHED if (file := folder.file(name)).exists()]
    sent = [file for file in sorted(weights.iterdir()) if any(fnmatch(file.name, one) for one in patterns)]
    sent += [*find_weight_files(weights, ""), *sorted(weights.glob(TEMPLATES))]
    untrusted_files.check_links([*sent, *(folder.path / name for name in names)], "")
    for file in sent:
        place = staged / file.relative_to(weights)
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(file.resolve())
    for name in CONFIGS:
        if (staged / name).exists():
            content = untrusted_files.read_object(weights / name, "")
            named = {key: base.name for key in content if key in NAMES_BASE and content[key]}
            (staged / name).unlink()
            write_json(staged / name, content | named, indent=2)
    for name in names:
        if name == "merge.json" and kind != "merged":
            continue
        text = folder.read_text(name)
        if name.endswith(".json"):
            content = json.loads(text)
            if name == "environment.json":
                content = without_variables(content)
            if name == "eval.json" and not recipe.publish.samples:
                content |= {"samples": [], "worst": []}
            write_json(staged / name, without_paths(content, known), indent=1)
        else:
            text = recipe_without_paths(text, known, base) if name.endswith(".yaml") else text
            (staged / name).write_text(text, encoding="utf-8")
    # Verify that other users can load the recipe
    load_recipe(staged / folder.recipe.name, (), folder.format_version)
    if not any(path.suffix == ".safetensors" for path in staged.iterdir()):
        what, fix = "the folder has no safetensors file to publish", command("merge", str(folder.path))
        problem = Problem(what, where=str(weights), fix=fix, code="run-damaged")
        raise UserError(problem, code=Exit.ARTEFACT)
    return {str(path.relative_to(staged)): path for path in sorted(staged.rglob("*")) if path.is_file()}


def check_shapes(folder: RunFolder) -> None:
    """Raise a UserError if a file of the run is damaged, because the copies and the card use it (exit 4)."""
    for name in run_folder.PUBLISHED:
        if name.endswith(".json") and folder.file(name).exists():
            folder.read(name)
    folder.steps()


def without_variables(content: dict[str, Any]) -> dict[str, Any]:
    """Return environment.json without variables that runs no longer record. An older run can have them."""
    launch = content.get("launch") or {}
    kept = recorded_variables.recorded(launch.get("environment") or {})
    return {**content, "launch": {**launch, "environment": kept}}


def write_json(path: Path, content: object, *, indent: int) -> None:
    text = json.dumps(strict_json.spelt(content), indent=indent, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair cannot be encoded
    path.write_text(text + "\n", encoding="utf-8", errors="replace")


def local_names(folder: RunFolder, recipe: Recipe, base: Base) -> dict[str, str]:
    """Map each path of this machine to its replacement: its last name, or the Hub name of the base model."""
    data, report = recipe.data, folder.found("data_report.json")
    paths: list[str | None] = [
        key for split in report.values() for part in ("sources", "formats") for key in split.get(part, ())
    ]
    sources = data.name if isinstance(data.name, list) else [data.name]
    paths += [source.name if isinstance(source, Source) else source for source in sources]
    paths += evaluated_files(folder.found("eval.json"))
    paths += [
        data.validation,
        data.chat_template,
        data.cache_dir,
        recipe.adapter.source,
        recipe.train.output_dir,
    ]
    named = last_names([path for path in paths if path and "/" in path and local_path(path)])
    named |= {str(path): folder.path.absolute().name for path in (folder.path, folder.path.absolute())}
    if local_path(recipe.model.name):
        config = RunFolder(folder.adapter).found("adapter_config.json")
        of_adapter = config.get("base_model_name_or_path") or recipe.model.name
        named |= {path: base.name for path in (recipe.model.name, of_adapter) if "/" in path}
    return {str(Path.home()): "~", str(Path.cwd()): ".", **named}


def evaluated_files(results: dict[str, Any]) -> list[str]:
    """Return the files that eval.json names. An override of `finetune evaluate` can add files."""
    places = [row.get("where", "") for row in results.get("worst", [])]
    places += [part.get("source", "") for part in results.get("sources", [])]
    files = list(dict.fromkeys(_PLACE.sub("", place) for place in places))
    # Notes in eval.json have absolute paths
    return files + [str(Path(file).expanduser().resolve()) for file in files]


def last_names(paths: Iterable[str]) -> dict[str, str]:
    """Map each path to its last name, with a number if another file has the same name."""
    names: dict[str, str] = {}
    of_file: dict[Path, str] = {}
    for path in paths:
        file = Path(path).expanduser().resolve()
        if file not in of_file and not Path(path).is_absolute():  # the path can be relative to another folder
            file = next((known for known in of_file if str(known).endswith(f"/{Path(path)}")), file)
        names[path] = of_file.setdefault(file, numbered(Path(path).name, of_file.values()))
    return names


def numbered(name: str, taken: Collection[str]) -> str:
    """Return `train.jsonl`, or `train.jsonl (2)` and so on if the name is taken."""
    names = chain([name], (f"{name} ({number})" for number in count(2)))
    return next(free for free in names if free not in taken)


def without_paths(value: object, known: dict[str, str], *, free: bool = False) -> Any:
    """Return JSON in which the paths of this machine are shortened to their last names.

    Args:
        free: the text comes from the data, so replace only `known` paths.
    """
    if isinstance(value, dict):
        clean: dict[str, Any] = {}
        for key, item in value.items():
            name = numbered(without_paths(key, known), clean)
            clean[name] = without_paths(item, known, free=free or key in ("samples", "worst"))
        return clean
    if isinstance(value, list):
        return [without_paths(item, known, free=free) for item in value]
    if not isinstance(value, str):
        return value
    longest_first = "|".join(map(re.escape, sorted((p for p in known if len(p) > 1), key=len, reverse=True)))
    text = re.sub(rf"(?<![\w/])(?:{longest_first})(?![\w-])", lambda found: known[found[0]], value)
    return text if free else _PATH.sub("", text)


def recipe_without_paths(text: str, known: dict[str, str], base: Base) -> str:
    """Return recipe.resolved.yaml without local paths. A file becomes `./name`, which is not a Hub id."""

    def said(found: re.Match[str]) -> str:
        try:
            value = yaml.safe_load(found[0])  # YAML has more escapes than JSON
        except yaml.YAMLError:
            return found[0]  # a quote inside a comment
        clean = without_paths(value, known)
        local = clean != value and not (base.on_hub and clean == base.name)
        return run_folder.flow(f"./{clean}" if local else clean)

    lines = [_QUOTED.sub(said, line) for line in text.splitlines()]
    lines = [_FILE.sub("", line) if line.startswith("#") else line for line in lines]
    text = "\n".join(without_paths(line, known) for line in lines) + "\n"
    return re.sub(r"^  (cache(_dir)?): .*$", r"  \1: null", text, flags=re.MULTILINE)


def refuse_secrets(files: dict[str, Path]) -> None:
    """Raise a UserError if a file contains a known kind of secret. The error masks the secret (exit 2)."""
    found = []
    for name, path in files.items():
        for line, shown in recipe_errors.secrets_in(text_of(path), client.any_token()):
            what, where = "a file to publish contains a secret", f"{name}:{line}"
            fix = "remove the secret from the file in the run folder, and revoke it"
            found.append(Problem(what, where=where, found=shown, fix=fix, code="publish-secret"))
    if found:
        raise UserError(*found)


def text_of(path: Path) -> str:
    """Return all text of a file. For weights this is the header, which holds names and metadata."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return file.read().decode("utf-8", "replace")
        size = int.from_bytes(file.read(8), "little")
        return file.read(min(size, LARGEST_HEADER)).decode("utf-8", "replace")


def unnamed_base(name: str) -> str:
    fix = "set publish.base_model=ORGANIZATION/NAME if the model is on the Hub"
    return f"the base model is a local folder, which the model card calls `{name}`; {fix}"


def say_of(base: Base, files: dict[str, Path]) -> list[str]:
    """Return notes on the uploaded files."""
    notes = [] if base.on_hub else [unnamed_base(base.name)]
    if not base.licence_from:
        notes.append(
            "the license of the base model is unknown, so the model card says `other`; set publish.license"
        )
    results = json.loads(files["eval.json"].read_text(encoding="utf-8")) if "eval.json" in files else {}
    rows = len(results.get("samples", [])) + len(results.get("worst", []))
    if rows:
        notes.append(
            f"eval.json contains {rows} validation examples; set publish.samples=false to remove them"
        )
    return notes


def show(screen: Console, files: dict[str, Path], section: Publish, staged: Path) -> None:
    """Print the files of a dry run, and the folder that contains them."""
    rows = [(name, f"{path.stat().st_size:,}") for name, path in files.items()]
    where = f"{section.repo or 'a repository'} ({'private' if section.private else 'public'})"
    screen.table(f"files for {where}", ("file", "bytes"), rows)
    screen.say("", f"these files and the model card are in {staged}", "finetune uploaded nothing")


def push(
    folder: RunFolder, recipe: Recipe, repo: str, files: dict[str, Path], screen: Console
) -> dict[str, Any]:
    """Upload the missing files, verify them with the Hub's file list, and write publish.json."""
    section, ledger = recipe.publish, RunChecks()
    done = client.upload(repo, files, f"finetune: {folder.path.absolute().name}", section.revision)
    right = [name for name, path in files.items() if client.same(path, done.listed.get(name))]
    how, code = f"sizes and hashes in the Hub's listing of {done.commit}", Exit.ARTEFACT
    ledger.add("published files", f"all {len(files)}", f"all {len(right)}", how, code=code)
    ledger.check()
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
        "receipts": ledger.as_json(),
    }
    folder.write("publish.json", report)
    sent = f"uploaded {len(done.sent)} of {len(files)} files" if done.sent else "the repository is up to date"
    screen.say("", f"{sent}: {url}", "next:", f"  {command('evaluate', f'{repo}@{done.commit}')}")
    return report
