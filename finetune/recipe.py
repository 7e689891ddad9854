"""A recipe: seven sections, read strictly, frozen once read. Nothing here imports torch.

    recipe = load("recipes/quickstart.yaml", ["adapter.type=ia3"])

`train:` takes SFTConfig's own keys and `adapter:` PEFT's own keys for the chosen type; both are checked
against the installed classes (`upstream.py`). The sections below hold what is ours.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, create_model

from finetune import recipe_errors, strict_yaml, upstream
from finetune.errors import Problem, UserError
from finetune.renames import owner_of
from finetune.sections import Adapter, Data, Eval, Model, Publish, Section, Speed, Train


@dataclass
class Origin:
    """Where a recipe came from: for error messages, and for `recipe.resolved.yaml`."""

    path: Path
    where: dict[strict_yaml.Path, str] = field(default_factory=dict)
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


@dataclass(frozen=True)
class AdapterType:
    """What an adapter type takes: the upstream class, keys it decides itself, and our defaults."""

    sources: tuple[upstream.Source, ...] = ()
    decides: frozenset[str] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict)


_BY_RUN = frozenset(
    [
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ]
)
_LORA_DEFAULTS = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
_LORA = AdapterType(upstream.LORA_CONFIG, frozenset({"use_dora"}), _LORA_DEFAULTS)
_ADALORA_DECIDES = frozenset({"use_dora", "total_step", "rank_pattern", "loftq_config"})

ADAPTERS = {
    "lora": _LORA,
    "qlora": _LORA,
    "dora": _LORA,
    "qdora": _LORA,
    "adalora": AdapterType(upstream.ADALORA_CONFIG, _ADALORA_DECIDES, _LORA_DEFAULTS),
    "ia3": AdapterType(upstream.IA3_CONFIG),
    "full": AdapterType(),
}
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
    "warmup_steps": {"ge": 0},
    "max_grad_norm": {"ge": 0},
    "logging_steps": {"gt": 0},
    "save_steps": {"gt": 0},
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
    _complete_adapter(raw, origin)
    _resolve_paths(raw, origin.path.parent)
    recipe: Any = None
    try:
        recipe = sections()["recipe"].model_validate(raw)
    except ValidationError as error:
        known = {name: frozenset(section.model_fields) for name, section in sections().items()}
        problems += recipe_errors.explain(error, raw, origin.where, known)
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
def sections() -> dict[str, type[BaseModel]]:
    """The complete models, ours plus upstream's fields, by section name, `adapter.<type>` and `recipe`."""
    types = {f"adapter.{name}": _adapter_section(name, kind) for name, kind in ADAPTERS.items()}
    union = Annotated[Union[tuple(types.values())], Field(discriminator="type")]  # noqa: UP007 (from a tuple)
    train = _train_section()
    recipe = _create("Recipe", __base__=Recipe, adapter=(union, ...), train=(train, train()))
    return {
        "recipe": recipe,
        "model": Model,
        "data": Data,
        "speed": Speed,
        "train": train,
        "eval": Eval,
        "publish": Publish,
        **types,
    }


def json_schema() -> dict[str, Any]:
    """The JSON schema editors use to complete and check a recipe."""
    schema = sections()["recipe"].model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "finetune recipe",
    }


def _train_section() -> type[Train]:
    found = upstream.fields(upstream.SFT_CONFIG)
    names = [name for name in found if not owner_of(name) and name not in Train.model_fields]
    return _create("Train", __base__=Train, **{name: _field(name, found[name]) for name in names})


def _adapter_section(name: str, kind: AdapterType) -> type[Adapter]:
    found = upstream.fields(kind.sources)
    fields = {key: _field(key, found[key]) for key in found if key not in kind.decides | _BY_RUN}
    return _create(name.capitalize(), __base__=Adapter, type=(Literal[name], ...), **fields)


def _field(name: str, source: upstream.UpstreamField) -> tuple[Any, Any]:
    """An upstream field as pydantic's; its default is never used: only what was set is passed on."""
    annotation = Annotated[source.annotation, Field(**_LIMITS.get(name, {}))]
    return (annotation, Field(default=None, description=source.help))


def _read(path: Path) -> strict_yaml.Document:
    try:
        if path.stat().st_size > strict_yaml.MAX_BYTES:
            found = f"{path.stat().st_size:,} bytes"
            expected = f"at most {strict_yaml.MAX_BYTES:,}"
            raise UserError(
                Problem("too large for a recipe", where=str(path), found=found, expected=expected)
            )
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{path}, byte {error.start}"
        raise UserError(Problem("not UTF-8", where=where, fix="save the recipe as UTF-8")) from None
    except OSError as error:
        near = recipe_errors.similar_files(path)
        fix = near or "finetune recipes lists the shipped ones"
        raise UserError(
            Problem(f"cannot read the recipe: {error.strerror}", where=str(path), fix=fix)
        ) from None
    return strict_yaml.parse(text, str(path))


def _apply_overrides(
    raw: dict[str, Any], overrides: tuple[str, ...] | list[str], origin: Origin
) -> list[Problem]:
    problems = []
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
        target[path[-1]] = document.value
        origin.where[path] = where
        origin.set_by[f"{section}.{name.split('.')[0]}"] = "override"
        for rival in recipe_errors.RIVALS.get(key, ()):
            rival_section, rival_name = rival.split(".")
            dropped = raw.get(rival_section, {})
            if document.value is not None and dropped.get(rival_name) is not None:
                origin.notices.append(
                    f"{rival}: {dropped.pop(rival_name)} is displaced by the override of {key}"
                )
                origin.set_by.pop(rival, None)
    return problems


def _complete_adapter(raw: dict[str, Any], origin: Origin) -> None:
    """Leave out keys that only other types have, and add our defaults, both on record."""
    adapter = raw.get("adapter")
    kind = ADAPTERS.get(str(adapter.get("type"))) if isinstance(adapter, dict) else None
    if not isinstance(adapter, dict) or kind is None:
        return
    of_any_type = {key for name in ADAPTERS for key in sections()[f"adapter.{name}"].model_fields}
    own = sections()[f"adapter.{adapter['type']}"].model_fields
    for key in [key for key in adapter if key not in own and key in of_any_type]:
        origin.notices.append(
            f"adapter.{key}: {adapter['type']} has no such key; left out ({adapter.pop(key)})"
        )
        origin.set_by[f"adapter.{key}"] = f"left out: {adapter['type']} has no such key"
    for key, value in kind.defaults.items():
        if key not in adapter:
            adapter[key] = value
            origin.set_by[f"adapter.{key}"] = "default"


def _resolve_paths(raw: dict[str, Any], folder: Path) -> None:
    """Relative paths are looked up from the working directory first, then from the recipe's folder."""

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if isinstance(value, dict) and isinstance(value.get("name"), str):  # one of several sources
            return {**value, "name": resolve(value["name"])}
        if not isinstance(value, str) or os.path.isabs(value) or value.startswith("~"):
            return os.path.expanduser(value) if isinstance(value, str) else value
        here, beside = (glob.glob(str(base / value)) for base in (Path(), folder))
        return str(folder / value) if beside and not here else value

    for section, key in (
        ("model", "name"),
        ("data", "name"),
        ("data", "validation"),
        ("data", "chat_template"),
        ("data", "cache"),
    ):
        if isinstance(raw.get(section), dict) and raw[section].get(key):
            raw[section][key] = resolve(raw[section][key])
