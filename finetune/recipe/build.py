"""Build a Recipe from parsed YAML, and the JSON schema from its sections."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import BaseModel, Field, create_model

from finetune.recipe import adapter_types, upstream_options
from finetune.recipe.renames import owner_of
from finetune.recipe.schema import (
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
    Recipe,
    Section,
    Source,
    Speed,
    Train,
)

_DEBUG = Literal["underflow_overflow", "tpu_metrics_debug"]


def own_keys(kind: adapter_types.AdapterType) -> dict[str, Any]:
    """Return the keys that finetune adds for this type: name -> (annotation, pydantic field)."""
    own = {"lora": LORA_KEYS, "adalora": ADALORA_KEYS}.get(kind.peft, {})
    return {**PEFT_KEYS, **own} if kind.peft else {}


def adapter_keys(name: str) -> frozenset[str]:
    """Return every key that `adapter:` may have under `type: name`."""
    kind = adapter_types.find(name)
    return kind.keys | {"type", *own_keys(kind)}


def is_left_out(name: str, key: str) -> bool:
    """Return whether PEFT has this key for the type. Recipes can't set all of PEFT's keys."""
    kind = adapter_types.all_types().get(name)
    return kind is not None and key in upstream_options.fields(kind.sources)


_create: Any = create_model  # its overloads do not support fields made at run time


# Limits of the libraries' keys. The libraries check them late or not at all.
_LIMITS: dict[str, dict[str, Any]] = {
    "r": {"ge": 1},
    "lora_alpha": {"gt": 0},
    "lora_dropout": {"ge": 0, "lt": 1},
    "target_r": {"ge": 1},
    "init_r": {"ge": 1},
    "tinit": {"ge": 0},
    "tfinal": {"ge": 0},
    "deltaT": {"ge": 1},
    "orth_reg_weight": {"ge": 0},
    "beta1": {"gt": 0, "lt": 1},  # of AdaLoRA's averages
    "beta2": {"gt": 0, "lt": 1},
    "num_virtual_tokens": {"ge": 1},
    "num_cayley_neumann_terms": {"ge": 2},
    "d_initial": {"gt": 0, "allow_inf_nan": False},  # VeRA's other vector starts at 0
    "num_vectors": {"ge": 2},
    "vector_length": {"ge": 1},
    "init_vector_bank_bound": {"gt": 0, "allow_inf_nan": False},
    "init_theta_d_bound": {"allow_inf_nan": False},
    "num_subspaces": {"ge": 1},
    "subspace_rank": {"ge": 1},
    "sparse_rate": {"gt": 0, "le": 1},
    "boft_block_size": {"ge": 0},
    "weight_decay": {"ge": 0, "allow_inf_nan": False},
    "adam_beta1": {"ge": 0, "lt": 1},
    "adam_beta2": {"ge": 0, "lt": 1},
    "adam_epsilon": {"ge": 1e-30, "allow_inf_nan": False},  # 0 in float32 gives NaN where a gradient is 0
    "warmup_steps": {"ge": 0, "le": 1e15},
    "max_grad_norm": {"ge": 0},
    "logging_steps": {"gt": 0, "le": 1e15},
    "dataloader_num_workers": {"ge": 0, "le": 1024},
    "dataloader_prefetch_factor": {"ge": 1, "le": 1024},
    "data_seed": {"ge": 0, "lt": 2**32},
    "label_smoothing_factor": {"ge": 0, "lt": 1},
    "neftune_noise_alpha": {"ge": 0, "le": 1e6, "allow_inf_nan": False},
    "router_aux_loss_coef": {"ge": 0, "allow_inf_nan": False},
    "torch_empty_cache_steps": {"ge": 1, "le": 1e15},
}

# Types of keys that the libraries annotate as any string.
_TYPES: dict[str, Any] = {
    "dataloader_multiprocessing_context": Literal["fork", "forkserver", "spawn"] | None,
    "debug": Literal[""] | _DEBUG | list[_DEBUG],
    "include_num_input_tokens_seen": bool | Literal["all", "non_padding", "no"],
    "pad_to_multiple_of": Optional[Literal["auto"] | Annotated[int, Field(ge=1, le=2**20)]],  # noqa: UP045 (pyright)
    "train_sampling_strategy": Literal["random", "sequential", "group_by_length", "batch_rebalance"],
}


@cache
def sections(kind: str = "") -> dict[str, type[BaseModel]]:
    """Return the complete pydantic models by section name, with finetune's keys and the libraries' fields.

    The model of the whole recipe is under `recipe`.

    Args:
        kind: the adapter type; the empty string accepts any mapping as the adapter section.
    """
    adapter: Any = _adapter_section(kind) if kind else dict[str, Any]
    train = _train_section()
    recipe = _create("Recipe", __base__=Recipe, adapter=(adapter, ...), train=(train, train()))
    named = {"model": Model, "data": Data, "speed": Speed, "train": train, "eval": Eval, "publish": Publish}
    return {"recipe": recipe, **named, **({"adapter": adapter} if kind else {})}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema with which editors complete and check a recipe."""
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
    """Return the docstring below each key of a section in schema.py.

    Pydantic can read them too (`use_attribute_docstrings`), but that would add 0.1 s to every command.

    Args:
        name: the class name of a section, or of a section derived from it.
    """
    made, todo = {}, [Section]
    while todo:
        made |= {kind.__name__: kind for kind in todo}
        todo = [below for kind in todo for below in kind.__subclasses__()]
    texts: dict[str, str] = {}
    for kind in reversed(made[name].__mro__):
        if kind.__module__ == Section.__module__:
            texts |= upstream_options.texts_beside_fields(Path(inspect.getfile(kind)), kind.__name__)
    return texts


@cache
def _train_section() -> type[Train]:
    found = upstream_options.fields(upstream_options.SFT_CONFIG)
    names = [name for name in found if not owner_of(name) and name not in Train.model_fields]
    return _create("Train", __base__=Train, **{name: _field(name, found[name]) for name in names})


@cache
def _adapter_section(name: str) -> type[Adapter]:
    kind = adapter_types.find(name)
    found = upstream_options.fields(kind.sources)
    fields = {key: _field(key, found[key]) for key in found if key in kind.keys}
    return _create(
        name.capitalize(),
        __base__=Adapter,
        type=(Literal[name], ...),
        **fields,
        **own_keys(kind),
    )


def _field(name: str, source: upstream_options.UpstreamField) -> tuple[Any, Any]:
    """Return a library's field as a pydantic field. Its default is not used: only keys that are set count."""
    plain: Any = _TYPES.get(name, source.annotation)
    if source.nested:  # a config class of PEFT becomes a mapping of its fields
        (*_, class_name), inner = source.nested[0], upstream_options.fields(source.nested)
        plain = _create(class_name, __base__=Section, **{key: _field(key, inner[key]) for key in inner})
    annotation = Annotated[plain, Field(**_limits(name, plain))]
    first_sentence = source.help.partition(". ")[0][:200]
    return (annotation, Field(default=None, description=first_sentence))


def _limits(name: str, plain: object) -> dict[str, Any]:
    """Return the limits of a library's key, in addition to its type."""
    if name in _LIMITS:
        return _LIMITS[name]
    if name.endswith("dropout") and plain is not bool:
        return _LIMITS["lora_dropout"]
    return {"pattern": "^(none|all|[a-z0-9]+_only)$"} if name == "bias" and plain is str else {}


@cache
def known_keys() -> dict[str, frozenset[str]]:
    """Return the keys of each section, and of each `adapter.<type>`."""
    ours = {name: frozenset(section.model_fields) for name, section in sections().items()}
    types = adapter_types.all_types()
    inner = {  # keys of nested configs such as `eva_config:`
        f"adapter.{key}": frozenset(upstream_options.fields(held.nested))
        for kind in types.values()
        for key, held in upstream_options.fields(kind.sources).items()
        if held.nested
    }
    nested = {"speed.qat": Qat, "data.expect": Expect, "data.name": Source}
    return (
        ours
        | {name: frozenset(section.model_fields) for name, section in nested.items()}
        | inner
        | {f"adapter.{name}": adapter_keys(name) for name in types}
    )


def of_another_type(key: str) -> bool:
    return any(key in keys for name, keys in known_keys().items() if name.startswith("adapter."))
