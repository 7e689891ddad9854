"""What vLLM's LoRA loader accepts.

The rules are those of vLLM's files `vllm/lora/peft_helper.py` (features), `vllm/config/lora.py` (ranks),
`vllm/lora/utils.py` (names of tensors) and `vllm/lora/lora_model.py` (modules and experts).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank`."""
MODULES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "qkv_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj",
)
"""Linear layers of Llama-style models that vLLM replaces by layers with LoRA."""
VARIANTS = (
    "use_bdlora", "use_qalora", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
    "layer_replication",
)  # fmt: skip
"""Options of PEFT's LoRA that change the shapes of A and B, or what the layer computes with them."""
TENSOR = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_[AB]\.weight")


def largest_rank(config: dict[str, Any]) -> int | None:
    """Return the smallest `--max-lora-rank` that fits, or `None`."""
    return next((size for size in RANKS if size >= int(config.get("r") or 0)), None)


def refusals(config: dict[str, Any]) -> list[str]:
    """Return each feature of an adapter_config.json that vLLM's LoRA loader does not support."""
    # vLLM reads PEFT's stacked experts only for model classes with `is_3d_moe_weight`. Other classes need one
    # module per expert (vLLM's main branch, lora/lora_model.py, from_local_checkpoint, and
    # lora/model_manager.py, _create_lora_modules). An adapter on a router is not tested with vLLM.
    parameters = sorted(config.get("target_parameters") or ())
    reasons = {
        f"a {config.get('peft_type')} adapter": config.get("peft_type") != "LORA",
        "DoRA": config.get("use_dora"),
        "modules_to_save": config.get("modules_to_save"),
        "new tokens": config.get("trainable_token_indices"),
        "trained biases": config.get("bias", "none") != "none" or config.get("lora_bias"),
        "different ranks or alphas per layer": config.get("rank_pattern") or config.get("alpha_pattern"),
        f"the adapted parameters {', '.join(parameters)}": parameters,
    }
    reasons |= {f"the option {name}": config.get(name) for name in VARIANTS}
    found = [reason for reason, holds in reasons.items() if holds]
    return found or ([] if largest_rank(config) else [f"rank {config.get('r')}"])


def unexpected(tensors: Iterable[str]) -> list[str]:
    """Return the tensors of an adapter that vLLM's LoRA loader would not accept by their names."""
    found = []
    for name in tensors:
        named = TENSOR.fullmatch(name)
        if not named or ".experts" in name or named["module"].rpartition(".")[2] not in MODULES:
            found.append(name)
    return sorted(found)
