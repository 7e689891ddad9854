"""Read the `configs:` of a folder's dataset card: which files belong to which split.

A damaged card is an error. Without the card, the names of the files would decide, and other files could be
read than the card names.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from finetune.core import foreign_yaml, regular_files, strict_json
from finetune.core.errors import Problem, UserError

CARDS = ("README.md", ".huggingface.yaml")  # the files that `datasets` reads
MARK = "---"  # the line before and after the YAML of README.md
NAMES_FILES = re.compile(r"^(configs|[ -]*(data_files|data_dir)) *:", re.MULTILINE)
KEYS = ("config_name", "data_files", "data_dir", "default")
# Keys that change no row. Other keys are options of a reader of `datasets`, which finetune does not use
HARMLESS = {*KEYS, "version", "description", "features", "drop_labels", "drop_metadata"}
SIMILAR = 0.85  # difflib's ratio of a key and the key that was probably meant


def configs_of(folder: Path, key: str) -> dict[str, dict[str, Any]]:
    """Return the configs in the dataset cards of a folder, by name; empty without a card.

    Raises:
        UserError: a card is damaged, not a regular file, or too large (exit 2).
    """
    found = dict[str, dict[str, Any]]()
    for path in (folder / name for name in CARDS):
        if path.exists():
            for config in _read(path, key):
                found[str(config["config_name"])] = config
    return found


def check_options(config: dict[str, Any], folder: Path, key: str) -> None:
    """Refuse a config with options of a reader, such as a separator or rows to skip (exit 2)."""
    options = sorted(str(name) for name in config.keys() - HARMLESS)
    if options:
        raise UserError(
            Problem(
                "finetune does not apply the options of a reader in a dataset card",
                key,
                where=str(folder / CARDS[0]),
                found=", ".join(options)[:200],
                fix="convert the files to JSON Lines, and name them in data.name",
                why="without these options, finetune would read other rows",
                code="data-format",
            )
        )


def unusable(path: Path, key: str, found: str) -> UserError:
    """Return the error for a card or a manifest that is damaged, or that names files that are missing."""
    return UserError(
        Problem(
            f"finetune can't use {path.name}, which lists the files of the dataset",
            key,
            where=str(path),
            found=found,
            fix="restore the file, or name the data files in place of the folder",
            why="finetune would otherwise read other files of the folder",
            code="data-format",
        )
    )


def _read(path: Path, key: str) -> list[dict[str, Any]]:
    """Return the configs of one card."""
    regular_files.check_regular(path, key, regular_files.limit_of(path))
    text = path.read_bytes().decode("utf-8-sig", "replace")
    yaml, is_whole = (text, True) if path.suffix == ".yaml" else _block(text)
    names_files = NAMES_FILES.search(yaml) is not None
    if not is_whole:
        if names_files:
            raise unusable(path, key, f"no line {MARK} before or after the YAML")
        return []
    try:
        content = foreign_yaml.read(yaml, path.name, strict_json.DEEPEST)
    except UserError as error:
        if names_files:
            problem = error.problems[0]
            raise unusable(path, key, f"{problem.what}: {problem.found}") from error
        return []
    if not isinstance(content, dict) or "configs" not in content:
        if names_files:
            raise unusable(path, key, "files, but no `configs:`")
        return []
    return _checked(content["configs"], path, key)


def _block(text: str) -> tuple[str, bool]:
    """Return the YAML at the start of a README.md, and whether the lines around it are there."""
    first, *lines = text.lstrip().replace("\r\n", "\n").split("\n")
    if first[: len(MARK)].count("-") < len(MARK) - 1:  # a flipped bit may have changed a character
        return "", False
    end = next((number for number, line in enumerate(lines) if line.rstrip() == MARK), None)
    return "\n".join(lines[:end]), first.rstrip() == MARK and end is not None


def _checked(configs: object, path: Path, key: str) -> list[dict[str, Any]]:
    """Return the configs if each has a name, and no key that is probably another one."""
    entries = configs if isinstance(configs, list) else []
    if not entries:
        raise unusable(path, key, "no list in `configs:`")
    for entry in entries:
        if not isinstance(entry, dict) or "config_name" not in entry:
            raise unusable(path, key, "a config without `config_name`")
        for name in entry.keys() - set(KEYS):
            if near := get_close_matches(name, KEYS, 1, SIMILAR):
                raise unusable(path, key, f"`{name}` in place of `{near[0]}`")
        said = entry.get("data_files")
        for part in said if isinstance(said, list) else ():
            if isinstance(part, dict) and not {"split", "path"} <= part.keys():
                raise unusable(path, key, "an entry of `data_files` without `split` or `path`")
    return entries
