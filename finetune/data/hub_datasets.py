"""Load a dataset from its Hub repository only, with a reader of plain data.

The card of a repository can name files at any address. The names of its files choose the reader. The reader
of .tar files opens members such as .pth with `torch.load`. So finetune checks the card before `datasets`
resolves a file, and checks the reader before it opens a file.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from finetune.core import foreign_yaml, regular_files, strict_json
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.formatting import as_yaml
from finetune.data import read_limits
from finetune.data.dataset_cards import CARDS
from finetune.hub import client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from datasets import DatasetBuilder

    from finetune.recipe.schema import Source

# Allowed readers of `datasets`; `cache` reads a dataset that was prepared before
READERS = ("arrow", "csv", "json", "parquet", "text", "cache")
# Options of readers that a card may set: they skip no row and rewrite no text.
PLAIN_OPTIONS = {
    "name", "version", "description", "data_dir", "data_files", "features", "na_filter", "names",
    "column_names", "quoting", "doublequote", "encoding", "field", "sample_by", "newlines_in_values",
}  # fmt: skip
ONE_CHARACTER = {"sep", "delimiter", "quotechar", "escapechar"}  # pandas takes longer ones for patterns
MOST_COLUMNS = 1000  # that a card may name for a CSV file
# Encodings that Python decodes in linear time
ENCODING = re.compile(
    r"utf[-_]?8([-_]sig)?|utf[-_]?(16|32)([-_]?[lb]e)?|(us[-_])?ascii|latin[-_]?1|iso[-_]?8859[-_]\d{1,2}"
    r"|(cp|windows[-_]?)\d{3,4}|gb(k|2312|18030)|big5|shift[-_]?jis|euc[-_](jp|kr)|koi8[-_][ru]",
    re.IGNORECASE,
)
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S")  # `datasets` takes `file:/` for an address
HUB_FILE = re.compile(r"hf://datasets/(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)/(?P<path>.+)")
LONGEST_NAME = 193  # in characters: 96 each for owner and name, and a slash


def load(source: Source, *, key: str = "data.name", **options: Any) -> Any:
    """Load one split of a Hub dataset, or all of its splits by name.

    Args:
        source: its name, subset, revision, split and limits.
        key: the key that names the dataset, for errors.
        options: `data_files` and `data_dir` in the repository.

    Raises:
        UserError: the name is not valid, files are outside the repository, the reader is not allowed, a file
            is too large, or the dataset has no such subset or split (exit 2). The Hub can't be reached, or
            gives an odd answer (exit 3).
    """
    check_name(source.name)
    try:
        return _loaded(source, options)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # the Hub's library does not check the types in the Hub's answers
        title = " ".join(filter(None, (source.name, source.subset, source.split)))
        raise _not_loaded(title, key, error) from error


def _loaded(source: Source, options: dict[str, Any]) -> Any:
    from finetune.data import plain_downloads

    name = source.name
    make = _maker(name, source.subset, source.revision, options)
    # Otherwise pandas takes texts of a CSV file such as "NA" and "null" for missing values
    texts = partial(make, na_filter=False)
    try:
        builder = make()
    except ValueError as error:  # without a network, the cache knows a CSV dataset by this option
        try:
            builder = texts()
        except (ValueError, TypeError):  # readers of other formats do not know the option
            raise error from None
    check_builder(builder, name)
    if type(builder).__module__.endswith(".csv"):
        builder = texts()
    if not type(builder).__module__.endswith(".cache"):
        # The types in a card can expand each row without limit. The readers find the types of the data
        config: Any = builder.config
        builder.info.features = config.features = None
    plain_downloads.prepare(builder, read_limits.of_source(source))
    return builder.as_dataset(split=source.split)


def _maker(
    name: str, subset: str | None, revision: str | None, options: dict[str, Any]
) -> Callable[..., DatasetBuilder]:
    """Return the function that makes the builder of a dataset, after its card and the options are checked."""
    import datasets

    _check_inside(options, name)
    _check_inside(_configs_of_card(name, revision), name)
    given = {key: value for key, value in options.items() if value is not None}
    return partial(datasets.load_dataset_builder, name, subset, revision=revision, **given)


def load_for_task(path: str, subset: str | None, options: dict[str, Any]) -> Any:
    """Load a dataset as `datasets.load_dataset` does, for a task of lm-eval.

    Args:
        path: the id of a dataset, or a reader of `datasets` with the `data_files` of the task.
        options: `split`, `revision`, and options of `datasets.load_dataset_builder`.

    Raises:
        UserError: as `load`, or the dataset is a folder (exit 2).
    """
    from finetune.data import plain_downloads

    split, revision = options.pop("split", None), options.pop("revision", None)
    try:
        builder = _builder_of_task(path, subset, revision, options)
        check_types(builder.info.features, path, "eval.tasks")
        plain_downloads.prepare(builder, read_limits.DEFAULT)
        check_types(builder.info.features, path, "eval.tasks")
    except UserError as error:
        problems = (replace(one, key="eval.tasks") for one in error.problems)
        raise UserError(*problems, code=error.code) from None
    return builder.as_dataset(split=split)


def check_types(features: dict[str, Any] | None, name: str, key: str) -> None:
    """Refuse columns of images, audio and video, and lists of a fixed length (exit 2).

    Decoders of images download from addresses. A list of a fixed length takes memory in each row.
    """
    for column, feature in (features or {}).items():
        if not _is_plain(feature):
            raise UserError(
                Problem(
                    f"finetune can't evaluate on the column {column} of {name}",
                    key,
                    found=type(feature).__name__,
                    expected="text, numbers or booleans",
                    fix="use a dataset without images, audio, video and lists of a fixed length",
                    code="eval-task",
                )
            )


def _is_plain(feature: object) -> bool:
    from datasets import ClassLabel, Value
    from datasets.features import Json

    if getattr(feature, "length", -1) >= 0:
        return False
    if isinstance(feature, dict | list):
        return all(map(_is_plain, feature.values() if isinstance(feature, dict) else feature))
    inner = getattr(feature, "feature", None)  # the type inside a list
    return isinstance(feature, Value | ClassLabel | Json) if inner is None else _is_plain(inner)


def _builder_of_task(
    path: str, subset: str | None, revision: str | None, options: dict[str, Any]
) -> DatasetBuilder:
    import datasets

    if path in packaged_readers():
        if "data_files" in options:
            options["data_files"] = _at_one_commit(options["data_files"], revision or "main")
        builder = datasets.load_dataset_builder(path, subset, revision=revision, **options)
        _check_reader(builder, path)
        return builder
    check_name(path)
    revision = client.dataset_commit(path, revision or "main")  # for the card and the files
    builder = _maker(path, subset, revision, options)()
    check_builder(builder, path)
    return builder


def _at_one_commit(files: Any, revision: str) -> Any:
    """Return the `data_files` of a task, with the commit in each address of the Hub.

    Raises:
        UserError: another address (exit 2).
    """
    if isinstance(files, dict):
        return {split: _at_one_commit(named, revision) for split, named in files.items()}
    if isinstance(files, list | tuple):
        return [_at_one_commit(file, revision) for file in files]
    file = HUB_FILE.fullmatch(str(files))
    if file is None:
        _check_inside(str(files).removeprefix("/"), "of a task")
        return files
    _check_inside(file["path"], file["name"])
    commit = client.dataset_commit(file["name"], revision)
    return f"hf://datasets/{file['name']}@{quote(commit, safe='')}/{file['path']}"


def _not_loaded(title: str, key: str, error: Exception) -> UserError:
    """Return the error for a Hub dataset that cannot be loaded: network (exit 3) or wrong input (exit 2)."""
    from datasets.exceptions import DatasetsError

    # The cause of a DatasetGenerationError says which row cannot be read
    cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
    said = " ".join(str(cause).split())[:300]  # the following lines list the choices
    odd_answer = client.is_odd_answer(error) and not isinstance(error, DatasetsError)
    if odd_answer or isinstance(cause, (OSError, client.http_error())) or "Couldn't find cache" in said:
        code, fix = Exit.ENVIRONMENT, "check the name, the revision and the network. Without a network: set"
        fix += " data.revision to a commit, and run finetune data RECIPE --prepare DIR elsewhere"
    else:
        code, fix = Exit.INPUT, "set data.subset and data.split to a subset and a split of the dataset"
        if "scripts" in said:
            fix = "data.revision: refs/convert/parquet"
    return UserError(
        Problem(
            "finetune can't load the dataset from the Hub",
            key,
            found=f"{title}: {said}",
            fix=fix,
            code="hub",
        ),
        code=code,
    )


def check_name(name: str, key: str = "data.name", where: str = "") -> None:
    """Raise a UserError for names of readers in `datasets`, addresses and storage buckets (exit 2)."""
    if name in packaged_readers():  # `datasets` would read the files of the working directory
        raise UserError(
            Problem(
                f"{name} is a reader of `datasets`, not a dataset",
                key,
                where=where,
                found=name,
                expected="a file, a folder or a Hub id",
                fix="name a file, such as data/train.jsonl",
                code="data-not-found",
            )
        )
    if not NAME.fullmatch(name) or ".." in name or len(name) > LONGEST_NAME or name.startswith("buckets/"):
        raise UserError(
            Problem(
                "this is not the id of a dataset on the Hub",
                key,
                where=where,
                found=name[:200],
                expected="an id such as owner/name",
                fix="name a file, such as data/train.jsonl, or a Hub id such as owner/name",
                code="data-not-found",
            )
        )


@cache
def packaged_readers() -> frozenset[str]:
    """Return the names of the readers in `datasets` without importing it."""
    spec = find_spec("datasets")
    places = (spec.submodule_search_locations if spec else None) or ()
    folders = [folder for place in places for folder in Path(place, "packaged_modules").iterdir()]
    return frozenset(folder.name for folder in folders if folder.is_dir())


def check_builder(builder: DatasetBuilder, name: str) -> None:
    """Raise a UserError for readers of pickles, archives or databases, and for outside files (exit 2).

    A card can set options of the reader, such as rows to skip. Most of them are an error, too.
    """
    reader = _check_reader(builder, name)
    _check_cache(builder, name)
    files = [str(path) for paths in (builder.config.data_files or {}).values() for path in paths]
    outside = [path for path in files if "::" in path or not path.startswith(f"hf://datasets/{name}@")]
    if outside and not reader.endswith(".cache"):
        raise UserError(_outside(name, ", ".join(outside)[:200]))
    if options := {**_set_options(builder.config), **_odd_options(builder.config)}:
        raise UserError(
            Problem(
                f"finetune does not allow these options of the reader of the dataset {name}",
                "data.name",
                found=as_yaml(options)[:200],
                expected=f"{', '.join(sorted(ONE_CHARACTER))} of one character, or a usual encoding",
                fix="download the dataset's files, and name them in data.name",
                why="the dataset card sets them; they can skip rows, change texts or never end",
                code="unsafe-file",
            )
        )


def _check_cache(builder: DatasetBuilder, name: str) -> None:
    """Check that the version in a card, which is a part of the path, leads out of no cache (exit 2)."""
    from datasets import config

    root, cache = (os.path.realpath(path) for path in (config.HF_DATASETS_CACHE, builder.cache_dir))
    if ".." in Path(builder.cache_dir).parts or not Path(cache).is_relative_to(root):
        raise UserError(_outside(name, f"version: {builder.config.version}"[:200]))


def _check_reader(builder: DatasetBuilder, name: str) -> str:
    """Return the module of a dataset's reader if it is allowed (exit 2)."""
    reader = type(builder).__module__
    if reader not in [f"datasets.packaged_modules.{one}.{one}" for one in READERS]:
        raise UserError(
            Problem(
                f"finetune does not allow the reader of the dataset {name}",
                "data.name",
                found=reader.removeprefix("datasets.packaged_modules.").partition(".")[0],
                expected=", ".join(READERS[:5]),
                fix="download the dataset's plain data files",
                why="it can run code or open other files",
                code="unsafe-file",
            )
        )
    return reader


def _set_options(config: Any) -> dict[str, Any]:
    """Return the options of a reader that are neither plain nor at their default."""
    found = {}
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        is_character = isinstance(value, str) and len(value) == 1
        if field.name in PLAIN_OPTIONS or (field.name in ONE_CHARACTER and is_character):
            continue
        if value is not default and value != default:
            found[field.name] = value
    return found


def _odd_options(config: Any) -> dict[str, Any]:
    """Return an encoding that is slow, and too many names of columns."""
    encoding = getattr(config, "encoding", None)
    found = {} if encoding is None or ENCODING.fullmatch(str(encoding)) else {"encoding": encoding}
    for key in ("names", "column_names"):
        names = getattr(config, key, None)
        if isinstance(names, list) and len(names) > MOST_COLUMNS:
            found[key] = f"{len(names):,} names"
    return found


def _configs_of_card(name: str, revision: str | None) -> list[Any]:
    """Return the `configs:` of a repository's cards. The list is empty if no card can be downloaded."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    found = []
    for file in CARDS:
        try:
            path = Path(hf_hub_download(name, file, repo_type="dataset", revision=revision))
            text = _yaml_of_readme(path) if file == "README.md" else regular_files.read_text(path)
            content = foreign_yaml.read(text, file, strict_json.DEEPEST, in_python=True)
            found.append(content.get("configs") if isinstance(content, dict) else None)
        except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError):
            continue  # loading the dataset reports the reason
        except (ValueError, UserError) as error:
            raise UserError(
                Problem(
                    f"finetune can't read the dataset card of {name}",
                    "data.name",
                    where=file,
                    found=error.problems[0].what if isinstance(error, UserError) else str(error)[:200],
                    fix="name a file of the dataset, or another revision",
                    code="data-format",
                )
            ) from error
    return found


def _yaml_of_readme(path: Path) -> str:
    """Return the YAML in a README.md as `DatasetCard.load` reads it, with the line breaks of the file."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    regular_files.check_regular(path, "data.name", regular_files.limit_of(path))
    with path.open(newline="", encoding="utf-8-sig") as file:
        block = REGEX_YAML_BLOCK.search(file.read())
    return block[2] if block else ""


def _check_inside(named: object, name: str) -> None:
    """Raise a UserError for addresses, chained file systems and paths outside the repository (exit 2)."""
    for text in _texts(named):
        parts = re.split(r"[/\\]", text)
        is_address = SCHEME.match(text) or "://" in text or "::" in text
        if is_address or ".." in parts or not (parts[0] or text == ""):
            raise UserError(_outside(name, text[:200]))


def _outside(name: str, found: str) -> Problem:
    return Problem(
        f"the dataset {name} names files outside of its repository",
        "data.name",
        found=found,
        expected="paths in the repository",
        fix="download files that you trust",
        code="unsafe-file",
    )


def _texts(value: object) -> Iterator[str]:
    """Yield each text in nested values. A value that YAML aliases repeat counts once."""
    waiting, seen = [value], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict | list) and id(part) not in seen:
            seen.add(id(part))
            waiting += [*part, *part.values()] if isinstance(part, dict) else part
