"""Apply `key=value` overrides to a recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from finetune.core import strict_yaml
from finetune.core.errors import Problem
from finetune.recipe.schema import Origin

SHOWN = 200  # characters of an override in each message about it


def of_path(key: str, path: str | Path) -> str:
    """Return the override that sets a key to a path, in quotes if YAML would read another value.

    A leading `~` is a folder here, and not the home folder.
    """
    text = str(path)
    text = f"./{text}" if text.startswith("~") else text
    is_plain = re.fullmatch(r"[\w./][\w./ -]*(?<! )", text) and strict_yaml.scalar(text) == text
    return f"{key}={text if is_plain else json.dumps(text, ensure_ascii=False)}"


def apply_overrides(
    raw: dict[str, Any], overrides: tuple[str, ...] | list[str], origin: Origin
) -> list[Problem]:
    problems, before, now = list[Problem](), dict[str, Any](), dict[str, Any]()
    for text in overrides:
        key, equals, value = text.partition("=")
        section, dot, name = key.partition(".")
        where = f"override {text!r}" if len(text) <= SHOWN else f"override {text[:SHOWN]!r}..."
        if not (equals and dot and name):
            problems.append(
                Problem(
                    "this text is not an override of a recipe key",
                    where=where,
                    expected="section.key=value, such as train.learning_rate=1e-4",
                    fix="train.learning_rate=1e-4",
                    code="command-line",
                )
            )
            continue
        document = strict_yaml.parse(value, where)
        problems += document.problems
        target, path = raw, (section, *name.split("."))
        for depth, part in enumerate(path[:-1], start=1):  # adapter.rank_pattern.q_proj=8
            origin.where.setdefault(path[:depth], where)
            if not isinstance(target.setdefault(part, {}), dict):
                key, what = ".".join(path[:depth]), "this key has a value and no keys below it"
                problems.append(Problem(what, key, where=where, fix=f"{key}=...", code="command-line"))
                target = {}
                break
            target = target[part]
        before.setdefault(key, target.get(path[-1]))
        now.pop(key, None)
        target[path[-1]] = now[key] = document.value
        for place in [place for place in origin.where if place[: len(path)] == path]:
            del origin.where[place]  # a place in the replaced value
        origin.where |= dict.fromkeys([path, *((*path, *keys) for keys in document.where)], where)
        origin.set_by[f"{section}.{name.split('.')[0]}"] = "override"
    _displace(raw, before, now, origin)
    file_type = before.get("adapter.type")
    if isinstance(file_type, str) and file_type != now.get("adapter.type", file_type):
        origin.file_type = file_type
    return problems


def _displace(raw: dict[str, Any], before: dict[str, Any], now: dict[str, Any], origin: Origin) -> None:
    """Remove the keys that overrides displace, and record each as a notice.

    An override displaces keys of the file and earlier overrides.

    Args:
        before: the values in the file, by dotted key.
        now: the values of the overrides, by dotted key and in order.
    """
    for key, value in reversed(now.items()):
        if _said(raw, key) is None:  # null, or displaced by a later override
            continue
        changed = (key, f"{key}={value}") if value != before[key] else ()
        of_another = [rival for one in changed for rival in OF_ANOTHER.get(one, ())]
        rivals = [*RIVALS.get(key, ()), *(one for one in of_another if one not in now)]
        for rival in rivals:
            if (said := _said(raw, rival)) is not None:
                origin.notices.append(f"{rival}: finetune ignores {said}, because you override `{key}`")
                origin.set_by.pop(rival, None)
                section, name = rival.split(".")
                del raw[section][name]


def _said(raw: dict[str, Any], key: str) -> Any:
    """Return the value of a dotted key in a recipe as it was read."""
    section, _, name = key.partition(".")
    content = raw.get(section)
    return content.get(name) if isinstance(content, dict) else None


# An override of one key displaces the other. Both keys in one file are an error.
RIVALS = {
    "train.max_steps": ("train.num_train_epochs",),
    "train.num_train_epochs": ("train.max_steps",),
    "data.validation": ("data.validation_fraction",),
    "data.validation_fraction": ("data.validation",),
}
# An override that changes the key, or that sets this value, makes the listed keys of the file meaningless.
OF_ANOTHER = {
    "model.name": ("model.revision",),
    "data.name": ("data.revision", "data.subset"),
    "train.save_strategy=epoch": ("train.save_steps",),
    "data.streaming=True": ("train.train_sampling_strategy", "train.data_seed"),
}
