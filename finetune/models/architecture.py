"""A model's shapes from its config.json and the headers of its files: no weight is read, no torch imported.

transformers takes five seconds to read a config; what a config.json leaves out is read from the defaults in
transformers' source. Families that this file does not know are built on the meta device, which takes longer.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from finetune.autoconfig.mixed_precision import DTYPES, STORED
from finetune.core import packages
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.paths import local_path
from finetune.kernels.kernel_limits import FP8_MULTIPLE
from finetune.models import checkpoint_headers, module_names
from finetune.recipe import upstream_options
from finetune.recipe.adapter_types import FOUR_BIT

if TYPE_CHECKING:
    from finetune.models.module_names import Names
    from finetune.recipe.schema import Model

FROM_CONFIG = "config.json"
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# A checkpoint's experts, which are one weight in transformers' model, and what chooses among them: no linear
# layer is either there
STACKED = re.compile(r"\.experts\.|\.(gate|router)$")


@dataclass(frozen=True)
class Architecture:
    """Shapes of a model."""

    config: Any
    """Its config's values as attributes, with `get_text_config()`."""
    tensors: dict[str, tuple[int, ...]]
    """Shape of each weight by its name; a tied head is not among them."""
    source: str
    unknown: str = ""
    """Why what it keeps for backward, and how long it takes, is not known; the empty string if it is."""

    @cached_property
    def names(self) -> Names:
        """Of what text runs through."""
        return checkpoint_headers.of_tensors(checkpoint_headers.of_text_model(self.tensors))

    @cached_property
    def linear(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer that text runs through, without the head."""
        return {name: self.stored[name] for name in self.names.linear if name in self.stored}

    @cached_property
    def stored(self) -> dict[str, tuple[int, int]]:
        """The same of all linear layers, those of a multimodal model's towers too."""
        names = [n for n in checkpoint_headers.of_tensors(self.tensors).linear if not STACKED.search(n)]
        sizes = {name: self.tensors[f"{name}.weight"] for name in names}
        return {name: (size[0], size[1]) for name, size in sizes.items()}

    @cached_property
    def parameters(self) -> int:
        return sum(map(prod, self.tensors.values()))

    @cached_property
    def of_text(self) -> int:
        """Parameters, without the towers of a multimodal model."""
        return sum(prod(self.tensors[name]) for name in self.names.parameters)


def read(model: Model) -> Architecture:
    """The shapes of a local model, or of one on the Hub, of which only config.json is fetched.

    Raises:
        UserError: no config.json, or not one of a decoder (exit 2); the Hub can't be reached (exit 3).
    """
    folder = Path(model.name)
    path = folder / "config.json" if folder.is_dir() or local_path(model.name) else _from_hub(model)
    config = config_in(path)
    text = config.get_text_config()
    missing = [key for key in NEEDED if getattr(text, key, None) is None]
    if missing:
        found = f"{text.model_type}: no {', '.join(missing)}"
        raise UserError(Problem("its config is not that of a decoder we know", "model.name", found=found))
    unknown = ""
    if experts(text):
        unknown = f"{text.model_type} has experts, and how many tokens each one gets is not known"
    elif text.model_type not in NORMS:
        unknown = f"the layers of {text.model_type} are not known here"
    quantised = getattr(config, "quantization_config", None)
    found = {} if quantised or not folder.is_dir() else checkpoint_headers.tensors(folder)
    if found:
        return Architecture(config, {n: tuple(s) for n, s in found.items()}, "headers of its files", unknown)
    if text is config and (made := of(text)):  # with towers, transformers knows them
        return Architecture(config, made, FROM_CONFIG, unknown)
    return Architecture(config, _kept(path), "the model on the meta device", unknown)


def config_in(path: Path) -> Any:
    """A model's config.json, by `as_config` (exit 2 if it can't be read)."""
    try:
        return as_config(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        problem = Problem("the folder holds no config.json that can be read", "model.name", found=str(error))
        raise UserError(problem) from error


def as_config(raw: dict[str, Any]) -> Any:
    """A config.json as attributes, completed with transformers' defaults for its family."""
    family = raw.get("model_type") or ""
    values: dict[str, Any] = {"tie_word_embeddings": True, **_defaults(family), **raw}
    for name, other in _other_names(family).items():
        values[name] = values[other] = raw.get(other, raw.get(name, values.get(other, values.get(name))))
    config = SimpleNamespace(**{**values, "model_type": family})
    inner = raw.get("text_config")
    text = as_config(inner) if isinstance(inner, dict) else config
    config.get_text_config = lambda: text
    return config


def _defaults(family: str) -> dict[str, Any]:
    """Plain default values of a family's config class in the installed transformers."""
    node = _class_of(family)
    return dict(_constants(node)) if node else {}


def _other_names(family: str) -> dict[str, str]:
    """A family's own names of what others call `hidden_size` and the like: its `attribute_map`."""
    node = _class_of(family)
    found = [
        one.value
        for one in (node.body if node else [])
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "attribute_map"
    ]
    return ast.literal_eval(found[0]) if found else {}


@cache
def _class_of(family: str) -> ast.ClassDef | None:
    """A family's config class in the installed transformers, without an import."""
    if file := upstream_options.of_family(family, "configuration"):
        path = packages.source_of("transformers", file)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and f"model_type = {family!r}" in map(ast.unparse, node.body):
                return node
    return None


def _constants(node: ast.ClassDef) -> list[tuple[str, Any]]:
    """Annotated fields and, of older classes, arguments of `__init__`, whose defaults are constants."""
    found = [(n.target, n.value) for n in node.body if isinstance(n, ast.AnnAssign)]
    pairs = [(target.id, value) for target, value in found if isinstance(target, ast.Name)]
    for function in (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"):
        arguments = function.args.args[len(function.args.args) - len(function.args.defaults) :]
        pairs += [(a.arg, value) for a, value in zip(arguments, function.args.defaults, strict=True)]
    return [(name, value.value) for name, value in pairs if isinstance(value, ast.Constant)]


def _kept(path: Path) -> dict[str, tuple[int, ...]]:
    """`_on_meta`, which takes ten seconds, once for each config.json and version of transformers."""
    asked = path.read_bytes() + version("transformers").encode()
    cache = Path(os.environ.get("FINETUNE_CACHE") or Path.home() / ".cache" / "finetune")
    kept = cache / "shapes" / f"{hashlib.sha256(asked).hexdigest()[:24]}.json"
    try:
        held = json.loads(kept.read_text(encoding="utf-8"))
        return {str(name): tuple(map(int, shape)) for name, shape in held.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        made = _on_meta(path.parent)
    with contextlib.suppress(OSError):  # a home that can't be written
        kept.parent.mkdir(parents=True, exist_ok=True)
        writing = kept.with_suffix(f".{os.getpid()}")
        writing.write_text(json.dumps(made))
        os.replace(writing, kept)
    return made


def _on_meta(folder: Path) -> dict[str, tuple[int, ...]]:
    """The weights of a model that transformers builds without memory."""
    logging.disable(logging.WARNING)  # of packages that transformers imports, about themselves
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder, trust_remote_code=False)
            )
    except ImportError as error:  # of a model whose images or sound another package reads
        said = " ".join(str(error).split())
        problem = Problem("transformers can't build it without another package", "model.name", found=said)
        raise UserError(problem, code=Exit.ENVIRONMENT) from error
    except (OSError, ValueError, KeyError) as error:
        problem = Problem(
            "not a model that transformers knows", "model.name", found=str(error).splitlines()[0]
        )
        raise UserError(problem) from error
    finally:
        logging.disable(logging.NOTSET)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _from_hub(model: Model) -> Path:
    """config.json in the Hub's cache."""
    from huggingface_hub import hf_hub_download

    from finetune.hub import client

    revision = client.commit(model.name, model.revision or "main")
    with client.explained(model.name, read=True):
        return Path(hf_hub_download(model.name, "config.json", revision=revision))


BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def weights(found: Architecture, storage: str, precision: str) -> float:
    """Bytes of the base as it is stored; a quantised one with its scales, the rest in the launch's dtype."""
    if storage in STORED:
        return found.parameters * BYTES[STORED[storage]]
    linear, other = found.stored, BYTES[DTYPES[precision]]
    coded = 0.0
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
    return coded + (found.parameters - sum(map(prod, linear.values()))) * other


def scales(size: int) -> float:
    """Bytes beside 4-bit codes of so many weights: a code for each 64, a scale for 256 of those, tables."""
    return size / 64 + 4 * size / (64 * 256) + 4 * (16 + 256)


Shapes = dict[str, tuple[int, ...]]

# Decoders of Llama's layers: q, k, v, o; gate, up, down. Norms of a layer
BEFORE = ("input_layernorm", "post_attention_layernorm")
AROUND = (*BEFORE, "pre_feedforward_layernorm", "post_feedforward_layernorm")
NORMS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "granite"), BEFORE),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma2": AROUND,
    "gemma3_text": AROUND,
}
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")  # in the place of gate, up and down
JOINED = ("phi3",)  # Llama's, with q, k and v in one product, gate and up in one
MOE = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
BIASED = {"qwen2": ("q_proj", "k_proj", "v_proj"), "qwen2_moe": ("q_proj", "k_proj", "v_proj")}
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")  # a norm of one head for queries, one for keys
WIDE_NORMS = ("olmo2", "olmoe")  # a norm of all queries, one of all keys


def of(config: Any) -> Shapes | None:
    """The weights of a decoder; `None` if its family is not known here.

    Args:
        config: of the text model.
    """
    family = config.model_type
    if family == "gpt_neox":
        return _as_gpt_neox(config)
    plain = not getattr(config, "mlp_only_layers", None) and getattr(config, "decoder_sparse_step", 1) == 1
    if family in EXPERTS and not plain:
        return None
    return _as_llama(config) if family in (*NORMS, *EXPERTS, *JOINED) else None


def experts(config: Any) -> int:
    """Of a layer of a text model, which transformers holds as tensors of three dimensions; 0: it has none."""
    return max(int(getattr(config, key, None) or 0) for key in MOE)


def _as_llama(config: Any) -> Shapes:
    """Of Llama's layers, with experts or without."""
    family, hidden, wide = config.model_type, config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * size
    linear = {
        "self_attn.q_proj": (heads * size, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, heads * size),
    }  # fmt: skip
    if family not in EXPERTS:
        linear |= _mlp("mlp", wide, hidden)
    elif shared := getattr(config, "shared_expert_intermediate_size", None):
        linear |= {**_mlp("mlp.shared_expert", shared, hidden), "mlp.shared_expert_gate": (1, hidden)}
    if family in JOINED:
        joined = {
            "self_attn.qkv_proj": (heads * size + 2 * keys, hidden),
            "mlp.gate_up_proj": (2 * wide, hidden),
        }
        linear = {**joined, **{name: linear[name] for name in ("self_attn.o_proj", "mlp.down_proj")}}
    layer: Shapes = {f"{name}.weight": shape for name, shape in linear.items()}
    for name, (outputs, _) in linear.items():
        kind = "attention_bias" if "self_attn" in name else "mlp_bias"
        if getattr(config, kind, False) or module_names.short(name) in BIASED.get(family, ()):
            layer[f"{name}.bias"] = (outputs,)
    layer |= {f"{name}.weight": (hidden,) for name in NORMS.get(family, BEFORE)}
    if family in HEAD_NORMS:
        layer |= {f"self_attn.{name}_norm.weight": (size,) for name in ("q", "k")}
    if family in WIDE_NORMS:
        layer |= {"self_attn.q_norm.weight": (heads * size,), "self_attn.k_norm.weight": (keys,)}
    if family in EXPERTS:
        number, wide = experts(config), getattr(config, "moe_intermediate_size", None) or wide
        layer["mlp.gate.weight"] = (number, hidden)
        layer["mlp.experts.gate_up_proj"] = (number, 2 * wide, hidden)
        layer["mlp.experts.down_proj"] = (number, hidden, wide)
    ends: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    return _whole(config, "model.layers", layer, ends)


def _mlp(name: str, wide: int, hidden: int) -> dict[str, tuple[int, int]]:
    up = {f"{name}.{kind}_proj": (wide, hidden) for kind in ("gate", "up")}
    return {**up, f"{name}.down_proj": (hidden, wide)}


def _as_gpt_neox(config: Any) -> Shapes:
    """Of GPT-NeoX's: queries, keys and values in one product, everything with a bias."""
    hidden, wide = config.hidden_size, config.intermediate_size
    linear = {
        "mlp.dense_h_to_4h": (wide, hidden), "mlp.dense_4h_to_h": (hidden, wide),
        "attention.query_key_value": (3 * hidden, hidden), "attention.dense": (hidden, hidden),
    }  # fmt: skip
    layer: Shapes = {f"{name}.weight": shape for name, shape in linear.items()}
    biased = {name for name in linear if "attention" not in name or getattr(config, "attention_bias", True)}
    layer |= {f"{name}.bias": (linear[name][0],) for name in biased}
    both = [(name, kind) for name in BEFORE for kind in ("weight", "bias")]
    layer |= {f"{name}.{kind}": (hidden,) for name, kind in both}
    ends: Shapes = {"gpt_neox.embed_in.weight": (config.vocab_size, hidden)}
    ends |= {f"gpt_neox.final_layer_norm.{kind}": (hidden,) for kind in ("weight", "bias")}
    return _whole(config, "gpt_neox.layers", layer, ends)


def _whole(config: Any, where: str, layer: Shapes, ends: Shapes) -> Shapes:
    """All layers, what is outside of them, and the head where it is not the embeddings."""
    head = {} if config.tie_word_embeddings else {"lm_head.weight": (config.vocab_size, config.hidden_size)}
    layers = range(config.num_hidden_layers)
    return {
        **ends,
        **{f"{where}.{index}.{name}": size for index in layers for name, size in layer.items()},
        **head,
    }
