"""Check `speed.qat`: its config, the adapter type and the packages that it needs."""

from __future__ import annotations

from typing import Any

from finetune.core import packages
from finetune.core.errors import Problem, nearest
from finetune.core.formatting import as_yaml
from finetune.recipe import adapter_types
from finetune.recipe.schema import QAT_CONFIGS

_CUDA_ONLY = "torchao can store these weights only for NVIDIA GPUs"
_UNTRAINED = "torchao has no quantization-aware training for this config"
# Each config was prepared and converted on the CPU (torchao 0.18.0).
REFUSED = {
    "Int4WeightOnlyConfig": _CUDA_ONLY,
    "Float8DynamicActivationInt4WeightConfig": _CUDA_ONLY,
    "Float8DynamicActivationFloat8WeightConfig": _CUDA_ONLY,
    "Int8WeightOnlyConfig": _UNTRAINED,
    "Int8DynamicActivationInt8WeightConfig": _UNTRAINED,
    "Int8StaticActivationInt8WeightConfig": _UNTRAINED,
    "Float8WeightOnlyConfig": _UNTRAINED,
    "Int8DynamicActivationInt4WeightConfig": "torchao has removed this config. It is the same as "
    "Int8DynamicActivationIntxWeightConfig with `weight_dtype: int4`",
}
TYPES = ("lora", "rslora", "dora", "adalora", "ia3", "full")  # finetune computes their merged weight


def class_name(config: str) -> str:
    """Return torchao's name of a config. A recipe may write it without `Config` at the end."""
    return config if config.endswith("Config") else f"{config}Config"


def missing() -> Problem | None:
    """Return a problem if torchao, an optional package, is not installed."""
    if packages.installed("torchao"):
        return None
    return Problem(
        "QAT needs torchao, which is not installed",
        "speed.qat",
        fix=packages.install_extra("quantize"),
        code="package-missing",
    )


def conflicts(raw: dict[str, Any]) -> list[Problem]:
    """Return the settings that conflict with `speed.qat`, in a recipe as it was read."""
    sections = {name: raw.get(name) for name in ("speed", "adapter", "model")}
    speed, adapter, model = (value if isinstance(value, dict) else {} for value in sections.values())
    qat, kind = speed.get("qat"), adapter.get("type")
    if not isinstance(qat, dict):
        return []
    found = _config_problems(qat.get("config"))
    types, base = adapter_types.all_types(), str(model.get("quantization", "auto"))
    meant = types[kind].storage if isinstance(kind, str) and kind in types else ""
    if meant or base not in ("auto", "none"):
        plain = {"qlora": "lora", "qdora": "dora", "qadalora": "adalora"}.get(str(kind), "lora")
        key, value = ("adapter.type", str(kind)) if meant else ("model.quantization", base)
        found.append(
            Problem(
                "`speed.qat` excludes a quantized base model",
                key,
                found=value,
                fix=f"type: {plain}" if meant else "quantization: auto",
                why="QAT rounds weights that are not quantized yet",
                code="recipe-conflict",
            )
        )
    elif kind in types and kind not in TYPES:
        found.append(
            Problem(
                f"`speed.qat` does not support {kind}",
                "adapter.type",
                found=as_yaml(kind),
                expected=" or ".join(TYPES),
                fix="type: lora",
                why="QAT rounds the merged weight in each forward pass",
                code="recipe-conflict",
            )
        )
    if adapter.get("lora_dropout"):
        found.append(
            Problem(
                "`speed.qat` excludes LoRA dropout",
                "adapter.lora_dropout",
                found=as_yaml(adapter["lora_dropout"]),
                fix="lora_dropout: 0",
                why="QAT merges the adapter into the weight that it rounds",
                code="recipe-conflict",
            )
        )
    init = adapter.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(adapter_types.REBASING_INITS):
        found.append(
            Problem(
                "`speed.qat` excludes this initialization",
                "adapter.init_lora_weights",
                found=init,
                fix="init_lora_weights: true",
                why=(
                    "it changes the base weights, so the saved adapter would be rounded "
                    "differently than in training"
                ),
                code="recipe-conflict",
            )
        )
    return found


def _config_problems(config: object) -> list[Problem]:
    """Return the problem of a name that is not in `QAT_CONFIGS`, with the nearest name that is."""
    if not isinstance(config, str) or class_name(config) in QAT_CONFIGS:
        return []
    name = class_name(config)
    near = "Int8DynamicActivationIntxWeightConfig" if "Dynamic" in name else "IntxWeightOnlyConfig"
    near = near if name in REFUSED else nearest(name, QAT_CONFIGS)
    return [
        Problem(
            REFUSED.get(name, "torchao's QAT has no config with this name"),
            "speed.qat.config",
            found=config,
            expected=" or ".join(QAT_CONFIGS),
            fix=f"config: {near}" if near else "",
            code="value-choice",
        )
    ]
