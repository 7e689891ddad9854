"""Explain the mistakes in a recipe, each with its place in the file and the nearest valid name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from finetune.core import privacy
from finetune.core.error_codes import SECRET_IN_RECIPE
from finetune.core.errors import Problem, nearest
from finetune.core.formatting import as_yaml, shortened
from finetune.core.privacy import masked
from finetune.recipe import (
    adapter_rules,
    adapter_types,
    build,
    command_line_overrides,
    qat_rules,
    train_rules,
)
from finetune.recipe.renames import KEYS, RENAMED, current, current_value, meant, owner_of

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

Where = Mapping[tuple[str, ...], str]
Known = Mapping[str, frozenset[str]]

_SECRET_KEY = re.compile(r"^(token|password|secret)$|(hub|hf|auth|access|api|wandb)_?(token|key)$")

_EXPECTED = {  # pydantic's error types in the words of a recipe
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "none_required": "null",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_UNITS = {  # key, without its section -> what its number counts
    "max_length": "tokens",
    "max_new_tokens": "tokens",
    "max_example_bytes": "bytes",
    "max_uncompressed_bytes": "bytes",
    "shuffle_buffer": "examples",
    "limit": "examples",
    "num_fewshot": "examples",
    "samples": "examples",
    "effective_batch_size": "sequences",
    "per_device_train_batch_size": "sequences",
    "batch_size": "sequences",
    "max_steps": "steps",
    "save_steps": "steps",
    "eval_steps": "steps",
    "skip_nonfinite": "steps",
    "num_train_epochs": "epochs",
    "save_total_limit": "checkpoints",
    "dataloader_timeout": "seconds",
    "early_stopping_patience": "evaluations",
}

_REQUIRED = {  # what to add, for a required key or section
    "model": "model: {name: meta-llama/Llama-3.1-8B-Instruct}",
    "model.name": "model: {name: meta-llama/Llama-3.1-8B-Instruct}",
    "data": "data: {name: data/train.jsonl, validation_fraction: 0.02}",
    "data.name": "data: {name: data/train.jsonl, validation_fraction: 0.02}",
    "adapter": "adapter: {type: lora, r: 16}",
}
MOST_EXPLAINED = 200  # mistakes whose help is searched for. An error shows fewer
MOST_CHOICES = 5  # in one error
_NOT_CONCATENATED = {  # key -> its value without an effect, and why it excludes concatenated examples
    "train.pad_to_multiple_of": (1, "each padding token would be an example of its own in the sequence"),
    "train.neftune_noise_alpha": (0, "transformers would scale the noise by the length of the whole batch"),
}
METRICS = ("loss", "eval_loss", "exact_match", "eval_exact_match")  # in addition to the metrics of tasks


def explain(
    error: ValidationError, raw: dict[str, Any], where: Where, known: Known, under: tuple[str, ...] = ()
) -> list[Problem]:
    """Return one problem for each place that pydantic reports. The types of a union share one problem.

    Args:
        under: the path of the validated part in `raw`.
    """
    grouped: dict[tuple[str, ...], list[Any]] = {}
    for item in error.errors(include_url=False):
        path = _place({**item, "loc": (*under, *item["loc"])}, where)
        grouped.setdefault(path, []).append(item)
    inside = {path[:depth] for path in grouped for depth in range(1, len(path))}  # parents of a mistake
    wrong = [(path, items) for path, items in grouped.items() if path not in inside]
    problems = [_problem(path, items, raw, where, known) for path, items in wrong[:MOST_EXPLAINED]]
    return problems + [
        Problem("this key is not valid", ".".join(path), place_of(path, where), code="unknown-key")
        for path, _ in wrong[MOST_EXPLAINED:]
    ]


def secrets(
    raw: Any, where: Where, path: tuple[str, ...] = (), known: list[str] | None = None
) -> list[Problem]:
    """Find secrets in a recipe, because recipes are shared. Mask them in messages and remove them from `raw`.

    Args:
        known: the secrets of this process; `None`: this function reads them.
    """
    found, known = [], privacy.secrets() if known is None else known
    items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for key, value in list(items):
        here = (*path, str(key))
        named = isinstance(raw, dict) and _SECRET_KEY.search(str(key)) and isinstance(value, str) and value
        if named or (isinstance(value, str) and masked(value, known) != value):
            place = masked(place_of(here, where), known)  # the place of an override is its text
            found.append(
                Problem(
                    "the recipe holds a secret",
                    ".".join(here),
                    where=place,
                    found="****",
                    fix="remove it, and set HF_TOKEN in the environment or run `hf auth login`",
                    why="recipes are shared and uploaded",
                    code=SECRET_IN_RECIPE,
                )
            )
            raw[key] = None  # no later message shows it
        else:
            found += secrets(value, where, here, known)
    return found


def secrets_in(text: str, token: str) -> list[tuple[int, str]]:
    """Return the line and the first characters of each secret in a text.

    Args:
        token: a secret in addition to those of the environment.
    """
    known = [*{token, *privacy.secrets()} - {""}]
    found, line, end = list[tuple[int, str]](), 1, 0
    for one in privacy.find_secrets(text, known):
        line, end = line + text.count("\n", end, one.start), max(end, one.start)
        found.append((line, f"{text[one.start : one.start + 3]}****"))
    return found


def conflicts(raw: dict[str, Any], where: Where) -> list[Problem]:
    """Return the problems of settings that exclude each other or would silently have no effect."""

    def get(key: str) -> Any:
        section, name = key.split(".")
        return raw[section].get(name) if isinstance(raw.get(section), dict) else None

    def problem(key: str, what: str, code: str = "recipe-conflict", **texts: str) -> None:
        problems.append(Problem(what, key, place_of(tuple(key.split(".")), where), code=code, **texts))

    problems: list[Problem] = []
    for key, (rival,) in list(command_line_overrides.RIVALS.items())[::2]:
        if get(key) is not None and get(rival) is not None:
            problem(
                key,
                f"this key excludes `{rival}`",
                found=f"{as_yaml(get(key))} and {as_yaml(get(rival))}",
                fix=f"remove `{key}`, or remove `{rival}`",
            )
    every = get("eval.eval_steps")
    alone = get("data.validation") is None and get("data.validation_fraction") is None
    if every is not None and alone:
        problem(
            "eval.eval_steps",
            "evaluation during training needs a validation set",
            found=as_yaml(every),
            fix="data.validation_fraction: 0.1",
        )
    for key in ("eval.early_stopping_patience", "eval.metric_for_best_model"):
        if every is None and get(key) not in (None, "loss", "eval_loss"):
            fix = "eval.eval_steps: 50" + (" and data.validation_fraction: 0.1" if alone else "")
            problem(
                key,
                "this key needs `eval.eval_steps`",
                found=as_yaml(get(key)),
                fix=fix,
                why="it uses the evaluations during training",
            )
    flat = [key for key in ("data.packing", "data.padding_free") if get(key)]
    excludes = f"this key excludes {' and '.join(f'`{key}: true`' for key in flat)}"
    for key, (harmless, why) in _NOT_CONCATENATED.items():
        if flat and get(key) not in (None, harmless):
            problem(key, excludes, found=as_yaml(get(key)), fix=f"remove `{key}`", why=why)
    added = get("model.add_tokens") if isinstance(get("model.add_tokens"), list) else []
    if repeated := ", ".join(text for text, count in Counter(map(str, added)).items() if count > 1):
        problem(
            "model.add_tokens",
            "the list has a token twice",
            "value-choice",
            found=repeated,
            fix=f"add_tokens: {json.dumps(list(dict.fromkeys(map(str, added))), ensure_ascii=False)}",
        )
    best = get("eval.metric_for_best_model")
    if isinstance(best, str) and "/" not in best and best not in METRICS:
        near = meant("eval.metric_for_best_model", best, METRICS)
        problem(
            "eval.metric_for_best_model",
            "unknown metric",
            "eval-setting",
            found=best,
            expected="loss, exact_match, or task/metric such as arc_easy/acc",
            fix=f"metric_for_best_model: {near}" if near else "",
        )
    elif isinstance(best, str) and "/" in best and not get("eval.tasks"):
        problem(
            "eval.metric_for_best_model",
            "`eval.tasks` lacks the task of this metric",
            "eval-setting",
            found=best,
            fix=f"tasks: [{best.rpartition('/')[0]}]",
        )
    problems += _batch_problem(
        get("train.effective_batch_size"), get("train.per_device_train_batch_size"), where
    )
    for conflicts_of in (adapter_rules.conflicts, qat_rules.conflicts, train_rules.conflicts):
        problems += [
            replace(one, where=place_of(tuple(one.key.split(".")), where)) for one in conflicts_of(raw)
        ]
    return problems


def _batch_problem(effective: Any, micro: Any, where: Where) -> list[Problem]:
    """Return the problem of an effective batch size that is no multiple of the micro-batch size."""
    if not all(type(n) is int and n > 0 for n in (effective, micro)) or not effective % micro:
        return []
    low, high = effective // micro * micro, (effective // micro + 1) * micro
    return [
        Problem(
            f"this value is not a multiple of `per_device_train_batch_size: {micro}`",
            "train.effective_batch_size",
            where=place_of(("train", "effective_batch_size"), where),
            found=f"{effective} sequences",
            expected=f"{low} or {high} sequences" if low else f"{high} sequences",
            fix=f"effective_batch_size: {high}",
            code="batch-size",
        )
    ]


def _place(item: ErrorDetails, where: Where) -> tuple[str, ...]:
    """Return pydantic's `loc` without the branches of unions: the longest prefix that the file contains."""
    loc = [str(part) for part in item["loc"]]
    if item["type"] in ("missing", "extra_forbidden"):  # the last part is not in the file or has no branch
        path: tuple[str, ...] = ()
        for part in loc[:-1]:
            path = (*path, part) if (*path, part) in where else path
        return (*path, loc[-1])
    while len(loc) > 1 and tuple(loc) not in where:
        loc.pop()
    return tuple(loc)


def _problem(
    path: tuple[str, ...], items: list[Any], raw: dict[str, Any], where: Where, known: Known
) -> Problem:
    key, kind, value = ".".join(path), items[0]["type"], items[0]["input"]
    if kind == "extra_forbidden":
        return unknown_key(path, raw, where, known)
    if kind == "missing":
        return Problem(
            "the recipe lacks this required key" if len(path) > 1 else "the recipe lacks this section",
            key,
            where=place_of(path[:-1], where),
            fix=_REQUIRED.get(
                key, f"add `{path[-1]}:` to `{path[-2]}:`" if len(path) > 1 else f"add a section `{key}:`"
            ),
            why="finetune has no default for it",
            code="missing-key",
        )
    if broken := next((item for item in items if item["type"] == "value_error"), None):
        what, expected, fix = broken["ctx"]["error"].args  # of a rule in schema.py
        return Problem(
            what,
            key,
            where=place_of(path, where),
            found=show(value),
            code="value-type",
            expected=expected,
            fix=fix,
        )
    shown = items[:1] if kind in _BOUNDS else items  # two bounds of a union would be confusing
    expected = " or ".join(dict.fromkeys(_expected(item, path[-1]) for item in shown))
    allowed = [str(v) for item in items if item["type"] == "literal_error" for v in _literals(item)]
    what, code = ("out of range", "value-range") if kind in _BOUNDS else ("wrong type", "value-type")
    if kind == "literal_error":
        what, code = "not one of the allowed values", "value-choice"
    today = current_value(key, value)
    near = as_yaml(today) if today != value else meant(key, value, allowed)
    fix = f"{path[-1]}: {near}" if near and not path[-1].isdecimal() else near
    expected = "" if near else expected
    if not fix and (usual := _share(items[0]["input"], items)):
        fix = f"{path[-1]}: {usual}"
    elif not fix and (usual := _default(path, raw)):
        fix, expected = f"{path[-1]}: {usual}", f"{expected}; the default is {usual}"
    return Problem(what, key, place_of(path, where), show(value), expected, fix, code=code)


def _share(value: Any, items: list[Any]) -> str:
    """Return a percentage as a share, if the value must be a share; else the empty string."""
    bounds = [item["ctx"] for item in items if item["type"] in _BOUNDS]
    is_share = any(bound.get("lt", bound.get("le")) == 1 for bound in bounds)
    return f"{value / 100:g}" if is_share and isinstance(value, int) and 1 < value < 100 else ""


def _default(path: tuple[str, ...], raw: dict[str, Any]) -> str:
    """Return finetune's default of a key; the empty string if it has none."""
    if len(path) != 2:
        return ""
    adapter = raw.get("adapter")
    kind = str(adapter.get("type")) if isinstance(adapter, dict) else ""
    kind = kind if kind in adapter_types.all_types() else ""
    if path[0] == "adapter" and kind and path[1] in (own := adapter_types.find(kind).defaults):
        return as_yaml(own[path[1]])
    section = build.sections(kind).get(path[0])
    default = section.model_fields[path[1]].default if section and path[1] in section.model_fields else None
    return as_yaml(default) if isinstance(default, (bool, int, float, str)) else ""


def unknown_key(path: tuple[str, ...], raw: dict[str, Any], where: Where, known: Known) -> Problem:
    """Explain an unknown key by its new name, its section or the nearest key, in this order."""
    section, name, at = path[0], path[-1], place_of(path, where)
    if len(path) == 1:
        return _unknown_section(section, raw, at, known)
    value, dotted = _value(raw, path), ".".join(path)
    if dotted in KEYS:
        key, today = current(dotted, value)
        return Problem(
            "this key has a new name",
            dotted,
            where=at,
            found=show(value),
            fix=f"{key}: {as_yaml(today)}",
            code="renamed-key",
        )
    adapter = raw.get("adapter")
    kind = f"adapter.{adapter.get('type')}" if isinstance(adapter, dict) else ""
    # The key of a source in a list is `data.name`.
    inner = ".".join(part for part in path[:-1] if not part.isdecimal())
    around = (".".join(path[:-1]), inner, section, kind)
    own = next((known[place] for place in around if known.get(place)), frozenset())
    homes = [s for s, names in known.items() if name in names and s != "recipe"]
    many = ("adapter.", "optimizations.")  # have one entry per type or optimization
    homes = [home.split(".")[0] if home.startswith(many) else home for home in homes]
    homes = [home for home in homes if home not in (section, inner)]
    renamed = RENAMED.get(name) or (owner_of(name) if section == "train" else "")
    if not renamed and name in own | {"use_dora", "use_rslora"}:
        renamed = "`adapter.type`, which sets this option"
    near = nearest(name, own)
    what, fix = "unknown key", f"rename it to `{near}`" if near else ""
    if renamed:
        what, fix = f"`{inner}:` has no such key", _use(renamed)
    elif homes and not fix:
        what, fix = "this key belongs to another section", f"move it to `{homes[0]}:`"
    elif owner_of(name):
        what, fix = f"`{inner}:` has no such key", _use(owner_of(name))
    elif section == "adapter" and len(path) == 2 and build.is_left_out(str(raw["adapter"].get("type")), name):
        what, fix = "finetune does not support this key of PEFT", f"remove `{name}`"
    elif homes:
        fix = f"{fix}, or move it to `{homes[0]}:`"
    return Problem(
        what,
        dotted,
        where=at,
        found=show(value),
        expected="" if fix else choices(name, own),
        fix=fix,
        code="unknown-key",
    )


def _use(instead: str) -> str:
    """Return an instruction from a text of `renames.py`: the instruction itself, or the name to use."""
    return instead if instead.startswith("remove it") else f"use {instead}"


def _unknown_section(name: str, raw: dict[str, Any], at: str, known: Known) -> Problem:
    allowed = ["model", "data", "adapter", "speed", "train", "eval", "publish"]
    if "recipe" not in known:  # an ablation file
        allowed = sorted({section.split(".")[0] for section in known})
    homes = [
        section.split(".")[0] for section, names in known.items() if name in names and section != "recipe"
    ]
    renamed, near = RENAMED.get(name, "") or owner_of(name), nearest(name, allowed)
    fix = _use(renamed) if renamed else f"rename it to `{near}`" if near else ""
    if homes and name not in RENAMED:
        fix = f"move it to `{homes[0]}:`"
    return Problem(
        "unknown section",
        name,
        where=at,
        found=show(raw.get(name)),
        expected="" if fix else ", ".join(allowed),
        fix=fix,
        code="unknown-key",
    )


def choices(name: str, allowed: Iterable[str]) -> str:
    """Return at most five allowed names, the most similar first, and the number of other names."""
    names = sorted(allowed)
    near = get_close_matches(name, names, n=MOST_CHOICES, cutoff=0.0)
    more = len(names) - len(near)
    return ", ".join(near) + (f" or one of {more} more" if more else "")


def _expected(item: Any, name: str) -> str:
    """Return what a key accepts. `name` is the key without its section."""
    kind = str(item["type"])
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        limit, unit = item["ctx"][bound], _UNITS.get(name, "")
        unit = unit.removesuffix("s") if limit == 1 else unit
        number = f"{limit:,.0f}" if float(limit).is_integer() else f"{limit:g}"
        return f"{words} {number} {unit}".rstrip()
    if kind == "literal_error":
        return choices(str(item["input"]), _literals(item))
    if kind == "string_pattern_mismatch":
        return _form(item["ctx"]["pattern"])
    return _EXPECTED.get(kind, str(item["msg"]))


def _form(pattern: str) -> str:
    """Describe the values of a pattern in the schema, such as "mlp:N or full:N" for `^(mlp|full):[1-9]`."""
    kinds = re.match(r"\^\(?([\w|]+)\)?:", pattern)
    return " or ".join(f"{kind}:N" for kind in kinds[1].split("|")) if kinds else pattern.strip("^$")


def _literals(item: Any) -> list[str]:
    return re.findall(r"'([^']*)'", item["ctx"]["expected"])


def _value(raw: object, path: tuple[str, ...]) -> Any:
    for part in path:
        if isinstance(raw, list):
            raw = dict(zip(map(str, range(len(raw))), raw, strict=True))
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


def place_of(path: tuple[str, ...], where: Where) -> str:
    """Return the place of a key in the file, or of its nearest parent that the file contains."""
    while path and path not in where:
        path = path[:-1]
    return where.get(path, "")


def show(value: object) -> str:
    """Return a value with its type, shortened for a message."""
    text = shortened(as_yaml(value), 60)
    names = {int: "integer", float: "number", bool: "boolean", list: "list"}
    if isinstance(value, str):
        return f'"{text}" (string)'
    if value is None:
        return "null"
    return f"{text} ({names[type(value)]})" if type(value) in names else text
