"""All model surgery for speed and memory, in one place and order: fuse, checkpoint, offload, compile.

Fused forwards are what a recomputed layer runs again; recomputation wraps a layer's call, offloading of its
input wraps that, and compile stands inside both, so that a recomputed layer runs its compiled code again.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.autoconfig import compilation, cuda_graphs, memory_estimate
from finetune.autoconfig.compilation import Work, choose_compile
from finetune.autoconfig.memory_estimate import Keeps, Memory
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.run_checks import Choice
from finetune.distributed import collectives, launch_environment, sharded_tensors
from finetune.models import module_names
from finetune.quantization import qat
from finetune.quantization.fp8_linear import Fp8Linear
from finetune.recipe import adapter_types
from finetune.speed.activation_offload import Activations
from finetune.speed.lm_head_loss import base_of

if TYPE_CHECKING:
    from finetune.core.run_checks import RunChecks
    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Speed


def apply(model: Any, speed: Speed, work: Work, hardware: Hardware, ledger: RunChecks) -> dict[str, Choice]:
    """Change the model's own modules in place, read back what changed, and return what was chosen.

    Raises:
        UserError: what was asked for can't be had together, or not here (exit 3).
    """
    layers = decoder_layers(model)
    if not layers:
        return unknown(model, speed)
    fused, whole = choose_fused(speed.fused, model, hardware, work.sharded), False
    done = fused.reason
    if fused.value == "on":
        fused, whole = add_fused(model, layers, fused, ledger)
        done = str(ledger.receipts[-1].actual)
    broken = breaking(model)
    if problem := compilation.against_breaks(speed.compile, broken):
        raise UserError(problem, code=Exit.ENVIRONMENT)
    work = work._replace(eager=work.eager or broken)
    compile = as_rank_0(choose_compile(speed.compile, work, hardware))
    graphs = choose_graphs(model, speed.compile, work, compile, hardware)
    how = {"fused": whole, "compiled": compile.value == "on", "offload": speed.offload}
    plan = memory(model, work.tokens, hardware, **how, parts=work.parts, each=work.each, sharded=work.sharded)
    room, host = least(plan.room - work.awaited, work.host)
    plan = plan._replace(room=room, host=host, unfused=f"speed.fused: {done}")
    made = cuda_graphs.beside(graphs, speed, speed.activation_checkpointing, plan, hardware)
    checkpointing, offload, graphs = as_rank_0(made[:3])
    if problem := compilation.against_graphs(speed.compile, checkpointing.value, offload.value, work.sharded):
        raise UserError(problem, code=Exit.ENVIRONMENT)
    if checkpointing.value != "none":
        count, mlps = memory_estimate.split(checkpointing.value, len(layers))
        rounded = checkpointing.value.startswith("mlp_int8")
        add_activation_checkpointing(model, layers, count, ledger, mlps=mlps if whole else 0, rounded=rounded)
    if count := round(memory_estimate.away(offload.value, len(layers)) * len(layers)):
        device = torch.device(hardware.device)  # the weights may still be on the CPU: rank 0 hands them on
        chosen = [
            one for one in layers if one.gradient_checkpointing or checkpointing.value in ("mlp", "mlp_int8")
        ]
        count = min(count, len(chosen))
        Activations([chosen[i * len(chosen) // count] for i in range(count)], device, layers[-1])
    if compile.value == "on":
        torch._dynamo.reset()  # of a run before in this process
        torch._dynamo.utils.counters.clear()
        # eager runs what is over it, without a word: layers may differ by their ranks
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(layers) + 8)
        torch._dynamo.config.optimize_ddp = False  # that cuts each layer in two at its first MiB of gradients
        # The first layer's input asks for a gradient, as the others' do: a graph of its own, which it would
        # be without, is 8 s of compiling (benchmarks/LOG.md), and the gradient a thousandth of a step
        base_of(model).enable_input_require_grads()
        mode = speed.compile if isinstance(speed.compile, str) and speed.compile != "auto" else None
        mode = mode or (compilation.GRAPHS[0] if graphs.value == "on" else None)
        for layer in layers:
            layer.compile(mode=mode)  # in place: torch.compile(layer) would rename every key
        for parameter in [p for layer in layers for p in layer.parameters() if graphs.value == "on"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(own_gradient)
        compiled = sum(layer._compiled_call_impl is not None for layer in layers)
        how = "layers with a compiled call"
        ledger.add("speed.compile", f"{len(layers)} layers", f"{compiled} layers", how)
    chosen = {"speed.fused": fused, "speed.compile": compile, "speed.activation_checkpointing": checkpointing}
    return {**chosen, "speed.offload": worth(offload, model), "CUDA graphs": graphs}


def choose_graphs(model: Any, asked: str | bool, work: Work, compile: Choice, hardware: Hardware) -> Choice:
    """Whether the compiled layers of this model run as CUDA graphs."""
    fp8 = any(isinstance(module, Fp8Linear) for module in model.modules())
    kind = "full" if not hasattr(model, "peft_config") else "fp8" if fp8 else "adapter"
    products = cuda_graphs.products(model.config, work.tokens, hardware.peak_flops, kind=kind)
    return cuda_graphs.choose(asked, compile, differs=work.differs, products=products, kind=kind)


def least(*memory: float) -> list[float]:
    """Of each number the least that a rank has."""
    return [min(each) for each in zip(*collectives.gathered(memory), strict=True)]


def as_rank_0(chosen: Any) -> Any:
    """What rank 0 has chosen, whose GPU may be another. All must choose alike: a layer that one recomputes
    gathers its weights once more, where they are split, and a rank that does not would never answer."""
    return collectives.from_main(lambda: chosen)


def own_gradient(parameter: torch.Tensor) -> None:
    """A CUDA graph writes each gradient where it wrote the last one, to which autograd would add it."""
    if not hasattr(parameter.grad, "own"):  # to the copy autograd adds in place
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()
        parameter.grad.own = True  # pyright: ignore[reportAttributeAccessIssue] (a mark of ours)


def unknown(model: Any, speed: Speed) -> dict[str, Choice]:
    """What is chosen for a model whose decoder layers are not where transformers' decoders have them.

    Raises:
        UserError: something was asked for that needs them (exit 3).
    """
    reason, off = f"the layers of {type(base_of(model)).__name__} are not known", (False, "none", "auto")
    options = ("fused", "compile", "activation_checkpointing", "offload")
    problems = [
        Problem(reason, f"speed.{name}", found=getattr(speed, name), fix=f"speed.{name}: {fix}")
        for name, fix in zip(options, ("auto", "auto", "auto", "none"), strict=True)
        if getattr(speed, name) not in off and getattr(speed, name) != "optimizer"
    ]
    if problems:
        raise UserError(*problems, code=Exit.ENVIRONMENT)
    made = {f"speed.{name}": Choice("off", reason) for name in options[:2]}
    made |= {"speed.activation_checkpointing": Choice("none", reason), "CUDA graphs": Choice("off", reason)}
    offload = speed.offload if speed.offload != "auto" else "none"
    return {**made, "speed.offload": worth(Choice(offload, reason), model)}


def choose_fused(asked: str | bool, model: Any, hardware: Hardware, sharded: str = "") -> Choice:
    """Whether adapters run through the fused forwards of `fused_lora`.

    Raises:
        UserError: asked for where there is no adapter (exit 2), or where weights are sharded (exit 3).
    """
    if sharded and hasattr(model, "peft_config"):
        reason = f"{sharded} splits the weights that fast forwards hold whole"
        if asked is True:
            problem = Problem(reason, "speed.fused", found=sharded, fix="speed.fused: auto")
            raise UserError(problem, code=Exit.ENVIRONMENT)
        return Choice("off", reason if asked == "auto" else "asked for")
    adapted, rounding = hasattr(model, "peft_config"), bool(qat.rounding(model))
    dtype = str(model.dtype).removeprefix("torch.")
    return compilation.choose_fused(asked, hardware, adapted=adapted, dtype=dtype, rounding=rounding)


def add_fused(model: Any, layers: list[Any], chosen: Choice, ledger: RunChecks) -> tuple[Choice, bool]:
    """Fuse, with a run check; returns the choice with what was done, and whether every layer's MLP is fused:
    that of a layer with experts is not, if only what they share is.

    Raises:
        UserError: asked for, and no layer can be (exit 3).
    """
    from finetune.speed.fused_layers import Fused

    made = Fused(model, layers)
    left = "; ".join(f"{count} by PEFT: {reason}" for reason, count in sorted(made.left.items()))
    got = f"{made.served} linear layers" + (f"; {left}" if left else "")
    got += "".join(f"; {count} MLPs in parts: {reason}" for reason, count in sorted(made.parts.items()))
    if chosen.reason == "asked for" and not made.served:
        what, fix = "none of the adapter's layers can be fused", "speed.fused: auto"
        raise UserError(Problem(what, "speed.fused", found=left, fix=fix), code=Exit.ENVIRONMENT)
    how = f"fast forwards on the live model, at most {made.worst:.1g} from the modules' own (relative)"
    ledger.add("speed.fused", "what can be fused", got, how, ok=True)
    value = "on" if made.served else "off"
    whole = made.mlps == len(layers) and not any(experts_of(layer) for layer in layers)
    return chosen if chosen.reason == "asked for" else Choice(value, f"{chosen.reason}: {got}"), whole


def breaking(model: Any) -> str:
    """Why layers can't be compiled whole: forwards of PEFT's that break the graph; empty: none is left."""
    whole = [module for module in model.modules() if hasattr(module, "finetune_fused")]
    fused, found = {id(part) for module in whole for part in module.modules()}, set[str]()
    for module in model.modules():
        if not isinstance(module, BaseTunerLayer) or id(module) in fused:
            continue
        kind = type(module).__module__.split(".")[-2]
        found |= {kind} if kind in adapter_types.BREAKING else set()
        found |= {"DoRA"} if getattr(module, "lora_magnitude_vector", None) else set()
        found |= {"experts' adapters"} if type(module).__name__ == "ParamWrapper" else set()
    return f"PEFT's forward of {', '.join(sorted(found))} breaks the graph" if found else ""


def add_activation_checkpointing(
    model: Any, layers: list[Any], count: int, ledger: RunChecks, *, mlps: int = 0, rounded: bool = False
) -> None:
    """Recompute `count` of the layers, evenly spread, the first among them; of the others their norms.

    Args:
        mlps: of so many of the others, the first ones, gate and up too, which are fused.
        rounded: gate and up that are not made again are kept in int8.
    """
    chosen = {i * len(layers) // count for i in range(count)}
    if count:
        enable = getattr(model, "activation_checkpointing_enable", None)
        enable = enable or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen and isinstance(layer, GradientCheckpointingLayer)
        for norm in [] if index in chosen else norms_of(layer):
            norm.forward = MethodType(_again, norm)  # a partial is its own: each layer would be compiled
    others = [layer for index, layer in enumerate(layers) if index not in chosen]
    for index, layer in enumerate(others):
        for stack in fused_mlps(layer):
            stack.kept = "input" if index < mlps else "int8" if rounded else "product"
    total, wrapped = len(layers), sum(bool(layer.gradient_checkpointing) for layer in layers)
    alone = sum("forward" in vars(norm) for layer in layers for norm in norms_of(layer))
    kept = [stack.kept for layer in layers for stack in fused_mlps(layer)]
    again, in_int8 = kept.count("input"), kept.count("int8")
    got = f"{wrapped} of {total}" + (f", and {alone} norms" if alone else "")
    got += f", gate and up of {again} MLPs" if again else ""
    got += f"; those of {in_int8} kept in int8" if in_int8 else ""
    some = "mlp" if mlps == total else "mlp_int8" if rounded else "mlp" if mlps else "norms"
    some += f":{mlps}" if 0 < mlps < total else ""
    asked = f"{count} of {total}" if count else some
    how = "layers with the flag set, norms with a forward that is checkpointed, what MLPs keep"
    right = wrapped == count and again == mlps and in_int8 == (total - mlps if rounded else 0)
    ledger.add("speed.activation_checkpointing", asked, got, how, ok=right)


def _again(norm: torch.nn.Module, *inputs: torch.Tensor) -> Any:
    """A norm's forward, made again in backward."""
    own = type(norm).forward
    return checkpoint(own, norm, *inputs, use_reentrant=False, preserve_rng_state=False)


def fused_mlps(layer: Any) -> list[Any]:
    """Gate and up of a decoder layer's fused MLPs."""
    fused = [m.finetune_fused for m in layer.modules() if hasattr(m, "finetune_fused")]
    return [parts[0] for parts in fused if len(parts) == 3]


def experts_of(layer: Any) -> list[Any]:
    """The experts of a decoder layer's MLP, whose weights stand in one parameter or in a list of modules."""
    return [module for name, module in layer.named_modules() if name.endswith("experts")]


def norms_of(layer: Any) -> list[Any]:
    """The norms of a decoder layer whose output its linear layers read, and so keep until backward."""
    return [m for m in layer.children() if "Norm" in type(m).__name__ and not list(m.children())]


def worth(offload: Choice, model: Any) -> Choice:
    """The choice, with what there is to gain from the optimizer's part."""
    if offload.value not in ("optimizer", "all"):
        return offload
    state = 8 * sum(p.numel() for p in model.parameters() if p.requires_grad) / 2**30
    little = ", which is little: an adapter's" if hasattr(model, "peft_config") else ""
    return Choice(offload.value, f"AdamW's state takes {state:.2g} GiB{little}")


def decoder_layers(model: Any) -> list[Any]:
    """The decoder layers of a transformers or PEFT model, in order; none where they are not to be found."""
    layers = getattr(base_of(model).get_decoder(), "layers", None)
    return list(layers) if isinstance(layers, torch.nn.ModuleList) else []


def memory(
    model: Any,
    tokens: int,
    hardware: Hardware,
    *,
    fused: bool,
    compiled: bool,
    offload: str = "none",
    parts: int = 1,
    each: float = 12.0,
    sharded: str = "",
) -> Memory:
    """The memory plan of `tokens` tokens on this model and device; `parts`, `each`, `sharded`: as `Work` has
    them."""
    trained = {n: sharded_tensors.shape(p).numel() for n, p in model.named_parameters() if p.requires_grad}
    ia3 = any("ia3_l" in name for name in trained)
    columns = ia3 or any("lora_magnitude_vector" in name for name in trained)
    adapted, layers = hasattr(model, "peft_config"), max(1, len(decoder_layers(model)))
    repeated = model.config.get_text_config()._attn_implementation in ("sdpa", "eager")
    repeated &= launch_environment.parallel("CP") == 1  # where rows are shared SDPA has no mask
    four_bit = bool(getattr(base_of(model), "is_loaded_in_4bit", False))
    keeps = Keeps(fused, compiled, adapted, columns, dropped(model) // layers, repeated, not ia3, four_bit)
    in_fp8 = any(isinstance(module, Fp8Linear) for module in model.modules())
    keeps = keeps._replace(uncast=adapted and parts > 1, fp8=in_fp8, head=head_trains(model))
    given = {"free": free_gib(hardware), "trained": sum(trained.values()) // parts, "offload": offload}
    return memory_estimate.activations(
        model.config, tokens, keeps, **given, extra=qat.kept_gib(model), each=each, sharded=bool(sharded)
    )


def head_trains(model: Any) -> bool:
    """Whether the output head does: with all, or by `modules_to_save`."""
    head = model.get_output_embeddings()
    return head is not None and any(parameter.requires_grad for parameter in head.parameters())


def dropped(model: Any) -> int:
    """Inputs of the layers whose adapter drops some of them, summed over the model."""
    adapters = (m for m in model.modules() if getattr(m, "lora_dropout", None))
    drops = (
        any(isinstance(d, torch.nn.Dropout) for d in m.lora_dropout.values()) * m.in_features
        for m in adapters
    )
    return sum(drops)


def free_gib(hardware: Hardware) -> float:
    """Memory of the GPU that nothing holds, in GiB."""
    if hardware.device != "cuda":
        return hardware.memory_gib
    torch.cuda.empty_cache()
    limit = torch.cuda.get_per_process_memory_fraction() * hardware.memory_gib
    held = torch.cuda.memory_allocated() / 2**30
    return min(torch.cuda.mem_get_info()[0] / 2**30, limit - held)


def flops_per_token(adapted: torch.nn.Module) -> float:
    """FLOPs of one token's forward and backward through the linear layers (attention's own is not counted).

    A frozen weight costs 2 FLOPs an element in forward and 2 for its input's gradient; a trained one 2 more.
    """
    base = base_of(adapted)
    beside = set(base.modules()) - set(module_names.of_text(base))
    linear = [m for m in adapted.modules() if isinstance(m, torch.nn.Linear) and m not in beside]
    return sum(m.in_features * m.out_features * (6.0 if m.weight.requires_grad else 4.0) for m in linear)
