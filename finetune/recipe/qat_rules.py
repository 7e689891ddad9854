"""Check `speed.qat`: its config, the adapter type and the packages that it needs."""

from __future__ import annotations

from typing import Any

from finetune.core import packages
from finetune.core.errors import Problem, nearest
from finetune.recipe import adapter_types
from finetune.recipe.schema import QAT_CONFIGS

_CUDA_ONLY = "torchao trains it, but packs its weights for NVIDIA GPUs only"
_UNTRAINED = "torchao has no training for it"
# Each config was prepared and converted on the CPU (torchao 0.18.0).
REFUSED = {
    "Int4WeightOnlyConfig": _CUDA_ONLY,
    "Float8DynamicActivationInt4WeightConfig": _CUDA_ONLY,
    "Float8DynamicActivationFloat8WeightConfig": _CUDA_ONLY,
    "Int8WeightOnlyConfig": _UNTRAINED,
    "Int8DynamicActivationInt8WeightConfig": _UNTRAINED,
    "Int8StaticActivationInt8WeightConfig": _UNTRAINED,
    "Float8WeightOnlyConfig": _UNTRAINED,
    "Int8DynamicActivationInt4WeightConfig": "torchao has it no more: it is "
    "Int8DynamicActivationIntxWeightConfig with weight_dtype int4",
}
TYPES = ("lora", "rslora", "dora", "adalora", "ia3", "full")  # finetune computes their merged weight


def class_name(config: str) -> str:
    """Return torchao's name of a config. A recipe may write it without `Config` at the end."""
    return config if config.endswith("Config") else f"{config}Config"


def missing() -> Problem | None:
    """Return a problem if torchao, an optional package, is not installed."""
    if packages.installed("torchao"):
        return None
    what = "needs torchao, which is not installed"
    return Problem(what, "speed.qat", fix=packages.install_extra("quantize"))


def conflicts(raw: dict[str, Any]) -> list[tuple[str, str, dict[str, str]]]:
    """Return the settings that conflict with `speed.qat`, in a recipe as it was read.

    Each has a dotted key, a message, and the other fields of the problem.
    """
    sections = {name: raw.get(name) for name in ("speed", "adapter", "model")}
    speed, adapter, model = (value if isinstance(value, dict) else {} for value in sections.values())
    asked, kind = speed.get("qat"), adapter.get("type")
    if not isinstance(asked, dict):
        return []
    found = _config_problems(asked.get("config"))
    types, base = adapter_types.all_types(), str(model.get("quantization", "auto"))
    meant = types[kind].storage if isinstance(kind, str) and kind in types else ""
    if meant or base not in ("auto", "none"):
        plain = {"qlora": "lora", "qdora": "dora", "qadalora": "adalora"}.get(str(kind), "")
        key, value = ("adapter.type", str(kind)) if meant else ("model.quantization", base)
        what = "a base that is quantised already excludes speed.qat, which rounds whole weights"
        found.append((key, what, {"found": value, "fix": plain or "quantization: auto"}))
    elif kind in types and kind not in TYPES:
        what = "speed.qat rounds the merged weight, which is not known here for this type"
        found.append(("adapter.type", what, {"found": str(kind), "expected": ", ".join(TYPES)}))
    if adapter.get("lora_dropout"):
        what = "speed.qat has no input of the adapter's own to drop parts of: its weight is merged in forward"
        found.append(("adapter.lora_dropout", what, {"fix": "lora_dropout: 0"}))
    init = adapter.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(adapter_types.REBASING_INITS):
        what = (
            "changes the base's weights, so that the saved adapter's are rounded otherwise than in training"
        )
        found.append(
            ("adapter.init_lora_weights", what, {"found": init, "fix": "drop it, or drop speed.qat"})
        )
    return found


def _config_problems(config: Any) -> list[tuple[str, str, dict[str, str]]]:
    """Return the problem of a name that is not in `QAT_CONFIGS`, with the nearest name that is."""
    if not isinstance(config, str) or class_name(config) in QAT_CONFIGS:
        return []
    name = class_name(config)
    texts = {"found": config, "expected": " or ".join(QAT_CONFIGS)}
    if name in REFUSED:
        near = "Int8DynamicActivationIntxWeightConfig" if "Dynamic" in name else "IntxWeightOnlyConfig"
        return [("speed.qat.config", REFUSED[name], {**texts, "fix": near})]
    return [
        ("speed.qat.config", "no such config in torchao's QAT", {**texts, "fix": nearest(name, QAT_CONFIGS)})
    ]
