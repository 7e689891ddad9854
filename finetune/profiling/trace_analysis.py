"""Operations of a traced step, and GPU kernels that they launched: seconds, kind of work, FLOPs by shapes.

A kernel's name says how it computes, not for what: eager attention's products and softmax are kernels that
linear layers and losses launch too. So a kernel is of the kind of the operation that launched it, or of one
around that; under `torch.compile`, which launches its own, Inductor's names say what was fused.
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COPIES = "to the CPU and back"
# Kinds by the names of kernels and of operations; the first that is found is it
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
KINDS_AROUND = ("communication", "attention")  # which an operation has from one that it is part of
COMPUTED: tuple[str, ...] = ("products", "attention", "memory-bound")
BESIDE: tuple[str, ...] = ("communication", COPIES)  # which run beside what is computed
SOFTMAX = ("aten::_softmax", "aten::_softmax_backward_data")
# Where the first of two factors stands among an operation's inputs
FACTORS = {"aten::mm": 0, "aten::_scaled_mm": 0, "aten::_grouped_mm": 0, "aten::addmm": 1}
FACTORS["aten::_addmm_activation"] = 1
OVERHEAD = 5e-6  # seconds to call an operation under the CPU's profiler, in which nothing is computed
INTERRUPTED = 5e-4  # seconds beyond three times the usual, of an operation whose thread lost the CPU


class Ran(NamedTuple):
    """A kernel, or an operation of the CPU."""

    name: str
    kind: str
    """communication, to the CPU and back, attention, products, memory-bound."""
    seconds: float
    operation: Any
    """Itself, or what launched it; `None`: not known."""
    begun: float | None = None
    """When a kernel began, in seconds; `None`: operations of the CPU, of which only their own time counts."""

    @property
    def span(self) -> tuple[float, float]:
        """From when to when a kernel ran; empty for the CPU's operations."""
        begun = self.begun or 0.0
        return begun, begun + (self.seconds if self.begun is not None else 0.0)


def computed(events: Iterable[Any], *, cuda: bool, lost: float = 0.0) -> list[Ran]:
    """Kernels of the profiler's events, or operations of the CPU, and seconds that each computed.

    Args:
        lost: seconds in which the CPU's thread did not run; no more than these is taken for waits.
    """
    events = list(events)
    scores = score_shapes(events)
    found = _kernels(events) if cuda else _on_cpu(events, lost)
    return [
        Ran(name, kind_of(name, operation, scores), seconds, operation, begun)
        for name, operation, seconds, begun in found
    ]


def spent(ran: list[Ran]) -> dict[str, float]:
    """Seconds of each kind: of communication and copies those in which a GPU computes nothing."""
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
    """Seconds of a span in which one of those that cover ran."""
    hidden = 0.0
    for start, stop in covered[max(0, bisect_right(covered, (begun, math.inf)) - 1) :]:
        if start >= end:
            break
        hidden += max(0.0, min(stop, end) - max(start, begun))
    return hidden


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time in spans that do not meet, in order."""
    found = list[tuple[float, float]]()
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _kernels(events: list[Any]) -> Iterator[tuple[str, Any, float, float]]:
    """Each kernel, the operation that launched it, which lists it by name and length, and when it began."""
    owners: dict[tuple[str, float], deque[Any]] = defaultdict(deque)
    for event in events:
        for kernel in event.kernels:
            owners[kernel.name, kernel.duration].append(event)
    for event in events:
        # ranges of the host are on the GPU's line too, and span all that runs in them
        if str(event.device_type).endswith("CUDA") and not event.is_user_annotation:
            by = owners[event.name, event.time_range.elapsed_us()]
            begun = event.time_range.start / 1e6
            yield event.name, by.popleft() if by else None, event.self_device_time_total / 1e6, begun


def _on_cpu(events: list[Any], lost: float) -> Iterator[tuple[str, Any, float, None]]:
    """The CPU's profiler gives times of the clock. One of an operation that took far longer than others of
    its name and about its shapes may have held a wait for the CPU, which another process had: as much as the
    thread lost is taken off. A thread that always ran waited for nothing: memory that is new takes as long.
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
    """Shapes of attention's scores, every token against every other, where a softmax of them runs.

    They tell the passes over scores from others: scaling, mask, dropout, and all that again in backward. No
    shapes where rows are as long as heads are wide, as then queries have the same.
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
    """The kind of a kernel, or of an operation under its own name."""
    if named(name) == COPIES:  # of what attention keeps, too
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
    """A softmax of attention's, or its backward: a loss has rows."""
    return operation.name in SOFTMAX and len(operation.input_shapes[0]) == 4


@cache
def named(name: str) -> str:
    """The kind that a name tells; empty: none."""
    return next((kind for kind, part in KINDS.items() if re.search(part, name, re.IGNORECASE)), "")


def flops(operation: Any) -> float:
    """Of a product, by the shapes of its factors; 0: not known."""
    if operation is None or operation.name not in FACTORS:
        return 0.0
    first, second = operation.input_shapes[FACTORS[operation.name] :][:2]
    return 2.0 * math.prod(first) * second[-1] if len(first) == 2 and len(second) in (2, 3) else 0.0


def in_fp8(ran: Iterable[Ran]) -> bool:
    return any(each.operation is not None and each.operation.name == "aten::_scaled_mm" for each in ran)


def of_peak(ran: Iterable[Ran], peak: float, fp8: float | None) -> float | None:
    """Share of a peak that products reach: FLOPs of all that ran, over their time.

    What runs again in backward is counted, and the head for the tokens that it was computed for. Products of
    which no shapes are known are left out with their time; `None`: those are most of them.

    Args:
        fp8: the peak of products in fp8; `None`: not known, and they are left out.
    """
    ideal: dict[int, float] = {}
    all_seconds = seconds = 0.0
    for each in ran:
        if each.kind != "products":
            continue
        all_seconds += each.seconds
        rate = fp8 if each.operation is not None and each.operation.name == "aten::_scaled_mm" else peak
        if rate and (work := flops(each.operation)):
            ideal[id(each.operation)] = work / rate  # once, also of one that launched several kernels
            seconds += each.seconds
    return sum(ideal.values()) / seconds if seconds > all_seconds / 2 else None
