"""A run on the Hub: `finetune publish RUN`. Private unless asked, by an allow-list, the run folder as it was.

What goes up is staged in a folder of its own first: the weights as links to the run's files, every text
without the paths of this machine, and the card.
"""

from __future__ import annotations

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

from finetune.core import safe_files, standard_streams, strict_json, untrusted_files
from finetune.core.errors import Exit, Problem, UserError
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
    from collections.abc import Collection, Iterable, Sequence

    from finetune.core.console import Console
    from finetune.export.base_model import Base
    from finetune.recipe.schema import Publish, Recipe

# Nothing else ever goes up: no training_args.bin, no checkpoint, no log
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
TEMPLATES = "additional_chat_templates/*.jinja"  # by name, of a tokenizer that has several
CONFIGS = ("adapter_config.json", "config.json", "tokenizer_config.json")
NAMES_BASE = ("base_model_name_or_path", "tokenizer_name_or_path", "_name_or_path", "name_or_path")
LARGEST_HEADER = 100_000_000  # bytes: safetensors reads no larger one
_PATH = re.compile(r"(?<![\w:/.<~])~?/(?:[^\s/\"',;:()<>]+/)+(?=[^\s/])")  # the `/home/a/` of `/home/a/b`
_FILE = re.compile(r"(?:[\w.-]+/)+(?=[\w-]+\.\w)")  # the `a/` of `a/b.jsonl`, in a comment
_PLACE = re.compile(r"(:\d+|\[\d+\]|!.*)$")  # of a row in its file
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')


def check(section: Publish, model: str) -> list[str]:
    """What would keep a run from being published, before it trains: name, token, rights.

    A repository that is not there is made, private unless asked: that is the proof that it can be.

    Returns:
        Notes.

    Raises:
        UserError: a name that can't be (exit 2); a public repository in place of a private one, no token, one
            that may not write there, no network (3).
    """
    if section.repo is None:
        return []
    checker.check_names(section)
    try:
        repo, notes = client.prepare(section.repo, private=section.private, revision=section.revision)
    except UserError as error:
        later = "; or publish.repo=null, and `finetune publish` when the run is there"
        problems = [replace(problem, fix=problem.fix + later) for problem in error.problems]
        raise UserError(*problems, code=error.code) from error
    notes.append(f"the run will be published to {repo} ({'private' if section.private else 'public'})")
    if local_path(model) and not section.base_model:
        notes.append(unnamed_base(Path(model).name))
    return notes


def after_training(recipe: Recipe, folder: RunFolder, screen: Console) -> None:
    """Push a run that asks for it. It is whole by now, so nothing that goes wrong here makes it fail."""
    if recipe.publish.repo is None:
        return
    try:
        run(folder.path, screen, target_overrides(recipe.publish))
    except Exception as error:  # of whatever kind: the run is whole
        again = format_command(folder, recipe.publish)
        why = "\n".join(map(str, error.problems)) if isinstance(error, UserError) else visible(error)
        said = [*f"not published: {why}".split("\n"), "the run is whole; to try again:", f"  {again}"]
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
    """Publish a run, or show what would go up.

    Args:
        overrides: of the run's recipe, such as `publish.repo=organisation/name`.
        merged: what `finetune merge` left, in place of the adapter.

    Returns:
        The content of publish.json; of a dry run nothing.

    Raises:
        UserError: no repository, a secret in a file, a link to elsewhere (exit 2); a public repository in
            place of a private one, the token, the network or the Hub (3); files there that are others (4).
    """
    folder = run_folder.open_run(path)
    recipe = run_folder.recipe_of(folder, overrides, files=False)
    section = recipe.publish
    checker.check_names(section)
    if not dry_run and publish_target.of_file(recipe):
        fix = f"your own --repo; to publish there: {format_command(folder, section)}"
        raise UserError(publish_target.problem(recipe, fix))
    if section.repo is None and not dry_run:
        fix = "--repo organisation/name; --dry-run shows what would go up"
        raise UserError(Problem("no repository to publish to", "publish.repo", found="null", fix=fix))
    kind, weights = find_weights(folder, merged)
    config = RunFolder(weights).found("adapter_config.json")
    base = base_model.find(recipe.model, section, config, online=not dry_run)
    staged, shown = Path(tempfile.mkdtemp(prefix="finetune-publish-")), False
    try:
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
            shown = True
            return {}
        return push(folder, recipe, repo, files, screen)
    finally:
        if not shown:
            shutil.rmtree(staged)


def target_overrides(section: Publish) -> list[str]:
    """Where a run is published and who can read it, as overrides."""
    named = {"repo": section.repo, "private": section.private, "revision": section.revision}
    return [f"publish.{key}={json.dumps(value)}" for key, value in named.items()]


def format_command(folder: RunFolder, section: Publish) -> str:
    """The command that publishes a run where `section` says."""
    words = ["finetune", "publish", str(folder.path), "--repo", section.repo or "organisation/name"]
    words += [] if section.private else ["--public"]
    return shlex.join([*words, *([f"publish.revision={section.revision}"] if section.revision else [])])


def find_weights(folder: RunFolder, merged: bool) -> tuple[str, Path]:
    """adapter | model | merged, and the folder (exit 2 where nothing was merged, or several times)."""
    if not merged:
        return ("adapter" if folder.weights == folder.adapter else "model"), folder.weights
    merged_to = folder.found("merge.json")
    inside = [name for name in merged_to if name == Path(name).name]
    if merged_to and not inside:  # a stranger's run could name any folder of this machine
        what, fix = "the merged weights lie outside of the run folder", f"finetune merge {folder.path}"
        raise UserError(Problem(what, where=str(folder.path), found=", ".join(merged_to), fix=fix))
    found = [path for name in inside if (path := folder.path / name).is_dir()]
    plain = [path for path in found if path == folder.path / "merged"] or found
    if len(plain) != 1:
        what = "which of them?" if found else "nothing is merged in this run"
        fix = "keep one of them in the run folder" if found else f"finetune merge {folder.path}"
        names = ", ".join(path.name for path in found)
        raise UserError(Problem(what, where=str(folder.path), found=names, fix=fix))
    untrusted_files.check_model(plain[0], "")
    return "merged", plain[0]


def merge_report(folder: RunFolder, weights: Path) -> dict[str, Any]:
    """What merge.json says of these weights; of others nothing."""
    reports = folder.found("merge.json")
    return next((report for name, report in reports.items() if folder.path / name == weights), {})


def stage(
    folder: RunFolder, recipe: Recipe, kind: str, weights: Path, base: Base, staged: Path
) -> dict[str, Path]:
    """What goes up but for the card: links to the run's files, and copies of those that name local paths."""
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
    load_recipe(staged / folder.recipe.name, (), folder.format_version)  # what others will open must load
    if not any(path.suffix == ".safetensors" for path in staged.iterdir()):
        raise UserError(Problem("no safetensors to publish", where=str(weights)), code=Exit.ARTEFACT)
    return {str(path.relative_to(staged)): path for path in sorted(staged.rglob("*")) if path.is_file()}


def check_shapes(folder: RunFolder) -> None:
    """Refuse a run with a damaged file: the copies and the model card are made of them (exit 4)."""
    for name in run_folder.PUBLISHED:
        if name.endswith(".json") and folder.file(name).exists():
            folder.read(name)
    folder.steps()


def without_variables(content: dict[str, Any]) -> dict[str, Any]:
    """environment.json without variables that a run does not write down; an older one has others."""
    launch = content.get("launch") or {}
    kept = recorded_variables.recorded(launch.get("environment") or {})
    return {**content, "launch": {**launch, "environment": kept}}


def write_json(path: Path, content: object, *, indent: int) -> None:
    text = json.dumps(strict_json.spelt(content), indent=indent, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8", errors="replace")  # half a surrogate pair is no text


def local_names(folder: RunFolder, recipe: Recipe, base: Base) -> dict[str, str]:
    """Path of this machine -> what is said of it instead: its name; of the base what it is on the Hub."""
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
    """The files that eval.json speaks of, which an override of `finetune evaluate` may have named."""
    places = [row.get("where", "") for row in results.get("worst", [])]
    places += [part.get("source", "") for part in results.get("sources", [])]
    files = list(dict.fromkeys(_PLACE.sub("", place) for place in places))
    return files + [str(Path(file).expanduser().resolve()) for file in files]  # as its notes have them


def last_names(paths: Iterable[str]) -> dict[str, str]:
    """Path -> its last name, numbered where another file has that name."""
    names: dict[str, str] = {}
    of_file: dict[Path, str] = {}
    for path in paths:
        file = Path(path).expanduser().resolve()
        if file not in of_file and not Path(path).is_absolute():  # it may be relative to another folder
            file = next((known for known in of_file if str(known).endswith(f"/{Path(path)}")), file)
        names[path] = of_file.setdefault(file, numbered(Path(path).name, of_file.values()))
    return names


def numbered(name: str, taken: Collection[str]) -> str:
    """`train.jsonl`, or `train.jsonl (2)` and so on if that is taken."""
    names = chain([name], (f"{name} ({number})" for number in count(2)))
    return next(free for free in names if free not in taken)


def without_paths(value: object, known: dict[str, str], *, free: bool = False) -> Any:
    """JSON without this machine's paths, but for their last names.

    Args:
        free: text of the data, in which only `known` paths are replaced.
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
    """recipe.resolved.yaml as others may see it; a file is `./name`, which no one takes for a Hub id."""

    def said(found: re.Match[str]) -> str:
        try:
            value = yaml.safe_load(found[0])  # which has more escapes than JSON
        except yaml.YAMLError:
            return found[0]  # of a comment
        clean = without_paths(value, known)
        local = clean != value and not (base.on_hub and clean == base.name)
        return run_folder.flow(f"./{clean}" if local else clean)

    lines = [_QUOTED.sub(said, line) for line in text.splitlines()]
    lines = [_FILE.sub("", line) if line.startswith("#") else line for line in lines]
    text = "\n".join(without_paths(line, known) for line in lines) + "\n"
    return re.sub(r"^  (cache(_dir)?): .*$", r"  \1: null", text, flags=re.MULTILINE)


def refuse_secrets(files: dict[str, Path]) -> None:
    """A secret of any kind that is known stops everything, masked, with its place (exit 2)."""
    found = []
    for name, path in files.items():
        for line, shown in recipe_errors.secrets_in(text_of(path), client.any_token()):
            what, where = "a secret would be published", f"{name}:{line}"
            fix = "take it out of the run folder's file, and revoke it"
            found.append(Problem(what, where=where, found=shown, fix=fix))
    if found:
        raise UserError(*found)


def text_of(path: Path) -> str:
    """All that is text in a file: of weights the header alone, which holds names and metadata."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return file.read().decode("utf-8", "replace")
        size = int.from_bytes(file.read(8), "little")
        return file.read(min(size, LARGEST_HEADER)).decode("utf-8", "replace")


def unnamed_base(name: str) -> str:
    where = "publish.base_model=organisation/name if it is on the Hub"
    return f"the base is a local folder, called `{name}` in the card; {where}"


def say_of(base: Base, files: dict[str, Path]) -> list[str]:
    """What is worth knowing of what goes up."""
    notes = [] if base.on_hub else [unnamed_base(base.name)]
    if not base.licence_from:
        notes.append(
            "the licence of the base is not known here, so the card says `other`: publish.license=..."
        )
    results = json.loads(files["eval.json"].read_text(encoding="utf-8")) if "eval.json" in files else {}
    rows = len(results.get("samples", [])) + len(results.get("worst", []))
    if rows:
        notes.append(
            f"eval.json shows {rows} validation examples; set publish.samples=false to leave them out"
        )
    return notes


def show(screen: Console, files: dict[str, Path], section: Publish, staged: Path) -> None:
    """The files of a dry run, and where they can be read as they would go up."""
    rows = [(name, f"{path.stat().st_size:,}") for name, path in files.items()]
    where = f"{section.repo or 'a repository'} ({'private' if section.private else 'public'})"
    screen.table(f"would go to {where}", ("file", "bytes"), rows)
    screen.say("", f"as they would go up, the card too: {staged}", "nothing left this machine")


def push(
    folder: RunFolder, recipe: Recipe, repo: str, files: dict[str, Path], screen: Console
) -> dict[str, Any]:
    """Send what the Hub lacks, prove by its own listing that it has what is here, leave publish.json."""
    section, ledger = recipe.publish, RunChecks()
    done = client.upload(repo, files, f"finetune: {folder.path.absolute().name}", section.revision)
    right = [name for name, path in files.items() if client.same(path, done.listed.get(name))]
    how, code = f"sizes and hashes in the Hub's listing of {done.commit}", Exit.ARTEFACT
    ledger.add("published files", f"all {len(files)}", f"all {len(right)}", how, code=code)
    ledger.check()
    others = sorted(done.listed.keys() - files.keys() - {".gitattributes"})
    if others:
        screen.say(f"note: also there, and left as they are: {', '.join(others)}")
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
    sent = f"{len(done.sent)} of {len(files)} files sent" if done.sent else "already up to date: nothing sent"
    screen.say("", f"{sent}; {url}", "next:", f"  finetune evaluate {repo}@{done.commit}")
    return report
