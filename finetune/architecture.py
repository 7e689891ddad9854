"""A model's shapes from its config.json and the headers of its files: no weight is read, no torch imported.

transformers takes five seconds to read a config; what a config.json leaves out is read from the defaults in
transformers' source. Families that this file does not know are built on the meta device, which takes longer.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from finetune import modules, upstream
from finetune.errors import Problem, UserError
from finetune.recipe import local_path

if TYPE_CHECKING:
    from finetune.modules import Names
    from finetune.sections import Model

# Decoders of Llama's layers: q, k, v, o; gate, up, down. Norms of a layer
BEFORE = ("input_layernorm", "post_attention_layernorm")
AROUND = (*BEFORE, "pre_feedforward_layernorm", "post_feedforward_layernorm")
NORMS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "granite"), BEFORE),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma2": AROUND,
    "gemma3_text": AROUND,
}
BIASED = {"qwen2": ("q_proj", "k_proj", "v_proj")}
HEAD_NORMS = ("qwen3", "gemma3_text")  # a norm of one head for queries, one for keys
MOE = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


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
        return modules.of_tensors(self.tensors)

    @cached_property
    def linear(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer, without the head."""
        sizes = {name: self.tensors[f"{name}.weight"] for name in self.names.linear}
        return {name: (size[0], size[1]) for name, size in sizes.items()}

    @cached_property
    def parameters(self) -> int:
        return sum(map(prod, self.tensors.values()))


def read(model: Model) -> Architecture:
    """The shapes of a local model, or of one on the Hub, of which only config.json is fetched.

    Raises:
        UserError: no config.json, or not one of a decoder (exit 2); the Hub can't be reached (exit 3).
    """
    folder = Path(model.name)
    path = folder / "config.json" if folder.is_dir() or local_path(model.name) else _from_hub(model)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = Problem("the folder holds no config.json that can be read", "model.name", found=str(error))
        raise UserError(problem) from error
    config = as_config(raw)
    text = config.get_text_config()
    missing = [key for key in ("hidden_size", "num_hidden_layers", "vocab_size") if not hasattr(text, key)]
    if missing:
        found = f"{text.model_type}: no {', '.join(missing)}"
        raise UserError(Problem("its config is not that of a decoder we know", "model.name", found=found))
    experts = next((key for key in MOE if getattr(text, key, None)), "")
    unknown = ""
    if experts:
        unknown = f"{text.model_type} has experts, and how many tokens each one gets is not known"
    elif text.model_type not in NORMS:
        unknown = f"the layers of {text.model_type} are not known here"
    quantised = getattr(config, "quantization_config", None)
    found = {} if quantised or not folder.is_dir() else modules.tensors(folder)
    if found:
        return Architecture(config, {n: tuple(s) for n, s in found.items()}, "headers of its files", unknown)
    if not unknown:
        return Architecture(config, _as_llama(text), "config.json")
    return Architecture(config, _on_meta(path.parent), "the model on the meta device", unknown)


def as_config(raw: dict[str, Any]) -> Any:
    """A config.json as attributes, completed with transformers' defaults for its family."""
    family = raw.get("model_type", "")
    values: dict[str, Any] = {"tie_word_embeddings": True, **_defaults(family), **raw}
    config = SimpleNamespace(**{**values, "model_type": family})
    inner = raw.get("text_config")
    text = as_config(inner) if isinstance(inner, dict) else config
    config.get_text_config = lambda: text
    return config


@cache
def _defaults(family: str) -> dict[str, Any]:
    """Plain default values of a family's config class in the installed transformers, without an import."""
    for folder in dict.fromkeys((family, family.removesuffix("_text"))):
        path = upstream.source_of("transformers", f"models/{folder}/configuration_{folder}.py")
        if folder and path.exists():
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and f"model_type = {family!r}" in map(
                    ast.unparse, node.body
                ):
                    return dict(_constants(node))
    return {}


def _constants(node: ast.ClassDef) -> list[tuple[str, Any]]:
    """Annotated fields and, of older classes, arguments of `__init__`, whose defaults are constants."""
    found = [(n.target, n.value) for n in node.body if isinstance(n, ast.AnnAssign)]
    pairs = [(target.id, value) for target, value in found if isinstance(target, ast.Name)]
    for function in (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"):
        arguments = function.args.args[len(function.args.args) - len(function.args.defaults) :]
        pairs += [(a.arg, value) for a, value in zip(arguments, function.args.defaults, strict=True)]
    return [(name, value.value) for name, value in pairs if isinstance(value, ast.Constant)]


def _as_llama(config: Any) -> dict[str, tuple[int, ...]]:
    """The weights of a decoder of Llama's layers, as transformers names them."""
    family, hidden, wide = config.model_type, config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * size
    linear = {
        "self_attn.q_proj": (heads * size, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()}
    for name, (outputs, _) in linear.items():
        kind = "attention_bias" if "self_attn" in name else "mlp_bias"
        if getattr(config, kind, False) or modules.short(name) in BIASED.get(family, ()):
            layer[f"{name}.bias"] = (outputs,)
    layer |= {f"{name}.weight": (hidden,) for name in NORMS[family]}
    if family in HEAD_NORMS:
        layer |= {f"self_attn.{name}_norm.weight": (size,) for name in ("q", "k")}
    if family == "olmo2":
        layer |= {"self_attn.q_norm.weight": (heads * size,), "self_attn.k_norm.weight": (keys,)}
    tensors = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for index in range(config.num_hidden_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return (
        tensors
        if config.tie_word_embeddings
        else {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    )


def _on_meta(folder: Path) -> dict[str, tuple[int, ...]]:
    """The weights of a model that transformers builds without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder, trust_remote_code=False)
            )
    except (OSError, ValueError, KeyError) as error:
        problem = Problem(
            "not a model that transformers knows", "model.name", found=str(error).splitlines()[0]
        )
        raise UserError(problem) from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _from_hub(model: Model) -> Path:
    """config.json in the Hub's cache."""
    from huggingface_hub import hf_hub_download

    from finetune import hub

    revision = hub.commit(model.name, model.revision or "main")
    with hub.explained(model.name):
        return Path(hf_hub_download(model.name, "config.json", revision=revision))
