"""Load a recipe: seven sections, checked strictly and then frozen. Nothing here imports torch.

    recipe = load("recipes/quickstart.yaml", ["adapter.type=ia3"])

`train:` takes SFTConfig's keys, and `adapter:` takes PEFT's keys for the chosen type (`adapter_types.py`).
Both are checked against the installed classes (`upstream_options.py`). `schema.py` holds finetune's own keys.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune.core import config_values, paths, shipped_files, strict_yaml
from finetune.core.command_lines import command
from finetune.core.errors import Problem, UserError, raise_if_any
from finetune.core.folder_search import match_paths
from finetune.recipe import adapter_types, build, command_line_overrides, recipe_errors, renames
from finetune.recipe.renames import meant
from finetune.recipe.schema import Origin, Recipe


def load(
    path: str | Path, overrides: tuple[str, ...] | list[str] = (), format_version: int | None = None
) -> Recipe:
    """Read a recipe file, apply `section.key=value` overrides, and check everything.

    Args:
        path: a recipe file, or the name of a shipped recipe, such as `quickstart`. A file has priority.
        format_version: the format of the run folder that holds the recipe. In format 1, old names are read as
            today's names. In any other recipe, an old name is an error.

    Raises:
        UserError: the recipe is wrong. The error lists every problem with its place in the file (exit 2).
    """
    origin = Origin(shipped_files.recipe_path(path))
    document = _read(origin.path)
    raw, problems = document.value, list(document.problems)
    if not isinstance(raw, dict):
        raise UserError(
            Problem(
                "the file is not a recipe",
                where=str(path),
                found=recipe_errors.show(raw),
                expected="a mapping with the sections model, data and adapter",
                fix=command("recipes", "quickstart", "--copy", "."),
                code="recipe-file",
            )
        )
    origin.where = document.where
    if format_version == 1:
        raw = renames.current_recipe(raw)
        origin.where = {
            tuple(renames.KEYS.get(".".join(key), ".".join(key)).split(".")) if len(key) == 2 else key: place
            for key, place in document.where.items()
        }
    return _build(raw, origin, overrides, problems)


def from_values(
    values: dict[str, Any], where: str | Path, overrides: tuple[str, ...] | list[str] = ()
) -> Recipe:
    """Return the recipe of values that are in no recipe file.

    Args:
        where: the file or folder that the values are from, for errors.

    Raises:
        UserError: the values or the overrides are wrong (exit 2).
    """
    sections = {name: keys for name, keys in values.items() if isinstance(keys, dict)}
    places = {(name, key): str(where) for name, keys in sections.items() for key in keys}
    return _build(values, Origin(Path(where), places), overrides, [])


def _build(
    raw: dict[str, Any], origin: Origin, overrides: tuple[str, ...] | list[str], problems: list[Problem]
) -> Recipe:
    """Apply overrides to parsed values, check everything, and return the recipe.

    Args:
        problems: what is already wrong.
    """
    origin.set_by = {".".join(key): "recipe" for key in origin.where if len(key) == 2}
    for section in [name for name, content in raw.items() if content is None]:
        raw[section] = {}  # `train:` with every line commented out
    problems += command_line_overrides.apply_overrides(raw, overrides, origin)
    problems += recipe_errors.secrets(raw, origin.where)
    problems += recipe_errors.conflicts(raw, origin.where)
    kind, unknown = _adapter_type(raw, origin)
    problems += unknown
    if kind:
        problems += _complete_adapter(raw["adapter"], kind, origin)
    _resolve_paths(raw, origin.path.parent)
    recipe: Any = None
    try:
        recipe = build.sections(kind)["recipe"].model_validate(raw)
    except ValidationError as error:
        problems += recipe_errors.explain(error, raw, origin.where, build.known_keys())
    except OverflowError:  # pydantic converts integers to floats
        problems += [
            Problem(
                "the number is too large", f"{section}.{key}", expected="at most 1e308", code="value-range"
            )
            for section, values in raw.items()
            for key, value in (values if isinstance(values, dict) else {}).items()
            if isinstance(value, int) and value.bit_length() > config_values.LARGEST_BITS
        ]
    raise_if_any(problems)
    origin.checked = recipe.model_dump()
    recipe._origin = origin
    return recipe


def _read(path: Path) -> strict_yaml.Document:
    try:
        text = strict_yaml.text_of(path, "the recipe")
    except OSError as error:
        near, ships = paths.similar_files(path), shipped_files.named(path)
        if ships and not os.path.exists(near):
            near = command("recipes", ships, "--copy", ".")
        raise UserError(
            Problem(
                "finetune can't read the recipe",
                where=str(path),
                found=error.strerror or str(error),
                fix=near or "finetune recipes",
                code="recipe-file",
            )
        ) from None
    return strict_yaml.parse(text, str(path))


def _adapter_type(raw: dict[str, Any], origin: Origin) -> tuple[str, list[Problem]]:
    """Return the recipe's `adapter.type`, or the problems with it."""
    adapter, types = raw.get("adapter"), adapter_types.all_types()
    if not isinstance(adapter, dict) or "type" not in adapter:
        if isinstance(adapter, dict):
            return "", [
                Problem(
                    "the recipe lacks this required key",
                    "adapter.type",
                    where=origin.where.get(("adapter",), ""),
                    fix="type: lora",
                    code="missing-key",
                )
            ]
        return "", []  # the validation of the sections reports it
    name, where = adapter["type"], origin.where.get(("adapter", "type"), "")
    if not isinstance(name, str) or name not in types:
        offered = [name for name, kind in types.items() if not kind.refused]
        found, near = recipe_errors.show(name), meant("adapter.type", str(name).replace("-", "_"), offered)
        return "", [
            Problem(
                "unknown adapter type",
                "adapter.type",
                where=where,
                found=found,
                expected="" if near else recipe_errors.choices(str(name), offered),
                fix=f"type: {near}" if near else "type: lora",
                code="adapter-type",
            )
        ]
    if types[name].refused:
        return "", [
            Problem(
                f"finetune does not support PEFT's {name}",
                "adapter.type",
                where=where,
                fix="type: lora",
                why=types[name].refused,
                code="adapter-type",
            )
        ]
    return name, []


def _complete_adapter(adapter: dict[str, Any], kind: str, origin: Origin) -> list[Problem]:
    """Remove keys that only other types have, add finetune's defaults, and record both.

    Returns:
        Problems of keys that this type has under another name. They are not ignored like other keys, because
            the recipe was written for this type. If an override sets the type, there are no such problems.
    """
    swapped, found = origin.set_by.get("adapter.type") == "override", []
    for key in [key for key in adapter if key not in build.adapter_keys(kind) and build.of_another_type(key)]:
        value, name = adapter.pop(key), adapter_types.called(kind, key)
        if name and not swapped:
            found.append(
                Problem(
                    f"{kind} has this key under another name",
                    f"adapter.{key}",
                    where=origin.where.get(("adapter", key), ""),
                    found=recipe_errors.show(value),
                    fix=f"{name}: {value}",
                    code="renamed-key",
                )
            )
            continue
        instead = f". {kind} calls it `{name}`" if name else ""
        origin.notices.append(f"adapter.{key}: finetune ignores {value}: {kind} has no such key{instead}")
        origin.set_by[f"adapter.{key}"] = f"ignored: {kind} has no such key"
    if kind in adapter_types.NOT_LINEAR and adapter.get("target_modules") == "all-linear":
        adapter.pop("target_modules")
        origin.notices.append(f"adapter.target_modules: {kind} ignores all-linear: it changes other modules")
        origin.set_by["adapter.target_modules"] = f"ignored: {kind} changes no linear layers"
    if adapter.get("init_from"):
        return found  # the adapter's own config has the values
    for key, value in adapter_types.find(kind).defaults.items():
        if key not in adapter:
            adapter[key] = value
            origin.set_by[f"adapter.{key}"] = "default"
    return found


def _resolve_paths(raw: dict[str, Any], folder: Path) -> None:
    """Resolve relative paths from the working directory, or else from the recipe's folder.

    A shipped recipe finds the shipped examples from any working directory. Names in `eval.tasks` are paths
    only if they end in .yaml or .yml, because a folder may have the name of a task of lm-eval.
    """
    shipped = folder.resolve().is_relative_to(shipped_files.folder("recipes"))
    folders = [folder, *([shipped_files.folder("examples").parent] if shipped else [])]

    def resolve(value: object, exists: Callable[[str], bool] = os.path.exists) -> Any:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if isinstance(value, dict) and isinstance(value.get("name"), str):  # one of several sources
            return {**value, "name": resolve(value["name"])}
        if not isinstance(value, str) or not value or os.path.isabs(value) or value.startswith("~"):
            return os.path.expanduser(value) if isinstance(value, str) else value
        if exists(value) or any(map(exists, matches(value, Path()))):
            return value
        for base in folders:
            if exists(str(base / value)):
                return str(base / value)
            if any(map(exists, matches(value, base))):
                return os.path.join(
                    glob.escape(str(base)), value
                )  # brackets in the folder's name are literal
        return value

    def matches(value: str, base: Path) -> list[str]:
        return [str(path) for path in match_paths(value, base)] if glob.has_magic(value) else []

    for section, key in (
        ("model", "name"),
        ("data", "name"),
        ("data", "validation"),
        ("data", "cache_dir"),
        ("adapter", "init_from"),
        ("eval", "forgetting"),
    ):
        if isinstance(raw.get(section), dict) and raw[section].get(key):
            raw[section][key] = resolve(raw[section][key])
    if isinstance(raw.get("data"), dict) and raw["data"].get("chat_template"):
        # A folder can have the name of a bundled template, such as gemma/.
        raw["data"]["chat_template"] = resolve(raw["data"]["chat_template"], os.path.isfile)
    train = raw.get("train")
    if isinstance(train, dict) and isinstance(train.get("output_dir"), str):  # created, not searched
        train["output_dir"] = os.path.expanduser(train["output_dir"])
    tasks = raw["eval"].get("tasks") if isinstance(raw.get("eval"), dict) else None
    if isinstance(tasks, list):
        files = (".yaml", ".yml")
        raw["eval"]["tasks"] = [resolve(name) if str(name).endswith(files) else name for name in tasks]
