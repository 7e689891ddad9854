"""Choose the files of a folder to read, by the rules of `datasets`.

- `save_to_disk` lists the files of a dataset in state.json, and the splits of a `DatasetDict` in
  dataset_dict.json.
- The README.md of a cloned dataset repository can list the files of each split under `configs:`.
- In other folders, the names of files and subfolders determine the split. Examples are `test.jsonl`, `dev/`
  and `data/train-00000-of-00002.parquet`.

finetune reads one split: the training split for `data.name`, the validation split for `data.validation`.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeAlias

from finetune.core import regular_files
from finetune.core.errors import Problem, UserError, first_line, nearest
from finetune.core.folder_search import Search, match_paths
from finetune.data import dataset_cards
from finetune.data.readers import can_read

Splits: TypeAlias = "dict[str, list[Path]]"

DEFAULT = "default"  # the name of the config of a dataset that has only one
NO_SPLIT = ""  # the split of a file whose name contains no split
# Files that belong to no split
NOT_LISTED = "not part of the saved dataset"
OTHER_CONFIGS = "other configs of README.md"
BELOW = "in folders below"
OF_RUNS = "of finetune's runs"
NEVER_READ = (NOT_LISTED, OTHER_CONFIGS, BELOW, OF_RUNS)
RECIPE_OF_RUN = "recipe.resolved.yaml"
# A copy of datasets.data_files.SPLIT_KEYWORDS. A test compares them.
KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_WORD = {
    split: re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:[-._ 0-9]|$)", re.IGNORECASE)
    for split, words in KEYWORDS.items()
}
_MARKS = re.compile(r"[*?\[]")
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}.*\..*")
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\..+)")
_MAP_CACHE = re.compile(r"(cache-|tmp).*\.arrow")
STATE, INFO, DICT = "state.json", "dataset_info.json", "dataset_dict.json"
OF_SAVED = re.compile(r"_(fingerprint|format_|output_all|split|data_files|indices)")  # keys of state.json
BOOKKEEPING = (STATE, INFO, DICT, "dataset_infos.json", "config.json")  # datasets.data_files.FILES_TO_IGNORE
MOST_OF_CARD = 200_000  # entries of folders that the patterns of a README.md look at together
DEEPEST = 8  # maximum depth of nested folders


class FolderFiles(NamedTuple):
    """The files of a folder: those to read and all other data files."""

    read: list[Path]
    others: Splits
    """Files that are not read, by split or by the reason why they have no split."""


def choose_files(
    folder: Path, key: str, split: str | None = None, config: str | None = None, *, on_hub: bool = False
) -> FolderFiles:
    """Choose the files of a folder that a recipe key reads.

    Args:
        split: the split to read. `None` and `train`: by the recipe key.
        config: a config in README.md, or a subfolder.
        on_hub: whether the folder is the outline of a repository. See `_splits_on_hub`.

    Raises:
        UserError: a manifest names missing files, or the folder has no such config or split (exit 2).
    """
    splits = _with_standard_names(_splits_of(folder, key, config, on_hub))
    if split in (None, "train"):
        return _choose_split(folder, key, splits)
    return _choose_named(folder, splits, split)


def all_splits(folder: Path, key: str, config: str | None = None, *, on_hub: bool = False) -> Splits:
    """Return all splits of a folder with their files, for evaluation tasks that name their own splits.

    Args:
        config: a config in README.md.

    Raises:
        UserError: a manifest names missing files, or no config of README.md is chosen (exit 2).
    """
    splits = _splits_of(folder, key, config, on_hub)
    return {split or "train": paths for split, paths in splits.items() if split not in NEVER_READ and paths}


def _splits_of(folder: Path, key: str, config: str | None = None, on_hub: bool = False) -> Splits:
    """Return the splits of a folder from its manifests, or else from the names of its files."""
    splits = _splits_of_dict(folder, key)
    if splits is None:
        splits = _splits_of_readme(folder, key, config)
    if splits is None and config not in (None, DEFAULT):
        if not stays_below(config) or not (folder / str(config)).is_dir():
            raise _no_config(folder, key, str(config), [])
        folder = folder / str(config)
    by_name = _splits_on_hub if on_hub else _splits_by_name
    return by_name(folder, key) if splits is None else splits


def _no_config(folder: Path, key: str, config: str, found: Iterable[str]) -> UserError:
    return UserError(
        Problem(
            f"the dataset {folder} has no config {config}",
            key,
            found=", ".join(found) or "no `configs:` in README.md",
            fix="use the name of a config in README.md, or of a folder",
            code="data-not-found",
        )
    )


def _choose_named(folder: Path, splits: Splits, split: str) -> FolderFiles:
    """Choose the files of the split that the recipe names."""
    named = {name: paths for name, paths in splits.items() if paths and name not in NEVER_READ}
    chosen = split if split in named else _standard_name(split)
    if chosen not in named:
        found = ", ".join(name or "files without a split" for name in named)
        near = nearest(split, filter(None, named))
        raise UserError(
            Problem(
                f"the folder {folder} has no split {split}",
                "data.split",
                found=found,
                fix=f"data.split: {near}" if near else "use one of these splits, or name a file",
                code="data-not-found",
            )
        )
    return FolderFiles(named[chosen], {name: paths for name, paths in splits.items() if name != chosen})


def _choose_split(folder: Path, key: str, splits: Splits) -> FolderFiles:
    splits = {split: paths for split, paths in splits.items() if paths}
    wanted = ("validation", "test", NO_SPLIT) if key == "data.validation" else ("train", NO_SPLIT)
    named = [split for split in splits if split not in NEVER_READ]
    if key == "data.validation" and len(named) == 1:
        wanted = tuple(named)
    chosen = next((split for split in wanted if split in splits), None)
    if chosen is None and named:
        kind = "validation" if key == "data.validation" else "training"
        raise UserError(
            Problem(
                f"the folder {folder} has no {kind} split",
                key,
                found=", ".join(f"{split} ({count_files(splits[split])})" for split in named),
                fix=f"{key}: {as_name(splits[named[0]])}",
                code="data-not-found",
            )
        )
    if chosen == NO_SPLIT:
        _check_one_kind(folder, key, splits[chosen])
    others = {split: paths for split, paths in splits.items() if split != chosen}
    return FolderFiles(splits[chosen] if chosen is not None else [], others)


def _check_one_kind(folder: Path, key: str, paths: list[Path]) -> None:
    """Raise a UserError if subfolders alone hold the files, and the files have several types (exit 2).

    Such a folder is probably a project, not a dataset.
    """
    kinds = Counter(path.suffix for path in paths)
    if len(kinds) == 1 or any(path.parent == folder for path in paths):
        return
    most = kinds.most_common(1)[0][0]
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    first = next(path for path in paths if path.suffix == most)
    raise UserError(
        Problem(
            f"the folders in {folder} have files of several types",
            key,
            found=found,
            fix=f"{key}: {first.parent}/*{most}",
            code="data-format",
        )
    )


def count_files(paths: list[Path]) -> str:
    return f"{len(paths)} file{'s' * (len(paths) != 1)}"


def as_name(paths: list[Path]) -> str:
    """Return a recipe value for these files: a file, a folder, a pattern or a list."""
    first, folder = paths[0], paths[0].parent
    if len(paths) == 1:
        return str(first)
    if all(path.parent == folder for path in paths):
        if sorted(path for path in folder.iterdir() if _is_data(path)) == sorted(paths):
            return str(folder)
        if shard := _SHARD.fullmatch(first.name):
            pattern = f"{glob.escape(str(folder / shard['split']))}-*{first.suffix}"
            if sorted(glob.glob(pattern)) == sorted(map(str, paths)):
                return pattern
    return f"[{', '.join(map(str, paths))}]"


def missing_shards(paths: list[Path]) -> list[Path]:
    """Return the shards that are missing by the names of the others, such as train-00001-of-00003.parquet."""
    found: dict[tuple[Path, str, int, str], set[int]] = {}
    for path in paths:
        if match := _NUMBERED.fullmatch(path.name):
            name, number, total, suffix = match.groups()
            found.setdefault((path.parent, name, int(total), suffix), set()).add(int(number))
    return [
        folder / f"{name}-{number:05}-of-{total:05}{suffix}"
        for (folder, name, total, suffix), numbers in found.items()
        for number in range(total)
        if number not in numbers
    ]


def without_runs(matches: list[Path], pattern: str) -> list[Path]:
    """Return the matches of a pattern without files in folders of finetune's runs.

    A run in a folder of the data would read its own files when it resumes. A folder that the pattern names
    without `*`, and files with a given name, stay.
    """
    parts = Path(pattern).parts
    named = next(number for number, part in enumerate(parts) if _MARKS.search(part))
    if not _MARKS.search(parts[-1]):
        return matches
    above = Path(*parts[:named]) if named else Path()
    found = {
        folder: (folder / RECIPE_OF_RUN).exists() for path in matches for folder in (path, *path.parents)
    }
    outer = {above, *above.parents}
    return [
        path for path in matches if not any(found[one] for one in (path, *path.parents) if one not in outer)
    ]


def _listed_in_state(folder: Path, key: str) -> list[Path] | None:
    """Return the files of a dataset that `save_to_disk` wrote, or `None` if the folder is no such dataset."""
    state = _json_in(folder / STATE, key)
    if state is None or not any(map(OF_SAVED.match, state)):
        return None
    listed = state.get("_data_files")
    if not isinstance(listed, list):
        raise dataset_cards.unusable(folder / STATE, key, "no list of `_data_files`")
    # Written by datasets 1; later versions ignore the indices and would read other rows
    if state.get("_indices_data_files"):
        raise UserError(
            Problem(
                "datasets 1 saved this dataset with selected rows",
                key,
                where=str(folder / STATE),
                fix="load it with datasets<2, call flatten_indices(), and save it again",
                why="newer versions ignore the selection",
                code="data-format",
            )
        )
    names = [str(entry.get("filename")) if isinstance(entry, dict) else str(entry) for entry in listed]
    missing = [name for name in names if "/" in name or not os.path.isfile(folder / name)]
    if missing:
        raise UserError(
            Problem(
                f"{len(missing)} of the {len(names)} files of this saved dataset are missing",
                key,
                where=str(folder / STATE),
                found=f"no {', '.join(missing[:5])}",
                fix="save the dataset again with save_to_disk",
                code="data-not-found",
            )
        )
    return [folder / name for name in names]


def _splits_of_dict(folder: Path, key: str) -> Splits | None:
    """Return the splits of a `DatasetDict` that `save_to_disk` wrote, or `None` if the folder is not one."""
    content = _json_in(folder / DICT, key)
    if content is None:
        return None
    names = content.get("splits")
    if not isinstance(names, list):
        raise dataset_cards.unusable(folder / DICT, key, "no list of `splits`")
    found = {}
    for name in dict.fromkeys(map(str, names)):
        is_inside = "/" not in name and name not in (".", "..")
        listed = _listed_in_state(folder / name, key) if is_inside else None
        if listed is None:
            raise UserError(
                Problem(
                    f"the split {name} of this saved dataset is missing",
                    key,
                    where=str(folder / DICT),
                    found=f"no {folder / name}",
                    fix="save the dataset again with save_to_disk",
                    code="data-not-found",
                )
            )
        found[name] = listed
        entries = set(Search(key).entries(folder / name)) - set(listed)
        unlisted = sorted(path for path in entries if _is_data(path))
        found[NOT_LISTED] = [*found.get(NOT_LISTED, []), *unlisted]
    return found


def _with_standard_names(splits: Splits) -> Splits:
    """Rename splits to their standard names, such as `dev` to `validation`.

    If several names mean the same split, only the first name in KEYWORDS is renamed.
    """
    standard_names = {}
    for standard, words in KEYWORDS.items():
        names = [name for name in splits if name.lower() in words]
        if names:
            first = min(names, key=lambda name: (words.index(name.lower()), name != name.lower()))
            standard_names[first] = standard
    return {standard_names.get(name, name): paths for name, paths in splits.items()}


def _splits_of_readme(folder: Path, key: str, config: str | None) -> Splits | None:
    """Return the splits under `configs:` in README.md, or `None` if it has no configs."""
    configs = dataset_cards.configs_of(folder, key)
    if not configs:
        return None
    search, missing = Search(key, MOST_OF_CARD), dict[str, list[str]]()
    by_config = {
        name: _splits_of_config(folder, entry, search, missing.setdefault(name, []))
        for name, entry in configs.items()
    }
    by_config = {name: splits for name, splits in by_config.items() if any(splits.values())}
    if not by_config:
        raise _no_files(folder, key, list(chain.from_iterable(missing.values())))
    if config is not None and config not in by_config:
        raise _no_config(folder, key, config, by_config)
    default = [name for name in by_config if name == DEFAULT or configs[name].get("default") is True]
    default = [config] if config in by_config else default
    if not default and len(by_config) > 1:
        first = next(iter(by_config.values()))
        raise UserError(
            Problem(
                f"the dataset {folder} has several configs, and none is the default",
                key,
                where=str(folder / "README.md"),
                found=", ".join(by_config),
                fix=f"{key}: {as_name(first.get('train') or _all(first))}",
                code="data-not-found",
            )
        )
    chosen = next(iter(default or by_config))
    dataset_cards.check_options(configs[chosen], folder, key)
    if missing[chosen]:
        raise _no_files(folder, key, missing[chosen])
    splits = by_config.pop(chosen)
    others = [path for found in by_config.values() for path in _all(found) if path not in _all(splits)]
    return {**splits, OTHER_CONFIGS: list(dict.fromkeys(others))}


def _no_files(folder: Path, key: str, patterns: list[str]) -> UserError:
    card = next(path for path in (folder / name for name in dataset_cards.CARDS) if path.exists())
    return dataset_cards.unusable(card, key, f"no data file for {', '.join(patterns[:5])}")


def _splits_of_config(folder: Path, config: dict[str, Any], search: Search, missing: list[str]) -> Splits:
    """Return the files of a config by split. Add the paths and patterns without a file to `missing`."""
    inside = str(config.get("data_dir") or "")
    base, said = folder / inside, config.get("data_files")
    if not stays_below(inside) or not base.is_dir():
        missing.append(inside)
        return {}
    if not said:
        named = _splits_by_name(base, "data.name") if inside else {}
        missing += [] if any(named.values()) else [inside or "the whole folder"]
        return {split: paths for split, paths in named.items() if split not in NEVER_READ}
    entries = said if isinstance(said, list) else [said]
    found: Splits = {}
    for entry in entries:
        split = str(entry.get("split")) if isinstance(entry, dict) else "train"
        patterns = entry.get("path") if isinstance(entry, dict) else entry
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            matches = match_paths(str(pattern), base, search=search) if stays_below(pattern) else []
            files = [path for path in matches if _is_data(path)]
            missing += [] if files else [str(pattern)]
            found[split] = list(dict.fromkeys([*found.get(split, []), *files]))
    return found


def stays_below(path: object) -> bool:
    """Return whether a path or pattern of a card stays inside its folder."""
    parts = PurePosixPath(str(path)).parts
    return not PurePosixPath(str(path)).is_absolute() and ".." not in parts


def _splits_by_name(folder: Path, key: str) -> Splits:
    """Return the splits by file names.

    A file in a subfolder counts only if no file above has the same split.
    """
    found: Splits = {}
    for path, split in _labeled(folder, folder, Search(key)).items():
        found.setdefault(split, []).append(path)
    top = {split: [path for path in paths if path.parent == folder] for split, paths in found.items()}
    kept = {split: top[split] or paths for split, paths in found.items()}
    by_folder = any(_split_of(folder, path.parent / "-") == "train" for path in found.get("train", ()))
    if top.get(NO_SPLIT) and not (top.get("train") or by_folder):
        kept.pop("train", None)  # for example old/train.jsonl
    read = set(_all(kept))
    return {**kept, BELOW: [path for path in _all(found) if path not in read]}


def _splits_on_hub(folder: Path, key: str) -> Splits:
    """Return the splits by names as `datasets` does: by shards, else by folders, else by names of files.

    Files in folders below count as files above do.
    """
    labeled = _labeled(folder, folder, Search(key))
    found = [path for path, split in labeled.items() if split not in NEVER_READ]
    for label in (_split_of_shard, _split_of_folders, _split_of_name):
        splits = {path: label(folder, path) for path in found}
        if any(splits.values()):
            kept: Splits = {}
            for path, split in splits.items():
                kept.setdefault(split or BELOW, []).append(path)
            return kept
    return {NO_SPLIT: found}


def _split_of_shard(root: Path, path: Path) -> str:
    *folders, name = path.relative_to(root).parts
    shard = _SHARD.fullmatch(name)
    return _standard_name(shard["split"]) if folders == ["data"] and shard else ""


def _split_of_folders(root: Path, path: Path) -> str:
    return _split_of(root, path.parent / "-") if path.parent != root else ""


def _split_of_name(root: Path, path: Path) -> str:
    return _split_of(root, root / path.name)


def _labeled(folder: Path, root: Path, search: Search) -> dict[Path, str]:
    """Return each data file in a folder and its subfolders, with its split or the reason why it has none."""
    if not search.is_new(folder):
        return {}
    found, names = {}, _listed_in_state(folder, search.key)
    listed = None if names is None else set(names)
    for entry in search.entries(folder):
        if entry.name.startswith((".", "__")):
            continue
        if os.path.isdir(entry):
            deep = len(entry.relative_to(root).parts) > DEEPEST
            below = {} if deep else _labeled(entry, root, search)
            found |= dict.fromkeys(below, OF_RUNS) if (entry / RECIPE_OF_RUN).exists() else below
        elif _is_data(entry):
            unlisted = _is_map_cache(entry) if listed is None else entry not in listed
            found[entry] = NOT_LISTED if unlisted else _split_of(root, entry)
    return found


def _split_of(root: Path, path: Path) -> str:
    """Return the split of a file, from its path relative to the folder."""
    *folders, name = path.relative_to(root).parts
    shard = _SHARD.fullmatch(name)
    if folders == ["data"] and shard:
        return _standard_name(shard["split"])
    for names in (folders, [name]):
        for split, word in _SPLIT_WORD.items():
            if any(word.search(part) for part in names):
                return split
    return NO_SPLIT


def _standard_name(split: str) -> str:
    """Return the standard name of a split, such as `validation` for `dev`, or the name itself."""
    return next((standard for standard, words in KEYWORDS.items() if split.lower() in words), split)


def _is_data(path: Path) -> bool:
    return has_data_suffix(path) and os.path.isfile(path)


def has_data_suffix(path: Path) -> bool:
    return can_read(path.with_suffix(path.suffix.lower())) and path.name not in BOOKKEEPING


def _is_map_cache(path: Path) -> bool:
    """Return whether `Dataset.map` or `Dataset.filter` wrote the file next to its dataset."""
    beside = path.parent
    return bool(_MAP_CACHE.fullmatch(path.name)) and ((beside / STATE).exists() or (beside / INFO).exists())


def _all(splits: Splits) -> list[Path]:
    return list(chain.from_iterable(splits.values()))


def _json_in(path: Path, key: str) -> dict[str, Any] | None:
    """Return the content of a manifest, or `None` if there is none.

    Raises:
        UserError: the manifest is damaged, not a regular file, or too large (exit 2).
    """
    if not path.exists():
        return None
    try:
        content = regular_files.read_json(path)
    except (OSError, ValueError) as error:
        raise dataset_cards.unusable(path, key, first_line(error)) from None
    if not isinstance(content, dict):
        raise dataset_cards.unusable(path, key, "no JSON object")
    return content
