"""Match `target_modules` and similar patterns with a model's module names."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError, nearest
from finetune.models import module_names
from finetune.recipe.adapter_types import REBASING_INITS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from finetune.models.module_names import Names


def match(targets: str | Iterable[str], names: Collection[str]) -> dict[str, int]:
    """How many of `names` each target matches, by PEFT's rules: a suffix, or one string as a whole regex."""
    if targets == "all-linear":
        return {"all-linear": len(names)}
    if isinstance(targets, str):
        try:
            return {targets: sum(bool(re.fullmatch(targets, name)) for name in names)}
        except re.error as error:
            problem = Problem(f"not a regular expression: {error}", "adapter.target_modules", found=targets)
            raise UserError(problem) from None
    return {t: sum(name == t or name.endswith(f".{t}") for name in names) for t in targets}


def unmatched(
    targets: str | Iterable[str], names: Collection[str], key: str = "target_modules"
) -> list[Problem]:
    """A problem for each target that matches nothing, with the nearest name and the names there are."""
    available = list(dict.fromkeys(module_names.short(name) for name in names))
    problems = []
    for index, (target, count) in enumerate(match(targets, names).items()):
        if not count:
            place = f"adapter.{key}" if isinstance(targets, str) else f"adapter.{key}.{index}"
            what = f'"{target}" matches no module of this model'
            fix = nearest(target, available)
            if isinstance(targets, str) and target in available:
                fix = f"[{target}]: a text is a regular expression for whole names"
            problems.append(Problem(what, place, found=", ".join(available), fix=fix))
    return problems


def problems(options: Mapping[str, Any], names: Names, *, any_module: bool = False) -> list[Problem]:
    """Every name and number among PEFT's options that nothing in the model answers to.

    Args:
        any_module: the type changes norms or embeddings too, not linear layers only.
    """
    found: list[Problem] = []
    targets = options.get("target_modules")
    embeddings = [name for name in names.modules if module_names.short(name) in ("embed_tokens", "wte")]
    layers = names.modules if any_module else [*names.linear, *embeddings]
    if targets is not None:
        found += unmatched(targets, names.linear if targets == "all-linear" else layers)
    if isinstance(targets, list) and "lm_head" in targets:
        what, fix = (
            "TRL's loss reads the head's own weight and would pass it by",
            "modules_to_save: [lm_head]",
        )
        found = [p for p in found if '"lm_head"' not in p.what]
        found.append(Problem(what, "adapter.target_modules", found="lm_head", fix=fix))
    adapted = targeted(options, names) if targets else []
    init, rows = str(options.get("init_lora_weights")), [name for name in embeddings if name in adapted]
    if init.startswith(REBASING_INITS) and rows:
        what = f"{init} is saved as a difference of LoRAs, which has no place for those of embeddings"
        fix = "linear layers alone, or init_lora_weights: true"
        found.append(Problem(what, "adapter.target_modules", found=", ".join(rows), fix=fix))
    for key in ("exclude_modules", "feedforward_modules"):
        found += unmatched(options.get(key) or (), layers, key)
    adapted = adapted if adapted and not options.get("target_parameters") else layers
    for key in ("rank_pattern", "alpha_pattern"):
        found += _patterns(options.get(key) or {}, adapted, key)
    for index, target in enumerate(options.get("modules_to_save") or ()):
        if not any(name.endswith(target) for name in names.modules):  # PEFT's rule: "norm" is every norm
            lost = unmatched([target], names.modules, "modules_to_save")
            found += [replace(problem, key=f"adapter.modules_to_save.{index}") for problem in lost]
    found += _parameters(options.get("target_parameters") or (), names)
    wanted = options.get("layers_to_transform")
    missing = [
        n for n in ([wanted] if isinstance(wanted, int) else wanted or ()) if not 0 <= n < names.layers
    ]
    if missing:
        expected = f"0 to {names.layers - 1}"
        texts = {"found": ", ".join(map(str, missing)), "expected": expected}
        found.append(Problem("the model has no such layer", "adapter.layers_to_transform", **texts))
    return found


def targeted(options: Mapping[str, Any], names: Names) -> list[str]:
    """The layers that PEFT's rules pick: targets, less exclusions, in the layers named."""
    targets, excluded = options["target_modules"], options.get("exclude_modules") or []
    layers, saved = options.get("layers_to_transform"), options.get("modules_to_save") or []
    wanted = None if layers is None else {layers} if isinstance(layers, int) else set(layers)
    candidates = names.linear if targets == "all-linear" else names.modules

    def picked(name: str) -> bool:
        if not any(match(targets, [name]).values()):
            return False
        if any(match(excluded, [name]).values()) or any(match(saved, [name]).values()):
            return False
        number = re.search(r"\.(\d+)\.", name)
        return wanted is None or (number is not None and int(number[1]) in wanted)

    return [name for name in candidates if picked(name)]


def uneven(targets: str | Iterable[str] | None, names: Names) -> str:
    """One line if the targets are not in every layer alike, else the empty string."""
    if targets is None:
        return ""
    picked = [n for n in names.linear if targets == "all-linear" or any(match(targets, [n]).values())]
    layers = Counter(module_names.short(name) for name in picked if re.search(r"\.\d+\.", name))
    partly = [
        f"{name} in {count} of {names.layers}" for name, count in layers.items() if count < names.layers
    ]
    return f"layers differ: {', '.join(partly)}" if partly else ""


def _patterns(pattern: Mapping[str, Any], names: Collection[str], key: str) -> list[Problem]:
    """Keys that match nothing, and keys that match the same module and give it other values.

    PEFT takes the first key that matches, and saves keys in the order of the alphabet: where another one
    would be the first then, the adapter can't be opened again.
    """
    available = list(dict.fromkeys(map(module_names.short, names)))
    problems, hits = list[Problem](), {name: [one for one in pattern if _ends(name, one)] for name in names}
    used = {one for matching in hits.values() for one in matching}
    for lost in (one for one in pattern if one not in used):
        what = f'"{lost}" matches no module that gets an adapter'
        texts = {"found": ", ".join(available), "fix": nearest(lost, available)}
        problems.append(Problem(what, f"adapter.{key}.{lost}", **texts))
    twice = {(them[0], min(them)): name for name, them in hits.items() if them}
    for (first, saved), name in twice.items():
        if pattern[first] == pattern[saved]:
            continue
        depth = len(saved) - len(saved.lstrip("(")) + 1  # "(" stands before what names have
        early = "(" * depth + first + ")" * depth
        what = f'"{first}" and "{saved}" match the same module, and PEFT saves them in another order'
        texts = {"found": name, "fix": f'"{early}" in place of "{first}", which stays the first'}
        problems.append(Problem(what, f"adapter.{key}", **texts))
    return problems


def _ends(name: str, pattern: str) -> bool:
    """Whether a regular expression is the end of a name (PEFT's `get_pattern_key`)."""
    try:
        return bool(re.match(rf"(.*\.)?({pattern})$", name))
    except re.error:
        return False


def _parameters(targets: Iterable[str], names: Names) -> list[Problem]:
    available = list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in names.parameters))
    return [
        Problem(
            f'"{target}" matches no parameter of this model',
            f"adapter.target_parameters.{index}",
            found=", ".join(available),
            fix=nearest(target, available),
        )
        for index, target in enumerate(targets)
        if not any(name == target or name.endswith(f".{target}") for name in names.parameters)
    ]
