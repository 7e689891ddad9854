"""Decide whether decoder layers are compiled and adapters are fused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from finetune.autoconfig import memory_estimate
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.formatting import as_yaml
from finetune.core.run_checks import Choice

if TYPE_CHECKING:
    from finetune.core.model_config import ModelConfig
    from finetune.hardware.detection import Hardware

# Modes of torch.compile that record CUDA graphs.
GRAPHS = ("reduce-overhead", "max-autotune")
# Seconds of a run's GEMMs from which compilation pays off. It takes about 20 s.
PAYS_FROM = 120
# Share of the peak FLOP/s at which the GEMMs are assumed to run, in runs and plans alike.
PRODUCTS = 0.4
# Largest total rank of the adapters in one fused GEMM.
MAX_RANK = 256


class Work(NamedTuple):
    """The work of a process on a model, and the memory that it has for it."""

    tokens: int
    """The largest number of tokens in one forward pass."""
    flops: float | None
    """FLOPs of this process over the whole run; `None` if the number of steps is unknown."""
    sharded: str = ""
    """The library that shards the weights: FSDP or DeepSpeed."""
    eager: str = ""
    """Why `auto` does not compile."""
    parts: int = 1
    """Number of shards of gradients and optimizer state. Each process holds one shard."""
    arriving_gib: float = 0.0
    """GiB of weights that arrive on this device when training starts, minus the weights that leave it."""
    host: float = math.inf
    """GiB of CPU memory that this process may fill by offloading."""
    bytes_per_parameter: float = 12.0
    """Bytes of gradient and optimizer state per trainable parameter."""
    graphs_unsupported: str = "the steps are not known to be alike"
    """Why `auto` must not record passes as CUDA graphs."""
    usable: float = 0.0
    """GiB that training may fill in addition to the weights and the adapter."""
    no_recompute: bool = False
    """TransformerEngine's fp8 applies only in the forward pass, so no layer can be recomputed."""


def choose_fused(
    requested: str | bool, hardware: Hardware, *, adapted: bool, dtype: str, rounding: bool
) -> Choice:
    """Choose whether adapters run through the fused forwards of `speed.fused_lora`.

    Args:
        adapted: whether an adapter trains.
        dtype: the dtype of the unquantized weights, such as bfloat16.
        rounding: whether quantization-aware training replaces the forward functions.

    Raises:
        UserError: fused adapters are asked for, but there is no adapter (exit 2).
    """
    if not adapted:
        if requested is True:
            raise UserError(
                Problem(
                    "speed.fused needs an adapter, and full fine-tuning has none",
                    "speed.fused",
                    found="true, with adapter.type: full",
                    fix="speed.fused: auto",
                    code="recipe-conflict",
                )
            )
        return Choice("off", "full fine-tuning has no adapter to fuse")
    if requested != "auto":
        return Choice("on" if requested else "off", "asked for")
    if hardware.device == "cpu":
        return Choice("off", "auto: on the CPU, PEFT's own forward pass runs")
    if dtype != "bfloat16":
        return Choice("off", f"auto: measured only in bf16, and the model is in torch.{dtype}")
    if rounding:
        return Choice("off", "auto: quantization-aware training has its own forward pass")
    return Choice("on", "auto")


def fused_unsupported_reason(config: ModelConfig) -> str:
    """Return why no linear layer of a model can run fused; the empty string if its config allows it."""
    clipped = getattr(config.get_text_config(), "clip_qkv", None) is not None
    return "the model clips q, k and v in place" if clipped else ""


def choose_compile(requested: str | bool, work: Work, hardware: Hardware) -> Choice:
    """Choose whether decoder layers are compiled. `auto` compiles if the run is long enough.

    The FLOPs of the GEMMs, which both plan and run know, give the estimated length.

    Raises:
        UserError: CUDA graphs are asked for on a machine without a GPU (exit 3).
    """
    check_compile(requested, hardware)
    if requested != "auto":
        return Choice("on" if requested else "off", "asked for")
    if hardware.device == "cpu":
        return Choice("off", "auto: compilation is not faster on the CPU")
    if work.eager:
        return Choice("off", f"auto: {work.eager}")
    if work.flops is None:
        text = f"auto: if the run has more than {PAYS_FROM} s of matrix multiplications"
        return Choice("on", f"{text}, which finetune decides when it loads the model")
    seconds = work.flops / (PRODUCTS * (hardware.peak_flops or 100e12))
    text = f"auto: the run has about {seconds:,.0f} s of matrix multiplications at {PRODUCTS:.0%} of the peak"
    if seconds < PAYS_FROM:
        return Choice("off", f"{text}, and compilation is worth it from {PAYS_FROM} s")
    return Choice("on", text)


def check_compile(requested: str | bool, hardware: Hardware) -> None:
    """Stop if the recipe requests CUDA graphs on a machine without a GPU (exit 3)."""
    if requested in GRAPHS and hardware.device == "cpu":
        raise UserError(
            Problem(
                "CUDA graphs need a GPU",
                "speed.compile",
                found=as_yaml(requested),
                fix="speed.compile: auto",
                code="hardware",
            ),
            code=Exit.ENVIRONMENT,
        )


def check_graph_breaks(compile: str | bool, broken: str) -> Problem | None:
    """Return a problem if the recipe requests compilation of layers that break the graph.

    Otherwise a run check would stop the run after the first step.

    Args:
        broken: why the graph breaks; the empty string if it does not.
    """
    if not broken or compile in ("auto", False):
        return None
    return Problem(
        broken, "speed.compile", found=str(compile).lower(), fix="speed.compile: auto", code="speed-option"
    )


def check_cuda_graphs(
    compile: str | bool, checkpointing: str, offload: str, sharded: str = ""
) -> Problem | None:
    """Return a problem if the recipe requests CUDA graphs with a setting that they do not support.

    - Activation checkpointing: a graph overwrites the outputs of its first run, and torch raises an error.
    - Sharded weights: a graph reads the weights at fixed addresses, but sharding moves them.
    - Offloaded activations: a graph reads activations at fixed addresses on the GPU.
    """
    code = "recipe-conflict"
    if compile in GRAPHS and sharded:
        return Problem(
            f"CUDA graphs do not work with {sharded}",
            "speed.compile",
            found=as_yaml(compile),
            why=f"a CUDA graph reads weights at fixed addresses, and {sharded} moves them",
            fix="speed.compile: true",
            code=code,
        )
    if compile in GRAPHS and memory_estimate.offloaded_share(offload, 1):
        return Problem(
            f"speed.compile: {compile} does not work with offloaded activations",
            "speed.offload",
            found=offload,
            why="a CUDA graph reads activations at fixed addresses on the GPU",
            fix="set `speed.offload: none`, or `speed.compile: true`",
            code=code,
        )
    if compile not in GRAPHS or not checkpointing.startswith("full"):
        return None
    key, why = "speed.activation_checkpointing", "layers run as CUDA graphs, which can't be recomputed whole"
    return Problem(
        f"speed.compile: {compile} does not work with layers that the backward pass recomputes",
        key,
        found=checkpointing,
        why=why,
        fix=f"set `{key}: mlp`, or `speed.compile: true`",
        code=code,
    )
