"""Choose from a memory plan which activations are kept, recomputed or offloaded to CPU memory.

A run and `finetune plan` both call this module. Like `memory_estimate`, it imports no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from finetune.autoconfig.memory_estimate import IN_FLIGHT, INT8, peak_activations_gib, recomputed_layers
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.run_checks import Choice

if TYPE_CHECKING:
    from finetune.autoconfig.memory_estimate import Memory
    from finetune.hardware.detection import Hardware


def choose_activation_checkpointing(requested: str, plan: Memory, hardware: Hardware) -> Choice:
    """Choose the activations that backward recomputes. `auto` recomputes as little as fits.

    - `none`: nothing.
    - `norms`: the norms of all layers.
    - `mlp`: the norms, and gate and up of all layers. `mlp:8` recomputes gate and up of eight layers.
    - `mlp_int8`: the norms. Gate and up are saved in int8. `mlp_int8:8` recomputes them in eight layers.
    - `full`: all layers. `full:8` recomputes eight layers, and norms, gate and up of the others.

    Raises:
        UserError: `mlp` or `mlp_int8` is asked for and MLPs are not fused (exit 3).
    """
    layers = plan.layers
    if requested.startswith("mlp") and not plan.mlps:
        raise UserError(
            Problem(
                f"{requested} recomputes only fused MLPs, and the MLPs of this model are not fused",
                "speed.activation_checkpointing",
                found=f"{requested}, with {plan.unfused}" if plan.unfused else requested,
                fix="set `speed.activation_checkpointing: auto`, or full",
                code="speed-option",
            ),
            code=Exit.ENVIRONMENT,
        )
    if plan.offloaded and requested == "auto":
        leaves = (plan.kept - plan.norms - plan.mlps) * plan.offloaded * plan.pinned
        if plan.mlps and leaves <= plan.host and max(peak_activations_gib(plan, "mlp")) <= plan.room:
            return Choice("mlp", f"auto: {leaves:.0f} GiB of other activations are offloaded to CPU memory")
        return Choice("full", "speed.offload offloads the inputs of recomputed layers")
    if requested != "auto":
        kind, _, count = requested.partition(":")
        every = "full" if kind == "full" else "mlp"  # `mlp_int8:N` of all N layers is `mlp`
        return Choice(every if count and int(count) >= layers else requested, "asked for")
    if hardware.device == "cpu":
        return Choice("none", "auto: CPU memory is large enough")
    free = max(0.0, plan.room)
    text = f"auto: activations need about {plan.kept:.0f} GiB, and {free:.0f} GiB are free for them"
    if plan.kept <= plan.room:
        return Choice("none", text)
    saved_gib = plan.kept - plan.norms
    if saved_gib <= plan.room:
        return Choice("norms", f"{text}; recomputing norms leaves {saved_gib:.0f} GiB")
    rounded, one = _rounded(plan, text), plan.norms / layers  # the norms of the running layer
    if plan.mlps and (count := math.ceil((saved_gib + one - plan.room) / plan.mlps * layers)) < layers:
        saved_gib -= count * plan.mlps / layers
        with_mlps = Choice(
            f"mlp:{count}", f"{text}; also recomputing {count} MLPs leaves {saved_gib:.0f} GiB"
        )
        return rounded if rounded and _cost(rounded.value, plan) < _cost(with_mlps.value, plan) else with_mlps
    saved_gib -= plan.mlps * (layers - 1) / layers  # the running layer holds its own
    saved = saved_gib / layers - plan.entry
    count = min(layers, math.ceil((saved_gib - plan.room) / saved) + 1)  # one layer is recomputed at a time
    return rounded or Choice(f"full:{count}" if count < layers else "full", text)


def choose(
    checkpointing: str, offload: str, plan: Memory, hardware: Hardware
) -> tuple[Choice, Choice, Memory]:
    """Choose activation checkpointing and offloading, and return them with the resulting memory plan.

    If both are `auto` and int8 alone would still leave some MLPs to recompute, other activations of a few
    layers are offloaded instead. That requires free CPU memory, and copies that are no slower than the layers
    that run at the same time.

    Raises:
        UserError: see `choose_activation_checkpointing`.
    """
    choice, layers = choose_activation_checkpointing(checkpointing, plan, hardware), plan.layers
    if offload != "auto":
        return choice, Choice(offload, "not asked for" if offload == "none" else "asked for"), plan
    if checkpointing != "auto" or hardware.device == "cpu":
        why = "no GPU" if hardware.device == "cpu" else "speed.activation_checkpointing is asked for"
        return choice, Choice("none", f"auto: {why}"), plan
    cheap = choice.value.startswith("mlp:") and _cost(choice.value, plan) <= _cost("mlp_int8", plan)
    per_layer = (plan.kept - plan.norms - plan.mlps) / layers
    passing = plan.norms / layers  # one tensor on its way to the CPU, another on its way back
    over = peak_activations_gib(plan, "mlp_int8")[1] + passing - plan.room
    count = max(1, math.ceil(over / per_layer) + IN_FLIGHT)
    if choice.value in ("none", "norms", "mlp_int8"):
        why = "not needed"
    elif not plan.offloadable:
        why = "only with compiled layers and fused MLPs on fp8"
    elif cheap:
        why = "recomputing these MLPs is cheaper than int8"
    elif count > layers:
        why = "offloading all layers would not be enough"
    elif count > plan.offloadable * layers:
        why = "copies would be slower than the layers"
    elif count * per_layer * plan.pinned > plan.host:
        why = f"{count * per_layer * plan.pinned:.0f} GiB do not fit in CPU memory"
    else:
        why = ""
    if why:
        return choice, Choice("none", f"auto: {why}"), plan
    half = Choice("mlp_int8", f"{choice.reason}; not more, because {count} layers offload other activations")
    return (
        half,
        Choice(
            f"activations:{count}",
            f"auto: {count * per_layer:.0f} GiB in CPU memory, so that no MLP is recomputed",
        ),
        plan._replace(offloaded=count / layers),
    )


def stronger_level(level: str, *, fused_mlps: bool, offloads: bool) -> str | None:
    """Return the next level, which needs less GPU memory; `None` after `full`.

    Args:
        fused_mlps: whether gate and up can be recomputed alone.
        offloads: whether activations are offloaded. `auto` combines offloading only with the lower levels.
    """
    order = ["none", "norms", "mlp", "full"] if fused_mlps else ["none", "norms", "full"]
    kind, _, count = level.partition(":")
    if level == "full":
        return None
    if count and kind in order:
        return kind  # in all layers instead of some
    if offloads or kind not in order:
        return "mlp" if kind == "mlp_int8" and not offloads else "full"
    return order[order.index(kind) + 1]


def _rounded(plan: Memory, text: str) -> Choice | None:
    """Return the `mlp_int8` level that recomputes as few MLPs as fits.

    Returns:
        The level; `None` if it does not fit or if `auto` does not use int8 for this model.
    """
    saved_gib, per_mlp = plan.kept - plan.norms - (1 - INT8) * plan.mlps, plan.mlps / plan.layers
    over = saved_gib + plan.norms / plan.layers - plan.room
    count = max(0, math.ceil(over / (INT8 * per_mlp))) if per_mlp else plan.layers
    if count >= plan.layers or plan.rounding == math.inf:
        return None
    value = f"mlp_int8:{count}" if count else "mlp_int8"
    text += f"; MLP activations in int8 leave {saved_gib - count * INT8 * per_mlp:.0f} GiB"
    return Choice(value, text + f", with {count} MLPs recomputed" * bool(count))


def _cost(checkpointing: str, plan: Memory) -> float:
    """Return the time that a level adds, in units of recomputing gate and up of one MLP."""
    rounding = plan.rounding * plan.layers if checkpointing.startswith("mlp_int8") else 0.0
    return recomputed_layers(checkpointing, plan.layers)[1] + rounding
