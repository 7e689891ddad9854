"""Follow what a problem says after `help:`: read it as changes of a recipe, and make them."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import yaml

from finetune.recipe import build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.core.errors import Problem

DROP = "<left out>"
RENAMING = ("unknown-key", "renamed-key")  # codes
Change = dict[str, Any]  # dotted key -> its new value, or DROP
_BETWEEN = re.compile(r"(?:[;,]? or |; )(?![^\[{]*[\]}])")  # alternatives, but not inside brackets
_PAIR = re.compile(r"((?:[a-z_]+\.)?[A-Za-z_0-9.]+)(?:: |=)(.+)")
_AND = re.compile(r"(?:,| and| with|, and) (?=(?:[a-z_]+\.)?\w+(?:: |=))(?![^\[{]*[\]}])")


def changes(problem: Problem, raw: dict[str, Any]) -> list[Change]:
    """The changes that a problem's advice names, each an alternative; prose and commands are none."""
    found, last = [], problem.key
    for said in _BETWEEN.split(problem.fix.replace("`", "")):
        said = re.sub(r"^(?:set|use|add) ", "", said.strip())
        change = _change(re.sub(r"^remove ", "drop ", said), problem, last, raw)
        if change:
            found.append(change)
            last = next(iter(change))
    return found


def make(change: Change, raw: dict[str, Any]) -> dict[str, Any]:
    """A recipe with a change made."""
    raw = copy.deepcopy(raw)
    for key, value in change.items():
        *path, name = key.split(".")
        at: Any = raw
        for part in path:
            at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
        place: Any = int(name) if isinstance(at, list) else name
        if value != DROP:
            at[place] = value
        elif isinstance(at, list):
            del at[place]
        else:
            at.pop(place, None)
    return raw


def _change(said: str, problem: Problem, key: str, raw: dict[str, Any]) -> Change:
    section, around = problem.key.partition(".")[0], problem.key.rpartition(".")[0]
    renamed = re.fullmatch(r'"(.+)" in place of "(.+)", which stays the first', said)
    if renamed:
        pattern = value_of(raw, problem.key)
        return {
            problem.key: {renamed[1] if one == renamed[2] else one: value for one, value in pattern.items()}
        }
    moved = re.fullmatch(r"move it to ([\w.]+):", said)
    if moved:
        name = problem.key.rpartition(".")[2]
        return {problem.key: DROP, f"{moved[1]}.{name}": value_of(raw, problem.key)}
    named = re.fullmatch(r"rename it to (\S+)", said)
    if named:
        return {problem.key: DROP, ".".join(filter(None, (around, named[1]))): value_of(raw, problem.key)}
    if dropped := re.match("drop it,? and ", said):
        return {problem.key: DROP, **dict(_pairs(said[dropped.end() :].removeprefix("set "), problem))}
    if said.startswith("drop "):
        names = re.sub(r" from `?[\w.]+`?$", "", said.removeprefix("drop ").partition(": ")[0])
        return _dropped(names, problem, raw)
    said, *dropped_too = re.split(r",? and (?:drop|remove) ", said)
    if dropped_too:
        return {**_change(said, problem, key, raw), f"{section}.{dropped_too[0]}": DROP}
    said, _, without = re.sub(r"^(\[[^\]]*\]): .*", r"\1", said).partition(
        " without "
    )  # a reason after a list
    if without and _known(f"{section}.{said}"):
        return _without(raw, f"{section}.{said}", without)
    if without and _known(f"{section}.{without}"):
        return {**_change(said, problem, key, raw), f"{section}.{without}": DROP}
    change = dict(_pairs(said, problem))
    if not said:
        return {}
    if not change and problem.code in RENAMING:
        name = re.split(r", | \(", said)[0]
        name = name if "." in name or not around else f"{around}.{name}"
        change = {name: value_of(raw, problem.key)} if _known(name) else {}
    elif not change and _names_a_key(problem, raw):
        change = {problem.key: DROP, f"{around}.{said}": value_of(raw, problem.key)}
    elif not change and (" " not in said or said[0] in "[{"):
        items = value_of(raw, key)
        if isinstance(items, list) and problem.found in items:
            key = f"{key}.{items.index(problem.found)}"
        change = {key: yaml.safe_load(said)}
    return {problem.key: DROP, **change} if problem.code in RENAMING and change else change


def _names_a_key(problem: Problem, raw: dict[str, Any]) -> bool:
    """Whether a problem is about the name of a mapping's key: `rank_pattern.qproj`."""
    around, _, name = problem.key.rpartition(".")
    of_mapping = isinstance(value_of(raw, around), dict) and around.count(".") > 0
    return of_mapping and (f'"{name}"' in problem.what or problem.what.startswith("no such column"))


def _without(raw: dict[str, Any], key: str, names: str) -> Change:
    """A list without some of its items."""
    items = value_of(raw, key)
    return {key: [item for item in items if item not in names.split(", ")]} if isinstance(items, list) else {}


def _dropped(names: str, problem: Problem, raw: dict[str, Any]) -> Change:
    """The keys or the items of a list that advice drops."""
    if names.startswith(("it", "one of")):
        return {problem.key: DROP}
    key = re.sub(r"\.\d+$", "", problem.key)
    said, items = re.split(r", | and ", names), value_of(raw, key)
    if isinstance(items, list) and all(one in items for one in said):
        return {key: [item for item in items if item not in said]}
    return {_whole(name, problem): DROP for name in said}


def _whole(name: str, problem: Problem) -> str:
    """A key with its sections. Without sections of its own, it has those of the problem's key."""
    if "." in name or name == problem.key.rpartition(".")[2]:
        return name if "." in name else problem.key
    around, section = problem.key.rpartition(".")[0], problem.key.partition(".")[0]
    nested = build.known_keys().get(around, frozenset()) if around else frozenset()
    return f"{around if name in nested else section}.{name}"


def _pairs(said: str, problem: Problem) -> Iterator[tuple[str, Any]]:
    for part in _AND.split(said):
        found = _PAIR.fullmatch(part)
        key = _whole(found[1], problem) if found else ""
        if found and _known(key) and "<a " not in found[2]:  # data.validation: <a file>
            value = found[2] if found[2][0] in "[{" else found[2].partition(", ")[0]
            yield key, value if value == "no" else yaml.safe_load(value)  # `no` is a text there


def _known(key: str) -> bool:
    section, _, name = key.partition(".")
    keys = build.known_keys()
    own = keys.get(section, frozenset()) | ({""} if not name else frozenset())
    if name.rpartition(".")[2] in keys.get(key.rpartition(".")[0], frozenset()):
        return True
    return name.partition(".")[0] in own or (
        section == "adapter" and (name == "type" or build.of_another_type(name))
    )


def value_of(raw: dict[str, Any], key: str) -> Any:
    at: Any = raw
    for part in key.split("."):
        at = at[int(part)] if isinstance(at, list) else at.get(part) if isinstance(at, dict) else None
    return at
