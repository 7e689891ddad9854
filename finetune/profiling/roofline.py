"""How much of a machine's peak a traced step reaches."""

from __future__ import annotations

import math
import time

import torch

from finetune.autoconfig import memory_estimate
from finetune.hardware import gpus
from finetune.hardware.detection import Hardware
from finetune.models import architecture
from finetune.planning import adapter_size, measured_rates, step_time
from finetune.profiling import trace_analysis, traced_step
from finetune.profiling.trace_analysis import Ran
from finetune.profiling.traced_step import Trace
from finetune.recipe.schema import Recipe


def roofline(
    trace: Trace, ran: list[Ran], whole: Recipe, machine: Hardware, seconds: float
) -> tuple[tuple[float, str] | None, float | None]:
    """Return the share of the peak that GEMMs reach with the peak's name, and the model's FLOPs as a share.

    The first share counts all executed GEMMs by their shapes, over their own time. This includes recomputed
    layers, and the output head for all tokens. The second share counts the FLOPs of the plan over the whole
    step, without recomputation, and the head only for tokens that contribute to the loss. The peak comes from
    `finetune doctor --measure` at shapes like the model's, or from the GPU's data sheet. A CPU without a
    measurement is timed now (0.3 s).

    A share is `None` if the GPU is not in the table, if the shapes of GEMMs are unknown, or if the model's
    GEMMs are unknown.
    """
    found = architecture.read(whole.model)
    one = memory_estimate.widths(found.config)
    peak, fp8, source = peaks(machine, one)
    if not peak:
        return None, None
    share = trace_analysis.of_peak(ran, peak, fp8)
    coded = f" ({fp8 / 1e12:,.4g} in fp8)" if fp8 and trace_analysis.in_fp8(ran) else ""
    reached = (share, f"{peak / 1e12:,.3g} TFLOP/s{coded}, {source}") if share else None
    if found.unknown:
        return reached, None
    has = adapter_size.adapted(whole.adapter, whole.model, found, 100)
    full = whole.adapter.type == "full"
    each, head = step_time.flops(found, has, full), (6.0 if full else 4.0) * one.vocabulary * one.hidden
    work = (each - head) * trace.computed + head * trace.scored
    return reached, work / traced_step.TRACED[machine.device] / seconds / peak


def peaks(machine: Hardware, one: memory_estimate.Widths) -> tuple[float, float | None, str]:
    """Return peak FLOP/s of GEMMs, the fp8 peak if there is one, and their source. 0 means not known."""
    known, gpu = measured_rates.read_for(machine.name, one)[0], gpus.of_device(machine.name)
    if known:
        return known["product"], known.get("fp8"), "measured by `finetune doctor --measure`"
    if gpu:
        return gpu.bf16, gpu.fp8, "from its data sheet"
    if machine.device == "cpu":
        return ceiling(), None, "measured now with a large GEMM"
    return 0.0, None, ""


def ceiling() -> float:
    """Return the FLOP/s of a large square fp32 GEMM on this CPU: the best of many, in thread time."""
    width = 1024
    x, weight = torch.randn(width, width), torch.randn(width, width)
    best, until = math.inf, time.perf_counter() + 0.3
    while time.perf_counter() < until or best == math.inf:
        begun = time.thread_time()
        torch.nn.functional.linear(x, weight)
        best = min(best, time.thread_time() - begun)
    return 2.0 * width**3 / best
