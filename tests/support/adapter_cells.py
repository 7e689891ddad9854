"""Cells of architecture x adapter type x spelling, and the verdicts of `check` and `train` on each."""

from __future__ import annotations

import json
import logging
import warnings
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.adapters import attach
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.models import architecture, model_class, module_lists
from finetune.models.module_names import short
from finetune.preflight import adapter_names, adapter_trial, gradient_probe
from finetune.recipe import adapter_types, loader
from support.architectures import CONFIGS, MULTIMODAL, config_of

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.core.errors import Problem
    from finetune.models.module_names import Names
    from finetune.recipe.schema import Recipe

TYPES: dict[str, dict[str, Any]] = {
    "lora": {"r": 4}, "dora": {"r": 4}, "adalora": {"r": 4}, "ia3": {}, "oft": {"oft_block_size": 8},
    "vera": {"r": 4}, "loha": {"r": 4}, "hira": {"r": 4}, "vblora": {"r": 4, "num_vectors": 16},
    "ln_tuning": {}, "trainable_tokens": {"token_indices": [3, 5]},
    "prompt_tuning": {"num_virtual_tokens": 3}, "full": {},
}  # fmt: skip
# Of the other types, sizes that fit into two layers of width 32
SMALL: dict[str, dict[str, Any]] = {
    "shira": {"r": 4}, "miss": {"r": 4}, "psoft": {"r": 4}, "road": {"group_size": 16},
    "fourierft": {"n_frequency": 10}, "waveft": {"n_frequency": 10},
}  # fmt: skip
SPELLINGS = (
    "default", "all-linear", "suffixes", "commas", "regex", "wide regex", "full name", "wrong name", "head",
    "embedding", "router", "expert parameters", "old experts", "container", "norm", "excluded", "saved head",
    "saved norm", "saved embedding", "rank pattern", "layers", "convolution", "rows", "tied embedding",
    "tied regex", "tied saved embedding", "tied saved head", "tied rows",
)  # fmt: skip


class Cell(NamedTuple):
    family: str
    kind: str
    spelling: str


# `gradient_probe.check` runs in one process, with the attention of the model
SETUP: Any = SimpleNamespace(launch=SimpleNamespace(sharded=""), attention=SimpleNamespace(value="eager"))
# The other types that finetune offers, on all linear layers or, where a type has none, as it is by default
OTHERS = [
    name
    for name, kind in adapter_types.all_types().items()
    if kind.peft and not kind.refused and not kind.storage and name not in TYPES
]
FAMILIES = [*CONFIGS, *MULTIMODAL, *(f"{name} tied" for name in ("llama", "gpt2", "bloom", *MULTIMODAL))]
CELLS = [Cell(family, kind, how) for family in FAMILIES for kind in TYPES for how in SPELLINGS]
CELLS += [Cell(family, kind, "default") for family in FAMILIES for kind in OTHERS]
CELLS += [Cell(family, "beft", "all-linear") for family in FAMILIES]  # has targets of its own by default


def options_of(cell: Cell, names: Names) -> dict[str, Any]:
    """The adapter's options in a recipe, by the names of the model."""
    linear = list(dict.fromkeys(map(short, names.linear)))
    first, last = linear[0], linear[-1]
    norms = [name for name in names.modules if "norm" in names.kinds[name].lower()]
    routers = [n for n, kind in names.kinds.items() if "Router" in kind or short(n) in ("gate", "router")]
    stacked = [n for n, shape in names.shapes.items() if len(shape) == 3 and "experts" in n]
    convolutions = [name for name in names.modules if names.kinds[name] == "Conv1d"]
    tying = {"ensure_weight_tying": True}
    found: dict[str, dict[str, Any]] = {
        "default": {},
        "all-linear": {"target_modules": "all-linear"},
        "suffixes": {"target_modules": [first, last]},
        "commas": {"target_modules": f"{first},{last}"},
        "regex": {"target_modules": rf".*\.({first}|{last})"},
        "wide regex": {"target_modules": r".*\.\d+\..*"},
        "full name": {"target_modules": [names.linear[0]]},
        "wrong name": {"target_modules": ["q_porj"]},
        "head": {"target_modules": [short(names.head)]},
        "embedding": {"target_modules": [short(names.embedding)]},
        "router": {"target_modules": [first, short((routers or names.linear)[-1])]},
        "expert parameters": {
            "target_modules": [first],
            "target_parameters": sorted({".".join(n.split(".")[-2:]) for n in stacked}) or ["experts.x"],
        },
        "old experts": {"target_modules": [first, "gate_proj", "up_proj", "down_proj"]},
        "container": {"target_modules": [short(names.linear[0].rpartition(".")[0])]},
        "norm": {"target_modules": sorted({short(name) for name in norms})},
        "excluded": {"target_modules": "all-linear", "exclude_modules": [last]},
        "saved head": {"modules_to_save": [short(names.head)]},
        "saved norm": {"modules_to_save": [short(norms[0]) if norms else "norm"]},
        "saved embedding": {"modules_to_save": [short(names.embedding)]},
        "rank pattern": {"rank_pattern": {first: 2}},
        "layers": {"layers_to_transform": [1]},
        "convolution": {"target_modules": [short(convolutions[0]) if convolutions else "conv1d"]},
        "rows": {"trainable_token_indices": [3, 96]},
        "tied embedding": {"target_modules": [first, short(names.embedding)], **tying},
        "tied regex": {"target_modules": rf".*\.({first}|{short(names.embedding)})", **tying},
        "tied saved embedding": {"modules_to_save": [short(names.embedding)], **tying},
        "tied saved head": {"modules_to_save": [short(names.head)], **tying},
        "tied rows": {"trainable_token_indices": [3, 96], **tying},
    }  # fmt: skip
    return {**TYPES.get(cell.kind, {}), **SMALL.get(cell.kind, {}), **found[cell.spelling]}


@cache
def names_of(family: str, folder: Path) -> Names:
    """The names as `check` reads them: from config.json."""
    place = folder / family
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(config_of(family).to_json_string(use_diff=False))
    path = place / "config.json"
    return module_lists.read(path, architecture.config_in(path)).names


def verdicts(cell: Cell, folder: Path) -> tuple[str, str] | None:
    """Why `check` and why `train` refuse a cell, empty where they accept; `None`: no such recipe exists."""
    names = names_of(cell.family, folder)
    path = folder / "recipe.yaml"
    section = {"type": cell.kind, **options_of(cell, names)}
    raw = {"model": {"name": str(folder / cell.family)}, "data": {"name": "data.jsonl"}, "adapter": section}
    path.write_text(json.dumps(raw))
    try:
        recipe = loader.load(path, ["train.max_steps=20"])
    except UserError:
        return None
    found = refused_by_check(recipe, names, folder / cell.family)
    by_train = why_not_trained(recipe, config_of(cell.family))
    if found is None:
        return by_train, by_train
    return "\n".join(f"{p.what} [{p.found}]" for p in found), by_train


def refused_by_check(recipe: Recipe, names: Names, model: Path) -> list[Problem] | None:
    """What `check` says of a recipe's adapter: from the names, and from a trial where it makes one.

    `None`: `check` says that only the run can try the adapter.
    """
    found = adapter_names.check_names(recipe, names, architecture.config_in(model / "config.json"))
    if not found and adapter_trial.is_needed(recipe):
        return adapter_trial.check_on_meta(recipe, model)
    return found


def why_not_trained(recipe: Any, config: Any) -> str:
    """Why a two-layer model does not train with this adapter; the empty string if it does."""
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a cell may warn; only errors count here
            loads = model_class.auto_class(config)
            model = loads.from_config(config, attn_implementation="eager").train()
            adapted: Any = attach.attach(model, recipe.adapter, 20, RunChecks())
            gradient_probe.check(adapted, recipe.adapter, SETUP, RunChecks())
            ids = torch.arange(12)[None]
            adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    except UserError as error:
        return str(error)
    except Exception as error:  # what is looked for
        return f"UNCAUGHT {type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)
    return ""
