"""Read a model's shapes from config.json and the headers of its weight files, without weights or torch.

transformers takes five seconds to read a config. So finetune reads values that config.json lacks from the
defaults in transformers' source. It builds families that this module does not know on the meta device, which
takes longer.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from finetune.autoconfig.mixed_precision import DTYPES, STORED
from finetune.core import model_config, packages, regular_files, untrusted_files
from finetune.core.errors import Problem, UserError, raise_if_any
from finetune.core.paths import local_path
from finetune.kernels.kernel_limits import (
    EXPERTS_STORAGES,
    FP8_MULTIPLE,
    STACKED,
    quantized_experts_unsupported_reason,
    stored_as_mxfp4,
)
from finetune.models import checkpoint_headers, direct_reads, module_lists
from finetune.recipe import upstream_options
from finetune.recipe.adapter_types import FOUR_BIT
from finetune.recipe.schema import Model

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Architecture:
    """Shapes of a model."""

    config: Any
    """The values of the config as attributes, with `get_text_config()`."""
    names: module_lists.Names
    """Modules and parameters, as in the model that a run trains."""
    source: str
    unknown: str = ""
    """Why the saved activations and the step time are unknown; the empty string if they are known."""
    note: str = ""
    """How finetune found the names, if that took long."""

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight by name, without a tied head."""
        return {**self.names.shapes, **self.names.tower_shapes}

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of each linear layer of the text model, without the head."""
        return self.names.linear_shapes

    @cached_property
    def stored(self) -> dict[str, tuple[int, int]]:
        """Return the same for all linear layers that a quantized model quantizes, with the encoders' layers.

        Layers that share a weight keep their dtype, and so do layers whose weights are read directly.
        """
        kept = {f"{name}.weight" for name in direct_reads.linear_layers(self.names)}
        kept |= {*self.names.shared, *self.names.shared.values()}
        own = {name: size for name, size in self.linear.items() if f"{name}.weight" not in kept}
        return {**own, **self.names.tower_linear_shapes}

    @cached_property
    def parameters(self) -> int:
        return sum(map(prod, self.tensors.values()))

    @cached_property
    def of_text(self) -> int:
        """Return the number of parameters without a multimodal model's encoders."""
        return sum(map(prod, self.names.shapes.values()))

    @property
    def trained_by_full(self) -> int:
        """Return the number of parameters of the text model that get a gradient."""
        return self.of_text - sum(prod(self.names.shapes[name]) for name in self.names.untrained)


def read(model: Model) -> Architecture:
    """Return the shapes of a local model or of a model on the Hub. From the Hub, download only config.json.

    Raises:
        UserError: config.json is missing or is not of a decoder (exit 2). The Hub can't be reached (exit 3).
    """
    folder = Path(model.name)
    path = folder / "config.json" if folder.is_dir() or local_path(model.name) else _from_hub(model)
    config = config_in(path)
    text = config.get_text_config()
    missing = [key for key in NEEDED if getattr(text, key, None) is None]
    if missing:
        found = f"{text.model_type}: no {', '.join(missing)}"
        what, fix = "the config is not the config of a decoder", "model.name: a causal language model"
        why, attention = "", ["num_attention_heads"]
        if missing == attention and text.model_type in upstream_options.model_classes("CAUSAL_LM"):
            what, why = (
                "finetune can't estimate a model without attention",
                "it knows the sizes of attention models",
            )
            fix = "run `finetune train` without a plan; `finetune check` checks the recipe"
        raise UserError(Problem(what, "model.name", found=found, fix=fix, why=why, code="model-unsupported"))
    known = text.model_type in KNOWN and (not model_config.experts(text) or model_config.expert_sizes(text))
    unknown = "" if known else f"finetune does not know the layers of {text.model_type}"
    if folder.is_dir():
        checkpoint_headers.tensors(folder)  # refuses damaged files
    names, source, note = module_lists.read(path, config)
    return Architecture(config, names, source, unknown, note)


def config_in(path: Path) -> Any:
    """Read a model's config.json with `as_config`. Damaged files and wrong types are errors (exit 2)."""
    try:
        raw = regular_files.read_json(path, "model.name")
        raise_if_any(untrusted_files.problems_of_config(raw, path, "model.name"))
        config = as_config(raw)
        text = config.get_text_config()
        raise_if_any(_without_window(text, path) + _foreign_layers(text, path))
        return config
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            Problem(
                "finetune can't read the model's config.json",
                "model.name",
                where=str(path),
                found=str(error),
                fix="download the model again",
                code="model-files",
            )
        ) from error


def _without_window(text: Any, path: Path) -> list[Problem]:
    """Check that layers of sliding-window attention have a window.

    The layers need it, and so does transformers' cache of generated answers, which it makes from the config.
    """
    types, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    source = _source_of(text)
    if source == "" or (isinstance(window, int) and window > 0):
        return []
    if isinstance(types, list):
        is_wrong = "sliding_attention" in types
    else:  # such families use a window in all layers, and some can switch it off
        is_for_all = source is not None and not re.search(r"\blayer_types\b", source) and window is not None
        is_wrong = getattr(text, "use_sliding_window", True) is not False and (
            isinstance(window, int) or is_for_all
        )
    if not is_wrong:
        return []
    what, fix = "the model has no window for its sliding-window attention", "set `sliding_window` in the file"
    found = f"sliding_window: {window}"
    return [Problem(what, "model.name", where=str(path), found=found, fix=fix, code="model-config")]


def _foreign_layers(text: Any, path: Path) -> list[Problem]:
    """Check that the config names no layers of linear attention that its family lacks.

    transformers would make the cache of generated answers for them.
    """
    types, kind = getattr(text, "layer_types", None), "linear_attention"
    if not isinstance(types, list) or kind not in types or kind in (_source_of(text) or kind):
        return []
    what, fix = f"the model's family has no layers of kind {kind}", "correct `layer_types` in the file"
    found = f"layer_types: {types}"
    return [Problem(what, "model.name", where=str(path), found=found, fix=fix, code="model-config")]


def _source_of(text: Any) -> str | None:
    """Return the source of a config class.

    `None` stands for an unknown class. The empty string stands for a model that has no cache, or has its own
    because its layers are not the usual attention.
    """
    node = _class_of(getattr(text, "model_type", ""))
    if node is None:
        return None
    source = ast.unparse(node)
    has_usual_cache = "num_attention_heads" in source and "use_cache" in source and "block_type" not in source
    return source if has_usual_cache else ""


def as_config(raw: dict[str, Any]) -> Any:
    """Return a config.json as attributes, completed with transformers' defaults for its family."""
    family = raw.get("model_type") or ""
    unknown = _class_of(family) is None  # transformers 5 asks a class that does not say it for False
    values: dict[str, Any] = {"tie_word_embeddings": unknown, **_defaults(family), **raw}
    for name, other in _other_names(family).items():
        values[name] = values[other] = raw.get(other, raw.get(name, values.get(other, values.get(name))))
    if values.get("num_hidden_layers") is None:
        values["num_hidden_layers"] = _count_layers(values)
    config = SimpleNamespace(**{**values, "model_type": family})
    inner = raw.get("text_config")
    text = as_config(inner) if isinstance(inner, dict) else config
    config.get_text_config = lambda: text
    # The class of the whole model holds the head, and asks its own config (transformers 5)
    if text is not config and _asks_text_config(family):
        config.tie_word_embeddings = config.tie_word_embeddings or text.tie_word_embeddings
    text.tie_word_embeddings = config.tie_word_embeddings
    return config


def _count_layers(values: dict[str, Any]) -> int | None:
    """Return the number of layers of a config that does not state it, or `None`."""
    kinds, blocks = values.get("layer_types") or values.get("layers_block_type"), values.get("num_layers")
    if isinstance(kinds, list):
        return len(kinds)
    is_longcat = values.get("model_type") == "longcat_flash"  # each of its blocks has two layers
    return 2 * blocks if is_longcat and isinstance(blocks, int) else None


def _asks_text_config(family: str) -> bool:
    """Return whether a config class also reads the head's tying from its text config, as before version 5."""
    node = _class_of(family)
    return bool(node and re.search(r"self\.text_config(\.|, ')tie_word_embeddings", ast.unparse(node)))


def _defaults(family: str) -> dict[str, Any]:
    """Return the constant defaults of a family's config class in the installed transformers."""
    node = _class_of(family)
    return dict(_constants(node)) if node else {}


def _other_names(family: str) -> dict[str, str]:
    """Return the `attribute_map` of a family: its own names of values such as `hidden_size`."""
    node = _class_of(family)
    found = [
        one.value
        for one in (node.body if node else [])
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "attribute_map"
    ]
    return ast.literal_eval(found[0]) if found else {}


@cache
def _class_of(family: str) -> ast.ClassDef | None:
    """Return the source of a family's config class in the installed transformers, without an import."""
    if file := upstream_options.of_family(family, "configuration"):
        path = packages.source_of("transformers", file)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and f"model_type = {family!r}" in map(ast.unparse, node.body):
                return node
    return None


def _constants(node: ast.ClassDef) -> list[tuple[str, Any]]:
    """Return annotated fields, and in older classes arguments of `__init__`, that have constant defaults."""
    found = [(n.target, n.value) for n in node.body if isinstance(n, ast.AnnAssign)]
    pairs = [(target.id, value) for target, value in found if isinstance(target, ast.Name)]
    for function in (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"):
        arguments = function.args.args[len(function.args.args) - len(function.args.defaults) :]
        pairs += [(a.arg, value) for a, value in zip(arguments, function.args.defaults, strict=True)]
    return [(name, value.value) for name, value in pairs if isinstance(value, ast.Constant)]


def _from_hub(model: Model) -> Path:
    """Return the path of config.json in the Hub's cache."""
    from huggingface_hub import hf_hub_download

    from finetune.hub import client

    revision = client.commit(model.name, model.revision or "main")
    with client.explained(model.name, read=True):
        return Path(hf_hub_download(model.name, "config.json", revision=revision))


BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def weights(found: Architecture, storage: str, precision: str) -> float:
    """Return the bytes of the base model: quantized weights with scales, and others in the launch's dtype."""
    if storage in STORED:
        return found.parameters * BYTES[STORED[storage]]
    linear, other = found.stored, BYTES[DTYPES[precision]]
    coded, stacks = 0.0, quantized_experts(found, storage)
    for experts, outputs, inputs in stacks:
        size = experts * outputs * inputs
        if stored_as_mxfp4(found.config):  # 4 bits, and 8 bits for each 32 weights
            coded += size / 2 + size / 32
        else:
            coded += size / 2 + scales(size) if storage in FOUR_BIT else size + 4 * experts * outputs
    for outputs, inputs in linear.values():
        size = outputs * inputs
        if storage == "fp8" and (outputs % FP8_MULTIPLE or inputs % FP8_MULTIPLE):
            coded += size * other
        elif storage == "fp8":
            coded += size + 4 * outputs
        elif storage in FOUR_BIT:
            coded += size / 2 + scales(size)
        else:
            coded += size + outputs * (4 if storage == "int8" else other)
    return coded + (found.parameters - sum(map(prod, [*linear.values(), *stacks]))) * other


def quantized_experts(found: Architecture, storage: str) -> list[tuple[int, ...]]:
    """Shapes of the stacked experts that a base model of this storage quantizes."""
    shapes = found.names.shapes
    if storage not in EXPERTS_STORAGES or quantized_experts_unsupported_reason(found.config, shapes):
        return []
    return [shape for name, shape in shapes.items() if len(shape) == 3 and name.endswith(STACKED)]


def scales(size: int) -> float:
    """Return the bytes of the scales and tables of 4-bit weights with double quantization.

    Each 64 weights have an 8-bit scale, and each 256 of these scales have an fp32 scale.
    """
    return size / 64 + 4 * size / (64 * 256) + 4 * (16 + 256)


# Decoders with the layers of Llama (q, k, v, o; gate, up, down), and with experts in place of the MLP
KNOWN = frozenset((
    "llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "granite", "olmo2", "gemma2", "gemma3_text",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe", "glm4_moe", "dots1", "ernie4_5_moe",
))  # fmt: skip
