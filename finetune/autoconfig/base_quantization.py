"""Choose how the base model's weights are stored: fp8, 4-bit, 8-bit or not quantized."""

from __future__ import annotations

from finetune.autoconfig import mixed_precision
from finetune.autoconfig.launch_settings import Launch
from finetune.core import formatting
from finetune.core.errors import Exit, Problem, UserError, raise_if_any
from finetune.core.packages import install_extra, installed
from finetune.core.run_checks import Choice
from finetune.hardware.detection import Hardware
from finetune.quantization import stored_weights
from finetune.quantization.stored_weights import Stored
from finetune.recipe import adapter_types
from finetune.recipe.adapter_types import QUANTIZED

NO_FP8 = "this machine can't train on an fp8 base model"


def whole_base(started: Launch) -> str:
    """Return why `auto` must not quantize the base model under this launch; the empty string if it may."""
    if started.sharded:
        return f"{started.sharded} shards the weights, and fp8 layers need whole weights"
    return "DeepSpeed casts the weights, and can't cast fp8" if started.splitter == "DeepSpeed" else ""


def choose_base(
    requested: str,
    adapter_type: str,
    precision: str,
    machine: Hardware,
    against_fp8: str | None = None,
    stored: Stored | None = None,
) -> Choice:
    """Choose how the base weights are stored: quantized, or in the dtype of the launch's precision.

    Args:
        requested: `model.quantization`.
        adapter_type: `adapter.type`.
        precision: the launch's mixed precision.
        against_fp8: why `auto` must not choose fp8 for this recipe and model, or the empty string. `None`:
            the model is loaded again after training. It keeps the storage of the training, even without fp8
            GEMMs.
        stored: the storage of a checkpoint that is quantized already.

    Raises:
        UserError: the machine has no fp8 GEMMs, or a package for quantization is not installed (exit 3). The
            checkpoint is stored in another quantization than the recipe asks for (exit 2).
    """
    if stored and stored.stays:
        return _as_stored(stored, requested)
    if stored:
        choice = choose_base(requested, adapter_type, precision, machine, against_fp8)
        if choice.value not in QUANTIZED:
            choice = choice._replace(reason=f"{choice.reason}; dequantized from {stored} while loading")
        elif stored.keeps_experts(choice.value):
            choice = choice._replace(reason=f"{choice.reason}; the experts stay in {stored}")
        return choice
    storage = adapter_types.base_storage(adapter_type, requested)
    if storage == "fp8":
        return _asked_for_fp8(mixed_precision.fp8_missing(machine, precision), reopened=against_fp8 is None)
    if storage:
        raise_if_any([missing_package(storage)], code=Exit.ENVIRONMENT)
        return Choice(
            storage, "asked for" if requested in QUANTIZED else f"{adapter_type} means a 4-bit base model"
        )
    if adapter_type == "full":
        return Choice("fp32", "full fine-tuning keeps fp32 weights under autocast")
    plain = {"no": "fp32", "fp16": "fp16"}.get(precision, "bf16")
    if requested == "none":
        return Choice(plain, "asked for")
    same = f"the launch computes in {formatting.precision(precision)}"
    if against_fp8 is None:
        return Choice(plain, same)
    if precision != "bf16":
        return Choice(plain, f"{same}, and an fp8 base model needs bf16")
    reason = mixed_precision.fp8_missing(machine, precision) or against_fp8
    if reason:
        return Choice(plain, f"{same}; not fp8: {reason}")
    return Choice("fp8", f"auto: {machine.name} has fp8 GEMMs, and the layers are large enough to gain")


def _as_stored(stored: Stored, requested: str) -> Choice:
    """Choose the storage of a checkpoint that bitsandbytes has quantized."""
    if requested in QUANTIZED and requested != stored.storage:
        raise UserError(
            Problem(
                f"the checkpoint is stored in {stored}, not {requested}",
                "model.quantization",
                found=requested,
                fix="set `model.quantization: auto`",
                code="quantization",
            )
        )
    raise_if_any([missing_package(stored.storage)], code=Exit.ENVIRONMENT)
    return Choice(stored.storage, f"as the checkpoint is stored ({stored_weights.DECLARED})")


def _asked_for_fp8(missing: str, *, reopened: bool) -> Choice:
    if not missing:
        return Choice("fp8", "asked for")
    if reopened:
        return Choice("fp8", f"as in training, with matrix multiplications in float32, because {missing}")
    raise UserError(
        Problem(
            NO_FP8,
            "model.quantization",
            found="fp8",
            why=missing,
            fix="set `model.quantization: auto`, or `adapter.type: qlora` to save memory",
            code="hardware",
        ),
        code=Exit.ENVIRONMENT,
    )


def missing_package(storage: str) -> Problem | None:
    """Return a problem if the storage needs a package that is not installed."""
    if storage not in QUANTIZED or storage == "fp8":
        return None
    package, extra = ("torchao", "quantize") if storage.startswith("torchao") else ("bitsandbytes", "bnb")
    if installed(package):
        return None
    return Problem(
        f"a base model in {storage} needs the package {package}, which is not installed",
        "model.quantization",
        fix=install_extra(extra),
        code="package-missing",
    )
