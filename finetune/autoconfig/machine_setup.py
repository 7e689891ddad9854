"""Detect this machine and choose attention and base model storage for it, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from finetune.autoconfig import attention_choice, base_quantization, launch_settings, mixed_precision
from finetune.autoconfig.attention_choice import Attends, RowLayout
from finetune.autoconfig.launch_settings import Launch
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.run_checks import Choice
from finetune.distributed import launch_environment
from finetune.hardware import detection
from finetune.hardware.detection import Hardware
from finetune.kernels import kernel_limits
from finetune.quantization.stored_weights import Stored
from finetune.recipe import adapter_types


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
class Weights:
    """Properties of a base model that decide its quantization, together with the recipe."""

    stored: Stored | None = None
    """The quantization of a checkpoint that is already quantized."""
    against_fp8: Callable[[], str] | None = None
    """Returns why fp8 is not possible; see `choose_base`. `None` if the run's quantization is used again."""


def choose(
    *,
    attention: str,
    base: str,
    adapter_type: str,
    attends: Attends | None = None,
    rows: RowLayout | None = None,
    weights: Weights = Weights(),
) -> Setup:
    """Detect the machine and the launch, and choose attention and base model storage for them.

    Args:
        attention: `model.attention`.
        base: `model.quantization`.
        adapter_type: `adapter.type`.
        attends: the properties of the model's attention; `None` means the attention of Llama.
        rows: the training sequences; `None` for evaluation, which uses masks and a KV cache.
        weights: the properties of the base model.

    Raises:
        UserError: this machine, its packages or the launch do not support a requested setting (exit 3).
    """
    hardware = detection.detect()
    started = launch_settings.read(hardware)
    stored, against_fp8 = weights.stored, weights.against_fp8
    by_launch = started.fp8 == launch_environment.FROZEN and base == "auto" and against_fp8 is not None
    if against_fp8 is not None and (reason := base_quantization.whole_base(started)):
        against_fp8 = partial(str, reason)
    storage = base_quantization.choose_base(
        "fp8" if by_launch else base, adapter_type, started.precision, hardware, against_fp8, stored
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
    dtype = mixed_precision.compute_dtype(started.precision, storage.value)
    chosen = Choice(*attention_choice.choose(attention, hardware, dtype, attends, rows))
    return Setup(hardware, started, chosen, storage)
