"""Decide whether to keep an optimization, by comparing its runs with the interleaved runs without it."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.evaluation import paired_differences
from finetune.experiments.runner import measured_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune.experiments.ablation.optimizations import Measure, Optimization

    Runs = list[dict[str, Any]]  # figures, by `measured_run.figures`

# A relative difference in speed of this size, and of four times the noise, is clear after one run
CLEAR = 0.2


class Scale(NamedTuple):
    """The figure that gains are computed from, and its noise."""

    limits: Measure
    rate: str
    noise: dict[str, float | None]
    """Relative standard deviation of one run, by figure. `None` if not known."""

    def sure(self, figure: str, runs: Runs, before: Runs) -> float:
        """Return the smallest significant relative change of a figure: twice its standard error."""
        noise, least = self.noise[figure], self.limits.min_gain
        if noise is None:
            return least
        return max(least, 2 * noise * math.sqrt(1 / len(runs) + 1 / len(before)))


def clear(scale: Scale, one: dict[str, Any], beside: dict[str, Any]) -> bool:
    """Return whether two runs differ so much in speed that a second pair of runs is not needed."""
    apart = []
    for rate in measured_run.UNITS:
        if one[rate] and beside[rate]:
            enough = max(CLEAR, 4 * (scale.noise[rate] or 0.0))
            ratio = one[rate] / beside[rate] - 1
            apart.append(0 if abs(ratio) < enough else math.copysign(1, ratio))
    return abs(sum(apart)) == len(apart)


def pays(scale: Scale, optimization: Optimization, one: dict[str, Any], beside: dict[str, Any]) -> bool:
    """Return whether a run needs less memory, or is faster, than the run it is compared with."""
    if optimization.gain == "memory":
        return one["memory_gib"] < beside["memory_gib"]
    return one[scale.rate] > beside[scale.rate]


def judge(
    scale: Scale,
    optimization: Optimization,
    runs: Runs,
    before: Runs,
    gate: Runs,
    rows: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the gain of an optimization, whether its losses match, and the verdict.

    Args:
        before: interleaved runs without the optimization.
        gate: the runs whose losses are the reference.
        rows: all optimizations. An optimization without gain and cost stays if another one builds on it that
            was faster alone than the whole stack. Otherwise that one could not be stacked.
    """
    failed = next((run["failed"] for run in [*runs, *before] if run["failed"]), "")
    if failed:
        return {"verdict": "error", "why": failed}
    found = measured_run.summary(runs) | {"against": measured_run.summary(before)}
    ratio, memory = (found[key] / found["against"][key] for key in (scale.rate, "memory_gib"))
    sure, less = (scale.sure(key, runs, before) for key in (scale.rate, "memory_gib"))
    found |= {"speedup": ratio, "noise": sure, "memory_ratio": memory, "worse": ratio < 1 - sure}
    lost = outside(scale.limits, optimization, runs, gate, found)
    if lost:
        return found | {"verdict": "failed", "why": lost}
    said = f"{ratio - 1:+.1%} {measured_run.UNITS[scale.rate]} (noise {sure:.1%})"
    said += f", validation loss {described_cost(found['loss_cost'])}" if "loss_cost" in found else ""
    if optimization.gain == "memory":
        # The time lost must not exceed the memory saved
        helps = memory < 1 - less and 1 - ratio <= min(sure, 1 - memory)
        return found | {
            "verdict": "kept" if helps else "dropped",
            "why": f"{memory - 1:+.1%} memory (noise {less:.1%}), {said}",
        }
    if ratio > 1 + sure:
        return found | {"verdict": "kept", "why": said}
    stacked = found["against"][scale.rate] * (1 + sure)
    open_yet = [row for row in rows if optimization.name in row["on"] and not row["status"]]
    above = [row["name"] for row in open_yet if _rate(scale, row) > stacked]
    if above and not found["worse"]:
        return found | {
            "verdict": "kept",
            "why": f"{said}, but {', '.join(above)} needs it and was faster alone",
        }
    return found | {"verdict": "dropped", "why": said}


def _rate(scale: Scale, row: dict[str, Any]) -> float:
    """Return the speed of an optimization alone, or 0 if it was not measured or failed."""
    alone = row.get("alone", {"verdict": "error"})
    return 0.0 if alone["verdict"] in ("error", "failed") else alone[scale.rate]


def loss_cost(runs: Runs, gate: Runs) -> dict[str, float] | None:
    """Return the relative increase of the validation loss over the loss of `gate`, with its 95 % interval.

    Return `None` if the two sides were not evaluated on the same examples, or `gate` has no loss.
    """
    base, own = (next(filter(None, (run.get("examples") for run in group)), None) for group in (gate, runs))
    if not base or not own or any(base[key] != own[key] for key in ("group", "tokens")):
        return None
    if not sum(base["tokens"]):
        return None
    before, after = ([float(loss) for loss in side["tuned"]["loss"]] for side in (base, own))
    found = paired_differences.difference(
        before, after, higher_is_better=False, weights=base["tokens"], groups=base["group"]
    )
    mean = sum(before) / sum(base["tokens"])
    return {key: found[key] / mean for key in ("value", "low", "high")} if mean else None


def outside(
    limits: Measure, optimization: Optimization, runs: Runs, gate: Runs, found: dict[str, Any]
) -> str:
    """Return why an optimization fails the loss gate, or an empty string. Add the measurements to `found`."""
    base, cost = measured_run.summary(gate), loss_cost(runs, gate)
    if cost:
        found["loss_cost"] = cost
    if optimization.gate == "curve":
        found["apart"] = measured_run.distance(runs[0]["losses"], base["losses"])
        if found["apart"] > limits.loss_band:
            limit = f"the limit is {limits.loss_band:.1%}"
            return f"the training losses differ by {found['apart']:.1%} from the baseline's; {limit}"
    if cost:
        return _too_costly(cost, limits.held_out_band)
    if optimization.gate == "curve":
        return ""
    half = len(base["losses"]) // 2
    worse = statistics.mean(found["losses"][half:]) / statistics.mean(base["losses"][half:]) - 1
    found["worse_held_out"] = worse
    if not worse <= limits.held_out_band:
        limit = f"the limit is {limits.held_out_band:.1%}; the run has no validation set (data.validation)"
        return f"the training loss of the second half is {worse:.1%} higher; {limit}"
    return ""


def _too_costly(cost: dict[str, float], band: float) -> str:
    if not cost["value"] <= band:
        return f"the validation loss is {described_cost(cost)} higher; the limit is {band:.1%}"
    if not cost["high"] <= band:
        more = "raise measure.steps or measure.held_out_rows for a smaller interval"
        return f"the validation loss may be more than {band:.1%} higher ({described_cost(cost)}); {more}"
    return ""


def described_cost(cost: dict[str, float]) -> str:
    """Format a cost as `+0.3% (-0.1% to +0.7%)`."""
    return f"{cost['value']:+.1%} ({cost['low']:+.1%} to {cost['high']:+.1%})"
