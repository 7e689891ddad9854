"""Whether the installed kernels of gated delta nets compute right gradients here, and can be compiled."""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import TYPE_CHECKING

from packaging.version import Version

from finetune.core import packages
from finetune.core.errors import Exit, Problem, UserError
from finetune.recipe import upstream_options

if TYPE_CHECKING:
    from finetune.core.model_config import ModelConfig
    from finetune.hardware.detection import Hardware

PACKAGE = "fla"  # the module of flash-linear-attention
# On Hopper GPUs, these versions of Triton compute wrong gradients of gated delta nets. The package raises an
# error in the first backward pass, or uses tilelang (flash-linear-attention 0.6, fla/ops/common/chunk_o.py).
HOPPER, FIRST_WRONG, FIRST_RIGHT = 9, Version("3.4.0"), Version("3.7.1")


def uses_package(config: ModelConfig) -> bool:
    """Return whether layers of this model run the kernels of flash-linear-attention here."""
    family = config.get_text_config().model_type
    return PACKAGE in upstream_options.kernel_packages(family).values() and packages.installed(PACKAGE)


def not_compiled_reason(config: ModelConfig) -> str:
    """Return why `auto` does not compile the layers of this model; the empty string if it may."""
    if not uses_package(config):
        return ""
    return "torch.compile takes minutes for the kernels of flash-linear-attention"  # benchmarks/LOG.md


def check(config: ModelConfig, hardware: Hardware) -> None:
    """Refuse a model whose kernels compute wrong gradients on this GPU.

    Raises:
        UserError: the installed Triton is one of these versions (exit 3).
    """
    if hardware.capability[0] != HOPPER or not uses_package(config) or packages.installed("tilelang"):
        return
    triton = _triton_version()
    if triton is None or not FIRST_WRONG <= Version(triton) < FIRST_RIGHT:
        return
    family = config.get_text_config().model_type
    raise UserError(
        Problem(
            f"flash-linear-attention can't train {family} on this GPU with this version of Triton",
            found=f"triton {triton} on {hardware.name}",
            expected=f"triton {FIRST_RIGHT} or newer, or tilelang",
            why="on Hopper GPUs, its kernels compute wrong gradients with this version",
            fix=f"{packages.install_command('tilelang')}, or uninstall flash-linear-attention (slower)",
            code="package-missing",
        ),
        code=Exit.ENVIRONMENT,
    )


def _triton_version() -> str | None:
    """Return the version of Triton, which nightly builds of torch install under another name."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None
