"""What a run would choose for a recipe on a machine, asked of the functions that it asks, without a model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from finetune.autoconfig import (
    attention_choice,
    base_quantization,
    compilation,
    cuda_graphs,
    memory_estimate,
    mixed_precision,
    optimizer_choice,
)
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.run_checks import Choice
from finetune.distributed import launch_environment
from finetune.planning import memory_by_phase, sharding_cost
from finetune.preflight import choice_checks
from finetune.recipe import adapter_types

if TYPE_CHECKING:
    from finetune.models.architecture import Architecture
    from finetune.planning.planned_run import PlannedRun, Target
    from finetune.planning.sharding_cost import Share
    from finetune.recipe.schema import Recipe

CONTEXT_GIB = 0.6  # of a GPU, that CUDA itself holds
CPU_GIB = 1.5  # of a process with the libraries imported


def storage_and_attention(recipe: Recipe, found: Architecture, target: Target) -> tuple[Choice, Choice]:
    """How the base would be stored and what attends, as `choice_checks.setup_of` asks it for a run."""
    flat, kind = recipe.data.packing or recipe.data.padding_free, recipe.adapter.type
    against = partial(choice_checks.against_fp8, recipe, found.config)
    by, precision, machine = target.by, target.precision, target.machine
    launched = sharding_cost.launched(by, 1, precision)
    if kept := base_quantization.whole_base(launched):
        against = partial(str, kept)
    asked = "fp8" if by.frozen_fp8 and recipe.model.quantization == "auto" else recipe.model.quantization
    stored = choice_checks.check_stored(recipe, found.config)
    base = base_quantization.choose_base(asked, kind, precision, machine, against, stored)
    dtype = mixed_precision.compute_dtype(precision, base.value)
    shown = attention_choice.Rows(flat, recipe.data.max_length, adapter_types.find(kind).prompt)
    attends = attention_choice.read(found.config)
    return base, Choice(*attention_choice.choose(recipe.model.attention, machine, dtype, attends, shown))


def fused(run: PlannedRun) -> Choice:
    """Whether adapters run fused; `speed.apply.choose_fused` for a model that is not there.

    Raises:
        UserError: asked for, and no layer of it can be (exit 2 or 3).
    """
    speed, by, storage = run.recipe.speed, run.target.by, run.storage
    if by.weights and not run.full and speed.fused == "auto":
        return Choice("off", f"{by.name} splits the weights that fast forwards hold whole")
    # bitsandbytes' and ours leave what they don't store in codes in the launch's dtype
    plain = (
        mixed_precision.DTYPES[run.target.precision]
        if storage in adapter_types.QUANTISED
        else mixed_precision.STORED[storage]
    )
    made = compilation.choose_fused(
        speed.fused, run.target.machine, adapted=not run.full, dtype=plain, rounding=speed.qat is not None
    )
    obstacle = run.adapter.obstacle
    if storage in ("int8", "torchao_int8"):
        obstacle = f"the base is stored in {storage}"
    if made.value == "off" or not obstacle:
        return made
    if speed.fused is True:
        what, fix = "none of the adapter's layers can be fused", "speed.fused: auto"
        raise UserError(Problem(what, "speed.fused", found=obstacle, fix=fix), code=Exit.ENVIRONMENT)
    return Choice("off", f"auto: {obstacle}")


def compiled(run: PlannedRun, fused: Choice, work: float) -> Choice:
    """Whether layers would be compiled.

    Args:
        fused: what `fused` chose.
        work: FLOPs of a step.
    """
    has, asked = run.adapter, run.recipe.speed.compile
    dora = has.columns and has.rank > 0 and fused.value != "on"  # by PEFT's forward, which breaks the graph
    plain = not run.full and run.storage in mixed_precision.STORED
    with launch_environment.under(dict(run.target.by.variables)):
        eager = launch_environment.eager(plain=plain)
    kind = "DoRA" if dora else adapter_types.find(run.recipe.adapter.type).peft
    kind = "experts' adapters" if has.experts else kind
    if dora or has.experts or kind in adapter_types.BREAKING:
        broken = f"PEFT's forward of {kind} breaks the graph"
        if problem := compilation.against_breaks(asked, broken):
            raise UserError(problem, code=Exit.ENVIRONMENT)
        eager = eager or broken
    whole = compilation.Work(0, work * (run.steps or 0), eager=eager)
    return compilation.choose_compile(asked, whole if run.steps or eager else None, run.target.machine)


def recomputed(
    run: PlannedRun, memory: memory_estimate.Memory, graphs: Choice
) -> tuple[Choice, Choice, Choice, memory_estimate.Memory]:
    """What would be made again, what would leave the GPU and whether layers are graphs beside that, as a run
    chooses it, and the memory plan so."""
    speed, machine, by = run.recipe.speed, run.target.machine, run.target.by
    if machine.host_gib is not None:
        memory = memory._replace(host=machine.host_gib / run.target.processes)
    asked = speed.activation_checkpointing
    asked = "none" if by.once and asked == "auto" else asked  # as model_setup.make_fast
    again, offload, graphs, memory = cuda_graphs.beside(graphs, speed, asked, memory, machine)
    sharded = by.name if by.weights else ""
    if problem := compilation.against_graphs(speed.compile, again.value, offload.value, sharded):
        raise UserError(problem, code=Exit.ENVIRONMENT)
    return again, offload, graphs, memory


def graphed(run: PlannedRun, compile: Choice, *, searched: bool) -> Choice:
    """Whether compiled layers would be CUDA graphs, in passes of full rows."""
    recipe, config = run.recipe, run.model.config
    kind = "full" if run.full else "fp8" if run.storage == "fp8" else "adapter"
    with launch_environment.under(dict(run.target.by.variables)):
        alone = cuda_graphs.alone(run.target.processes)
    differs = cuda_graphs.differs(
        recipe.data,
        recipe.adapter,
        recipe.speed,
        config,
        alone=alone,
        searched=searched,
        attention=run.attention,
        storage=run.storage,
    )
    products = cuda_graphs.products(config, run.tokens, run.target.machine.peak_flops, kind=kind)
    return cuda_graphs.choose(recipe.speed.compile, compile, differs=differs, products=products, kind=kind)


def room(
    run: PlannedRun, kept: memory_estimate.Keeps, share: Share
) -> tuple[memory_estimate.Memory, float, float]:
    """The memory plan as a run makes it once its model is loaded, GiB that all of it may take, and of these
    the GiB that a step leaves free where weights are split."""
    recipe, machine, found, has = run.recipe, run.target.machine, run.model, run.adapter
    precision = run.target.precision
    held = memory_by_phase.of_process(found, run.storage, precision, share, full=not kept.adapted)
    held += 4 * has.trained / memory_estimate.GIB / share.weights if kept.adapted else 0.0
    held += share.gathered + share.more + share.outside
    system = CPU_GIB if machine.device == "cpu" else CONTEXT_GIB + share.nccl
    free = max(0.0, machine.memory_gib - system - held)
    whole = sum(outputs * inputs for outputs, inputs in found.linear.values())
    extra = 8 * whole / memory_estimate.GIB if recipe.speed.qat else 0.0
    state = optimizer_choice.state_bytes(optimizer_choice.asked(recipe.train), recipe.speed) + 4 * share.half
    # as model_setup.work_of: the gradient, DDP's copy of it, what the optimizer and AdaLoRA keep
    each = 4 + 4 * share.buckets + state + (memory_estimate.AVERAGES if has.allocates else 0)
    memory = memory_estimate.activations(
        found.config,
        run.tokens,
        kept,
        free=free,
        trained=has.trained // share.states,
        offload=recipe.speed.offload,
        each=each,
        extra=extra,
        sharded=share.weights > 1,
    )
    if (
        not kept.adapted and share.states == 1 and precision != "no"
    ):  # as model_setup.work_of: autocast's copies
        one = memory_estimate.widths(found.config)
        copied = 2 * (whole + one.vocabulary * one.hidden) / memory_estimate.GIB
        memory = memory._replace(room=memory.room - copied)
    alone = machine.memory_gib - system + share.nccl - held + share.more
    usable = held - share.more + memory_estimate.usable_gib(max(0.0, alone), sharded=False)
    kept_free = usable - held - memory_estimate.usable_gib(free, sharded=True) if share.weights > 1 else 0.0
    return memory, min(usable, machine.memory_gib), kept_free
