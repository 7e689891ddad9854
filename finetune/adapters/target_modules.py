"""Match `target_modules` and similar patterns with a model's module names, by PEFT's rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from finetune.core import pattern_time
from finetune.core.errors import Problem
from finetune.models import module_names
from finetune.models.module_names import Names
from finetune.recipe import adapter_rules, adapter_types

EVERYTHING = "all-linear"
WITH_EXPERTS = "all-linear-and-experts"


def is_suffix(target: str, name: str) -> bool:
    """Return whether a name equals the target or ends with it after a dot. This is PEFT's rule for lists."""
    return name == target or name.endswith(f".{target}")


def match(targets: str | Iterable[str], names: Collection[str]) -> dict[str, int]:
    """Return how many of `names` each target matches.

    As in PEFT, the entries of a list are suffixes, and a string is a regular expression for the full name.
    """
    if targets == EVERYTHING:
        return {EVERYTHING: len(names)}
    if isinstance(targets, str):
        return {targets: sum(bool(re.fullmatch(targets, name)) for name in names)}
    counts = Counter(ending for name in names for ending in _endings(name))
    return {t: counts[t] for t in targets}


def _endings(name: str) -> Iterator[str]:
    """Return all targets that `is_suffix` accepts for a name: the name, and its text after each dot."""
    while name:
        yield name
        name = name.partition(".")[2]


def slow_patterns(options: Mapping[str, Any], names: Collection[str], key: str = "") -> list[Problem]:
    """Return the problem of the first regular expression that takes too long on the names of a model.

    Args:
        options: PEFT's options, from the recipe or from a PEFT config.
        names: full names of all modules.
        key: the recipe key that names the PEFT config; empty if the options come from the recipe.
    """
    patterns = [one for one in adapter_rules.patterns(options) if not pattern_time.is_plain(one[1])]
    if not patterns:
        return []
    wrapped = [f"base_model.model.{name}" for name in names]  # the names in a PeftModel
    slow = pattern_time.find_slow([pattern for _, _, pattern in patterns], [*names, *wrapped])
    if slow is None:
        return []
    option, text, _ = patterns[slow]
    found, place = f"{option}: {text}" if key else text, key or f"adapter.{option}"
    return [
        Problem(
            "this regular expression takes too long",
            place,
            found=found[:200],
            fix="write a list of names, or fewer repetitions",
            code="adapter-option",
        )
    ]


def with_targets(options: Mapping[str, Any], peft: str, names: Names) -> dict[str, Any]:
    """Return PEFT's options. Add PEFT's targets for the family if the recipe names no targets."""
    if options.get("target_modules") is not None or peft not in adapter_types.OWN_TARGETS:
        return dict(options)
    own = adapter_types.own_targets(peft, names.family)
    if peft == "trainable_tokens":
        own = [module_names.short(names.embedding)]
    return {**options, "target_modules": own}


def targeted(options: Mapping[str, Any], names: Names) -> list[str]:
    """Return the modules that PEFT adapts: targets without exclusions, in the requested layers."""
    targets = options.get("target_modules")
    if targets is None:
        return []
    candidates = names.linear if targets == EVERYTHING else names.kinds
    return [name for name in candidates if is_targeted(options, name)]


def is_targeted(options: Mapping[str, Any], name: str) -> bool:
    """Do the same as PEFT's `check_target_module_exists` (peft 0.21.2, tuners/tuners_utils.py)."""
    if not any(match(options["target_modules"], [name]).values()):
        return False
    if any(match(options.get("exclude_modules") or (), [name]).values()):
        return False
    if any(re.match(rf"(^|.*\.){one}($|\..*)", name) for one in options.get("modules_to_save") or ()):
        return False
    layers = options.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    wanted = {layers} if isinstance(layers, int) else set(layers)
    number = _layer_of(name, options.get("layers_pattern"))
    return number is not None and number in wanted


def _layer_of(name: str, patterns: str | list[str] | None) -> int | None:
    """Return the number of the layer that contains a module, by PEFT's rule."""
    patterns = [patterns] if isinstance(patterns, str) and patterns else patterns or [r"[^.]*"]
    for pattern in patterns:
        start = r".*?\." if pattern == r"[^.]*" else r"(?:^|.*?\.)"
        if found := re.match(rf"{start}{pattern}\.(?P<idx>\d+)\.", name):
            return int(found["idx"])
    return None


def uneven(picked: Iterable[str], names: Names) -> str:
    """Return a line of text if the targeted modules differ between layers, else the empty string."""
    linear = set(names.linear)
    layers = Counter(
        module_names.short(name) for name in picked if name in linear and re.search(r"\.\d+\.", name)
    )
    partly = [
        f"{name} in {count} of {names.layers}" for name, count in layers.items() if count < names.layers
    ]
    return f"layers differ: {', '.join(partly)}" if partly else ""
