"""Analyze a traced step: seconds, kind of work, and FLOPs of its operations and GPU kernels.

A kernel's name does not tell its purpose: the GEMMs and softmax of eager attention use the same kernels as
linear layers and losses. So a kernel has the kind of the operation that launched it, or of an operation
around that one. `torch.compile` launches its own kernels, and Inductor's names list the fused operations.
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

COPIES = "to the CPU and back"
# Kinds by names of kernels and operations. The first match counts.
KINDS = {
    COPIES: r"memcpy (dtoh|htod)",
    "communication": r"nccl|all_?reduce|all_?gather|reduce_?scatter|c10d::|gloo",
    "attention": (
        r"flash|fmha|sdpa|attention|attn|scaled_dot_product|aten::bmm|aten::baddbmm"
        r"|triton_\w*(?<!_log)_softmax"
    ),
    "products": (
        r"gemm|gemv|cutlass|xmma|nvjet|cublas|wgmma|splitk|scaled_mm|grouped_mm|triton_tem_\w*mm"
        r"|aten::(mm|addmm|_addmm_activation|_int_mm|mkldnn_linear|matmul|linear)\b|onednn|mkldnn"
    ),
}
KINDS_AROUND = ("communication", "attention")  # kinds that an operation inherits from an operation around it
COMPUTED: tuple[str, ...] = ("products", "attention", "memory-bound")
BESIDE: tuple[str, ...] = ("communication", COPIES)  # kinds that run in parallel to computation
SOFTMAX = ("aten::_softmax", "aten::_softmax_backward_data")
# Position of the first factor among an operation's inputs
FACTORS = {
    "aten::mm": 0,
    "aten::_scaled_mm": 0,
    "aten::_grouped_mm": 0,
    "aten::addmm": 1,
    "aten::_addmm_activation": 1,
}
OVERHEAD = 5e-6  # seconds that the CPU profiler adds to each operation
INTERRUPTED = 5e-4  # seconds above three times the usual time, for an operation whose thread was interrupted


class Ran(NamedTuple):
    """A GPU kernel, or an operation on the CPU."""

    name: str
    kind: str
    """communication, to the CPU and back, attention, products, or memory-bound."""
    seconds: float
    operation: Any
    """The CPU operation itself, or the operation that launched the kernel. `None` if not known."""
    begun: float | None = None
    """Start of a kernel in seconds. `None` for CPU operations, because only their duration counts."""

    @property
    def span(self) -> tuple[float, float]:
        """Start and end of a kernel in seconds. The span is empty for CPU operations."""
        begun = self.begun or 0.0
        return begun, begun + (self.seconds if self.begun is not None else 0.0)


def computed(events: Iterable[Any], *, cuda: bool, lost: float = 0.0) -> list[Ran]:
    """Return the kernels of the profiler's events, or the CPU operations, with the seconds of each.

    Args:
        lost: seconds in which the CPU thread did not run. At most this time is subtracted as waits.
    """
    events = list(events)
    scores = score_shapes(events)
    found = _kernels(events) if cuda else _on_cpu(events, lost)
    return [
        Ran(name, kind_of(name, operation, scores), seconds, operation, begun)
        for name, operation, seconds, begun in found
    ]


def spent(ran: list[Ran]) -> dict[str, float]:
    """Return the seconds of each kind. Communication and copies count only while the GPU computes nothing."""
    found: dict[str, float] = dict.fromkeys((*COMPUTED, *BESIDE), 0.0)
    for each in ran:
        if each.kind in COMPUTED or each.begun is None:
            found[each.kind] += each.seconds
    covered = _union([each.span for each in ran if each.kind in COMPUTED])
    for kind in BESIDE:
        spans = _union([each.span for each in ran if each.kind == kind])
        found[kind] += sum(end - begun - _within(begun, end, covered) for begun, end in spans)
        covered = _union([*covered, *spans])
    return found


def _within(begun: float, end: float, covered: list[tuple[float, float]]) -> float:
    """Return the seconds of a span that the covering spans overlap."""
    hidden = 0.0
    for start, stop in covered[max(0, bisect_right(covered, (begun, math.inf)) - 1) :]:
        if start >= end:
            break
        hidden += max(0.0, min(stop, end) - max(start, begun))
    return hidden


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping spans and sort them."""
    found = list[tuple[float, float]]()
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _kernels(events: list[Any]) -> Iterator[tuple[str, Any, float, float]]:
    """Yield each kernel's name, the operation that launched it, its seconds and its start.

    The profiler lists the kernels of an operation by name and duration.
    """
    owners: dict[tuple[str, float], deque[Any]] = defaultdict(deque)
    for event in events:
        for kernel in event.kernels:
            owners[kernel.name, kernel.duration].append(event)
    for event in events:
        # ranges of the host are also on the GPU's timeline, and cover the kernels inside them
        if str(event.device_type).endswith("CUDA") and not event.is_user_annotation:
            by = owners[event.name, event.time_range.elapsed_us()]
            begun = event.time_range.start / 1e6
            yield event.name, by.popleft() if by else None, event.self_device_time_total / 1e6, begun


def _on_cpu(events: list[Any], lost: float) -> Iterator[tuple[str, Any, float, None]]:
    """Yield the CPU operations, with waits removed from their wall-clock times.

    An operation that took much longer than others with its name and similar shapes may have waited while
    another process used the CPU. The waits are removed up to the time that the thread lost. If the thread
    always ran, there was no wait: allocating new memory can take as long.
    """
    alike: dict[tuple[Any, ...], list[tuple[Any, float]]] = {}
    for event in events:
        if "::" in event.name:
            about = [[size.bit_length() for size in shape] for shape in event.input_shapes or []]
            times = alike.setdefault((event.name, str(about)), [])
            times.append((event, event.self_cpu_time_total / 1e6))
    found = list[tuple[Any, float, float]]()
    for times in alike.values():
        usual = statistics.median_low(seconds for _, seconds in times)
        for event, seconds in times:
            beyond = seconds - usual if seconds > 3 * usual + INTERRUPTED else 0.0
            found.append((event, seconds, beyond))
    waits = sum(beyond for _, _, beyond in found)
    share = min(1.0, lost / waits) if waits else 0.0
    for event, seconds, beyond in found:
        yield event.name, event, max(0.0, seconds - share * beyond - OVERHEAD), None


def score_shapes(events: Iterable[Any]) -> set[tuple[int, ...]]:
    """Return the shapes of attention scores (tokens x tokens), which are the inputs of a softmax.

    They identify other operations on scores: scaling, mask, dropout, and their backward. The set is empty if
    sequences are as long as heads are wide, because queries then have the same shapes.
    """
    softmax, factors = set[tuple[int, ...]](), list[tuple[int, ...]]()
    for event in events:
        shapes = [tuple(shape) for shape in event.input_shapes or [()]]
        if over_scores(event):
            softmax.add(shapes[0])
        if event.name in ("aten::bmm", "aten::baddbmm"):
            factors += [shape for shape in shapes if len(shape) == 3]
    return set() if factors and all(shape[1] == shape[2] for shape in factors) else softmax


def kind_of(name: str, operation: Any, scores: set[tuple[int, ...]]) -> str:
    """Return the kind of a kernel, or of a CPU operation under its own name."""
    if named(name) == COPIES:  # also for the saved activations of attention
        return COPIES
    around, each = {named(name)}, operation
    while each is not None:
        around.add(named(each.name))
        each = each.cpu_parent
    for kind in KINDS_AROUND:
        if kind in around:
            return kind
    if operation is None:
        return named(name) or "memory-bound"
    shapes = set(map(tuple, operation.input_shapes or []))
    if over_scores(operation) or not scores.isdisjoint(shapes):
        return "attention"
    return "products" if "products" in (named(name), named(operation.name)) else "memory-bound"


def over_scores(operation: Any) -> bool:
    """Return whether the operation is a softmax of attention or its backward.

    The softmax of a loss has two dimensions.
    """
    return operation.name in SOFTMAX and len(operation.input_shapes[0]) == 4


@cache
def named(name: str) -> str:
    """Return the kind that a name implies, or an empty string."""
    return next((kind for kind, part in KINDS.items() if re.search(part, name, re.IGNORECASE)), "")


def flops(operation: Any) -> float:
    """Return the FLOPs of a GEMM from the shapes of its factors, or 0 if they are not known."""
    if operation is None or operation.name not in FACTORS:
        return 0.0
    first, second = operation.input_shapes[FACTORS[operation.name] :][:2]
    return 2.0 * math.prod(first) * second[-1] if len(first) == 2 and len(second) in (2, 3) else 0.0


def in_fp8(ran: Iterable[Ran]) -> bool:
    return any(each.operation is not None and each.operation.name == "aten::_scaled_mm" for each in ran)


def of_peak(ran: Iterable[Ran], peak: float, fp8: float | None) -> float | None:
    """Return the share of a peak that GEMMs reach: the FLOPs of all executed GEMMs over their time.

    Recomputation in the backward pass counts, and so does the head for all of its tokens. GEMMs without known
    shapes are excluded with their time. Return `None` if they are the majority.

    Args:
        fp8: the peak of fp8 GEMMs. `None` excludes them.
    """
    ideal: dict[int, float] = {}
    all_seconds = seconds = 0.0
    for each in ran:
        if each.kind != "products":
            continue
        all_seconds += each.seconds
        rate = fp8 if each.operation is not None and each.operation.name == "aten::_scaled_mm" else peak
        if rate and (work := flops(each.operation)):
            # Count an operation once, even if it launched several kernels
            ideal[id(each.operation)] = work / rate
            seconds += each.seconds
    return sum(ideal.values()) / seconds if seconds > all_seconds / 2 else None
