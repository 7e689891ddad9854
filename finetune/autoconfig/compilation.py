"""Decide whether decoder layers are compiled and adapters are fused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from finetune.autoconfig import memory_estimate
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.run_checks import Choice

if TYPE_CHECKING:
    from finetune.core.model_config import ModelConfig
    from finetune.hardware.detection import Hardware

GRAPHS = ("reduce-overhead", "max-autotune")  # torch.compile's modes that record CUDA graphs
PAYS_FROM = 120  # of a run's products from which compiling, which takes about 20 s, pays
PRODUCTS = 0.4  # of the peak: how fast they are taken to run for that, by runs and plans alike
MAX_RANK = 256  # of the adapters in one fused product


class Work(NamedTuple):
    """What a process is to do with a model, and what it has for that."""

    tokens: int
    """Of one forward pass, at most."""
    flops: float | None
    """Of this process, over the whole run; `None`: the number of steps is not known."""
    sharded: str = ""
    """What splits weights between processes: FSDP, DeepSpeed."""
    eager: str = ""
    """Why `auto` does not compile."""
    parts: int = 1
    """Into how many parts gradients and optimizer state are split. This process has one of them."""
    awaited: float = 0.0
    """GiB of weights that come to this device when training starts, less those that leave."""
    host: float = math.inf
    """GiB of the CPU's memory that this process may fill with what leaves the GPU."""
    each: float = 12.0
    """Bytes of a number that trains, beside its weight: gradient and optimizer state."""
    differs: str = "not known to be alike"
    """Why passes can't be CUDA graphs, if `auto` is to say."""
    usable: float = 0.0
    """GiB that training may fill, the weights and the adapter being there."""
    once: bool = False
    """TransformerEngine's fp8 is in force in forward alone: no layer can run again in backward."""


def choose_fused(
    asked: str | bool, hardware: Hardware, *, adapted: bool, dtype: str, rounding: bool
) -> Choice:
    """Whether adapters run through the fused forwards of `speed.fused_lora`.

    Args:
        dtype: of the model's plain weights: bfloat16.
        rounding: whether quantization-aware training has forwards of its own there.

    Raises:
        UserError: asked for where there is no adapter (exit 2).
    """
    if not adapted:
        if asked is True:
            what, fix = "there is no adapter to fuse: every parameter trains", "speed.fused: auto"
            raise UserError(Problem(what, "speed.fused", found="adapter.type: full", fix=fix))
        return Choice("off", "no adapter: every parameter trains")
    if asked != "auto":
        return Choice("on" if asked else "off", "asked for")
    if hardware.device == "cpu":
        return Choice("off", "auto: it is for GPUs; on the CPU PEFT's own forward runs")
    if dtype != "bfloat16":
        return Choice("off", f"auto: its kernels are measured in bf16, the model is in torch.{dtype}")
    if rounding:
        return Choice("off", "auto: quantization-aware training has forwards of its own")
    return Choice("on", "auto")


def fused_obstacle(config: ModelConfig) -> str:
    """Why no linear layer of such a model can run fused; the empty string: its config forbids it nowhere."""
    clipped = getattr(config.get_text_config(), "clip_qkv", None) is not None
    return "the model clips q, k and v in place" if clipped else ""


def choose_compile(asked: str | bool, work: Work, hardware: Hardware) -> Choice:
    """Whether each decoder layer is compiled: where the run is long enough for it to pay.

    How long it takes is not asked, which a plan knows and a run does not: both decide by its products.

    Raises:
        UserError: CUDA graphs are asked for where there is no GPU (exit 3).
    """
    check_compile(asked, hardware)
    if asked != "auto":
        return Choice("on" if asked else "off", "asked for")
    if hardware.device == "cpu":
        return Choice("off", "auto: on the CPU it does not pay")
    if work.eager:
        return Choice("off", f"auto: {work.eager}")
    if work.flops is None:
        text = f"auto: for more than {PAYS_FROM} s of products at {PRODUCTS:.0%} of the peak"
        return Choice("on", f"{text}, decided when the model is loaded")
    seconds = work.flops / (PRODUCTS * (hardware.peak_flops or 100e12))
    text = f"auto: about {seconds:,.0f} s of products at {PRODUCTS:.0%} of the peak"
    if seconds < PAYS_FROM:
        return Choice("off", f"{text}, it pays from {PAYS_FROM} s up")
    return Choice("on", text)


def check_compile(asked: str | bool, hardware: Hardware) -> None:
    """Refuse CUDA graphs where there is no GPU (exit 3)."""
    if asked in GRAPHS and hardware.device == "cpu":
        what, fix = "CUDA graphs need a GPU", "speed.compile: auto"
        raise UserError(Problem(what, "speed.compile", found=str(asked), fix=fix), code=Exit.ENVIRONMENT)


def against_breaks(compile: str | bool, broken: str) -> Problem | None:
    """Refuse to compile layers that break the graph: a run check would end the run after a step.

    Args:
        broken: what breaks the graph; empty: nothing does.
    """
    if not broken or compile in ("auto", False):
        return None
    return Problem(broken, "speed.compile", found=str(compile).lower(), fix="speed.compile: auto")


def against_graphs(
    compile: str | bool, checkpointing: str, offload: str, sharded: str = ""
) -> Problem | None:
    """What keeps torch's CUDA graphs from layers: that backward runs them again, whose outputs lie where the
    first run's lay, which torch ends the run for; that what splits weights moves them; or that what backward
    needs leaves the GPU, for a graph reads it where it was."""
    if compile in GRAPHS and sharded:
        what, fix = (
            f"CUDA graphs hold weights where they were, and {sharded} moves them",
            "speed.compile: true",
        )
        return Problem(what, "speed.compile", found=str(compile), fix=fix)
    if compile in GRAPHS and memory_estimate.away(offload, 1):
        what = f"layers whose activations leave the GPU can't be CUDA graphs (speed.compile: {compile})"
        fix = "speed.offload: none; or speed.compile: true"
        return Problem(what, "speed.offload", found=offload, fix=fix)
    if compile not in GRAPHS or not checkpointing.startswith("full"):
        return None
    what = f"layers that run again in backward can't be CUDA graphs, as speed.compile: {compile} makes them"
    fix = "speed.activation_checkpointing: mlp, norms or none; or speed.compile: true"
    return Problem(what, "speed.activation_checkpointing", found=checkpointing, fix=fix)
