"""The translation of another tool's settings into a recipe, with a record of every key."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from finetune.core import strict_yaml
from finetune.core.formatting import as_yaml
from finetune.core.privacy import names_a_secret

TRANSLATED = "translated"
SAME = "same as finetune's default"
DIFFERS = "differs by default"
NOT_SUPPORTED = "not supported"
KINDS = (TRANSLATED, SAME, DIFFERS, NOT_SUPPORTED)
_NUMBER = re.compile(r"[+-]?(\d+\.\d*|\d+(\.\d*)?[eE][+-]?\d+)")


class TooLarge(Exception):
    """The recipe would be larger than finetune reads."""


class Entry(NamedTuple):
    """What became of one key."""

    kind: str
    key: str
    """The tool's key, dotted, or finetune's key if the tool's default was written into the recipe."""
    value: Any
    text: str
    """The finetune key and value, or the reason."""


@dataclass(frozen=True)
class Rule:
    """What to do with a key of a tool."""

    target: str = ""
    """The finetune key that takes the value."""
    convert: Callable[[Any], Any] | None = None
    same: str = ""
    """Why the key needs no setting."""
    reason: str = ""
    """Why finetune does not support the key."""
    off: tuple[Any, ...] = (None, False, "", 0)
    """Values that switch the key off, so that nothing is lost."""


def number(value: object) -> Any:
    """Return the number in a string: YAML 1.1 reads 2e-5 as a string."""
    return strict_yaml.scalar(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


@dataclass
class Translation:
    """A recipe under construction."""

    tool: str
    source: dict[str, Any]
    """The tool's settings that are not translated yet."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Dotted finetune key -> value."""
    entries: list[Entry] = field(default_factory=list)
    accelerate: str = ""
    """A shipped accelerate config that fits the tool's launch."""
    taken: tuple[str, Any] = ("", None)
    """The key and the value that were read last, for an error about the value."""

    def __post_init__(self) -> None:
        self.given = dict(self.source)
        self.origins = dict[str, str]()  # finetune key -> the tool's key that set it
        self.size = 0  # characters of the comments in the recipe

    def take(self, key: str, default: object = None) -> Any:
        """Remove a key from the source and return its value; the default if it is missing or null."""
        value = self.source.pop(key, None)
        self.taken = key, value
        return default if value is None else value

    def set(self, target: str, value: object, key: str, given: object) -> None:
        """Set a finetune key, and record the key that it comes from.

        If another key of the tool has set it to another value, the first one stays, and the report says so.
        """
        first = self.origins.setdefault(target, key)
        if first != key and self.recipe.get(target, value) != value:
            self.unsupported(key, given, f"{first} also sets {target}, so remove {first} or {key}")
            return
        self.recipe[target] = value
        self.record(TRANSLATED, key, given, f"{target}: {value}")

    def record(self, kind: str, key: str, value: object, text: str) -> None:
        """Add an entry. The recipe has a comment for each, so their number is limited.

        Raises:
            TooLarge: the comments are longer than a recipe can be.
        """
        self.size += len(key) + len(text)
        if self.size > strict_yaml.MAX_BYTES:
            raise TooLarge
        self.entries.append(Entry(kind, key, _without_secrets(key, value), text))

    def move(self, key: str, target: str) -> None:
        """Set a finetune key to the value of a key of the tool."""
        value = self.take(key)
        self.set(target, value, key, value)

    def same(self, key: str, text: str) -> None:
        """Record why a key needs no setting, if it has a value."""
        if (value := self.take(key)) is not None:
            self.record(SAME, key, value, text)

    def unsupported(self, key: str, value: object, reason: str) -> None:
        self.record(NOT_SUPPORTED, key, value, reason)

    def apply(self, rules: dict[str, Rule]) -> None:
        """Translate every key that has a rule. `name_*` is the rule of all keys that start so."""
        starts = {name[:-1]: rule for name, rule in rules.items() if name.endswith("*")}
        for key in list(self.source):
            of_start = (rule for start, rule in starts.items() if key.startswith(start))
            if rule := rules.get(key) or next(of_start, None):
                self.apply_rule(key, self.source.pop(key), rule)

    def apply_rule(self, key: str, value: object, rule: Rule) -> None:
        self.taken = key, value
        if rule.target and value is not None:
            value = number(value)
            self.set(rule.target, rule.convert(value) if rule.convert else value, key, value)
        elif rule.reason and value not in rule.off:
            self.unsupported(key, value, rule.reason)
        else:
            unset = "it is not set" if value is None else "finetune does this too" if value else "it is off"
            self.record(SAME, key, value, rule.same or unset)

    def keep_default(self, target: str, theirs: object, ours: object, why: str = "") -> None:
        """Write the tool's default into the recipe if the recipe has no value for the key."""
        if target not in self.recipe:
            self.recipe[target] = theirs
            if theirs == ours:
                self.record(SAME, target, theirs, why or f"{self.tool} has the same default")
                return
            shown, own = as_yaml(theirs), as_yaml(ours)
            text = f"the default of {self.tool} is {shown}, the default of finetune is {own}; kept {shown}"
            self.record(DIFFERS, target, theirs, f"{text}{'; ' if why else ''}{why}")

    def refuse(self, target: str, why: str) -> None:
        """Remove a finetune key whose value finetune does not accept."""
        del self.recipe[target]
        for place, entry in enumerate(self.entries):
            if entry.key == target or entry.text.startswith(f"{target}: "):
                self.entries[place] = Entry(NOT_SUPPORTED, entry.key, entry.value, why)

    def finish(self) -> None:
        """Record the keys that no rule knows, and those that are switched off."""
        for key, value in self.source.items():
            if value is not None:
                self.unsupported(key, value, f"finetune does not know this key of {self.tool}")
        self.source = {}
        recorded = {entry.key.split(".")[0] for entry in self.entries}
        for key, value in self.given.items():
            if key not in recorded and not value:
                self.record(SAME, key, value, "it is not set" if value is None else "it is off")


def _without_secrets(key: str, value: Any) -> Any:
    """Return the value of a key for people, with `****` in place of passwords and tokens."""
    if value is not None and names_a_secret(f"{key}:"):
        return "****"
    if isinstance(value, dict):
        return {name: _without_secrets(str(name), one) for name, one in value.items()}
    return [_without_secrets("", one) for one in value] if isinstance(value, list) else value
