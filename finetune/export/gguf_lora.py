"""Write an adapter alone as a GGUF LoRA, which llama.cpp applies to its base model (`--lora FILE`)."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.export import gguf_families, gguf_file, vllm_rules
from finetune.export.gguf_families import GgufTensor

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from finetune.core.model_config import ModelConfig

HALF = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<half>[AB])\.weight")


def check(adapter: Path, target: str = "a GGUF LoRA") -> dict[str, Any]:
    """Return the adapter's config.

    Raises:
        UserError: the target can't hold the adapter (exit 2).
    """
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    found = [reason for reason in vllm_rules.refusals(config) if not reason.startswith("rank")]
    if found:
        raise UserError(
            Problem(
                f"{target} can't hold this adapter",
                where=str(adapter),
                found=", ".join(found),
                fix="remove --adapter, so that finetune merges it",
                code="export",
            )
        )
    return config


def entries(config: dict[str, Any], family: gguf_families.Family, name: str) -> dict[str, Any]:
    """Return the keys of the file. llama.cpp scales an adapter by alpha / rank."""
    alpha, rank = float(config["lora_alpha"]), int(config["r"])
    return {
        "general.architecture": family.architecture,
        "general.type": "adapter",
        "general.name": name,
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha * rank**0.5 if config.get("use_rslora") else alpha,
    }


def plan(names: list[str], config: ModelConfig, family: gguf_families.Family) -> list[GgufTensor]:
    """Return the tensors of the file. B has the rows of the weight, so it takes llama.cpp's order of rows.

    Raises:
        UserError: llama.cpp has no such tensor (exit 2).
    """
    table = gguf_families.tensor_names(config, family)
    planned, unknown = list[GgufTensor](), list[str]()
    for name in sorted(names):
        half = HALF.fullmatch(name)
        found = half and table.get_name(f"{half['module']}.weight", try_suffixes=(".weight",))
        if not half or not found or ".experts" in name or "embed" in name:
            unknown.append(name)
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        rows = (
            heads.get(half["module"].rpartition(".")[2], 0) if family.permuted and half["half"] == "B" else 0
        )
        planned.append(GgufTensor(f"{found}.lora_{half['half'].lower()}", (name,), _rows(rows)))
    refuse_tensors("llama.cpp", unknown)
    return planned


def refuse_tensors(program: str, names: list[str]) -> None:
    """Refuse tensors of an adapter that a program has no place for (exit 2)."""
    if names:
        raise UserError(
            Problem(
                f"{program} has no place for a tensor of the adapter",
                found=", ".join(names[:3]),
                fix="remove --adapter",
                code="export",
            )
        )


def _rows(heads: int) -> Any:
    return lambda tensors: gguf_families.in_pairs(tensors[0], heads) if heads else tensors[0]


def write(path: Path, adapter: Path, config: PreTrainedConfig, name: str, kind: str) -> list[str]:
    """Write the file, and return each difference that gguf's reader finds."""
    family = gguf_families.family_of(config)
    keys = entries(check(adapter), family, name)
    with gguf_file.opened(adapter) as source:
        tensors = plan(list(source.files), config, family)
        gguf_file.write(path, keys, tensors, source, kind)
        return gguf_file.differences(path, keys, tensors, source, kind)
