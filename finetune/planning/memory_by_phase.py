"""Compute the memory of each phase of a run from shapes alone: the memory table of `finetune plan`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from finetune.autoconfig import memory_estimate, optimizer_choice
from finetune.autoconfig.memory_estimate import EVALUATED_TOKENS, GIB, LARGEST_BATCH, Keeps
from finetune.autoconfig.mixed_precision import DTYPES, STORED
from finetune.models import architecture
from finetune.models.architecture import Architecture
from finetune.planning.planned_run import PlannedRun
from finetune.planning.sharding_cost import Share
from finetune.recipe.adapter_types import FOUR_BIT, QUANTIZED
from finetune.recipe.schema import Eval

# GPU memory of the CUDA context.
CONTEXT_GIB = 0.6
# CPU memory of a process after it has imported the libraries.
CPU_GIB = 1.5
# The name of offloaded memory in the table of phases.
HOST = "CPU memory"


@dataclass(frozen=True)
class Chosen:
    """The choices of a planned run that decide its memory."""

    kept: Keeps
    memory: memory_estimate.Memory
    checkpointing: str
    share: Share
    usable: float
    """GiB of a device that a run may use."""
    graphs: bool


def of_process(found: Architecture, storage: str, precision: str, share: Share, *, full: bool) -> float:
    """Return GiB of the base model in one process.

    Sharding leaves 4-bit scales whole in each process, because they are not parameters.
    """
    whole = 0.0
    if storage in FOUR_BIT:
        stored = [*found.stored.values(), *architecture.quantized_experts(found, storage)]
        whole = sum(architecture.scales(prod(shape)) for shape in stored)
    split = (architecture.weights(found, storage, precision) - whole) / share.weights
    return (whole + split / (2 if share.half and full else 1)) / GIB


def gathered(found: Architecture, storage: str, precision: str, *, full: bool, layers: int) -> float:
    """Return GiB of the gathered weights of `layers` layers, if the launch shards the weights.

    Gathered weights are quantized or in the launch's dtype. Full fine-tuning adds one layer's gradients.
    """
    other = architecture.BYTES[DTYPES[precision]]
    depth = found.config.get_text_config().num_hidden_layers
    size = sum(map(prod, found.stored.values()))
    linear = size * other if storage in STORED else architecture.weights(found, storage, precision)
    linear -= 0.0 if storage in STORED else (found.parameters - size) * other
    if storage in FOUR_BIT:  # scales are not sharded
        linear -= sum(architecture.scales(prod(shape)) for shape in found.stored.values())
    return (linear / depth * layers + (4 * size / depth if full else 0.0)) / GIB


def outside(found: Architecture, precision: str) -> float:
    """Return GiB of the embeddings, the head and the norms in the launch's dtype."""
    size = sum(map(prod, found.stored.values()))
    return (found.parameters - size) * architecture.BYTES[DTYPES[precision]] / GIB


def room(run: PlannedRun, share: Share) -> tuple[float, float, float]:
    """Return three amounts of a device's memory in GiB.

    Returns:
        Free memory after the model is loaded, memory that a run may use in total, and memory that a step
        must leave free if the weights are sharded.
    """
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
    """Return GiB by phase and kind for one process. The phases go from loading to merging."""
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
    read = base if run.storage in QUANTIZED else part  # FSDP2 shards quantized weights after loading
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
        stored = base if run.storage in QUANTIZED and run.storage != "fp8" else 0.0
        made["merge"] = {
            "weights": 4 * found.parameters / GIB + stored,
            "adapters": 4 * has.trained / GIB,
        }
    return made


def _optimizer(run: PlannedRun, share: Share) -> float:
    """Return GiB of the optimizer state and of AdaLoRA's averages in one process."""
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
    """Return GiB that one process offloads to CPU memory."""
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
    """Return GiB by kind at the peak of a step, and the memory that CUDA graphs keep between steps."""
    config, share, kept, plan, full = run.model.config, chosen.share, chosen.kept, chosen.memory, run.full
    trained, tokens = run.adapter.trained / GIB, run.tokens
    autocast = full and run.target.precision != "no" and share.weights == 1 and not share.half
    copies = 2 * sum(map(prod, run.model.linear.values())) / GIB if autocast else 0.0
    buckets = 4 * trained if share.buckets else 0.0
    gradients = 4 * trained / share.states
    at_loss, at_backward = memory_estimate.peak_activations_gib(plan, chosen.checkpointing)
    of_head = {"trained": full or kept.head, "fp8": kept.loss_fp8}
    loss = memory_estimate.loss_gib(config, tokens, compiled=kept.compiled, **of_head)
    passing = memory_estimate.backward_gib(config, tokens, kept)
    if plan.offloaded:  # two layers' inputs: one on its way to the CPU and one on its way back
        passing += 2 * tokens * memory_estimate.widths(config).hidden * 2 / GIB
    some = 0.0 if full and run.batch.accumulation == 1 else gradients
    # An adapter's run gathers only the head at the loss, and only layers in backward. Full fine-tuning keeps
    # both gathered.
    layers, ends = share.gathered, share.outside
    head = ends if run.model.names.tied else ends / 2  # the other half: the embeddings
    at_head, in_layers = (layers + ends,) * 2 if full else (head, layers)
    first, then = (whole + copies + buckets for whole in (at_head, in_layers))
    # CUDA graphs keep their memory pool: the loss and the time between two steps can't use it.
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
    """Return GiB that a forward pass offloads to CPU memory.

    Recomputed layers offload their inputs. With `mlp` and `mlp_int8`, layers offload the activations that are
    neither recomputed nor stored in int8.

    Args:
        entry: GiB of a layer's input.
    """
    each = memory_estimate.recomputed_layers(checkpointing, plan.layers)[0] * entry
    if checkpointing in ("mlp", "mlp_int8"):
        each = plan.kept - plan.norms - plan.mlps
    return plan.offloaded * each


def _evaluation(
    own: dict[str, float], found: Architecture, settings: Eval, longest: int, usable: float
) -> dict[str, float]:
    """Return GiB of one evaluation batch: logits with their softmax, and the KV cache of generated answers.

    `eval.batch_size: auto` halves the batch until it fits.
    """
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
