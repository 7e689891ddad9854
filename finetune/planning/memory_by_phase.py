"""What each phase of a run holds, in GiB, from shapes alone: the bytes of `finetune plan`'s memory table."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from finetune.autoconfig import memory_estimate, optimizer_choice
from finetune.autoconfig.memory_estimate import EVALUATED_TOKENS, GIB, LARGEST_BATCH, Keeps
from finetune.autoconfig.mixed_precision import DTYPES, STORED
from finetune.models import architecture
from finetune.recipe.adapter_types import FOUR_BIT, QUANTISED

if TYPE_CHECKING:
    from finetune.models.architecture import Architecture
    from finetune.planning.planned_run import PlannedRun
    from finetune.planning.sharding_cost import Share
    from finetune.recipe.schema import Eval

CONTEXT_GIB = 0.6  # of a GPU, that CUDA itself holds
CPU_GIB = 1.5  # of a process with the libraries imported
HOST = "CPU memory"  # what leaves the GPU, beside the phases


@dataclass(frozen=True)
class Chosen:
    """What was chosen for the memory of a planned run."""

    kept: Keeps
    memory: memory_estimate.Memory
    checkpointing: str
    share: Share
    usable: float
    """GiB of a device."""
    graphs: bool


def of_process(found: Architecture, storage: str, precision: str, share: Share, *, full: bool) -> float:
    """GiB of the base in one process. A split leaves 4-bit scales whole: they are no parameters."""
    whole = (
        sum(architecture.scales(prod(shape)) for shape in found.stored.values())
        if storage in FOUR_BIT
        else 0.0
    )
    split = (architecture.weights(found, storage, precision) - whole) / share.weights
    return (whole + split / (2 if share.half and full else 1)) / GIB


def gathered(found: Architecture, storage: str, precision: str, *, full: bool, layers: int) -> float:
    """GiB of some layers' weights, as they are gathered where they are divided: in the launch's dtype, or as
    codes; where they train, one layer's gradients beside them."""
    other = architecture.BYTES[DTYPES[precision]]
    depth = found.config.get_text_config().num_hidden_layers
    size = sum(map(prod, found.stored.values()))
    linear = size * other if storage in STORED else architecture.weights(found, storage, precision)
    linear -= 0.0 if storage in STORED else (found.parameters - size) * other
    if storage in FOUR_BIT:  # whole in each process
        linear -= sum(architecture.scales(prod(shape)) for shape in found.stored.values())
    return (linear / depth * layers + (4 * size / depth if full else 0.0)) / GIB


def outside(found: Architecture, precision: str) -> float:
    """GiB of the weights outside of layers in the launch's dtype: embeddings, head, norms."""
    size = sum(map(prod, found.stored.values()))
    return (found.parameters - size) * architecture.BYTES[DTYPES[precision]] / GIB


def room(run: PlannedRun, share: Share) -> tuple[float, float, float]:
    """GiB of a device: what nothing holds once the model is loaded, what a run may take in all, and what a
    step leaves free where weights are split."""
    machine, precision, full = run.target.machine, run.target.precision, run.full
    held = of_process(run.model, run.storage, precision, share, full=full)
    held += 0.0 if full else 4 * run.adapter.trained / GIB / share.weights
    held += share.gathered + share.more + share.outside
    system = CPU_GIB if machine.device == "cpu" else CONTEXT_GIB + share.nccl
    free = max(0.0, machine.memory_gib - system - held)
    alone = machine.memory_gib - system + share.nccl - held + share.more
    usable = held - share.more + memory_estimate.usable_gib(max(0.0, alone), sharded=False)
    kept_free = usable - held - memory_estimate.usable_gib(free, sharded=True) if share.weights > 1 else 0.0
    return free, min(usable, machine.memory_gib), kept_free


def phases(run: PlannedRun, chosen: Chosen) -> dict[str, dict[str, float]]:
    """GiB of each kind in each phase of one process: load, step, evaluation, save, merge."""
    found, has, share, full = run.model, run.adapter, chosen.share, run.full
    base = architecture.weights(found, run.storage, run.target.precision) / GIB
    part = of_process(found, run.storage, run.target.precision, share, full=full)
    own = {"weights": part, "adapters": 0.0 if full else 4 * has.trained / GIB / share.weights}
    held = {**own, "optimizer": _optimizer(run, share)}
    step, pool = _largest_moment(run, chosen, held)
    own |= pool if run.recipe.eval.eval_steps else {}
    buffers = {"buffers": share.gathered + share.outside}
    evaluated = _evaluation(
        {**own, **buffers}, found, run.recipe.eval, run.recipe.data.max_length, chosen.usable
    )
    biggest = max(prod(shape) for shape in found.tensors.values()) / GIB
    read = base if run.storage in QUANTISED else part  # FSDP2 takes codes apart once they are there
    made = {
        "load": {"weights": read, "buffers": biggest * architecture.BYTES[DTYPES[run.target.precision]]},
        "step": step,
        "evaluation": {**own, **buffers, **evaluated},
        "save": held,
    }
    gone = _on_the_cpu(run, chosen)
    if any(gone.values()):
        made[HOST] = gone
    if not full:
        stored = base if run.storage in QUANTISED and run.storage != "fp8" else 0.0
        made["merge"] = {
            "weights": 4 * found.parameters / GIB + stored,
            "adapters": 4 * has.trained / GIB,
        }
    return made


def _optimizer(run: PlannedRun, share: Share) -> float:
    """GiB of the optimizer's state in one process, and of AdaLoRA's averages."""
    train, speed, trained = run.recipe.train, run.recipe.speed, run.adapter.trained / GIB
    if _offloads_optimizer(run):
        each = 0.0
    else:
        each = optimizer_choice.state_bytes(optimizer_choice.asked(train), speed) + 4 * share.half
    averages = memory_estimate.AVERAGES * trained if run.adapter.allocates else 0.0
    return each * trained / share.states + averages


def _offloads_optimizer(run: PlannedRun) -> bool:
    return run.recipe.speed.offload in ("optimizer", "all")


def _on_the_cpu(run: PlannedRun, chosen: Chosen) -> dict[str, float]:
    """GiB that leave one process's GPU for the CPU's memory."""
    hidden = memory_estimate.widths(run.model.config).hidden
    entry = 2 * run.tokens * hidden * (2 if run.full else 1) / GIB
    gone = {"activations": leaving(chosen.memory, chosen.checkpointing, entry)}
    if _offloads_optimizer(run):  # torchao keeps weights and gradients there too
        known = optimizer_choice.known_bytes(optimizer_choice.asked(run.recipe.train))
        gone["optimizer"] = (8 + (8.0 if known is None else known)) * (run.adapter.trained / GIB)
    return gone


def _largest_moment(
    run: PlannedRun, chosen: Chosen, held: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """GiB of each kind at the moment of a step that takes most, and what graphs keep between steps."""
    config, share, kept, plan, full = run.model.config, chosen.share, chosen.kept, chosen.memory, run.full
    trained, tokens = run.adapter.trained / GIB, run.tokens
    autocast = full and run.target.precision != "no" and share.weights == 1 and not share.half
    copies = 2 * sum(map(prod, run.model.linear.values())) / GIB if autocast else 0.0
    buckets = 4 * trained if share.buckets else 0.0
    gradients = 4 * trained / share.states
    at_loss, at_backward = memory_estimate.at_once(plan, chosen.checkpointing)
    loss = memory_estimate.loss_gib(config, tokens, compiled=kept.compiled, trained=full or kept.head)
    passing = memory_estimate.backward_gib(config, tokens, kept)
    if plan.away:  # a layer's input that leaves, and one that comes
        passing += 2 * tokens * memory_estimate.widths(config).hidden * 2 / GIB
    some = 0.0 if full and run.batch.accumulation == 1 else gradients
    # at the loss no layer is whole, and in backward the head no longer, unless they train
    layers, ends = share.gathered, share.outside
    head = ends if run.model.names.tied else ends / 2  # the rest are the embeddings
    at_head, in_layers = (layers + ends,) * 2 if full else (head, layers)
    first, then = (whole + copies + buckets for whole in (at_head, in_layers))
    # what graphs keep and work in no other takes meanwhile
    beside, pool = (
        {"CUDA graphs": gib} if chosen.graphs else {} for gib in (plan.graphs, at_backward + passing)
    )
    moments = [
        {**held, "gradients": some, "activations": at_loss, "logits": loss, "buffers": first, **beside},
        {**held, "gradients": some, "activations": at_backward, "buffers": passing + then, **beside},
        {**held, "gradients": gradients, "buffers": buckets, **pool},
    ]
    return max(moments, key=lambda moment: sum(moment.values())), pool


def leaving(plan: memory_estimate.Memory, checkpointing: str, entry: float) -> float:
    """GiB that a pass keeps in the CPU's memory: of layers that run again their inputs, of others whose norms
    and half MLPs do all else.

    Args:
        entry: GiB of a layer's input.
    """
    each = memory_estimate.split(checkpointing, plan.layers)[0] * entry
    if checkpointing in ("mlp", "mlp_int8"):
        each = plan.kept - plan.norms - plan.mlps
    return plan.away * each


def _evaluation(
    own: dict[str, float], found: Architecture, settings: Eval, longest: int, usable: float
) -> dict[str, float]:
    """Logits and their softmax of one batch, and keys and values of answers; `auto` halves until it fits."""
    one = memory_estimate.widths(found.config)
    rows = LARGEST_BATCH if settings.batch_size == "auto" else settings.batch_size
    while True:
        tokens = min(rows * longest, max(EVALUATED_TOKENS, longest))
        made = {
            "logits": tokens * one.vocabulary * 10 / GIB,
            "activations": tokens * (one.layers * (one.qkv - one.queries) + 3 * one.intermediate) * 2 / GIB,
        }
        if settings.batch_size != "auto" or rows == 1 or sum([*own.values(), *made.values()]) <= usable:
            return made
        rows //= 2
