"""How long a step takes: products, attention and passes over memory, each at a rate that was measured.

The shares of peaks below are those of whole, long runs on an H200 at its power limit (benchmarks/LOG.md): the
best a kernel does for some milliseconds is a tenth more, and no run sees it. On other GPUs they are taken
over, unless `finetune doctor --measure` has left its ceilings there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.autoconfig import attention_choice, cuda_graphs, memory_estimate
from finetune.hardware import gpus
from finetune.planning import measured_rates, sharding_cost

if TYPE_CHECKING:
    from finetune.autoconfig.memory_estimate import Keeps, Widths
    from finetune.models.architecture import Architecture
    from finetune.planning.adapter_size import Adapted
    from finetune.planning.planned_run import PlannedRun

# Of an H200's peaks, in steps of an 8B Llama (LOG.md, "What stands between 23,000 tokens/s and more")
PRODUCT = cuda_graphs.SHARE  # bf16: 457 TFLOP with the base in 661 ms, of 989 TFLOP/s
FP8_PRODUCT = 0.707  # 457 TFLOP in 327 ms, of 1,979
COPY = 0.88  # 4.23 of 4.8 TB/s: a device copy, reading and writing (performance of one H200)
THIN = (
    0.5  # of what wide products reach, by products with an adapter's rank: their tiles are not full, a guess
)
EAGER = (
    0.60  # of a copy's rate, by PyTorch's own element-wise kernels (adapters.json, 16 rows of the 1.1B shape)
)
H200_PEAK = 989.0  # TFLOP/s, that `attention_choice.SPEED` is of
MASKED = (150.0, 120.0)  # TFLOP/s of SDPA with a mask of all tokens: it computes the square, so half counts
ALIKE = {"flash_attention_2": "varlen"}  # no rates of its own yet; torch's varlen is 2
SHORT = 1170  # tokens of a document at which packed attention has half its rate: FlashAttention 3 and 4
LINK = 0.7  # of NVLink's or PCIe's one direction, by NCCL
# Of what runs beside sums between GPUs, which take some of its multiprocessors: 4 H200s reach 3.95 times the
# tokens/s of one (LoRA on an fp8 base, benchmarks/LOG.md)
BESIDE = 0.013
HOST = 0.85  # of PCIe's one direction, from and to pinned memory: 54 of 64 GB/s
# Bytes/s of the CPU's memory that its AdamW reads and writes: a guess, eight channels of DDR5 have 300e9
HOST_ADAMW = 80e9
ADAMW_BYTES = 28  # of each number: weight, gradient and two moments read, all but the gradient written
# Seconds to launch a layer's kernels, forward and backward: what small batches wait for. PEFT's of the 1.1B
# shape at 4 rows (adapters.json); fused ones are a guess
LAUNCH = {
    "compiled": cuda_graphs.LAUNCHED["adapter"],
    "compiled full": cuda_graphs.LAUNCHED["full"],  # no adapter is launched
    "compiled fp8": cuda_graphs.LAUNCHED["fp8"],
    "graphs": cuda_graphs.REPLAYED,
    "fused": 4.0e-3,
    "lora": 7.0e-3,
    "qlora": 8.4e-3,
    "dora": 13.6e-3,
    "ia3": 6.4e-3,
    "full": 6.1e-3,
    "offloaded": 2.2e-3,  # beside the others: hooks and copies (24gb_smallest, in passes of one row)
}
# Seconds of a step and linear layer for AdaLoRA's regulariser and importances: what is left of gpu.json's
# adalora-fp8 (224 layers) beside the plan's other parts. Beside LoRA on that machine it took 0.12e-3
ALLOCATION = 0.25e-3
REST = 0.5e-3  # seconds a layer: small kernels and waits in LOG.md's profile (22 ms of 32 layers)


class Rates(NamedTuple):
    """Of one device, and where they come from."""

    product: float  # FLOP/s
    fp8: float
    forward: float  # attention, FLOP/s
    backward: float
    bandwidth: float  # bytes/s, read and written
    link: float  # bytes/s that leave a device
    host: float  # bytes/s to the CPU's memory, and from it
    source: str


class Step(NamedTuple):
    """What one forward and backward pass is of."""

    tokens: int
    length: int  # of a document
    passes: int  # of an optimizer step
    storage: str
    full: bool
    recomputed: float  # share of the layers
    halves: float  # share of the layers whose gate and up alone are made again
    processes: int
    flat: bool  # documents end to end
    by: sharding_cost.Sharding = sharding_cost.DDP  # of several processes
    base: float = 0.0  # bytes of all weights, as they are gathered where they are divided
    leaving: float = 0.0  # bytes of a pass that wait in the CPU's memory
    stepped: bool = False  # by the CPU
    rounded: float = 0.0  # share of the layers whose gate and up are kept in int8
    graphs: bool = False  # compiled layers are CUDA graphs


def rates_of(name: str, attention: str, step: Step, one: Widths) -> Rates | None:
    """Rates of a GPU by its name: as they were measured on it at shapes like a model's, or from the shares
    above.

    `None` if it is not in the table.
    """
    known, (measured, why) = shipped(name, attention, step), measured_rates.read_for(name, one)
    if known is None or measured is None:
        return known and known._replace(source="; ".join(filter(None, (known.source, why))))
    found = {key: measured[key] for key in ("product", "fp8", "bandwidth", "link") if measured.get(key)}
    if attention in ("sdpa", "cudnn"):
        found |= {key: measured[key] for key in ("forward", "backward")}
    source = f"measured on this GPU by `finetune doctor --measure` on {measured['date']}"
    source += f", at {measured['shapes']}"
    return known._replace(**found, source=source)


def of_cpu(one: Widths) -> str:
    """Where the rate of a layer on this CPU is from, as `planner.cpu_rate` takes it."""
    measured, why = measured_rates.read_for("CPU", one)
    if measured:
        return f"a layer, by `finetune doctor --measure` on {measured['date']}, at {measured['shapes']}"
    return "; ".join(filter(None, ("a layer timed here", why)))


def shipped(name: str, attention: str, step: Step) -> Rates | None:
    """Rates of a GPU by its name, from the shares above; `None` if it is not in the table."""
    gpu = gpus.of_device(name)
    if gpu is None:
        return None
    text = attention_choice.SPEED.get(ALIKE.get(attention, attention), ("", ""))
    text = text[step.flat] or text[0] or text[1]
    pair = [float(part) for part in text.split("/")] if text else list(MASKED)
    short = (1 + SHORT / 2048) / (1 + SHORT / step.length) if step.flat else 1.0
    forward, backward = (speed * short / H200_PEAK * gpu.bf16 for speed in pair)
    measured = "measured on an H200" + ("" if "H200" in gpu.device else ", taken over to this GPU")
    rates = (
        gpu.bf16 * PRODUCT,
        gpu.fp8 * FP8_PRODUCT,
        forward,
        backward,
        gpu.bandwidth * COPY,
        gpu.link / 2 * LINK,
        gpu.host * HOST,
    )
    return Rates(*rates, f"shares of its data sheet's peaks, {measured}")


def of_step(
    run: PlannedRun, kept: Keeps, step: Step, cpu_rate: float | None
) -> tuple[dict[str, float], str, float]:
    """Seconds of a step by what they go into, where the rates come from, and bytes/s between GPUs."""
    found, has, machine = run.model, run.adapter, run.target.machine
    if machine.device == "cpu":
        if cpu_rate is None:
            return {}, "not known: this CPU has not been timed", 0.0
        whole = flops(found, has, step.full) * step.tokens * step.passes
        made = {"products and the rest": whole / cpu_rate * (1 + step.recomputed / 2)}
        return made, of_cpu(memory_estimate.widths(found.config)), 0.0
    rates = rates_of(machine.name, run.attention, step, memory_estimate.widths(found.config))
    if rates is None:
        return {}, f"not known: {machine.name} is not in the table of GPUs", 0.0
    made = seconds(found.config, has, found.linear, kept, step, rates)
    return made, rates.source, rates.link


def flops(found: Architecture, has: Adapted, full: bool) -> float:
    """FLOPs per token of linear layers, forward and backward, as `apply_to_model.flops_per_token` counts."""
    one = memory_estimate.widths(found.config)
    head = one.vocabulary * one.hidden
    frozen = sum(outputs * inputs for outputs, inputs in found.linear.values()) + head
    trained = (has.trained - has.saved) * (has.rank > 0) + head * has.head
    return 6.0 * frozen if full else 4.0 * frozen + 6.0 * trained


def seconds(
    config: Any, has: Adapted, linear: dict[str, tuple[int, int]], kept: Keeps, step: Step, rates: Rates
) -> dict[str, float]:
    """Seconds of an optimizer step by what they go into; they sum to the step."""
    one, tokens = memory_estimate.widths(config), step.tokens
    size = sum(outputs * inputs for outputs, inputs in linear.values())
    again = step.recomputed
    rate = rates.fp8 if step.storage == "fp8" and rates.fp8 else rates.product
    gate_and_up = 2 * one.intermediate / (one.qkv + one.queries + 3 * one.intermediate)  # of a forward
    base = 2 * size * tokens / rate * ((3 if step.full else 2) + again + step.halves * gate_and_up)
    thin = (
        0.0
        if step.full or not has.rank
        else 6 * (has.trained - has.saved) * tokens / (THIN * rates.product) * (1 + again / 3)
    )
    head = 2 * one.vocabulary * one.hidden * tokens / rates.product * (3 if step.full or has.head else 2)
    causal = 2 * tokens * step.length * one.queries * one.layers
    attention = causal * (1 + again) / rates.forward + 2.5 * causal / rates.backward
    forward, backward = passes(one, kept, has, step, linear)
    copies = tokens * one.layers * (forward * (1 + again) + backward)
    copies += tokens * one.vocabulary * (6 if kept.compiled else 24)
    memory = copies / (rates.bandwidth * (1 if kept.compiled else EAGER))
    memory += weight_passes(size, step, again) / rates.bandwidth
    optimizer = 0.0 if step.stepped else has.trained * 37 / rates.bandwidth / step.passes
    lora = "qlora" if kept.four_bit else "lora"
    kind = "full" if step.full else "dora" if has.columns and has.rank else lora if has.rank else "ia3"
    how = "compiled" if kept.compiled else "fused" if kept.fused else kind
    if kept.compiled:
        how += " full" if step.full else " fp8" if step.storage == "fp8" else ""
    how = "graphs" if step.graphs else how
    launch = (LAUNCH[how] + LAUNCH["offloaded"] * bool(step.leaving)) * one.layers * (1 + again / 3)
    rest = REST * one.layers
    parts = {
        "products": base + head + thin,
        "attention": attention,
        "memory-bound": memory + optimizer + rest,
    }
    busy = sum(parts.values())
    first = 2 * size * tokens / rate + causal / rates.forward
    first += tokens * one.layers * forward / (rates.bandwidth * (1 if kept.compiled else EAGER))
    if step.leaving or step.stepped:
        parts["to the CPU and back"] = copied(step, has.trained, first, busy - first, rates.host)
    parts["launch gaps"] = max(0.0, launch - sum(parts.values()))
    if step.processes > 1:
        parts["communication"] = (
            waited(step, has.trained, busy, base / 2, one.layers, rates.link) / step.passes
        )
        parts["communication"] += shared_rows(step, one) / rates.link
    made = {name: value * step.passes for name, value in parts.items()}
    return {**made, "rank allocation": ALLOCATION * len(has.names)} if has.allocates else made


def copied(step: Step, trained: int, forward: float, backward: float, rate: float) -> float:
    """Seconds of a pass that computing waits for copies to and from the CPU's memory, and for AdamW there.

    A layer's copy runs beside the next layer, in both directions; gradients leave beside backward. When the
    last are there, the CPU steps one tensor while the next one's gradient comes and its own weight goes.

    Args:
        forward: seconds that layers compute; `backward`: and what follows.
        rate: bytes/s in each direction.
    """
    away, sums = step.leaving / rate, 4 * trained / rate if step.stepped else 0.0
    waits = max(0.0, away - forward) + max(0.0, away + sums - backward)
    return waits + (max(ADAMW_BYTES * trained / HOST_ADAMW, sums) / step.passes if step.stepped else 0.0)


def waited(step: Step, trained: int, busy: float, backward: float, layers: int, link: float) -> float:
    """Seconds of an optimizer step that computing waits for other GPUs.

    DDP sums adapters' gradients when the last backward is through, but for what fits beside that of a single
    pass. Gathered layers come while the ones before them run: a wait is what that does not cover, and the
    first layer of each pass, which nothing covers.

    Args:
        busy: seconds of a pass; `backward`: of its products in backward.
        link: bytes/s that leave a GPU.
    """
    gathers, sums = sharding_cost.sent(step.by, step.processes, step.base, trained, step.passes)
    own = BESIDE * busy * step.passes
    if not step.by.weights:
        hidden = 0.0 if step.passes > 1 and not step.by.states else backward * step.passes
        return max(0.0, sums / link - hidden) + gathers / link + own
    first = gathers / 2 / layers / link
    return max(first, (gathers + sums) / link - busy * step.passes) + own


def shared_rows(step: Step, one: Widths) -> float:
    """Bytes that leave a GPU in a pass where processes share rows: their parts' keys and values go to the
    others in forward, when layers run again, and in backward, whence their gradients come back."""
    others, own = step.by.sharing - 1, 2 * (one.qkv - one.queries) * step.tokens
    return own * others * one.layers * (3 + step.recomputed)


def passes(
    one: Any, kept: Keeps, has: Adapted, step: Step, linear: dict[str, tuple[int, int]]
) -> tuple[float, float]:
    """Bytes that a token moves in a layer beside products and attention, forward and backward.

    Compiled and fused, an 8B Llama's on an H200 (milliseconds of a step, computed and measured): norms, rope
    and residuals 37 and 37; gated activation 43 and 42 to 50; thin products with rounding 57 and 54.
    """
    hidden, wide, qkv = one.hidden, one.intermediate, one.qkv
    inputs = sum(linear[name][1] for name in has.names) / one.layers
    outputs = sum(linear[name][0] for name in has.names) / one.layers
    outside = qkv + 2 * hidden  # what layers but gate and up put out
    if kept.fused or kept.compiled:
        forward, backward = 24.0 * hidden + 6 * wide, 48.0 * hidden + 16.8 * wide
        every = 2 * hidden + one.queries + wide  # q, k, v read one input together, gate and up too
        share = min(1.0, len(has.names) / max(1, len(linear)))
        if has.rank:
            forward += share * (2 * every + 4 * outside)
            backward += share * 4 * every + 2 * outputs
        if step.storage == "fp8":
            forward, backward = forward + 3 * every, backward + 3 * (outside + 2 * wide)
        forward += 9 * wide * step.rounded  # measured, and by its bytes alone nothing
        if kept.columns:
            forward, backward = forward + 4 * outside, backward + 8 * outside
        if not kept.compiled:  # norms, rope and residuals in many passes
            forward, backward = forward + 60 * hidden + 16 * qkv, backward + 60 * hidden + 32 * qkv
        return forward + 3 * kept.dropped, backward + 2 * kept.dropped
    forward = 76.0 * hidden + 16 * qkv + 12 * wide
    backward = 116.0 * hidden + 32 * qkv + 24 * wide
    if step.full:
        return 1.3 * forward, 1.3 * backward
    if not has.rank:  # IA3: products with a vector in fp32
        return forward + 20 * outputs, backward + 36 * outputs
    cast = 0 if kept.four_bit or kept.uncast else 1  # inputs to fp32 and back
    forward += (2 + 8 * cast) * inputs + 12 * outputs
    backward += (8 + 12 * cast) * inputs + 12 * outputs
    if kept.columns:
        forward, backward = forward + 40 * outputs, backward + 60 * outputs
    return forward, backward


def weight_passes(size: int, step: Step, again: float) -> float:
    """Bytes of passes over the weights themselves: transposed (fp8), dequantised (4 bits), cast (full)."""
    if step.storage == "fp8":
        return 2.0 * size
    if step.storage in ("nf4", "fp4"):
        return 2.5 * size * (2 + again)
    if step.storage in ("int8", "torchao_int8"):
        return 3.0 * size * (2 + again)
    return 6.0 * size if step.full else 0.0
