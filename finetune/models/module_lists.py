"""Read the names of a model's modules from its config, without torch where possible.

`module_lists.json` holds one list for each common family, with sizes as products of config values.
`scripts/make_module_lists.py` (`make schema`) makes it for one version of transformers. Other versions do not
read it. The lists of other models are made on the meta device once, and kept on disk.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import os
import time
import warnings
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core import regular_files, safe_files, upstream_private, verified_files
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.core.verified_files import Damaged
from finetune.models import autograd_graph, model_class, model_files, module_names, usual_configs
from finetune.models.module_names import Names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig, PreTrainedModel

    from finetune.core.model_config import ModelConfig

FORMAT = 7  # the format of the lists on disk; raise it if `Names` or its contents change
SHIPPED = Path(__file__).parent / "module_lists.json"
RENAMED = ("gpt_neox",)  # families with a shipped list whose weights transformers renames as it reads them


class ModuleList(NamedTuple):
    """Module names, and notes for the user on how finetune found them."""

    names: Names
    source: str
    note: str = ""


def read(path: Path, config: PreTrainedConfig | ModelConfig) -> ModuleList:
    """Return the names of the model with the config.json at `path`.

    Args:
        config: the completed config from `architecture.config_in`.

    Raises:
        UserError: transformers can't build the model (exit 2), or a package is missing (exit 3).
    """
    raw = regular_files.read_json(path, "model.name")
    shipped = _shipped(raw, config)
    if shipped is not None:
        return ModuleList(shipped, "the list of its family")
    words = getattr(config.get_text_config(), "vocab_size", None) or 0
    matters = {key: value for key, value in raw.items() if not usual_configs.has_no_effect(key, value, words)}
    content = json.dumps([FORMAT, version("transformers"), matters], sort_keys=True)
    cache_root = Path(os.environ.get("FINETUNE_CACHE") or Path.home() / ".cache" / "finetune")
    kept = cache_root / "modules" / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}.json"
    names, damage = _kept(kept)
    if names:
        return ModuleList(names, "the cache")
    started = time.monotonic()
    names = _build(path.parent)
    with contextlib.suppress(OSError):  # the home folder may be read-only
        kept.parent.mkdir(parents=True, exist_ok=True)
        text = verified_files.signed({"of": kept.name, "names": asdict(names)})
        safe_files.write_text(kept.parent, kept.name, text)
    took = f"{time.monotonic() - started:.0f} s"
    again = f"again, because {damage} in {kept.parent}" if damage else "for the first time"
    note = f"model.name: finetune read the module names of this {names.family} {again} ({took}); "
    return ModuleList(
        names, "the model on the meta device", f"{note}the next command finds them in its cache"
    )


def _kept(path: Path) -> tuple[Names | None, str]:
    """Return the names from a cache file, or `None` if they must be built, and how the file is damaged."""
    if not path.exists():
        return None, ""
    try:
        held = verified_files.read_signed(path)
        if held["of"] != path.name:
            raise Damaged(f"{path.name} is of another model")
        return _from_json(held["names"]), ""
    except Damaged as damage:
        return None, str(damage)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return None, f"{path.name} can't be read ({type(error).__name__})"


def _from_json(held: dict[str, Any]) -> Names:
    for key in ("shapes", "tower_shapes"):
        held[key] = {str(name): tuple(map(int, shape)) for name, shape in held[key].items()}
    for key in ("without_gradient", "untrained", "uncalled"):
        held[key] = tuple(held[key])
    names = Names(**held)
    if not names.kinds or not all(isinstance(kind, str) for kind in names.kinds.values()):
        raise ValueError("holds no modules")
    return names


def _build(folder: Path) -> Names:
    """Return the names of a model that transformers builds on the meta device, without memory."""
    logging.disable(logging.WARNING)  # packages that transformers imports log about themselves
    try:
        import torch

        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter(
                "ignore"
            )  # transformers repeats its warnings about the config when it loads the weights
            return of_meta_model(build_without_weights(folder))
    except ImportError as error:  # a package for images or audio is missing
        raise UserError(
            Problem(
                "transformers needs another package to build this model",
                "model.name",
                found=" ".join(str(error).split()),
                fix="install the package",
                code="package-missing",
            ),
            code=Exit.ENVIRONMENT,
        ) from error
    except Exception as error:  # transformers may raise any error for a wrong config
        said = first_line(error)
        if "trust_remote_code" in str(error):
            raise UserError(model_files.custom_code(said)) from error
        raise UserError(
            Problem(
                "transformers can't build a model from this config.json",
                "model.name",
                found=said,
                fix="correct the file, or download the model again",
                code="model-config",
            )
        ) from error
    finally:
        logging.disable(logging.NOTSET)


def build_without_weights(folder: Path) -> Any:
    """Build the model of a folder's config.json on the meta device."""
    from transformers import AutoConfig

    return of_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))


def of_config(config: PreTrainedConfig) -> Any:
    """Build the model of a config of transformers on the meta device."""
    import torch

    loads = model_class.auto_class(config)
    with torch.device("meta"):  # a run chooses the attention, so the config's choice does not matter
        return loads.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")


def of_live_model(model: Any) -> Names:
    """Return the names of a model in memory, with the modules that get no gradient.

    A model of the same class on the meta device shows them, as it does for names from a config. So `check`,
    `plan` and `train` agree. Families with a shipped list have no such modules.
    """
    import torch

    found = module_names.of_model(model)
    if is_shipped(found.family):
        return found
    config = copy.deepcopy(model.config)  # building a model may change the attention in its config
    upstream_private.forget_quantization(config)
    with torch.device("meta"):
        twin = of_meta_model(type(model)(config).to(torch.bfloat16))
    return replace(
        found, without_gradient=twin.without_gradient, uncalled=twin.uncalled, untrained=twin.untrained
    )


def of_meta_model(model: PreTrainedModel) -> Names:
    """Return the names of a model on the meta device, with the modules that get no gradient.

    One forward pass shows the modules. The model reads the weight of such a module without a call of its
    forward, or uses its output only for a choice. There are none if the model can't run on the meta device.
    The run checks the real model again before its first step (`preflight.gradient_probe`).
    """
    import torch

    from finetune.models import meta_forward

    names = module_names.of_model(model)
    inputs = meta_forward.inputs(model)
    if inputs is None:
        if meta_forward.runs(names.family):  # the config is wrong, and a run would fail too
            meta_forward.logits(model, {"input_ids": meta_forward.tokens(model), "use_cache": False})
        return names
    called = set[str]()
    hooks = [
        module.register_forward_hook(lambda *_, name=name: called.add(name))
        for name, module in model.named_modules()
    ]
    with torch.enable_grad():
        logits = meta_forward.logits(model, inputs)
    for hook in hooks:
        hook.remove()
    read = autograd_graph.parameters(autograd_graph.functions(logits))
    weights = {name: model.get_submodule(name).weight for name in names.modules if ".experts." not in name}
    uncalled = tuple(name for name in weights if name not in called)
    lost = [
        name
        for name, weight in weights.items()
        if name in called and weight.requires_grad and id(weight) not in read
    ]
    untrained = [name for name in names.shapes if id(model.get_parameter(name)) not in read]
    untrained = [name for name in untrained if ".experts." not in name]
    return replace(names, without_gradient=(*uncalled, *lost), uncalled=uncalled, untrained=tuple(untrained))


@cache
def _shipped_families() -> dict[str, Any]:
    held = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return held["families"] if version("transformers").startswith(f"{held['transformers']}.") else {}


def is_shipped(family: str) -> bool:
    """Return whether there is a shipped list for a family."""
    return family in _shipped_families()


def has_names_of_files(names: Names) -> bool:
    """Return whether the weight files of a model have the names of its parameters, as far as it is known."""
    experts = any(".experts." in name for name in names.shapes)
    return is_shipped(names.family) and names.family not in RENAMED and not experts


@cache
def usual_names() -> frozenset[str]:
    """Return the last parts of module names in the shipped lists, such as `q_proj` and `c_attn`."""
    kinds = (name for family in _shipped_families().values() for name in family["kinds"])
    return frozenset(map(module_names.short, kinds))


def _shipped(raw: dict[str, Any], config: ModelConfig) -> Names | None:
    """Return the shipped list with the sizes of a config; `None` if there is no list for such a config."""
    family = _shipped_families().get(config.model_type)
    if family is None or config.get_text_config() is not config:
        return None
    if any((getattr(config, key, None) or None) != (value or None) for key, value in family["fixed"].items()):
        return None
    try:
        return expand(family, config) if usual_configs.is_usual(raw, config, family) else None
    except (AttributeError, TypeError):  # the config lacks a size
        return None


def expand(family: dict[str, Any], config: ModelConfig) -> Names:
    """Fill in the sizes of a config in a family's list. In names, `*` means the number of a layer."""
    tied = bool(config.tie_word_embeddings)
    without = f"{family['head']}.weight" if tied else ""
    layers = config.num_hidden_layers
    sizes = {
        name: tuple(_size(config, part) for part in shape.split(" "))
        for name, shape in family["shapes"].items()
        if name != without
    }
    return Names(
        dict(_layer_by_layer(family["kinds"], layers)),
        dict(_layer_by_layer(sizes, layers)),
        config.model_type,
        family["embedding"],
        family["head"],
        tied,
    )


def _layer_by_layer(entries: dict[str, Any], layers: int) -> Iterator[tuple[str, Any]]:
    for repeated, group in groupby(entries.items(), key=lambda entry: "*" in entry[0]):
        listed = list(group)
        for index in range(layers) if repeated else (0,):
            yield from ((name.replace("*", str(index)), value) for name, value in listed)


def _size(config: ModelConfig, expression: str) -> int:
    """Compute an expression such as `2*num_key_value_heads*head_dim+hidden_size` from a config."""
    return sum(prod(_value(config, part) for part in term.split("*")) for term in expression.split("+"))


def _value(config: ModelConfig, part: str) -> int:
    if part.isdecimal():
        return int(part)
    value = getattr(config, part, None)
    if part == "head_dim" and value is None:
        value = config.hidden_size // config.num_attention_heads
    if part == "num_key_value_heads" and value is None:
        value = config.num_attention_heads
    if not isinstance(value, int):
        raise TypeError(f"{part} is no number")
    return value
