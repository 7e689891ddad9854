"""Keep local paths and secrets out of the files that are published."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from finetune.core import foreign_yaml
from finetune.core.errors import Problem, raise_if_any
from finetune.core.paths import local_path
from finetune.data.examples import file_of
from finetune.distributed import recorded_variables
from finetune.hub import client
from finetune.models import checkpoint_headers
from finetune.recipe import recipe_errors
from finetune.recipe.schema import Source
from finetune.run_folder import settings_text
from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from finetune.export.base_model import Base
    from finetune.recipe.schema import Recipe


# The `/home/a/` of `/home/a/b`
_PATH = re.compile(r"(?<![\w:/.<~])~?/(?:[^\s/\"',;:()<>]+/)+(?=[^\s/])")


# The `a/` of `a/b.jsonl` in a comment. It begins only where a path begins, or the search would be quadratic
_FILE = re.compile(r"(?<![\w./-])(?:[\w.-]+/)+(?=[\w-]+\.\w)")

# A quoted text, or all that follows a quote without an end
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*(?:"|\\?$)')
MOST_SHOWN = 5  # secrets of one file in an error


def without_variables(content: dict[str, Any]) -> dict[str, Any]:
    """Return environment.json without variables that runs no longer record. An older run can have them."""
    launch = content.get("launch") or {}
    kept = recorded_variables.recorded(launch.get("environment") or {})
    return {**content, "launch": {**launch, "environment": kept}}


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
    files = list(dict.fromkeys(file_of(place) for place in places))
    # Notes in eval.json have absolute paths
    return files + [os.path.realpath(os.path.expanduser(file)) for file in files]


def last_names(paths: Iterable[str]) -> dict[str, str]:
    """Map each path to its last name, with a number if another file has the same name."""
    names: dict[str, str] = {}
    of_file: dict[Path, str] = {}
    ends: dict[str, Path] = {}  # end of a path -> the first known path that ends so
    taken: set[str] = set()
    numbers: dict[str, int] = {}
    for path in paths:
        file = Path(os.path.realpath(os.path.expanduser(path)))
        if file not in of_file and not Path(path).is_absolute():  # the path can be relative to another folder
            file = ends.get(str(Path(path)), file)
        if file not in of_file:
            of_file[file] = numbered(Path(path).name, taken, numbers)
            taken.add(of_file[file])
            for start in range(1, len(file.parts)):
                ends.setdefault(str(Path(*file.parts[start:])), file)
        names[path] = of_file[file]
    return names


def numbered(name: str, taken: Collection[str], numbers: dict[str, int]) -> str:
    """Return `train.jsonl`, or `train.jsonl (2)` and so on if the name is taken.

    Args:
        numbers: the last number of each name, which this function counts.
    """
    while True:
        number = numbers[name] = numbers.get(name, 0) + 1
        free = name if number == 1 else f"{name} ({number})"
        if free not in taken:
            return free


def without_paths(value: object, known: dict[str, str], *, free: bool = False) -> Any:
    """Return JSON in which the paths of this machine are shortened to their last names.

    Args:
        free: the text comes from the data, so replace only `known` paths.
    """
    return _shortened(value, _pattern_of(tuple(known)), known, free)


def _shortened(value: object, pattern: re.Pattern[str], known: dict[str, str], free: bool) -> Any:
    if isinstance(value, dict):
        clean: dict[str, Any] = {}
        numbers: dict[str, int] = {}
        for key, item in value.items():
            name = numbered(_shortened(key, pattern, known, False), clean, numbers)
            clean[name] = _shortened(item, pattern, known, free or key in ("samples", "worst"))
        return clean
    if isinstance(value, list):
        return [_shortened(item, pattern, known, free) for item in value]
    if not isinstance(value, str):
        return value
    text = pattern.sub(lambda found: known[found[0]], value) if known else value
    return text if free else _PATH.sub("", text)


@lru_cache(maxsize=8)
def _pattern_of(paths: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of any of these paths. The longest path matches first."""
    longest_first = sorted((path for path in paths if len(path) > 1), key=len, reverse=True)
    return re.compile(rf"(?<![\w/])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-])")


def recipe_without_paths(text: str, known: dict[str, str], base: Base) -> str:
    """Return recipe.resolved.yaml without local paths. A file becomes `./name`, which is not a Hub id."""

    def said(found: re.Match[str]) -> str:
        try:
            value = yaml.safe_load(found[0])  # YAML has more escapes than JSON
        except foreign_yaml.ERRORS:
            return found[0]  # a quote inside a comment
        clean = without_paths(value, known)
        local = clean != value and not (base.on_hub and clean == base.name)
        return settings_text.flow(f"./{clean}" if local else clean)

    lines = [_QUOTED.sub(said, line) for line in text.splitlines()]
    lines = [_FILE.sub("", line) if line.startswith("#") else line for line in lines]
    text = "\n".join(without_paths(line, known) for line in lines) + "\n"
    return re.sub(r"^  (cache(_dir)?): .*$", r"  \1: null", text, flags=re.MULTILINE)


def refuse_secrets(files: dict[str, Path]) -> None:
    """Raise a UserError if a file contains a known kind of secret. The error masks the secret (exit 2)."""
    found = []
    for name, path in files.items():
        secrets = recipe_errors.secrets_in(text_of(path), client.any_token())
        more = f", and {len(secrets) - MOST_SHOWN:,} more in this file" if len(secrets) > MOST_SHOWN else ""
        for line, shown in secrets[:MOST_SHOWN]:
            found.append(
                Problem(
                    "a file to publish contains a secret",
                    where=f"{name}:{line}",
                    found=f"{shown}{more}",
                    fix="remove the secret from the file in the run folder, and revoke it",
                    code="publish-secret",
                )
            )
    raise_if_any(found)


def text_of(path: Path) -> str:
    """Return all text of a file. For weights this is the header, which holds names and metadata."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return file.read().decode("utf-8", "replace")
        size = int.from_bytes(file.read(8), "little")
        return file.read(min(size, checkpoint_headers.LARGEST_HEADER)).decode("utf-8", "replace")
