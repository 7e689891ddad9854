"""Detect this machine and choose attention and base model storage for it, each with its reason."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from finetune.autoconfig import (
    attention_choice,
    base_quantization,
    fp8_support,
    launch_settings,
    mixed_precision,
)
from finetune.autoconfig.attention_choice import Attends, RowLayout
from finetune.autoconfig.launch_settings import Launch
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.model_config import ModelConfig
from finetune.core.run_checks import Choice
from finetune.distributed import launch_environment
from finetune.hardware import detection
from finetune.hardware.detection import Hardware
from finetune.kernels import kernel_limits
from finetune.quantization.stored_weights import Stored
from finetune.recipe import adapter_types
from finetune.recipe.schema import Recipe


@dataclass(frozen=True)
class Setup:
    """This machine, this launch, and the choices for loading a model in training or evaluation."""

    hardware: Hardware
    launch: Launch
    attention: Choice
    storage: Choice

    @property
    def attn_implementation(self) -> str:
        """Return the attention's name in transformers. finetune registers the kernels without a mask."""
        return kernel_limits.IMPLEMENTATIONS.get(self.attention.value, self.attention.value)

    @property
    def compute_dtype(self) -> str:
        """Return the dtype of GEMMs: autocast's dtype, or without autocast the dtype of the weights."""
        return mixed_precision.compute_dtype(self.launch.precision, self.storage.value)

    @property
    def weights_dtype(self) -> str:
        """Return the dtype of the unquantized weights."""
        quantized = self.storage.value in adapter_types.QUANTIZED
        name = mixed_precision.DTYPES[self.launch.precision]
        return name if quantized else mixed_precision.STORED[self.storage.value]

    @property
    def quantized(self) -> str:
        """Return the storage of a quantized base model, such as nf4; the empty string for plain weights."""
        return "" if self.storage.value in mixed_precision.STORED else self.storage.value

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the launch."""
        return mixed_precision.autocast(self.hardware.device, self.launch.precision)


@dataclass(frozen=True)
class ModelProperties:
    """Properties of a base model that decide its attention and quantization, together with the recipe."""

    attends: Attends | None = None
    """The properties of its attention; `None` means the attention of Llama."""
    stored: Stored | None = None
    """The quantization of a checkpoint that is already quantized."""
    against_fp8: str | None = None
    """Why `auto` does not choose fp8; see `choose_base`. `None` if the run's quantization is used again."""


def choose_for_training(
    recipe: Recipe,
    config: ModelConfig,
    stored: Stored | None,
    on: tuple[Hardware, Launch] | None = None,
) -> Setup:
    """Choose how a recipe trains on this machine, or in a plan on another one. See `choose`."""
    prompt = adapter_types.find(recipe.adapter.type).prompt
    attends, against_fp8 = attention_choice.read(config), fp8_support.against_fp8(recipe, config)
    return choose(
        attention=recipe.model.attention,
        base=recipe.model.quantization,
        adapter_type=recipe.adapter.type,
        model=ModelProperties(attends, stored, against_fp8),
        rows=RowLayout(recipe.data.flat, recipe.data.max_length, prompt),
        on=on,
    )


def choose(
    *,
    attention: str,
    base: str,
    adapter_type: str,
    model: ModelProperties = ModelProperties(),
    rows: RowLayout | None = None,
    on: tuple[Hardware, Launch] | None = None,
) -> Setup:
    """Choose attention and base model storage for a machine and its launch.

    Args:
        attention: `model.attention`.
        base: `model.quantization`.
        adapter_type: `adapter.type`.
        rows: the training sequences; `None` for evaluation, which uses masks and a KV cache.
        on: the machine and the launch; `None` detects this machine and its launch.

    Raises:
        UserError: the machine, its packages or the launch do not support a requested setting (exit 3).
    """
    if on is None:
        machine = detection.detect()
        on = machine, launch_settings.read(machine)
    hardware, launch = on
    stored, against_fp8 = model.stored, model.against_fp8
    by_launch = launch.fp8 == launch_environment.FROZEN and base == "auto" and against_fp8 is not None
    if against_fp8 is not None:
        against_fp8 = base_quantization.whole_base(launch) or against_fp8
    storage = base_quantization.choose_base(
        "fp8" if by_launch else base, adapter_type, launch.precision, hardware, against_fp8, stored
    )
    if by_launch:
        storage = Choice(storage.value, "the launch's mixed_precision: fp8")
    if (
        storage.value == "int8"
        and hardware.device == "cpu"
        and "use_dora" in adapter_types.find(adapter_type).sets
    ):
        raise UserError(
            Problem(
                "DoRA does not work with an int8 base model on the CPU",
                "model.quantization",
                found="int8",
                why=(
                    "DoRA needs dequantized weights, and bitsandbytes can't dequantize int8 "
                    "weights on the CPU"
                ),
                fix="adapter.type: lora" if stored else "model.quantization: nf4",
                code="hardware",
            ),
            code=Exit.ENVIRONMENT,
        )
    dtype = mixed_precision.compute_dtype(launch.precision, storage.value)
    chosen = Choice(*attention_choice.choose(attention, hardware, dtype, model.attends, rows))
    return Setup(hardware, launch, chosen, storage)
