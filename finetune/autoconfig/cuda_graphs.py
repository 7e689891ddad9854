"""Choose CUDA graphs for compiled layers, if Python launches kernels more slowly than the GPU runs them.

A graph launches all kernels of a layer with one call. It supports one shape, so all batches must have the
same shape. CUDA graphs give an 8B fp8 base model with 2,048 tokens per forward pass 2.5 times the tokens/s
(24gb_fastest in docs/reference/benchmarks.md). They do not help if the GPU is the bottleneck. Recording takes
a few seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.autoconfig import activation_checkpointing, compilation, memory_estimate
from finetune.core.run_checks import Choice
from finetune.distributed import launch_environment
from finetune.recipe import adapter_types

if TYPE_CHECKING:
    from finetune.autoconfig.memory_estimate import Memory
    from finetune.core.model_config import ModelConfig
    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Recipe, Speed

# Seconds that Python needs to launch the kernels of a compiled layer, forward and backward. Machines differ:
# 4.0 to 6.3 ms in 135m-bf16, 2.8 to 3.2 ms in 135m-full, and 6.2 to 7.9 ms in 24gb_fastest on fp8
# (benchmarks/LOG.md).
LAUNCHED = {
    "adapter": 4.8e-3,
    "full": 3.2e-3,
    "fp8": 7.0e-3,
    # bf16-2048 of benchmarks/experts.py on an H100, before its operators became cheaper to call
    "experts": 6.8e-3,
    "quantized experts": 7.8e-3,  # nf4-full-1 of experts.json: 48 layers on an H200
}
# Seconds to launch a layer's two graphs and to copy its gradients (135m-bf16-packed on a slow machine).
REPLAYED = 2.4e-3
# Share of the GPU's peak bf16 FLOP/s that GEMMs with frozen weights reach on an H200.
SHARE = 0.70
# The same for layers with experts, whose other kernels take twice as long as their GEMMs (benchmarks/LOG.md).
EXPERTS_SHARE = 0.25
# Settings for which runs with and without CUDA graphs were equal (tests/gpu/test_gpu.py).
# These attention kernels need no mask. The address of a mask would change between steps.
ATTENTION = ("flash_attention_3", "flash_attention_4", "varlen")
# PEFT's types. The empty string is full fine-tuning.
ADAPTERS = ("", "lora", "adalora", "ia3")
STORED = ("fp32", "bf16", "fp8", "nf4")
FAMILIES = ("llama", "qwen3_moe")
RECOMPUTED = "layers are recomputed or offload their activations, which CUDA graphs do not support"


def is_single_plain_process(processes: int) -> bool:
    """Return whether a launch is one process without sharding and without an fp8 backend.

    CUDA graphs were tested only under such launches.
    """
    return (
        processes == 1
        and not launch_environment.splitter()
        and launch_environment.fp8().kind in ("", launch_environment.FROZEN)
    )


def unsupported_reason(
    recipe: Recipe, config: ModelConfig, *, single_process: bool, attention: str, storage: str, searched: bool
) -> str:
    """Return why `auto` must not record the passes of a run as CUDA graphs; the empty string if it may.

    Args:
        single_process: whether the launch is one process, as `is_single_plain_process` decides.
        searched: whether a search finds the micro-batch size.
    """
    data, adapter, speed = recipe.data, recipe.adapter, recipe.speed
    if not data.flat:
        return "padded batches have different lengths"
    if data.streaming:
        return "streamed batches have different lengths"
    if searched:
        return "a search finds the micro-batch size"
    if not single_process:
        return "not tested on several GPUs or under a launch that changes layers"
    text = config.get_text_config()
    drops = [getattr(text, key, 0) for key in ("resid_pdrop", "embd_pdrop", "hidden_dropout")]
    if adapter.options().get("lora_dropout") or any(drops):
        return "recording the graphs would change the random numbers of dropout"
    tried = {
        text.model_type: text.model_type in FAMILIES,
        attention: attention in ATTENTION,
        f"adapter.type: {adapter.type}": adapter_types.find(adapter.type).peft in ADAPTERS,
        f"a base model in {storage}": storage in STORED,
        "quantization-aware training": speed.qat is None,
    }
    fix = f"set `speed.compile: {compilation.GRAPHS[0]}` to use them"
    return next((f"not tested with {what}; {fix}" for what, is_tested in tried.items() if not is_tested), "")


def choose(
    requested: str | bool, compile: Choice, *, unsupported: str, gemm_seconds: float, kind: str
) -> Choice:
    """Choose whether compiled layers run as CUDA graphs, by the mode of torch.compile or if it pays off.

    Args:
        requested: `speed.compile`.
        compile: the choice for `speed.compile`.
        unsupported: why `auto` must not record passes; the empty string if it may.
        gemm_seconds: seconds of one layer's GEMMs in a forward and backward pass.
        kind: a key of `LAUNCHED`.
    """
    if compile.value != "on":
        return Choice("off", "layers are not compiled")
    if requested not in ("auto", True):
        return Choice("on" if requested in compilation.GRAPHS else "off", "asked for")
    launched, text = LAUNCHED[kind], f"a layer takes the GPU {gemm_seconds * 1e3:.1f} ms"
    if unsupported:
        return Choice("off", f"auto: {unsupported}")
    if gemm_seconds >= launched:
        return Choice("off", f"auto: {text}, so the GPU does not wait for Python")
    return Choice("on", f"auto: {text}, and Python needs about {launched * 1e3:.1f} ms to launch it")


def choose_with_memory(
    chosen: Choice, speed: Speed, checkpointing: str, plan: Memory, hardware: Hardware
) -> tuple[Choice, Choice, Choice, Memory]:
    """Choose activation checkpointing, offloading and CUDA graphs together.

    `auto` drops CUDA graphs if layers are recomputed or offloaded, or if the memory is too small for graphs.
    Graphs that the recipe asks for stay.

    Returns:
        Activation checkpointing, offloading, CUDA graphs, and the resulting memory plan.
    """
    requested = checkpointing, speed.offload
    if chosen.value == "on":
        checkpoints, offload, with_graphs = activation_checkpointing.choose(
            *requested, plan._replace(room=plan.room - plan.graphs), hardware
        )
        conflict = compilation.check_cuda_graphs(compilation.GRAPHS[0], checkpoints.value, offload.value)
        fits = max(memory_estimate.peak_activations_gib(with_graphs, checkpoints.value)) <= with_graphs.room
        if fits and not conflict:
            return checkpoints, offload, chosen, with_graphs
        if speed.compile not in compilation.GRAPHS:
            room = f"the {plan.graphs:.2g} GiB of CUDA graphs do not fit in memory"
            chosen = Choice("off", f"auto: {RECOMPUTED if conflict else room}")
    checkpoints, offload, plan = activation_checkpointing.choose(*requested, plan, hardware)
    return checkpoints, offload, chosen, plan


def layer_gemm_seconds(config: ModelConfig, tokens: int, peak: float | None, *, kind: str) -> float:
    """Return seconds of one layer's GEMMs in a forward and backward pass.

    Args:
        tokens: tokens of the pass.
        peak: the GPU's peak in bf16, in FLOP/s; `None` if it is not known.
        kind: a key of `LAUNCHED`.
    """
    shape = memory_estimate.widths(config)
    size = shape.hidden * (shape.qkv + shape.queries + 3 * shape.intermediate)
    rate = (EXPERTS_SHARE if shape.routed else SHARE) * (peak or 100e12) * (2 if kind == "fp8" else 1)
    return (6 if kind == "full" else 4) * size * tokens / rate
