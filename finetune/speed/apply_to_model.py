"""Change a model for speed and memory, in this order: fuse, checkpoint, offload, compile.

A recomputed layer runs its fused forward again. Recomputation wraps the call of a layer, and offloading wraps
the recomputation. Compilation is inside both, so that a recomputed layer runs its compiled code.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.autoconfig import compilation, memory_estimate
from finetune.autoconfig.compilation import Work
from finetune.autoconfig.decisions import Decisions, ModelSpec, decide, decide_fused, none_fused
from finetune.core import model_config, upstream_private
from finetune.core.run_checks import Choice, RunChecks
from finetune.distributed import collectives
from finetune.hardware.detection import Hardware
from finetune.models import module_names
from finetune.recipe.schema import Speed
from finetune.speed import router_balance
from finetune.speed.activation_offload import Activations
from finetune.speed.live_model_spec import decoder_layers, fused_mlps, live_model_spec
from finetune.speed.lm_head_loss import base_model_of


def apply(model: nn.Module, speed: Speed, work: Work, hardware: Hardware, checks: RunChecks) -> Decisions:
    """Change the model's modules in place, add run checks of the changes, and return the decisions.

    Raises:
        UserError: requested settings do not work together or on this machine (exit 3).
    """
    spec = live_model_spec(model)
    fused = decide_fused(spec, speed.fused, hardware, work.sharded)
    if fused.value == "on":
        fused, spec = add_fused(model, fused, checks)
    room = memory_estimate.usable_gib(free_gib(hardware), sharded=bool(work.sharded)) - work.arriving_gib
    usable, host = least(room, work.host)
    decided = decide(spec, speed, work._replace(usable=usable, host=host), hardware, fused)
    # All ranks use rank 0's decisions. With sharded weights, a recomputed layer gathers its weights again,
    # and ranks that do not recompute it would never answer.
    decided = collectives.from_main(lambda: decided)
    if spec.layers:
        change_layers(model, decided, hardware, checks)
    if decided.compile.value == "on":
        compile_layers(model, decided, speed, checks)
    return decided


def change_layers(model: nn.Module, decided: Decisions, hardware: Hardware, checks: RunChecks) -> None:
    """Recompute layers, and offload their inputs to CPU memory, as decided."""
    layers, checkpointing = decoder_layers(model), decided.checkpointing.value
    if checkpointing != "none":
        count, mlps = memory_estimate.recomputed_layers(checkpointing, len(layers))
        rounded, whole = checkpointing.startswith("mlp_int8"), decided.keeps.fused
        add_activation_checkpointing(model, layers, count, checks, mlps=mlps if whole else 0, rounded=rounded)
    if count := round(memory_estimate.offloaded_share(decided.offload.value, len(layers)) * len(layers)):
        device = torch.device(hardware.device)  # the weights may still be on the CPU until rank 0 sends them
        chosen = [one for one in layers if one.gradient_checkpointing or checkpointing in ("mlp", "mlp_int8")]
        count = min(count, len(chosen))
        Activations([chosen[i * len(chosen) // count] for i in range(count)], device, layers[-1])


def compile_layers(model: nn.Module, decided: Decisions, speed: Speed, checks: RunChecks) -> None:
    """Compile each decoder layer in place, with CUDA graphs if decided."""
    layers, graphs = decoder_layers(model), decided.graphs.value == "on"
    torch.compiler.reset()  # an earlier run of this process may have compiled layers
    upstream_private.compile_counters().clear()
    upstream_private.allow_graphs(2 * len(layers) + 8)
    # The first layer's input requires a gradient as the inputs of the other layers do. Otherwise this layer
    # needs its own graph, which takes 8 s to compile (benchmarks/LOG.md). The gradient takes 0.1 % of a step.
    base_model_of(model).enable_input_require_grads()
    mode = speed.compile if isinstance(speed.compile, str) and speed.compile != "auto" else None
    mode = mode or (compilation.GRAPHS[0] if graphs else None)
    for layer in layers:
        layer.compile(mode=mode)  # in place: torch.compile(layer) would rename every key
    for parameter in [p for layer in layers for p in layer.parameters() if graphs]:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(own_gradient)
    compiled = sum(upstream_private.is_compiled(layer) for layer in layers)
    checks.add(
        "speed.compile",
        expected=f"{len(layers)} layers",
        actual=f"{compiled} layers",
        how="decoder layers with a compiled call",
    )


def least(*memory: float) -> list[float]:
    """Return the minimum of each number over all ranks."""
    return [min(of_ranks) for of_ranks in zip(*collectives.gathered(memory), strict=True)]


def own_gradient(parameter: torch.Tensor) -> None:
    """Copy a gradient of a CUDA graph, which writes each gradient to the address of the previous one."""
    if not hasattr(parameter.grad, "own"):  # autograd adds in place to the copy
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()
        parameter.grad.own = True  # pyright: ignore[reportAttributeAccessIssue] (a mark of ours)


def add_fused(model: nn.Module, chosen: Choice, checks: RunChecks) -> tuple[Choice, ModelSpec]:
    """Fuse the adapters, and add a run check.

    Returns:
        The choice with a summary of the fused layers, and the spec of the fused model.

    Raises:
        UserError: the recipe asks for fused adapters, and no layer can be fused (exit 3).
    """
    from finetune.speed.fused_layers import Fused

    fused = Fused(model, decoder_layers(model))
    served = bool(fused.served or fused.experts.served or fused.experts.installed)
    if chosen.reason == "asked for" and not served:
        raise none_fused(fused.left_out())
    actual = fused.summary()
    checks.add(
        "speed.fused",
        expected="all layers that can be fused",
        actual=actual,
        how=(
            "fused layers of the model; largest relative difference from PEFT's own forward "
            f"{fused.worst:.1g}"
        ),
        ok=True,
    )
    spec = replace(live_model_spec(model), unfused=actual)
    if chosen.reason == "asked for":
        return chosen, spec
    return Choice("on" if served else "off", f"{chosen.reason}: {actual}"), spec


def add_activation_checkpointing(
    model: Any,
    layers: list[Any],
    count: int,
    checks: RunChecks,
    *,
    mlps: int = 0,
    rounded: bool = False,
) -> None:
    """Recompute `count` layers, evenly spread from the first one, and only the norms of the other layers.

    Args:
        mlps: number of the other layers, from the first one, that also recompute gate and up of fused MLPs.
        rounded: whether gate and up that are not recomputed are stored in int8.
    """
    chosen = {i * len(layers) // count for i in range(count)}
    if count:
        enable = getattr(model, "activation_checkpointing_enable", None)
        enable = enable or model.gradient_checkpointing_enable
        routers = router_balance.routers_of(base_model_of(model))
        enable({"use_reentrant": False, "context_fn": partial(_checkpoint_contexts, routers)})
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen and isinstance(layer, GradientCheckpointingLayer)
        for norm in [] if index in chosen else norms_of(layer):
            norm.forward = MethodType(_again, norm)  # with a partial, each layer would be compiled again
    others = [layer for index, layer in enumerate(layers) if index not in chosen]
    for index, layer in enumerate(others):
        for stack in fused_mlps(layer):
            stack.kept = "input" if index < mlps else "int8" if rounded else "product"
    total, wrapped = len(layers), sum(bool(layer.gradient_checkpointing) for layer in layers)
    alone = sum("forward" in vars(norm) for layer in layers for norm in norms_of(layer))
    kinds = [stack.kept for layer in layers for stack in fused_mlps(layer)]
    from_input, in_int8 = kinds.count("input"), kinds.count("int8")
    actual = f"{wrapped} of {total}" + (f", and {alone} norms" if alone else "")
    actual += f", gate and up of {from_input} MLPs" if from_input else ""
    actual += f"; {in_int8} MLPs in int8" if in_int8 else ""
    some = "mlp" if mlps == total else "mlp_int8" if rounded else "mlp" if mlps else "norms"
    some += f":{mlps}" if 0 < mlps < total else ""
    expected = f"{count} of {total}" if count else some
    right = wrapped == count and from_input == mlps and in_int8 == (total - mlps if rounded else 0)
    checks.add(
        "speed.activation_checkpointing",
        expected=expected,
        actual=actual,
        how="layers with the flag set, norms with a checkpointed forward, saved activations of fused MLPs",
        ok=right,
    )


def _checkpoint_contexts(routers: list[tuple[Any, int]]) -> tuple[Any, Any]:
    """Return the contexts of a layer's forward pass and of its recomputation, for `checkpoint`."""
    return nullcontext(), router_balance.recomputation(routers)


def _again(norm: torch.nn.Module, *inputs: torch.Tensor) -> Any:
    """Run a norm's forward, and recompute it in the backward pass."""
    return checkpoint(type(norm).forward, norm, *inputs, use_reentrant=False, preserve_rng_state=False)


def norms_of(layer: nn.Module) -> list[Any]:
    """Return the norms of a decoder layer whose outputs its linear layers save for the backward pass."""
    return [m for m in layer.children() if "Norm" in type(m).__name__ and not list(m.children())]


def free_gib(hardware: Hardware) -> float:
    """Return the free GPU memory in GiB."""
    if hardware.device != "cuda":
        return hardware.memory_gib
    torch.cuda.empty_cache()
    limit = torch.cuda.get_per_process_memory_fraction() * hardware.memory_gib
    allocated = torch.cuda.memory_allocated() / 2**30
    return min(torch.cuda.mem_get_info()[0] / 2**30, limit - allocated)


def flops_per_token(adapted: torch.nn.Module) -> float:
    """Return the FLOPs of one token's forward and backward pass through the linear layers, without attention.

    A frozen weight needs 2 FLOPs per element in the forward pass and 2 for the gradient of its input. A
    trainable weight needs 2 more.
    """
    base = base_model_of(adapted)
    beside = set(base.modules()) - set(module_names.of_text(base))
    config = base.config.get_text_config()
    sizes = model_config.expert_sizes(config)
    used, total = sizes.each / sizes.number if sizes else 1.0, 0.0
    for name, module in adapted.named_modules():
        if isinstance(module, torch.nn.Linear) and module not in beside:
            each = module.in_features * module.out_features * (used if ".experts." in name else 1.0)
            total += each * (6 if module.weight.requires_grad else 4)
    lists = any(isinstance(m, torch.nn.ModuleList) and n.endswith("experts") for n, m in base.named_modules())
    return total + (0 if lists else 4 * memory_estimate.routed_size(config))
