"""Describe a model and a launch to `autoconfig.decisions` from a recipe and a config, before both exist."""

from __future__ import annotations

from finetune.autoconfig import (
    compilation,
    cuda_graphs,
    delta_net_kernels,
    memory_estimate,
    mixed_precision,
    optimizer_choice,
)
from finetune.autoconfig.compilation import Work
from finetune.autoconfig.decisions import ModelSpec
from finetune.distributed import launch_environment
from finetune.models import architecture
from finetune.planning import step_time
from finetune.planning.planned_run import PlannedRun
from finetune.planning.sharding_cost import Share
from finetune.recipe import adapter_types


def model_spec(run: PlannedRun, *, fused: bool) -> ModelSpec:
    """Describe the model as it would be after its adapter is attached.

    Args:
        fused: whether adapters run fused.
    """
    has, storage = run.adapter, run.storage
    linear = run.model.linear
    layers = memory_estimate.widths(run.model.config).layers if run.model.names.has_decoder_layers else 0
    # Quantized base models keep their other weights in the launch's dtype.
    dtypes = mixed_precision.STORED if storage in mixed_precision.STORED else mixed_precision.DTYPES
    plain = storage if storage in mixed_precision.STORED else run.target.precision
    return ModelSpec(
        config=run.model.config,
        layers=layers,
        adapted=not run.full,
        dtype=dtypes[plain],
        codes="fp8" if storage == "fp8" else "4-bit" if storage in adapter_types.FOUR_BIT else "",
        trained=has.trained,
        columns=has.columns,
        multiplied=run.full or has.rank > 0,
        dropped=sum(linear[name][1] for name in has.names) // max(1, layers) if has.dropout else 0,
        head=run.full or has.head,
        repeated=run.attention in ("sdpa", "eager"),
        rounding=run.recipe.speed.qat is not None,
        rounded_gib=8 * _numbers(run) / memory_estimate.GIB if run.recipe.speed.qat else 0.0,
        # An MLP without adapters runs fused only on an fp8 base model, to save casts to fp8.
        fused_mlps=has.fusable and (has.mlps or storage == "fp8"),
        unsupported_reason=_unsupported_reason(run),
        breaks=_breaks(run, fused=fused) if layers else frozenset(),
        experts=_experts(run, fused=fused),
        dequantized=_quantized_experts(run),
    )


def work(run: PlannedRun, share: Share, free: float, *, searched: bool) -> Work:
    """Describe the work of one process, as `step_work.work_of` does for a run.

    Args:
        free: GiB of the device that are free after the model and its adapter are loaded.
        searched: whether a search finds the micro-batch size.
    """
    by, machine, recipe = run.target.by, run.target.machine, run.recipe
    of_row = run.batch.per_device * run.row_tokens / by.sharing  # mean tokens, as in a run
    flops = step_time.flops(run.model, run.adapter, run.full) * of_row * run.batch.accumulation
    with launch_environment.under(dict(by.variables)):
        eager = launch_environment.eager(plain=not run.full and run.storage in mixed_precision.STORED)
        eager = eager or delta_net_kernels.not_compiled_reason(run.model.config)
        single_process = cuda_graphs.is_single_plain_process(run.target.processes)
    state = optimizer_choice.state_bytes(optimizer_choice.asked(recipe.train), recipe.speed) + 4 * share.half
    averages = memory_estimate.AVERAGES if run.adapter.allocates else 0
    kinds = {"attention": run.attention, "storage": run.storage}
    usable = memory_estimate.usable_gib(free, sharded=share.weights > 1)
    if run.full and share.states == 1 and run.target.precision != "no":  # autocast's copies in 16 bits
        head = memory_estimate.widths(run.model.config)
        usable -= 2 * (_numbers(run) + head.vocabulary * head.hidden) / memory_estimate.GIB
    made = Work(
        run.tokens,
        None if run.steps is None else flops * run.steps,
        sharded=by.name if by.weights else "",
        eager=eager,
        parts=share.states,
        bytes_per_parameter=4 + 4 * share.buckets + state + averages,
        graphs_unsupported=cuda_graphs.unsupported_reason(
            recipe, run.model.config, single_process=single_process, searched=searched, **kinds
        ),
        usable=usable,
        no_recompute=by.no_recompute,
    )
    if machine.host_gib is None:
        return made
    return made._replace(host=machine.host_gib / run.target.processes)


def _numbers(run: PlannedRun) -> int:
    """Return the number of parameters in the linear layers."""
    return sum(outputs * inputs for outputs, inputs in run.model.linear.values())


def _unsupported_reason(run: PlannedRun) -> str:
    """Return why no layer of the adapter can run fused; else the empty string."""
    if run.adapter.fast_experts:
        return ""
    if run.storage in ("int8", "torchao_int8"):
        return f"the base model is stored in {run.storage}"
    return run.adapter.unsupported_reason or compilation.fused_unsupported_reason(run.model.config)


def _quantized_experts(run: PlannedRun) -> bool:
    return bool(architecture.quantized_experts(run.model, run.storage))


def _experts(run: PlannedRun, *, fused: bool) -> str:
    """Return how stacked experts run. Quantized experts always run fused."""
    if run.adapter.fast_experts and (fused or _quantized_experts(run)):
        return "fused"
    return "peft" if run.adapter.experts else ""


def _breaks(run: PlannedRun, *, fused: bool) -> frozenset[str]:
    """Return the adapters whose forward in PEFT breaks the graph of torch.compile."""
    has, kind = run.adapter, adapter_types.find(run.recipe.adapter.type).peft
    found = {kind} & set(adapter_types.BREAKING)
    found |= {"DoRA"} if has.columns and has.rank > 0 and (not fused or has.unsupported_reason) else set()
    found |= {"experts' adapters"} if _experts(run, fused=fused) == "peft" else set()
    return frozenset(found)
