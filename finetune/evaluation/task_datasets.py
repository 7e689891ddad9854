"""Load the datasets of lm-eval's tasks: finetune chooses the files, and `datasets` reads them.

lm-eval needs `datasets.Dataset`. The card of a repository decides which files are read, and nothing else.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from finetune.core.errors import Problem, UserError
from finetune.core.folder_search import match_paths
from finetune.data import dataset_folders, read_limits
from finetune.data.hub_datasets import packaged_readers, splits
from finetune.data.readers import kind

KEY = "eval.tasks"
# Readers of `datasets` by the suffix of a file
LOADERS = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow",
    ".txt": "text",
}  # fmt: skip
HUB_FILE = re.compile(r"hf://datasets/(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)/(?P<path>.+)")
ODD = re.compile(r"[*?\[\]]|::")  # `datasets` would look for other files
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S")  # fsspec takes `file:/` for an address


def as_datasets(
    files: dict[str, list[Path]], key: str, *, texts: bool = False, features: Any = None
) -> dict[str, Any]:
    """Return the rows of files as `datasets.Dataset`, by split, for lm-eval.

    Args:
        texts: take texts of a CSV file such as "NA" for texts, and not for missing values.
        features: types of the columns, which the task names.

    Raises:
        UserError: the files have several types, a column is not plain, or a file is damaged or too large
            (exit 2).
    """
    import datasets

    from finetune.data import plain_downloads

    kinds = sorted({kind(path) for paths in files.values() for path in paths})
    readers = {LOADERS.get(suffix) for suffix in kinds}
    if len(readers) != 1 or None in readers:
        raise UserError(
            Problem(
                "finetune can't evaluate on these files",
                key,
                found=", ".join(kinds) or "no data files",
                expected=f"files of one type: {', '.join(LOADERS)}",
                fix="name the files in dataset_kwargs.data_files",
                code="eval-task",
            )
        )
    odd = [str(path) for paths in files.values() for path in paths if ODD.search(str(path))]
    if odd:
        raise UserError(_of_a_task("files with signs that `datasets` takes for a pattern", odd[0]))
    reader = str(readers.pop())
    options: dict[str, Any] = {"na_filter": False} if texts and reader == "csv" else {}
    named = {split: [str(path) for path in paths] for split, paths in files.items()}
    try:
        builder = datasets.load_dataset_builder(reader, data_files=named, features=features, **options)
        plain_downloads.prepare(builder, read_limits.DEFAULT)
        check_types(builder.info.features, key)
        made: Any = builder.as_dataset()
    except (UserError, MemoryError):
        raise
    except Exception as error:  # the readers raise many types for damaged files
        raise UserError(_unreadable(files, key, error)) from error
    return dict(made)


def _unreadable(files: dict[str, list[Path]], key: str, error: Exception) -> Problem:
    cause = error.__cause__ or error
    return Problem(
        "`datasets` can't read the files of a task",
        key,
        where=", ".join(str(path) for paths in files.values() for path in paths[:3])[:500],
        found=f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}",
        fix="correct the files, or remove the task",
        code="data-format",
    )


def load_for_task(path: str, subset: str | None, options: dict[str, Any]) -> Any:
    """Load a dataset as `datasets.load_dataset` does, for a task of lm-eval.

    Args:
        path: the id of a dataset, or a reader of `datasets` with the `data_files` of the task.
        options: `split`, `revision`, `data_files`, `data_dir` and `features`.

    Raises:
        UserError: as `rows`, or the task has other options or files at other addresses (exit 2).
    """
    import datasets

    split, revision = options.pop("split", None), options.pop("revision", None)
    named, inside = options.pop("data_files", None), options.pop("data_dir", None)
    features = options.pop("features", None)
    if options:
        raise UserError(_of_a_task("options that finetune does not know", ", ".join(sorted(options))))
    if path in packaged_readers():
        files = {name: _files_of_task(given) for name, given in _by_split(named).items()}
    else:
        files = splits(path, KEY, lambda folder: _chosen(folder, subset, named, inside), revision)
    made: Any = as_datasets({name: paths for name, paths in files.items() if paths}, KEY, features=features)
    return datasets.DatasetDict(made) if split is None else made[split]


def _chosen(folder: Path, subset: str | None, named: Any, inside: str | None) -> dataset_folders.Splits:
    """Return the files of an outline that the options of `datasets.load_dataset` name, by split."""
    base = folder / (inside or "")
    if not base.resolve().is_relative_to(folder.resolve()) or not base.is_dir():
        raise UserError(_of_a_task("a folder that the dataset does not have", str(inside)))
    if named is None:
        return dataset_folders.all_splits(base, KEY, subset, on_hub=True)
    found: dataset_folders.Splits = {}
    for split, patterns in _by_split(named).items():
        for pattern in patterns:
            matches = match_paths(pattern, base, KEY) if dataset_folders.stays_below(pattern) else []
            files = [path for path in matches if path.is_file()]
            if not files:
                raise UserError(_of_a_task("a file that the dataset does not have", pattern))
            found[split] = list(dict.fromkeys([*found.get(split, []), *files]))
    return found


def _by_split(named: Any) -> dict[str, list[str]]:
    """Return `data_files` of `datasets.load_dataset` by split."""
    by_split = named if isinstance(named, dict) else {"train": named}
    return {
        str(split): [str(one) for one in (given if isinstance(given, list | tuple) else [given])]
        for split, given in by_split.items()
    }


def _files_of_task(addresses: list[str]) -> list[Path]:
    """Return local files, and the files of `hf://` addresses at one commit."""
    found = []
    for address in addresses:
        match = HUB_FILE.fullmatch(address)
        if match is None and SCHEME.match(address):
            raise UserError(_of_a_task("a file at an address", address))
        if match is None:
            found.append(Path(address))
            continue
        (paths,) = splits(match["name"], KEY, partial(_chosen_file, match["path"])).values()
        found += paths
    return found


def _chosen_file(path: str, folder: Path) -> dataset_folders.Splits:
    return _chosen(folder, None, path, None)


def _of_a_task(what: str, found: str) -> Problem:
    return Problem(
        f"a task of lm-eval names {what}",
        KEY,
        found=found[:200],
        expected="files in the repository of its dataset",
        fix="remove the task, or run it with `lm_eval`",
        code="eval-task",
    )


def check_types(features: dict[str, Any] | None, key: str) -> None:
    """Refuse columns of images, audio and video, whose decoders download from addresses (exit 2)."""
    for column, feature in (features or {}).items():
        if not _is_plain(feature):
            raise UserError(
                Problem(
                    f"finetune can't evaluate on the column {column}",
                    key,
                    found=type(feature).__name__,
                    expected="text, numbers or booleans",
                    fix="use a dataset without images, audio or video",
                    code="eval-task",
                )
            )


def _is_plain(feature: object) -> bool:
    from datasets import ClassLabel, Value
    from datasets.features import Json

    if isinstance(feature, dict | list):
        return all(map(_is_plain, feature.values() if isinstance(feature, dict) else feature))
    inner = getattr(feature, "feature", None)  # the type inside a list
    return isinstance(feature, Value | ClassLabel | Json) if inner is None else _is_plain(inner)
