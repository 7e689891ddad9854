"""YAML that another tool wrote: anchors and aliases are allowed, and the values stay small.

A few aliases can expand to more values than memory has room for, and deep nesting fills the stack.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from finetune.core import strict_yaml
from finetune.core.errors import Problem, UserError, first_line
from finetune.core.strict_yaml import MAX_DEPTH, TWICE

LARGEST = 1_000_000  # characters and values, with each alias replaced by its value
SHORTER = "keep only the training settings in the file"
FILLS_MEMORY = "a small text can expand to more than the memory holds"
MOST_BITS = 4096  # of an integer
# What PyYAML raises for text that is not YAML, or that it can't convert: dates, numbers, characters, tags
ERRORS = (
    yaml.YAMLError, ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError,
)  # fmt: skip


def read(
    text: str, source: str, deepest: int = MAX_DEPTH, *, unique: bool = False, in_python: bool = False
) -> Any:
    """Return the content of one YAML document, in plain values.

    Args:
        unique: whether to refuse a key that stands twice in a mapping. Without it, the last value counts.
        in_python: read with PyYAML's own parser, as a library that reads the same text later. It is slower
            than libyaml, and reads some characters otherwise.

    Raises:
        UserError: the text is not valid YAML, has tags, is nested too deeply, or expands to too much.
    """
    import yaml

    if in_python and len(text) > LARGEST:  # comments and empty lines count too
        raise UserError(
            Problem(
                "the YAML is too long",
                where=source,
                found=f"{len(text):,} characters",
                expected=f"at most {LARGEST:,}",
                fix=SHORTER,
                why="the parser of Python is slow",
                code="yaml-syntax",
            )
        )
    made = yaml.SafeLoader if in_python else getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check(yaml.parse(text, Loader=made), source, deepest)
        loader = made(text)
        try:
            node = loader.get_single_node()
            if unique and node is not None:
                _refuse_repeated(node, source)
            return _plain(loader.construct_document(node) if node is not None else None)
        finally:
            loader.dispose()
    except ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        raise UserError(
            Problem(
                "the file is not valid YAML",
                where=f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source,
                found=str(getattr(error, "problem", None) or first_line(error)),
                fix=strict_yaml.LINE,
                why=strict_yaml.WHY,
                code="yaml-syntax",
            )
        ) from None


def _check(events: Iterable[Any], source: str, deepest: int) -> None:
    """Refuse tags, deep nesting and aliases that expand to too much, before a value exists."""
    sizes: dict[str, int] = {}  # anchor -> the size of its value
    opened: list[tuple[str | None, int]] = []
    size = 0
    for event in events:
        kind = type(event).__name__
        before = size
        if getattr(event, "tag", None):
            raise _refused(
                "YAML tags are not allowed",
                source,
                event,
                found=event.tag,
                fix=f"remove {event.tag}",
                why="a tag can create any Python object",
            )
        if kind == "AliasEvent":
            if event.anchor not in sizes:
                raise _refused(
                    "the alias has no value before it",
                    source,
                    event,
                    why="an alias repeats an earlier value",
                    found=f"*{event.anchor}",
                    fix=f"write the value in place of *{event.anchor}",
                )
            size += sizes[event.anchor]
        elif kind == "ScalarEvent":
            size += 1 + len(event.value)
        elif kind in ("SequenceStartEvent", "MappingStartEvent"):
            size += 1
            opened.append((event.anchor, before))
        elif kind in ("SequenceEndEvent", "MappingEndEvent"):
            anchor, start = opened.pop()
            if anchor:
                sizes[anchor] = size - start
        if kind == "ScalarEvent" and event.anchor:
            sizes[event.anchor] = size - before
        if len(opened) > deepest:
            raise _refused(
                "the YAML is nested too deeply",
                source,
                event,
                expected=f"at most {deepest} levels",
                fix=SHORTER,
                why=FILLS_MEMORY,
            )
        if size > LARGEST:
            raise _refused(
                "the YAML is too large",
                source,
                event,
                expected=f"at most {LARGEST:,} characters",
                fix=SHORTER,
                why=FILLS_MEMORY,
            )


def _refuse_repeated(document: Any, source: str) -> None:
    """Refuse a key that stands twice in a mapping."""
    waiting, seen = [document], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node.value, list):
            continue
        seen.add(id(node))
        is_mapping = type(node).__name__ == "MappingNode"
        names = set[str]()
        for key, _ in node.value if is_mapping else ():
            if (name := str(key.value)) in names:
                raise _refused(
                    TWICE,
                    source,
                    key,
                    found=name,
                    fix="remove one of the two lines",
                    why=strict_yaml.ONE_VALUE,
                )
            names.add(name)
        waiting += [part for pair in node.value for part in pair] if is_mapping else node.value


def _refused(what: str, source: str, event: yaml.Event | yaml.Node, **texts: str) -> UserError:
    return UserError(
        Problem(
            what,
            where=f"{source}:{event.start_mark.line + 1}:{event.start_mark.column + 1}",
            code="yaml-syntax",
            **texts,
        )
    )


def _plain(value: object) -> Any:
    """Return lists, mappings with texts as keys, texts, numbers, booleans and nulls. A date becomes text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError("the number is too large")  # Python does not print it
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)
