"""Read the storage format of a checkpoint's weights, and decide whether they can be trained on.

This module does not import torch, because `finetune check` calls the same functions as a run.

- 4-bit and 8-bit weights of bitsandbytes stay quantized, and adapters train on them.
- fp8, mxfp8 and mxfp4 weights are dequantized while they load. So are fp8 weights of compressed-tensors with
  a scale for each output.
- mxfp4 experts stay as they are stored if the recipe asks for a quantized base model.
- Other methods are not supported, because PEFT or the merge needs weights that their packages do not return.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core import pattern_time, quantization_values
from finetune.core.errors import Problem
from finetune.kernels import kernel_limits
from finetune.kernels.kernel_limits import EXPERTS_STORAGES
from finetune.recipe import adapter_rules, adapter_types, qat_rules
from finetune.recipe.adapter_types import FOUR_BIT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from transformers import PreTrainedConfig

    from finetune.core.model_config import ModelConfig
    from finetune.recipe.schema import Recipe

DEQUANTIZED = ("fp8", "mxfp8", "mxfp4")  # methods that transformers dequantizes exactly during loading
WHOLE = "use the 16-bit checkpoint that it was quantized from"
OLD_FILES = (
    "quantize_config.json",
    "quant_config.json",
)  # files of AutoGPTQ and AutoAWQ, which transformers ignores
DECLARED = "quantization_config of its config.json"


class Stored(NamedTuple):
    """The storage format of a quantized checkpoint."""

    method: str
    """`quant_method`, as transformers names it."""
    storage: str
    """The equivalent value of `model.quantization`. Empty if there is none."""
    detail: str
    """Details from its config, such as `4 bits` or `blocks of 128 x 128`."""
    mxfp4_experts: bool = False
    """Whether it holds gpt-oss's experts in mxfp4, on which finetune can train as they are."""

    @property
    def stays(self) -> bool:
        """Whether adapters train on the quantized weights."""
        return self.method == "bitsandbytes"

    @property
    def trains(self) -> bool:
        return self.stays or self.dequantizes

    @property
    def dequantizes(self) -> bool:
        """Whether the weights are dequantized during loading."""
        return self.method in DEQUANTIZED or self.storage == "fp8"

    def keeps_experts(self, storage: str) -> bool:
        """Whether the experts stay as they are stored while the linear layers are quantized to `storage`."""
        return self.mxfp4_experts and storage in EXPERTS_STORAGES

    def __str__(self) -> str:
        name = f"{self.storage} ({self.method})" if self.storage not in ("", self.method) else self.method
        return f"{name}, {self.detail}" if self.detail else name


def read(config: PreTrainedConfig | ModelConfig) -> Stored | None:
    """Return the storage format that a model's config declares, or `None` if its weights are not quantized.

    Args:
        config: transformers' config of the model, config.json as attributes, or `None` if it is not known.
    """
    stored = format_of(declaration(config))
    if stored is None or config is None:
        return stored
    return stored._replace(mxfp4_experts=kernel_limits.stored_as_mxfp4(config))


def format_of(declared: Mapping[str, Any]) -> Stored | None:
    """Return the storage format of a `quantization_config`; `None` if it is empty."""
    if not declared:
        return None
    method = declared.get("quant_method")
    method = str(getattr(method, "value", method))
    if declared.get("load_in_4bit"):
        return Stored("bitsandbytes", str(declared.get("bnb_4bit_quant_type", "fp4")), "")
    if declared.get("load_in_8bit"):
        return Stored("bitsandbytes", "int8", "")
    if method == "bitsandbytes":  # neither 4-bit nor 8-bit: transformers reads plain weights
        return None
    fp8 = method == "compressed-tensors" and not unfit_groups(declared)
    return Stored(method, "fp8" if fp8 else "", _detail(declared))


def declaration(config: ModelConfig) -> dict[str, Any]:
    """Return the `quantization_config` of a model or its text model, as transformers reads it.

    Empty if there is none.
    """
    if config is None:
        return {}
    for section in (config, config.get_text_config()):
        for key in quantization_values.KEYS:
            declared: Any = getattr(section, key, None)
            declared = declared.to_dict() if hasattr(declared, "to_dict") else declared
            if isinstance(declared, dict) and declared:
                old = {"quant_method": "compressed-tensors"} if key == "compression_config" else {}
                return {**old, **declared}
    return {}


def forget(config: ModelConfig) -> Any:
    """Remove the quantization from a config, for weights that are not quantized."""
    for section in (config, config.get_text_config()):
        for key in quantization_values.KEYS:
            vars(section).pop(key, None)
    return config


def slow_pattern(config: ModelConfig, names: Callable[[], Collection[str]]) -> list[Problem]:
    """The problem of a regular expression in the list of modules to skip that takes too long.

    Args:
        names: gives the names of the model's modules, if one of the texts is no plain name.
    """
    patterns = quantization_values.skipped(declaration(config))
    patterns = [one for one in patterns if not pattern_time.is_plain(one[0])]
    slow = pattern_time.find_slow([pattern for _, pattern in patterns], names()) if patterns else None
    if slow is None:
        return []
    return [
        Problem(
            f"a regular expression in the {DECLARED} takes too long",
            "model.name",
            found=patterns[slow][0][:200],
            fix="write the names of the modules",
            code="unsafe-file",
        )
    ]


def complete(config: ModelConfig, **values: object) -> None:
    """Add values to the quantization config of a model, which tell transformers how to load it."""
    for section in (config, config.get_text_config()):
        if declared := getattr(section, "quantization_config", None):
            section.quantization_config = {**declared, **values}


def unfit_groups(declared: Mapping[str, Any]) -> list[str]:
    """Return the groups of a compressed-tensors checkpoint that the fp8 base model does not support."""
    groups = [group.get("weights") or {} for group in (declared.get("config_groups") or {}).values()]
    unfit = [
        f"{one.get('type')}{one.get('num_bits')} by {one.get('strategy')}"
        for one in groups
        if (one.get("num_bits"), one.get("type"), one.get("symmetric", True)) != (8, "float", True)
        or one.get("strategy") not in ("channel", "tensor")
    ]
    return sorted(set(unfit)) if groups else ["no groups"]


def _detail(declared: Mapping[str, Any]) -> str:
    bits = declared.get("bits") or declared.get("w_bit") or declared.get("nbits") or declared.get("num_bits")
    size, blocks = declared.get("group_size"), declared.get("weight_block_size")
    parts = [f"{bits} bits"] if bits else []
    parts += [f"groups of {size}"] if isinstance(size, int) and size > 0 else []
    parts += [f"blocks of {blocks[0]} x {blocks[1]}"] if isinstance(blocks, list | tuple) else []
    parts += unfit_groups(declared) if declared.get("config_groups") else []
    return ", ".join(parts)


def _asked(recipe: Recipe) -> str:
    """Return the quantization that a recipe means, by its key or its adapter type; else an empty string."""
    requested = recipe.model.quantization
    return requested if requested in EXPERTS_STORAGES else adapter_types.find(recipe.adapter.type).storage


def describe(stored: Stored, recipe: Recipe) -> str:
    """Describe in one line how a checkpoint's weights are handled."""
    if stored.keeps_experts(storage := _asked(recipe)):
        return f"the experts stay as the checkpoint stores them, in {stored}; linear layers get {storage}"
    if stored.stays:
        return f"the base model keeps its quantization: {stored}"
    return f"the base model is stored in {stored}, and finetune dequantizes it while it loads"


def refusal(stored: Stored) -> Problem:
    """Return the problem that checkpoints of this method cannot be trained on."""
    return Problem(
        f"finetune can't train on weights that {stored.method} quantized ({DECLARED})",
        "model.name",
        found=str(stored),
        expected=f"16-bit weights, or bitsandbytes, {', '.join(DEQUANTIZED)}",
        fix=WHOLE,
        code="quantization",
    )


def conflicts(stored: Stored, recipe: Recipe) -> list[Problem]:
    """Return the reasons why a recipe cannot be trained on this checkpoint."""
    requested, name = recipe.model.quantization, recipe.adapter.type
    meant, found = adapter_types.find(name).storage, str(stored)
    if not stored.trains:
        return [refusal(stored)]
    kept = stored.keeps_experts(_asked(recipe))
    allowed = kept or requested in ("auto", stored.storage) or (requested == "none" and stored.dequantizes)
    if not allowed:
        return [
            Problem(
                f"the checkpoint is stored in {stored} already ({DECLARED})",
                "model.quantization",
                found=requested,
                expected="auto",
                fix=f"model.quantization: auto, or {WHOLE}",
                code="quantization",
            )
        ]
    if stored.dequantizes and meant and not kept:
        return [
            Problem(
                f"{name} needs a base model that is not quantized yet, to quantize it to {meant}",
                "adapter.type",
                found=found,
                fix=f"adapter.type: {name.removeprefix('q')}, or {WHOLE}",
                code="quantization",
            )
        ]
    if not stored.stays:
        return []
    if name == "full":
        return [
            Problem(
                "full fine-tuning can't train quantized weights",
                "adapter.type",
                found=found,
                fix=f"adapter.type: lora, or {WHOLE}",
                code="quantization",
            )
        ]
    if meant and stored.storage not in FOUR_BIT:
        return [
            Problem(
                f"{name} needs a 4-bit base model, and the checkpoint is stored in {stored}",
                "adapter.type",
                found=found,
                fix=f"adapter.type: {name.removeprefix('q')}, or {WHOLE}",
                code="quantization",
            )
        ]
    return _of_options(stored, recipe)


def _of_options(stored: Stored, recipe: Recipe) -> list[Problem]:
    """Return the conflicts of a recipe with this quantization.

    LoftQ is a conflict, because it needs the weights before quantization.
    """
    raw = {
        name: getattr(recipe, name).model_dump(exclude_unset=True) for name in ("model", "adapter", "speed")
    }
    raw["model"]["quantization"] = stored.storage
    raw |= {
        "train": recipe.train.model_dump(exclude_unset=True),
        "data": recipe.data.model_dump(exclude_unset=True),
    }
    problems = [*adapter_rules.conflicts(raw), *qat_rules.conflicts(raw)]
    if raw["adapter"].get("init_lora_weights") == "loftq":
        problems.append(
            Problem(
                "LoftQ needs the weights before quantization",
                "adapter.init_lora_weights",
                found="loftq",
                code="recipe-conflict",
            )
        )
    by = f"the checkpoint is stored in {stored}: "
    return [
        replace(
            one,
            what=by + one.what,
            expected="",
            fix=WHOLE,
            code="quantization" if one.code == "recipe-conflict" else one.code,
        )
        for one in problems
    ]
