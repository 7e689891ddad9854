"""A recipe: seven sections, read strictly, frozen once read. Nothing here imports torch.

    recipe = load("recipes/quickstart.yaml", ["adapter.type=ia3"])

`train:` takes SFTConfig's own keys and `adapter:` PEFT's own keys for the chosen type (`adapter_types.py`);
both are checked against the installed classes (`upstream.py`). `sections.py` holds what is ours.
"""

from __future__ import annotations

import glob
import inspect
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, create_model

from finetune import adapter_types, recipe_errors, shipped, strict_yaml, upstream
from finetune.errors import Problem, UserError, nearest
from finetune.renames import owner_of
from finetune.sections import (
    ADALORA_KEYS,
    LORA_KEYS,
    PEFT_KEYS,
    Adapter,
    Data,
    Eval,
    Expect,
    Model,
    Publish,
    Qat,
    Section,
    Source,
    Speed,
    Train,
)


@dataclass
class Origin:
    """Where a recipe came from: for error messages, and for `recipe.resolved.yaml`."""

    path: Path
    where: dict[strict_yaml.Keys, str] = field(default_factory=dict)
    set_by: dict[str, str] = field(default_factory=dict)
    """Dotted key -> recipe | override | default (with the reason)."""
    notices: list[str] = field(default_factory=list)
    """What was left out or displaced, each to be said once."""


class Recipe(Section):
    """One run, whole. Only `train.run` sees all of it; every other function gets its section."""

    model: Model
    data: Data
    adapter: Adapter
    speed: Speed = Speed()
    train: Train = Train()
    eval: Eval = Eval()
    publish: Publish = Publish()
    _origin: Origin = PrivateAttr()

    @property
    def origin(self) -> Origin:
        return self._origin


_create: Any = create_model  # its overloads don't know fields made at run time


_LIMITS: dict[str, dict[str, Any]] = {  # of upstream's keys; upstream itself checks late or not at all
    "r": {"ge": 1},
    "lora_alpha": {"gt": 0},
    "lora_dropout": {"ge": 0, "lt": 1},
    "target_r": {"ge": 1},
    "init_r": {"ge": 1},
    "tinit": {"ge": 0},
    "tfinal": {"ge": 0},
    "deltaT": {"ge": 1},
    "orth_reg_weight": {"ge": 0},
    "weight_decay": {"ge": 0},
    "adam_beta1": {"ge": 0, "lt": 1},
    "adam_beta2": {"ge": 0, "lt": 1},
    "adam_epsilon": {"ge": 0, "allow_inf_nan": False},
    "warmup_steps": {"ge": 0, "le": 1e15},
    "max_grad_norm": {"ge": 0},
    "logging_steps": {"gt": 0, "le": 1e15},
    "dataloader_num_workers": {"ge": 0},
}


def load(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> Recipe:
    """Read a recipe file, apply `section.key=value` overrides, and check everything.

    Raises:
        UserError: with every problem found, each with its place in the file (exit 2).
    """
    origin = Origin(Path(path))
    document = _read(origin.path)
    raw, problems = document.value, list(document.problems)
    if not isinstance(raw, dict):
        fix = "start from one that works: finetune recipes quickstart --copy ."
        raise UserError(Problem("a recipe is a mapping of sections", where=str(path), fix=fix))
    origin.where = document.where
    origin.set_by = {".".join(key): "recipe" for key in document.where if len(key) == 2}
    for section in [name for name, content in raw.items() if content is None]:
        raw[section] = {}  # `train:` with every line commented out
    problems += _apply_overrides(raw, overrides, origin)
    problems += recipe_errors.secrets(raw, origin.where)
    problems += recipe_errors.conflicts(raw, origin.where)
    kind, unknown = _adapter_type(raw, origin)
    problems += unknown
    if kind:
        problems += _complete_adapter(raw["adapter"], kind, origin)
    _resolve_paths(raw, origin.path.parent)
    recipe: Any = None
    try:
        recipe = sections(kind)["recipe"].model_validate(raw)
    except ValidationError as error:
        problems += recipe_errors.explain(error, raw, origin.where, known_keys())
    if problems:
        raise UserError(*problems)
    recipe._origin = origin
    return recipe


def local_path(name: str) -> bool:
    """Whether a `name` means a file or folder rather than a Hub id: it exists, or only a path looks so."""
    if os.path.exists(os.path.expanduser(name)) or any(mark in name for mark in "*?["):
        return True
    looks_like_file = Path(name).suffix in DATA_SUFFIXES or ("/" not in name and "." in name)
    return looks_like_file or name.startswith((".", "/", "~")) or name.count("/") > 1


DATA_SUFFIXES = frozenset({".jsonl", ".json", ".csv", ".parquet", ".arrow", ".tar", ".txt"})


@cache
def sections(kind: str = "") -> dict[str, type[BaseModel]]:
    """The complete models, ours plus upstream's fields, by section name and `recipe`; its adapter is of type
    `kind`, or a mapping that is not looked into."""
    adapter: Any = _adapter_section(kind) if kind else dict[str, Any]
    train = _train_section()
    recipe = _create("Recipe", __base__=Recipe, adapter=(adapter, ...), train=(train, train()))
    named = {"model": Model, "data": Data, "speed": Speed, "train": train, "eval": Eval, "publish": Publish}
    return {"recipe": recipe, **named, **({"adapter": adapter} if kind else {})}


def json_schema() -> dict[str, Any]:
    """The JSON schema editors use to complete and check a recipe."""
    offered = [name for name, kind in adapter_types.all_types().items() if not kind.refused]
    types = tuple(_adapter_section(name) for name in offered)
    union = Annotated[Union[types], Field(discriminator="type")]  # noqa: UP007 (from a tuple)
    recipe = _create("Recipe", __base__=sections()["recipe"], adapter=(union, ...))
    schema = recipe.model_json_schema()
    for name, described in schema["$defs"].items():
        texts = _texts_beside_keys(name)
        for key in texts.keys() & described.get("properties", {}).keys():
            described["properties"][key].setdefault("description", texts[key])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "finetune recipe",
    }


def _texts_beside_keys(name: str) -> dict[str, str]:
    """Key -> the docstring that stands under it in sections.py, for a section or one made from it.

    Pydantic reads them too (`use_attribute_docstrings`), in 0.1 s that every command would pay.
    """
    made, todo = {}, [Section]
    while todo:
        made |= {kind.__name__: kind for kind in todo}
        todo = [below for kind in todo for below in kind.__subclasses__()]
    texts: dict[str, str] = {}
    for kind in reversed(made[name].__mro__):
        if kind.__module__ == Section.__module__:
            texts |= upstream.texts_beside_fields(Path(inspect.getfile(kind)), kind.__name__)
    return texts


@cache
def _train_section() -> type[Train]:
    found = upstream.fields(upstream.SFT_CONFIG)
    names = [name for name in found if not owner_of(name) and name not in Train.model_fields]
    return _create("Train", __base__=Train, **{name: _field(name, found[name]) for name in names})


@cache
def _adapter_section(name: str) -> type[Adapter]:
    kind = adapter_types.find(name)
    found = upstream.fields(kind.sources)
    fields = {key: _field(key, found[key]) for key in found if key in kind.keys}
    return _create(name.capitalize(), __base__=Adapter, type=(Literal[name], ...), **fields, **_ours(kind))


def _ours(kind: adapter_types.AdapterType) -> dict[str, Any]:
    """Keys of ours that a type takes besides PEFT's."""
    own = {"lora": LORA_KEYS, "adalora": ADALORA_KEYS}.get(kind.peft, {})
    return {**PEFT_KEYS, **own} if kind.peft else {}


def _field(name: str, source: upstream.UpstreamField) -> tuple[Any, Any]:
    """An upstream field as pydantic's; its default is never used: only what was set is passed on."""
    plain: Any = source.annotation
    if source.nested:  # a config class of PEFT's, as a mapping of its own fields
        (*_, class_name), inner = source.nested[0], upstream.fields(source.nested)
        plain = _create(class_name, __base__=Section, **{key: _field(key, inner[key]) for key in inner})
    annotation = Annotated[plain, Field(**_LIMITS.get(name, {}))]
    first_sentence = source.help.partition(". ")[0][:200]
    return (annotation, Field(default=None, description=first_sentence))


@cache
def known_keys() -> dict[str, frozenset[str]]:
    """Section, or `adapter.<type>` -> its keys."""
    ours = {name: frozenset(section.model_fields) for name, section in sections().items()}
    types = adapter_types.all_types()
    inner = {  # of `eva_config:` and the like
        f"adapter.{key}": frozenset(upstream.fields(held.nested))
        for kind in types.values()
        for key, held in upstream.fields(kind.sources).items()
        if held.nested
    }
    nested = {"speed.qat": Qat, "data.expect": Expect, "data.name": Source}
    return (
        ours
        | {name: frozenset(section.model_fields) for name, section in nested.items()}
        | inner
        | {f"adapter.{name}": _adapter_keys(name) for name in types}
    )


def _adapter_keys(name: str) -> frozenset[str]:
    kind = adapter_types.find(name)
    return kind.keys | {"type", *_ours(kind)}


def _of_another_type(key: str) -> bool:
    return any(key in keys for name, keys in known_keys().items() if name.startswith("adapter."))


def _read(path: Path) -> strict_yaml.Document:
    try:
        text = strict_yaml.text_of(path, "the recipe")
    except OSError as error:
        near, ships = recipe_errors.similar_files(path), shipped.named(path)
        if ships and not os.path.exists(near):
            near = f"it ships with this program: finetune recipes {ships} --copy . writes it here"
        fix = near or "finetune recipes lists the shipped ones"
        raise UserError(
            Problem(f"cannot read the recipe: {error.strerror}", where=str(path), fix=fix)
        ) from None
    return strict_yaml.parse(text, str(path))


def _apply_overrides(
    raw: dict[str, Any], overrides: tuple[str, ...] | list[str], origin: Origin
) -> list[Problem]:
    problems, before, now = list[Problem](), dict[str, Any](), dict[str, Any]()
    for text in overrides:
        key, equals, value = text.partition("=")
        section, dot, name = key.partition(".")
        where = f"override {text!r}"
        if not (equals and dot and name):
            expected = "section.key=value, such as train.learning_rate=1e-4"
            problems.append(Problem("not an override", where=where, expected=expected))
            continue
        document = strict_yaml.parse(value, where)
        problems += document.problems
        target, path = raw, (section, *name.split("."))
        for depth, part in enumerate(path[:-1], start=1):  # adapter.rank_pattern.q_proj=8
            origin.where.setdefault(path[:depth], where)
            if not isinstance(target.setdefault(part, {}), dict):
                problems.append(Problem("holds a value, not keys", ".".join(path[:depth]), where))
                target = {}
                break
            target = target[part]
        before.setdefault(key, target.get(path[-1]))
        now.pop(key, None)
        target[path[-1]] = now[key] = document.value
        origin.where[path] = where
        origin.set_by[f"{section}.{name.split('.')[0]}"] = "override"
    _displace(raw, before, now, origin)
    return problems


def _displace(raw: dict[str, Any], before: dict[str, Any], now: dict[str, Any], origin: Origin) -> None:
    """Leave out, on record, what overrides leave no sense: of the file, and of rivals that come before them.

    Args:
        before: what the file says, by dotted key.
        now: the overrides, in order.
    """
    for key, value in reversed(now.items()):
        if _said(raw, key) is None:  # null, or displaced by a later one
            continue
        changed = (key, f"{key}={value}") if value != before[key] else ()
        of_another = [rival for one in changed for rival in recipe_errors.OF_ANOTHER.get(one, ())]
        rivals = [*recipe_errors.RIVALS.get(key, ()), *(one for one in of_another if one not in now)]
        for rival in rivals:
            if (said := _said(raw, rival)) is not None:
                origin.notices.append(f"{rival}: {said} is displaced by the override of {key}")
                origin.set_by.pop(rival, None)
                section, name = rival.split(".")
                del raw[section][name]


def _said(raw: dict[str, Any], key: str) -> Any:
    """What a recipe, as it was read, says of a dotted key."""
    section, _, name = key.partition(".")
    content = raw.get(section)
    return content.get(name) if isinstance(content, dict) else None


def _adapter_type(raw: dict[str, Any], origin: Origin) -> tuple[str, list[Problem]]:
    """The recipe's `adapter.type`, or what is wrong with it."""
    adapter, types = raw.get("adapter"), adapter_types.all_types()
    if not isinstance(adapter, dict) or "type" not in adapter:
        if isinstance(adapter, dict):
            where = origin.where.get(("adapter",), "")
            return "", [Problem("is required", "adapter.type", where, fix="type: lora")]
        return "", []  # explained with the other sections
    name, where = adapter["type"], origin.where.get(("adapter", "type"), "")
    if not isinstance(name, str) or name not in types:
        offered = [name for name, kind in types.items() if not kind.refused]
        found, near = recipe_errors.show(name), nearest(str(name).lower().replace("-", "_"), offered)
        return "", [Problem("no such type", "adapter.type", where, found, ", ".join(offered), near)]
    if types[name].refused:
        what = f"PEFT's {name} is not for supervised fine-tuning: {types[name].refused}"
        return "", [Problem(what, "adapter.type", where, fix="lora, dora, or another type")]
    return name, []


def _complete_adapter(adapter: dict[str, Any], kind: str, origin: Origin) -> list[Problem]:
    """Leave out keys that only other types have, and add our defaults, both on record.

    Returns:
        Keys that this type has under another name, where it was not swapped by an override: such a recipe
            means them, and would be trained without.
    """
    swapped, found = origin.set_by.get("adapter.type") == "override", []
    for key in [key for key in adapter if key not in _adapter_keys(kind) and _of_another_type(key)]:
        value, name = adapter.pop(key), adapter_types.called(kind, key)
        if name and not swapped:
            where = origin.where.get(("adapter", key), "")
            what, fix = f"{kind} has no such key", f"{name}: {value}"
            found.append(Problem(what, f"adapter.{key}", where, recipe_errors.show(value), fix=fix))
            continue
        instead = f" ({kind} calls it {name})" if name else ""
        origin.notices.append(f"adapter.{key}: {kind} has no such key{instead}; left out ({value})")
        origin.set_by[f"adapter.{key}"] = f"left out: {kind} has no such key"
    if kind in adapter_types.NOT_LINEAR and adapter.get("target_modules") == "all-linear":
        adapter.pop("target_modules")
        origin.notices.append(f"adapter.target_modules: all-linear is nothing to {kind}; left out")
        origin.set_by["adapter.target_modules"] = f"left out: {kind} changes no linear layers"
    if adapter.get("from"):
        return found  # its own config says what it is
    for key, value in adapter_types.find(kind).defaults.items():
        if key not in adapter:
            adapter[key] = value
            origin.set_by[f"adapter.{key}"] = "default"
    return found


def _resolve_paths(raw: dict[str, Any], folder: Path) -> None:
    """Relative paths are looked up from the working directory first, then from the recipe's folder.

    Of `eval.tasks` only those that end as files do: a folder may be called as one of lm-eval's tasks is.
    """

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if isinstance(value, dict) and isinstance(value.get("name"), str):  # one of several sources
            return {**value, "name": resolve(value["name"])}
        if not isinstance(value, str) or not value or os.path.isabs(value) or value.startswith("~"):
            return os.path.expanduser(value) if isinstance(value, str) else value
        if os.path.exists(value) or glob.glob(value):
            return value
        if os.path.exists(folder / value):
            return str(folder / value)
        pattern = os.path.join(glob.escape(str(folder)), value)  # brackets of the folder are its name
        return pattern if glob.glob(pattern) else value

    for section, key in (
        ("model", "name"),
        ("data", "name"),
        ("data", "validation"),
        ("data", "chat_template"),
        ("data", "cache"),
        ("adapter", "from"),
        ("eval", "general"),
    ):
        if isinstance(raw.get(section), dict) and raw[section].get(key):
            raw[section][key] = resolve(raw[section][key])
    train = raw.get("train")
    if isinstance(train, dict) and isinstance(train.get("output_dir"), str):  # made, not looked up
        train["output_dir"] = os.path.expanduser(train["output_dir"])
    asked = raw["eval"].get("tasks") if isinstance(raw.get("eval"), dict) else None
    if isinstance(asked, list):
        files = (".yaml", ".yml")
        raw["eval"]["tasks"] = [resolve(name) if str(name).endswith(files) else name for name in asked]
