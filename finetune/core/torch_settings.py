"""Let torch compute as in a command, whatever the program around a call has set."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

EXACT = ("none", "ieee")  # values of `fp32_precision` that do not round the inputs of GEMMs


@contextlib.contextmanager
def usual() -> Iterator[None]:
    """Use torch's default dtype, device, gradients and precision of fp32 GEMMs, and restore them at the end.

    Raises:
        UserError: the call is inside `with torch.device(...)` of another device (exit 2).
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:  # the function imports it, with its usual settings
        yield
        return
    dtype, device, precisions = torch.get_default_dtype(), torch.get_default_device(), _precisions(torch)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.callback(_set_precisions, torch, precisions)
        # `train.full_determinism` switches both on
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        enabled = torch.are_deterministic_algorithms_enabled()
        stack.callback(torch.use_deterministic_algorithms, enabled, warn_only=warns)
        if legacy := _legacy_precision(torch):
            stack.callback(torch.set_float32_matmul_precision, legacy)
            torch.set_float32_matmul_precision("highest")
        _set_precisions(
            torch, {name: "none" for name, value in _precisions(torch).items() if value not in EXACT}
        )
        if dtype != torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        if device.type != "cpu":
            stack.callback(torch.set_default_device, device)
            torch.set_default_device(None)
            _check_device(torch.get_default_device())
        yield


def _check_device(device: Any) -> None:
    if device.type != "cpu":
        raise UserError(
            Problem(
                "a function of finetune can't run inside `with torch.device(...)`",
                found=f"with torch.device({str(device)!r})",
                fix="call it outside of this block; finetune chooses the devices itself",
                code="value-type",
            )
        )


def _legacy_precision(torch: Any) -> str:
    """Return the value of `set_float32_matmul_precision` if it rounds; empty if other settings are in use.

    Torch can't read the older settings, such as `allow_tf32`, if only the newer ones are changed.
    """
    try:
        found = torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""
    return "" if found == "highest" else found


def holders(torch: Any) -> dict[str, Any]:
    """Return the objects with a `fp32_precision` (torch 2.9). `all` and `mkldnn` give others their value."""
    backends = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return {}
    return {
        "all": backends,
        "cuda": backends.cuda.matmul,
        "mkldnn": backends.mkldnn,
        "cpu": backends.mkldnn.matmul,
    }


def _precisions(torch: Any) -> dict[str, str]:
    return {name: holder.fp32_precision for name, holder in holders(torch).items()}


def _set_precisions(torch: Any, wanted: dict[str, str]) -> None:
    for name, holder in holders(torch).items():
        if name in wanted and holder.fp32_precision != wanted[name]:
            holder.fp32_precision = wanted[name]
