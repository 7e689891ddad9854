"""Estimate the time of a step: GEMMs, attention and memory-bound kernels, each at a measured rate.

The shares of the peak rates below come from long runs on an H200 at its power limit (benchmarks/LOG.md). A
kernel is about 10% faster for some milliseconds, but no run reaches that speed. Other GPUs use the same
shares, unless `finetune doctor --measure` has measured their rates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from finetune.autoconfig import attention_choice, cuda_graphs, memory_estimate
from finetune.core import model_config
from finetune.hardware import gpus
from finetune.kernels import kernel_limits
from finetune.planning import measured_rates, sharding_cost

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from finetune.autoconfig.memory_estimate import Keeps, Widths
    from finetune.models.architecture import Architecture
    from finetune.planning.adapter_size import Adapted
    from finetune.planning.planned_run import PlannedRun

# Shares of an H200's peak rates, from steps of an 8B Llama (benchmarks/LOG.md).
# bf16 GEMMs: 457 TFLOP with the base model in 661 ms, of 989 TFLOP/s.
PRODUCT = cuda_graphs.SHARE
# fp8 GEMMs: 457 TFLOP in 327 ms, of 1,979 TFLOP/s.
FP8_PRODUCT = 0.707
# A copy on the device, read and written: 4.23 of 4.8 TB/s.
COPY = 0.88
# Share of a wide GEMM's rate that a GEMM with an adapter's rank reaches. A guess: the tiles are not full.
THIN = 0.5
# Share of a GEMM's rate that grouped GEMMs reach at 1,024 tokens for each expert (benchmarks/LOG.md).
GROUPED = 0.79
# The same for grouped GEMMs of fp8 experts: 14.8 TFLOP in 15.5 ms (fp8 in benchmarks/experts.json).
GROUPED_FP8 = 0.68
# Share of a copy's rate that PyTorch's element-wise kernels reach (adapters.json, 16 rows of the 1.1B model).
EAGER = 0.60
# TFLOP/s: the peak of the GPU on which `attention_choice.SPEED` was measured.
H200_PEAK = 989.0
# TFLOP/s of SDPA with a full mask. SDPA computes the whole square, so half of its FLOPs count.
MASKED = (150.0, 120.0)
# FlashAttention 2 has no measured rates, and torch's varlen runs FlashAttention 2.
ALIKE = {"flash_attention_2": "varlen"}
# Tokens of a document at which packed attention runs at half its rate (FlashAttention 3 and 4).
SHORT = 1170
# Share of the bandwidth of NVLink or PCIe in one direction that NCCL reaches.
LINK = 0.7
# Share of the step that communication adds, because NCCL takes multiprocessors from computation: 4 H200s
# reach 3.95 times the tokens/s of one (LoRA on an fp8 base model, benchmarks/LOG.md).
BESIDE = 0.013
# Share of PCIe's bandwidth in one direction that copies of pinned memory reach: 54 of 64 GB/s.
HOST = 0.85
# Bytes/s that AdamW reads and writes in CPU memory. It is a guess: eight channels of DDR5 reach 300e9.
HOST_ADAMW = 80e9
# Bytes per parameter: AdamW reads weight, gradient and two moments, and writes all but the gradient.
ADAMW_BYTES = 28
# Seconds in which Python launches a layer's kernels, forward and backward. They limit small batches. PEFT's
# values come from the 1.1B model at 4 rows (adapters.json). The value for fused layers is a guess.
LAUNCH = {
    "compiled": cuda_graphs.LAUNCHED["adapter"],
    "compiled full": cuda_graphs.LAUNCHED["full"],  # no adapter's kernels
    "compiled fp8": cuda_graphs.LAUNCHED["fp8"],
    "compiled experts": cuda_graphs.LAUNCHED["experts"],
    "compiled quantized experts": cuda_graphs.LAUNCHED["quantized experts"],
    "graphs": cuda_graphs.REPLAYED,
    "fused": 4.0e-3,
    "lora": 7.0e-3,
    "qlora": 8.4e-3,
    "dora": 13.6e-3,
    "ia3": 6.4e-3,
    "full": 6.1e-3,
    # added to the others for hooks and copies (24gb_smallest, micro-batches of one row)
    "offloaded": 2.2e-3,
}
# Share of the launch time of fused experts if they have no adapter (`nf4-full-attention-1` of experts.json).
FROZEN_EXPERTS = 0.78
# Seconds per step and linear layer for AdaLoRA's regularizer and importances: the time of gpu.json's
# adalora-fp8 (224 layers) minus the plan's other parts. The difference from LoRA on that machine was 0.12e-3.
ALLOCATION = 0.25e-3
# Seconds per layer for small kernels and waits (22 ms for 32 layers in the profile of benchmarks/LOG.md).
REST = 0.5e-3


class Rates(NamedTuple):
    """The rates of one device, and their source."""

    product: float
    """FLOP/s of GEMMs in 16 bits."""
    fp8: float
    """FLOP/s of fp8 GEMMs."""
    forward: float
    """FLOP/s of attention in the forward pass."""
    backward: float
    """FLOP/s of attention in the backward pass."""
    bandwidth: float
    """Bytes/s of device memory, read and written."""
    link: float
    """Bytes/s that a device sends to other devices."""
    host: float
    """Bytes/s to CPU memory, and the same rate back."""
    source: str
    fp8_experts: bool = False
    """Whether the GPU runs the GEMMs of experts in fp8."""


class Pass(NamedTuple):
    """One forward and backward pass of a process, and the number of passes in an optimizer step."""

    tokens: int
    length: int
    """Tokens of a document."""
    passes: int
    """Forward and backward passes of an optimizer step."""
    storage: str
    full: bool
    recomputed: float
    """Share of the layers that are recomputed."""
    halves: float
    """Share of the layers that recompute only gate and up."""
    processes: int
    flat: bool
    """Sequences hold several documents (packing, padding_free)."""
    fp8_experts: str | bool = "auto"
    """`speed.fp8_experts`."""
    by: sharding_cost.Sharding = sharding_cost.DDP
    """How the launch divides the training between its processes."""
    base: float = 0.0
    """Bytes of all weights in their gathered form."""
    leaving: float = 0.0
    """Bytes of activations that a pass offloads to CPU memory."""
    stepped: bool = False
    """The CPU runs the optimizer."""
    rounded: float = 0.0
    """Share of the layers that store gate and up in int8."""
    graphs: bool = False
    """Compiled layers run as CUDA graphs."""


class Workload(NamedTuple):
    """What a pass computes: the model, its adapter and the settings of the run."""

    config: PreTrainedConfig
    adapter: Adapted
    linear: dict[str, tuple[int, int]]
    """Outputs and inputs of each linear layer, by name."""
    keeps: Keeps
    step: Pass


def rates_of(name: str, attention: str, step: Pass, one: Widths) -> Rates | None:
    """Return the rates of a GPU, measured on it at a model's shapes, or else from the shares above.

    Returns:
        The rates; `None` if the table of GPUs lacks it.
    """
    known, (measured, why) = shipped(name, attention, step), measured_rates.read_for(name, one)
    if known is None or measured is None:
        return known and known._replace(source="; ".join(filter(None, (known.source, why))))
    found = {key: measured[key] for key in ("product", "fp8", "bandwidth", "link") if measured.get(key)}
    if attention in ("sdpa", "cudnn"):
        found |= {key: measured[key] for key in ("forward", "backward")}
    return known._replace(
        **found,
        source=f"measured on this GPU by `finetune doctor --measure` on {measured['date']}"
        f", at {measured['shapes']}",
    )


def of_cpu(one: Widths) -> str:
    """Return the source of the rate that `measured_rates.cpu_rate` takes for this CPU."""
    measured, why = measured_rates.read_for("CPU", one)
    if measured:
        return f"one layer, by `finetune doctor --measure` on {measured['date']}, at {measured['shapes']}"
    return "; ".join(filter(None, ("one layer, timed now", why)))


def shipped(name: str, attention: str, step: Pass) -> Rates | None:
    """Return the rates of a GPU from the shares above; `None` if the table of GPUs lacks it."""
    gpu = gpus.of_device(name)
    if gpu is None:
        return None
    text = attention_choice.SPEED.get(ALIKE.get(attention, attention), ("", ""))
    text = text[step.flat] or text[0] or text[1]
    pair = [float(part) for part in text.split("/")] if text else list(MASKED)
    short = (1 + SHORT / 2048) / (1 + SHORT / step.length) if step.flat else 1.0
    forward, backward = (speed * short / H200_PEAK * gpu.bf16 for speed in pair)
    measured = "measured on an H200" + ("" if "H200" in gpu.device else " and assumed for this GPU")
    rates = (
        gpu.bf16 * PRODUCT,
        gpu.fp8 * FP8_PRODUCT,
        forward,
        backward,
        gpu.bandwidth * COPY,
        gpu.link / 2 * LINK,
        gpu.host * HOST,
    )
    fp8_experts = gpu.capability == kernel_limits.FP8_EXPERTS_CAPABILITY
    return Rates(*rates, f"fractions of the data sheet's peaks, {measured}", fp8_experts)


def of_step(
    run: PlannedRun, kept: Keeps, step: Pass, cpu_rate: float | None
) -> tuple[dict[str, float], str, float]:
    """Return seconds of a step by kind of work, the source of the rates, and bytes/s between GPUs."""
    found, has, machine = run.model, run.adapter, run.target.machine
    if machine.device == "cpu":
        if cpu_rate is None:
            return {}, "not known, because this CPU has not been timed", 0.0
        whole = flops(found, has, step.full) * step.tokens * step.passes
        made = {"computation": whole / cpu_rate * (1 + step.recomputed / 2)}
        return made, of_cpu(memory_estimate.widths(found.config)), 0.0
    rates = rates_of(machine.name, run.attention, step, memory_estimate.widths(found.config))
    if rates is None:
        return {}, f"not known, because {machine.name} is not in the table of GPUs", 0.0
    made = seconds(Workload(found.config, has, found.linear, kept, step), rates)
    return made, rates.source, rates.link


def flops(found: Architecture, has: Adapted, full: bool) -> float:
    """Count FLOPs per token of the linear layers, forward and backward.

    `apply_to_model.flops_per_token` counts the same for a live model.
    """
    one = memory_estimate.widths(found.config)
    head = one.vocabulary * one.hidden
    frozen = _linear_size(found.linear) + memory_estimate.routed_size(found.config) + head
    trained = _adapter_size(found.config, has) + head * has.head
    return 6.0 * frozen if full else 4.0 * frozen + 6.0 * trained


def _linear_size(linear: dict[str, tuple[int, int]]) -> int:
    """Return the parameters of the linear layers that every token passes."""
    return sum(outputs * inputs for name, (outputs, inputs) in linear.items() if ".experts." not in name)


def _adapter_size(config: PreTrainedConfig, has: Adapted) -> float:
    """Return the parameters of adapters that one token passes; 0 for IA3."""
    sizes = model_config.expert_sizes(config.get_text_config())
    routed = has.experts * sizes.each / sizes.number if sizes else has.experts
    return (has.trained - has.saved - has.experts) * (has.rank > 0) + routed


def seconds(work: Workload, rates: Rates) -> dict[str, float]:
    """Return seconds of an optimizer step by kind of work. Their sum is the time of the step."""
    config, adapter, linear, kept, step = work
    one = memory_estimate.widths(config)
    base, gemms = _gemm_seconds(work, rates)
    moved = passes(work)
    parts = {
        "products": gemms,
        "attention": _causal_flops(one, step)
        * ((1 + step.recomputed) / rates.forward + 2.5 / rates.backward),
        "memory-bound": _memory_seconds(work, moved, rates) + REST * one.layers,
    }
    busy = sum(parts.values())
    if step.leaving or step.stepped:
        first = 2 * _linear_size(linear) * step.tokens / _base_rate(step, rates)
        first += _causal_flops(one, step) / rates.forward
        first += step.tokens * one.layers * moved[0] / _bandwidth(kept, rates)
        parts["to the CPU and back"] = copied(step, adapter.trained, first, busy - first, rates.host)
    parts["launch gaps"] = max(0.0, _launch_seconds(work) * one.layers - sum(parts.values()))
    if step.processes > 1:
        waits = waited(step, adapter.trained, busy, base / 2, one.layers, rates.link) / step.passes
        parts["communication"] = waits + shared_rows(step, one) / rates.link
    made = {name: value * step.passes for name, value in parts.items()}
    return {**made, "rank allocation": ALLOCATION * len(adapter.names)} if adapter.allocates else made


def _base_rate(step: Pass, rates: Rates) -> float:
    """Return FLOP/s of the GEMMs with the base model's weights."""
    return rates.fp8 if step.storage == "fp8" and rates.fp8 else rates.product


def _bandwidth(kept: Keeps, rates: Rates) -> float:
    """Return bytes/s of memory-bound kernels."""
    return rates.bandwidth * (1 if kept.compiled else EAGER)


def _causal_flops(one: Widths, step: Pass) -> int:
    """Return FLOPs of causal attention in a forward pass."""
    return 2 * step.tokens * step.length * one.queries * one.layers


def _gemm_seconds(work: Workload, rates: Rates) -> tuple[float, float]:
    """Return seconds of the GEMMs with linear layers' weights, and of all GEMMs."""
    config, adapter, linear, kept, step = work
    one, again = memory_estimate.widths(config), step.recomputed
    # The share of a forward pass that gate and up take.
    gate_and_up = 2 * one.intermediate / (one.qkv + one.queries + 3 * one.intermediate)
    times = (3 if step.full else 2) + again + step.halves * gate_and_up
    base = 2 * _linear_size(linear) * step.tokens / _base_rate(step, rates) * times
    head = 2 * one.vocabulary * one.hidden * step.tokens / rates.product
    if kept.loss_fp8 and rates.fp8:
        head *= 1 + rates.product / rates.fp8
    else:
        head *= 3 if step.full or adapter.head else 2
    size, experts = memory_estimate.routed_size(config), kept.experts == "peft"
    rate = GROUPED_FP8 * rates.fp8 if _fp8_experts(work, rates) else GROUPED * rates.product
    once = 2 * size * step.tokens / rate
    once = max(once, 2 * _stacked_weights(one) / rates.bandwidth)  # all weights are read once
    grouped = once * ((3 if step.full or experts else 2) + again)
    thin = 0.0
    if adapter.rank and not step.full:
        thin = 6 * _adapter_size(config, adapter) * step.tokens / (THIN * rates.product) * (1 + again / 3)
    return base, base + grouped + head + thin


def _fp8_experts(work: Workload, rates: Rates) -> bool:
    """Return whether the experts' GEMMs run in fp8."""
    asked, storage = work.step.fp8_experts, work.step.storage
    stored = storage == "fp8" or (asked is True and storage in kernel_limits.FP8_EXPERTS_STORAGES)
    return stored and asked is not False and work.keeps.dequantized and rates.fp8_experts


def _stacked_weights(one: Widths) -> float:
    """Return the number of all experts' weights: gate and up, and half as many of down."""
    return 1.5 * one.stack * one.layers


def _memory_seconds(work: Workload, moved: tuple[float, float], rates: Rates) -> float:
    """Return seconds of the memory-bound kernels of a pass, and of the optimizer.

    Args:
        moved: the bytes of `passes`.
    """
    config, adapter, linear, kept, step = work
    one, again, (forward, backward) = memory_estimate.widths(config), step.recomputed, moved
    copies = step.tokens * one.layers * (forward * (1 + again) + backward)
    copies += step.tokens * one.vocabulary * (6 if kept.compiled else 24)
    weights, stacks = weight_passes(_linear_size(linear), step, again), _stacked_weights(one)
    if _fp8_experts(work, rates):  # the rows of all experts are rounded, and the weights transposed
        weights += step.tokens * one.layers * (3 * one.routed * one.hidden + 9 * one.intermediate)
        weights += stacks * (2 + (0 if step.storage == "fp8" else 1.6 * (2 + again)))
    elif kept.dequantized:
        weights += weight_passes(int(stacks), step, again, dequantized=True)
    if kept.experts == "peft":  # B A, its sum with the weights, and their gradients (row `peft`)
        weights += 60 * stacks
    optimizer = 0.0 if step.stepped else adapter.trained * 37 / rates.bandwidth / step.passes
    return copies / _bandwidth(kept, rates) + weights / rates.bandwidth + optimizer


def _launch_seconds(work: Workload) -> float:
    """Return seconds that Python needs to launch one layer's kernels, forward and backward."""
    _, adapter, _, kept, step = work
    lora = "qlora" if kept.four_bit else "lora"
    kind = "full" if step.full else "dora" if adapter.columns and adapter.rank else lora
    kind = kind if step.full or adapter.rank else "ia3"
    how = "compiled" if kept.compiled else "fused" if kept.fused else kind
    if kept.compiled:
        quantized = " quantized" if kept.dequantized else ""
        how += f"{quantized} experts" if kept.experts == "fused" else ""
        how += " full" if step.full else " fp8" if step.storage == "fp8" and how == "compiled" else ""
    how = "graphs" if step.graphs else how
    launch = (LAUNCH[how] + LAUNCH["offloaded"] * bool(step.leaving)) * (1 + step.recomputed / 3)
    return launch * (FROZEN_EXPERTS if kept.experts == "fused" and not adapter.experts else 1.0)


def copied(step: Pass, trained: int, forward: float, backward: float, rate: float) -> float:
    """Return seconds of a pass that the GPU waits for copies to and from the CPU, and for AdamW on the CPU.

    The copy of a layer's activations overlaps with the next layer, in both directions. Gradients are copied
    during backward. Then the CPU updates one tensor while the next gradient arrives and the last weight
    leaves.

    Args:
        forward: seconds in which the layers compute their forward pass.
        backward: seconds of the rest of the pass.
        rate: bytes/s in each direction.
    """
    away, sums = step.leaving / rate, 4 * trained / rate if step.stepped else 0.0
    waits = max(0.0, away - forward) + max(0.0, away + sums - backward)
    return waits + (max(ADAMW_BYTES * trained / HOST_ADAMW, sums) / step.passes if step.stepped else 0.0)


def waited(step: Pass, trained: int, busy: float, backward: float, layers: int, link: float) -> float:
    """Return seconds of an optimizer step that a GPU waits for other GPUs.

    DDP's reduction of gradients overlaps with backward only if a step has a single pass. Gathered layers
    arrive while the layers before them run. The wait is the time that does not overlap, and at least the
    first layer of each pass.

    Args:
        busy: seconds of a pass.
        backward: seconds of the GEMMs in the backward pass.
        layers: the number of layers.
        link: bytes/s that a GPU sends.
    """
    gathers, sums = sharding_cost.sent(step.by, step.processes, step.base, trained, step.passes)
    own = BESIDE * busy * step.passes
    if not step.by.weights:
        hidden = 0.0 if step.passes > 1 and not step.by.states else backward * step.passes
        return max(0.0, sums / link - hidden) + gathers / link + own
    first = gathers / 2 / layers / link
    return max(first, (gathers + sums) / link - busy * step.passes) + own


def shared_rows(step: Pass, one: Widths) -> float:
    """Return bytes that a GPU sends in a pass under context parallelism.

    Each process sends its keys and values to the others in forward, in recomputed layers and in backward.
    Backward also sends their gradients back.
    """
    others, own = step.by.sharing - 1, 2 * (one.qkv - one.queries) * step.tokens
    return own * others * one.layers * (3 + step.recomputed)


def passes(work: Workload) -> tuple[float, float]:
    """Return bytes that memory-bound kernels move per token and layer, in forward and in backward.

    Estimate and measurement for a compiled and fused 8B Llama on an H200, in milliseconds of a step:

    - norms, rope and residuals: 37, measured 37
    - gated activation: 43, measured 42 to 50
    - GEMMs with the adapter's rank, with casts to fp8: 57, measured 54
    """
    config, has, linear, kept, step = work
    one = memory_estimate.widths(config)
    hidden, wide, qkv = one.hidden, one.intermediate, one.qkv
    inputs = sum(linear[name][1] for name in has.names) / one.layers
    outputs = sum(linear[name][0] for name in has.names) / one.layers
    outside = qkv + 2 * hidden  # outputs of all linear layers but gate and up
    rows = 2 * one.routed * hidden  # bytes of one token's inputs or outputs of all its experts
    # intermediate values that adapters of linear layers and casts to fp8 read
    mlp = 0 if one.routed else wide
    if kept.fused or kept.compiled:
        forward, backward = 24.0 * hidden + 6 * wide + 2 * rows, 48.0 * hidden + 16.8 * wide + 2 * rows
        backward += 6 * wide + 2 * rows if has.experts else 0.0
        every = 2 * hidden + one.queries + mlp  # q, k and v share one input, as do gate and up
        share = min(1.0, len(has.names) / max(1, len(linear)))
        if has.rank:
            forward += share * (2 * every + 4 * outside)
            backward += share * 4 * every + 2 * outputs
        if step.storage == "fp8":
            forward, backward = forward + 3 * every, backward + 3 * (outside + 2 * mlp)
        forward += 9 * wide * step.rounded  # int8: measured, as its bytes alone predict no time
        if kept.columns:
            forward, backward = forward + 4 * outside, backward + 8 * outside
        if not kept.compiled:  # norms, rope and residuals run as many kernels
            forward, backward = forward + 60 * hidden + 16 * qkv, backward + 60 * hidden + 32 * qkv
        return forward + 3 * kept.dropped, backward + 2 * kept.dropped
    forward = 76.0 * hidden + 16 * qkv + 12 * wide + 3 * rows
    backward = 116.0 * hidden + 32 * qkv + 24 * wide + 3 * rows
    if step.full:
        return 1.3 * forward, 1.3 * backward
    if not has.rank:  # IA3 multiplies by a vector in fp32
        return forward + 20 * outputs, backward + 36 * outputs
    cast = 0 if kept.four_bit or kept.uncast else 1  # inputs are cast to fp32 and back
    forward += (2 + 8 * cast) * inputs + 12 * outputs
    backward += (8 + 12 * cast) * inputs + 12 * outputs
    if kept.columns:
        forward, backward = forward + 40 * outputs, backward + 60 * outputs
    return forward, backward


def weight_passes(size: int, step: Pass, again: float, *, dequantized: bool = False) -> float:
    """Return bytes that kernels move to transpose, dequantize or cast the weights in a pass.

    Args:
        size: parameters of the linear layers.
        again: share of the layers that are recomputed.
        dequantized: fp8 weights are dequantized, as experts are, and do not go through fp8 GEMMs.
    """
    if step.storage == "fp8" and not dequantized:
        return 2.0 * size
    if step.storage in ("nf4", "fp4"):
        return 2.5 * size * (2 + again)
    if step.storage in ("fp8", "int8", "torchao_int8"):
        return 3.0 * size * (2 + again)
    return 6.0 * size if step.full else 0.0
