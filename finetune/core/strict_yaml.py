"""Read YAML for recipes: YAML 1.2 scalars, with the position of every value.

`1e-4` is a number and `no` is a string. PyYAML reads YAML 1.1, where it is the other way round. Duplicate
keys, tags, anchors and aliases are errors, so a recipe can neither run code nor expand without limit.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from finetune.core.errors import Problem, UserError, first_line
from finetune.core.regular_files import check_regular

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
MOST_VALUES = 5_000  # of a document: several checks look at each value
LONGEST_NUMBER = 400  # characters
TWICE = "the mapping has the same key twice"
LINE = "correct this line; a key and its value look like `learning_rate: 2e-4`"
WHY = "YAML separates keys and values by a colon and a space, and sections by indentation"
ONE_VALUE = "the second value would silently replace the first"
ALONE = "each value of a recipe stands where it is used"
Keys = tuple[str, ...]

# The core schema of YAML 1.2.2, section 10.3.2: the pattern of a plain scalar, and its value
_SCALARS: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"~|null|Null|NULL|"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text, 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", "", 1))),
)


@dataclass
class Document:
    """A parsed file: its values, and their positions such as `{("adapter", "r"): "a.yaml:3:6"}`."""

    value: Any = None
    where: dict[Keys, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    values: int = 0
    """Number of values, lists and mappings."""


def parse(text: str, source: str) -> Document:
    """Parse one YAML document. Collect duplicate keys, tags and aliases in `problems`.

    Raises:
        UserError: `text` is not YAML or not UTF-8, is too large, has too many values or is nested too deeply.
    """
    if len(text) > MAX_BYTES:
        raise UserError(
            Problem(
                "the YAML is too large",
                where=source,
                found=f"{len(text):,} characters",
                expected=f"at most {MAX_BYTES:,}",
                fix="name a recipe, such as recipes/quickstart.yaml",
                why="a recipe has a few kilobytes",
                code="yaml-syntax",
            )
        )
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document = Document()
    try:
        events = iter(yaml.parse(text, Loader=loader))
        next(events)  # stream start
        if isinstance(next(events), yaml.StreamEndEvent):
            return document
        document.value = _node(events, next(events), (), document, source)
        next(events)  # document end
        if not isinstance(extra := next(events), yaml.StreamEndEvent):
            document.problems.append(
                Problem(
                    "the file has a second YAML document",
                    where=_mark(source, extra),
                    fix="remove the line `---` and all lines below it",
                    why="a recipe is one document",
                    code="yaml-syntax",
                )
            )
    except yaml.YAMLError as error:
        raise UserError(_syntax_problem(error, source)) from None
    except UnicodeEncodeError:  # bytes of a command line that are not UTF-8
        raise UserError(
            Problem(
                "the text is not UTF-8",
                where=source,
                fix="rename the file, or correct the encoding of the terminal",
                code="yaml-syntax",
            )
        ) from None
    return document


def text_of(path: pathlib.Path, what: str) -> str:
    """Return the text of a file for `parse`.

    Args:
        what: the kind of file, for the message.

    Raises:
        UserError: the file is too large or not UTF-8 (exit 2).
        OSError: the file can't be read.
    """
    if not path.is_dir():  # for a folder, the read below raises a clear OSError
        check_regular(path)
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UserError(
            Problem(
                f"the file is too large for {what}",
                where=str(path),
                found=f"{size:,} bytes",
                expected=f"at most {MAX_BYTES:,}",
                fix="name the file with the settings, not the data",
                why="such a file has a few kilobytes",
                code="yaml-syntax",
            )
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            Problem(
                f"{what} is not UTF-8",
                where=f"{path}, byte {error.start}",
                found=f"0x{error.object[error.start]:02x}",
                fix=f"save {what} as UTF-8",
                code="yaml-syntax",
            )
        ) from None


def scalar(text: str) -> Any:
    """Return the value of a plain (unquoted) scalar by the core schema of YAML 1.2."""
    if len(text) > LONGEST_NUMBER:
        return text  # Python limits the digits of integers that it reads and prints
    for pattern, convert in _SCALARS:
        if pattern.fullmatch(text):
            return convert(text)
    return text


def _node(events: Iterator[Any], event: Any, path: Keys, document: Document, source: str) -> Any:
    where = _mark(source, event)
    document.where.setdefault(path, where)
    key = ".".join(path)
    if len(path) > MAX_DEPTH:
        raise UserError(
            Problem(
                "the YAML is nested too deeply",
                where=where,
                expected=f"at most {MAX_DEPTH} levels",
                fix="remove the inner brackets or indentation",
                why="recipes have three levels of keys",
                code="yaml-syntax",
            )
        )
    document.values += 1
    if document.values > MOST_VALUES:
        raise UserError(
            Problem(
                "the YAML has too many values",
                where=where,
                expected=f"at most {MOST_VALUES:,}",
                fix="remove the values that the recipe does not need",
                why="a recipe has about a hundred values",
                code="yaml-syntax",
            )
        )
    if isinstance(event, yaml.AliasEvent):
        document.problems.append(
            Problem(
                "YAML aliases are not allowed",
                key,
                where=where,
                found=f"*{event.anchor}",
                fix="write the value itself in place of the alias",
                why=ALONE,
                code="yaml-syntax",
            )
        )
        return None
    if event.anchor:
        document.problems.append(
            Problem(
                "YAML anchors are not allowed",
                key,
                where=where,
                found=f"&{event.anchor}",
                fix=f"remove `&{event.anchor}`",
                why=ALONE,
                code="yaml-syntax",
            )
        )
    if event.tag:
        document.problems.append(
            Problem(
                "YAML tags are not allowed",
                key,
                where=where,
                found=event.tag,
                fix=f"remove `{event.tag}`",
                why="a tag can create any Python object",
                code="yaml-syntax",
            )
        )
    if isinstance(event, yaml.ScalarEvent):
        return scalar(event.value) if event.implicit[0] else event.value
    if isinstance(event, yaml.SequenceStartEvent):
        return _sequence(events, path, document, source)
    return _mapping(events, path, document, source)


def _sequence(events: Iterator[Any], path: Keys, document: Document, source: str) -> list[Any]:
    items: list[Any] = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        items.append(_node(events, event, (*path, str(len(items))), document, source))
    return items


def _mapping(events: Iterator[Any], path: Keys, document: Document, source: str) -> dict[str, Any]:
    items: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        where = _mark(source, event)
        name = event.value if isinstance(event, yaml.ScalarEvent) else None
        if name is None:
            document.problems.append(
                Problem(
                    "a list or a mapping can't be a key",
                    ".".join(path),
                    where=where,
                    found="a list" if isinstance(event, yaml.SequenceStartEvent) else "a mapping",
                    expected="a word",
                    fix='write a word, or put the key in quotes: "[a, b]": 1',
                    why="keys of recipes are strings",
                    code="yaml-syntax",
                )
            )
            name = str(_node(events, event, (*path, "?"), document, source))
        here = (*path, name)
        if name in items:
            first = document.where[here]
            document.problems.append(
                Problem(
                    TWICE,
                    ".".join(here),
                    where=where,
                    found=f"first at {first}",
                    fix="remove one of the two lines",
                    why=ONE_VALUE,
                    code="yaml-syntax",
                )
            )
        document.where[here] = where
        items[name] = _node(events, next(events), here, document, source)
    return items


def _mark(source: str, event: Any) -> str:
    return f"{source}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"


def _syntax_problem(error: yaml.YAMLError, source: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    return Problem(
        "the text is not valid YAML",
        where=f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source,
        found=getattr(error, "problem", None) or first_line(error),
        fix=LINE,
        why=WHY,
        code="yaml-syntax",
    )
