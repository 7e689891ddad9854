"""Write recipe.resolved.yaml, and read its lines with who set each value."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from finetune.core import foreign_yaml
from finetune.core.visible_text import visible
from finetune.recipe import renames
from finetune.recipe.schema import Recipe, Train

Choices = dict[str, tuple[Any, str]]  # dotted key -> (value, who chose it and why)
_SETTING = re.compile(r"  (?P<note># )?(?P<key>\w+): (?P<rest>.*)")


def resolved_yaml(recipe: Recipe, chosen: dict[str, tuple[Any, str]]) -> str:
    """Return the recipe as YAML with every effective value, and a comment with who set it.

    The result loads as a recipe.

    Args:
        chosen: dotted key -> (value, who chose it and why). Keys that recipes don't have become comments.
    """
    lines = [f"# All settings of this run, from {visible(recipe.origin.path.name)}."]
    lines += ["# Each comment names the source of the value: recipe, override, launch, hardware or default."]
    chosen = dict(chosen)
    for section in type(recipe).model_fields:
        lines.append(f"{section}:")
        for key in _shown(recipe, section):
            dotted = f"{section}.{key}"
            default = (
                getattr(getattr(recipe, section), key),
                recipe.origin.set_by.get(dotted, "default"),
            )
            value, who = chosen.pop(dotted, default)
            lines.append(f"  {key}: {flow(value)}  # {visible(who)}")
        for dotted in [dotted for dotted in chosen if dotted.startswith(f"{section}.")]:
            value, who = chosen.pop(dotted)
            lines.append(f"  # {dotted.partition('.')[2]}: {flow(value)}  ({visible(who)})")
    lines += [f"# ignored: {visible(notice)}" for notice in recipe.origin.notices]
    return "\n".join(lines) + "\n"


LIBRARY = "default of the library"  # marks a default of SFTConfig or PEFT in recipe.resolved.yaml


class Setting(NamedTuple):
    """A line of recipe.resolved.yaml."""

    section: str
    key: str
    value: str
    """The value as text."""
    who: str
    """Who set the value and why; "default" if nobody did."""


def settings(resolved: str, format_version: int) -> list[Setting]:
    """Return the lines of recipe.resolved.yaml with current key names, without library defaults."""
    found, section = list[Setting](), ""
    for line in resolved.split("\n"):
        if match := _SETTING.fullmatch(line):
            value, _, who = match["rest"].rpartition("  (" if match["note"] else "  # ")
            who = who.removesuffix(")") if match["note"] else who
            if who == LIBRARY:
                continue
            line_of = Setting(section, match["key"], value or match["rest"], who if value else "")
            found.append(_current(line_of) if format_version == 1 else line_of)
        elif line.endswith(":") and not line.startswith(("#", " ")):
            section = line[:-1]
    return found


def _current(line: Setting) -> Setting:
    """Return a line of format 1 with its current key name."""
    old = f"{line.section}.{line.key}"
    if old not in renames.KEYS and old not in renames.RECORDED:
        return line
    try:
        key, value = renames.current(old, yaml.safe_load(line.value))
    except foreign_yaml.ERRORS:
        return line
    section, _, name = key.partition(".")
    return Setting(section, name, flow(value), line.who)


def _shown(recipe: Recipe, section: str) -> list[str]:
    """Return the keys that finetune or the user set. environment.json has the defaults of libraries."""
    content = getattr(recipe, section)
    if section == "adapter":
        return [key for key in type(content).model_fields if key in content.model_fields_set]
    if section == "train":
        return [
            key
            for key in type(content).model_fields
            if key in content.model_fields_set | Train.model_fields.keys()
        ]
    return list(type(content).model_fields)


def flow(value: Any) -> str:
    """Format a value on one line of YAML 1.2, from which the same value is read back."""
    if isinstance(value, BaseModel):  # skip a null that a reader would fill in
        fields = type(value).model_fields
        defaults = {key: field.default for key, field in fields.items()}
        return flow({key: one for key, one in value if one is not None or defaults.get(key) is not None})
    if isinstance(value, float):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    if isinstance(value, Enum):  # an option of PEFT or transformers
        return flow(value.value)
    if isinstance(value, str):
        # The escapes of `visible` are valid in YAML.
        return visible(
            yaml.safe_dump(value, default_style='"', allow_unicode=True, width=float("inf")).strip()
        )
    if value is None or isinstance(value, (bool, int)):
        return json.dumps(value)
    if isinstance(value, (list, tuple, set)):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    return "{" + ", ".join(f"{flow(str(k))}: {flow(v)}" for k, v in value.items()) + "}"
