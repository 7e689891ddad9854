"""Write the module lists of common families into the package (`make schema`); tests compare with the models.

Each family is built on the meta device with two sets of sizes. Each dimension becomes the product of config
values that gives it under both. Each other value of the config is changed once: where the modules change with
it, the list holds for its default only.
"""

from __future__ import annotations

import json
import logging
import re
from importlib.metadata import version
from itertools import combinations_with_replacement
from math import prod
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.models import module_lists
from finetune.models.module_names import Names

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "granite", "olmo2",
    "phi3", "gpt_neox", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe",
)  # fmt: skip
# A `head_dim` in the config would give norms of another width than their projections
WITHOUT_HEAD_DIM = ("olmoe",)
SIZES: tuple[dict[str, int], ...] = (
    {
        "hidden_size": 48, "intermediate_size": 86, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 3, "vocab_size": 97, "num_experts": 11, "num_local_experts": 11,
        "head_dim": 10, "moe_intermediate_size": 14, "shared_expert_intermediate_size": 22,
        "max_position_embeddings": 59,
    },
    {
        "hidden_size": 80, "intermediate_size": 142, "num_hidden_layers": 3, "num_attention_heads": 10,
        "num_key_value_heads": 2, "vocab_size": 131, "num_experts": 13, "num_local_experts": 13,
        "head_dim": 14, "moe_intermediate_size": 26, "shared_expert_intermediate_size": 34,
        "max_position_embeddings": 67,
    },
)  # fmt: skip
# Values that change no module by their kind: what a number scales, a token's id, a name
SKIPPED = re.compile(
    r"token_id|rope|rotary|partial|dropout|eps|range|torch_dtype|dtype|tie_word|architectures"
)


WITHOUT_EFFECT = ("architectures", "transformers_version", "use_cache")


def config_of(family: str, sizes: dict[str, int], **others: Any) -> Any:
    names = AutoConfig.for_model(family).to_dict().keys()
    known = AutoConfig.for_model(family).attribute_map
    given = {key: value for key, value in sizes.items() if key in names or key in known}
    if family not in WITHOUT_HEAD_DIM:  # many models read it, although their config class does not have it
        given["head_dim"] = sizes["head_dim"]
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(family, **{**given, **tokens, "tie_word_embeddings": False, **others})


def names_of(config: Any) -> Names:
    with torch.device("meta"):
        return module_lists.of_meta_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def starred(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name, count=1)


def expression(values: tuple[int, int], candidates: dict[str, tuple[int, ...]]) -> str:
    if values == (1, 1):
        return "1"
    found = [text for text, sizes in candidates.items() if sizes == values]
    return min(found, key=lambda text: (text.count("*") + text.count("+"), text))


def expressions(configs: list[Any]) -> dict[str, tuple[int, ...]]:
    """Sums and products of config values that a dimension may be, with their value under both configs."""
    keys = [key for key in SIZES[0] if all(getattr(config, key, None) for config in configs)]
    keys += [] if "head_dim" in keys else ["head_dim"]
    plain = {key: tuple(module_lists._value(config, key) for config in configs) for key in keys}
    products = [(key,) for key in keys] + list(combinations_with_replacement(keys, 2))
    made = {"*".join(keys): tuple(prod(plain[key][i] for key in keys) for i in (0, 1)) for keys in products}
    times = {
        f"{n}*{text}": (n * first, n * second) for n in (2, 3, 4) for text, (first, second) in made.items()
    }
    heads, kv = "num_attention_heads*head_dim", "2*num_key_value_heads*head_dim"
    joined = {}
    if "num_key_value_heads" in keys:
        joined = {f"{heads}+{kv}": tuple(made[heads][i] + times[kv][i] for i in (0, 1))}
    return {**made, **times, **joined}


def fixed_of(family: str, names: Names, used: set[str]) -> dict[str, Any]:
    """Values that the modules depend on, beside sizes: the list holds for these defaults only."""
    found: dict[str, Any] = {}
    for key, value in config_of(family, SIZES[0]).to_dict().items():
        if key in used or key in SIZES[0] or key in WITHOUT_EFFECT or SKIPPED.search(key):
            continue
        other: Any = None
        if isinstance(value, bool):
            other = not value
        elif isinstance(value, int):
            other = value * 2 or 1
        elif value == [] or (value is None and key.endswith("_layers")):
            other = [0]
        elif value is None and key in ("n_inner",):
            other = 40
        if other is None:
            continue
        try:
            changed = names_of(config_of(family, SIZES[0], **{key: other}))
        except Exception:  # the config class refuses the other value, so no list can depend on it
            continue
        if changed != names:
            found[key] = AutoConfig.for_model(family).to_dict().get(key)
    return found


def family_list(family: str) -> dict[str, Any]:
    configs = [config_of(family, sizes) for sizes in SIZES]
    first, second = map(names_of, configs)
    assert not first.without_gradient and not first.untrained, (
        f"{family} reads weights of modules that it does not call"
    )
    candidates = expressions(configs)
    shapes = {}
    for name, size in first.shapes.items():
        pairs = zip(size, second.shapes[name], strict=True)
        shapes[starred(name)] = " ".join(expression(pair, candidates) for pair in pairs)
    used = {part for text in shapes.values() for part in re.split(r"[ *+]", text)}
    fixed = {"head_dim": None} if family in WITHOUT_HEAD_DIM else {}
    defaults = dict(sorted(AutoConfig.for_model(family).to_dict().items()))
    return {
        "fixed": fixed | fixed_of(family, first, used),
        "defaults": {
            key: type(value)() if isinstance(value, list | dict) else value for key, value in defaults.items()
        },
        "kinds": {starred(name): kind for name, kind in first.kinds.items()},
        "shapes": shapes,
        "embedding": first.embedding,
        "head": first.head,
    }


def main() -> None:
    logging.disable(logging.WARNING)
    major, minor = version("transformers").split(".")[:2]
    held = {"transformers": f"{major}.{minor}", "families": {name: family_list(name) for name in FAMILIES}}
    module_lists.SHIPPED.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
