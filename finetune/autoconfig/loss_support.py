"""Decide from a recipe and its launch whether the chunked loss works, before a model is loaded.

`speed.lm_head_loss` verifies the live model in addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.autoconfig import memory_estimate, mixed_precision
from finetune.core.errors import Exit, Problem, UserError
from finetune.distributed import launch_environment
from finetune.kernels.kernel_limits import FP8_MULTIPLE, FP8_WIDTH
from finetune.recipe import adapter_types

if TYPE_CHECKING:
    from finetune.core.model_config import ModelConfig
    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Recipe

CHUNKED = ("chunked", "chunked_fp8")  # the values of `speed.loss` that `speed.chunked_cross_entropy` computes
FP16 = "fp16 rounds small probabilities to zero"
HEAD_TRAINS = "the output head trains"
HAS_SOFTCAP = "the model has a softcap of its logits"
ODD_SIZE = f"a size of the output head is not a multiple of {FP8_MULTIPLE}"


def check_recipe(recipe: Recipe, config: ModelConfig | None) -> list[Problem]:
    """Find settings of the recipe and properties of the model that exclude the requested loss.

    Args:
        config: the config of the base model; `None` if it is not known yet.
    """
    loss, kind = recipe.speed.loss, adapter_types.find(recipe.adapter.type)
    if loss not in CHUNKED:
        return []
    reason = run_unsupported_reason(
        virtual_tokens=kind.prompt,
        label_smoothing=recipe.train.passed_on().get("label_smoothing_factor") or 0.0,
        loss_type="nll",
        fp16=False,
    )
    if loss == "chunked_fp8" and config and not reason:
        reason = fp8_unsupported_reason(config, head_trains=not kind.peft)
    return [refusal(loss, reason)] if reason else []


def check_machine(loss: str, hardware: Hardware, precision: str) -> None:
    """Refuse a chunked loss that a machine or the precision of a launch excludes.

    Args:
        loss: `speed.loss`.
        precision: the launch's mixed precision.

    Raises:
        UserError: exit 3.
    """
    missing = mixed_precision.fp8_missing(hardware, precision) if loss == "chunked_fp8" else ""
    reason = FP16 if precision == "fp16" and loss in CHUNKED else missing
    if reason:
        raise UserError(refusal(loss, reason), code=Exit.ENVIRONMENT)


def refusal(loss: str, reason: str) -> Problem:
    """Return the problem of a requested loss that does not work.

    Args:
        loss: `speed.loss`.
    """
    return Problem(
        "the chunked loss does not work for this run",
        "speed.loss",
        found=loss,
        why=reason,
        fix="speed.loss: auto",
        code="speed-option",
    )


def run_unsupported_reason(
    *, virtual_tokens: bool, label_smoothing: float, loss_type: str, fp16: bool
) -> str:
    """Return a setting of the run that excludes the chunked loss; the empty string if it works.

    Args:
        virtual_tokens: whether the adapter adds tokens to the prompt.
        label_smoothing: `label_smoothing_factor` of `SFTConfig`.
        loss_type: `loss_type` of `SFTConfig`.
        fp16: whether autocast's dtype is float16.
    """
    obstacles = {
        "the adapter adds virtual tokens": virtual_tokens,
        "label smoothing needs all logits": label_smoothing != 0,
        f"loss_type {loss_type} weights tokens": loss_type != "nll",
        FP16: fp16,
        "ZeRO-3 shards the head": launch_environment.zero_stage() == "3",
        "context parallelism splits sequences": launch_environment.parallel("CP") > 1,
    }
    return next((reason for reason, is_so in obstacles.items() if is_so), "")


def auto_uses_fp8(config: ModelConfig, *, head_trains: bool) -> bool:
    """Return whether `speed.loss: auto` chooses `chunked_fp8` on an fp8 base model."""
    wide = memory_estimate.widths(config).hidden >= FP8_WIDTH
    return wide and not fp8_unsupported_reason(config, head_trains=head_trains)


def fp8_unsupported_reason(config: ModelConfig, *, head_trains: bool) -> str:
    """Return why an fp8 GEMM can't compute the gradient of the hidden states; the empty string if it can."""
    sizes = memory_estimate.widths(config)
    obstacles = {
        HEAD_TRAINS: head_trains,
        HAS_SOFTCAP: memory_estimate.softcap(config) is not None,
        ODD_SIZE: sizes.vocabulary % FP8_MULTIPLE or sizes.hidden % FP8_MULTIPLE,
    }
    return next((reason for reason, is_so in obstacles.items() if is_so), "")
