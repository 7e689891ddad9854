"""All model surgery for speed and memory, in one place and one order: fuse, recompute, offload, compile.

Fused forwards are what a recomputed layer runs again; recomputation wraps a layer's call, offloading of its
input wraps that, and compile stands inside both, so that a recomputed layer runs its compiled code again.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune import qat
from finetune.errors import Exit, Problem, UserError
from finetune.hardware import Choice
from finetune.speed.offload import Activations

if TYPE_CHECKING:
    from finetune.hardware import Hardware
    from finetune.receipts import Ledger
    from finetune.sections import Speed

SPARE = 0.92  # of the memory that is free: the allocator's gaps take the rest
HEAD_GIB = 3.0  # of the loss on the output head: a chunk's logits, and the gradient of the hidden state
COMPILE_SECONDS = 120  # of training from which compiling, which takes about 20 s, pays


class Work(NamedTuple):
    """What a run asks of a model."""

    tokens: int  # of one forward pass, at most
    flops: float  # of this process, over the whole run
    sharded: str = ""  # what splits weights between processes: FSDP, DeepSpeed


class Memory(NamedTuple):
    """What the activations of one forward pass take, in GiB."""

    layers: int
    kept: float  # until backward, if nothing is recomputed
    norms: float  # of that, what norms make, which is cheap to make again
    entry: float  # of that, a layer's input: all that is kept of a recomputed one
    room: float  # for all of it


def apply(model: Any, speed: Speed, work: Work, hardware: Hardware, ledger: Ledger) -> dict[str, Choice]:
    """Change the model's own modules in place, read back what changed, and return what was chosen."""
    layers = decoder_layers(model)
    if not layers:
        return unknown(model, speed)
    fused, whole = choose_fused(speed.fused, model, hardware, work.sharded), False
    if fused.value == "on":
        fused, whole = add_fused(model, layers, fused, ledger)
    plan = memory(model, work.tokens, hardware, fused=whole, offload=speed.offload)
    recompute = choose_recompute(speed.recompute, plan, hardware)
    if speed.offload in ("activations", "all") and speed.recompute == "auto":
        recompute = Choice(f"{len(layers)} of {len(layers)}", "speed.offload keeps recomputed layers' inputs")
    if recompute.value != "none":
        whole = 0 if recompute.value == "cheap" else int(recompute.value.split()[0])
        add_recompute(model, layers, whole, ledger)
    if speed.offload in ("activations", "all"):
        Activations([layer for layer in layers if layer.gradient_checkpointing], model.device)
    compile = choose_compile(speed.compile, work, hardware)
    if compile.value == "on":
        torch._dynamo.reset()  # of a run before in this process
        torch._dynamo.utils.counters.clear()
        # eager runs what is over it, without a word: layers may differ by their ranks
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(layers) + 8)
        for layer in layers:
            layer.compile()  # in place: torch.compile(layer) would rename every key
        compiled = sum(layer._compiled_call_impl is not None for layer in layers)
        how = "layers with a compiled call"
        ledger.add("speed.compile", f"{len(layers)} layers", f"{compiled} layers", how)
    chosen = {"speed.fused": fused, "speed.compile": compile, "speed.recompute": recompute}
    return {**chosen, "speed.offload": choose_offload(speed.offload, model)}


def unknown(model: Any, speed: Speed) -> dict[str, Choice]:
    """What is chosen for a model whose decoder layers are not where transformers' decoders have them.

    Raises:
        UserError: something was asked for that needs them (exit 3).
    """
    reason, off = f"the layers of {type(base_of(model)).__name__} are not known", (False, "none", "auto")
    options = ("fused", "compile", "recompute", "offload")
    problems = [
        Problem(reason, f"speed.{name}", found=getattr(speed, name), fix=f"speed.{name}: {fix}")
        for name, fix in zip(options, ("auto", "auto", "auto", "none"), strict=True)
        if getattr(speed, name) not in off and getattr(speed, name) != "optimizer"
    ]
    if problems:
        raise UserError(*problems, code=Exit.ENVIRONMENT)
    made = {f"speed.{name}": Choice("off", reason) for name in options[:2]}
    made["speed.recompute"] = Choice("none", reason)
    return {**made, "speed.offload": choose_offload(speed.offload, model)}


def choose_fused(asked: str | bool, model: Any, hardware: Hardware, sharded: str = "") -> Choice:
    """Whether adapters run through the fast forwards of `lora`.

    Raises:
        UserError: asked for where there is no adapter (exit 2), or where weights are sharded (exit 3).
    """
    if sharded and hasattr(model, "peft_config"):
        reason = f"{sharded} splits the weights that fast forwards hold whole"
        if asked is True:
            problem = Problem(reason, "speed.fused", found=sharded, fix="speed.fused: auto")
            raise UserError(problem, code=Exit.ENVIRONMENT)
        return Choice("off", reason if asked == "auto" else "asked for")
    if not hasattr(model, "peft_config"):
        if asked is True:
            what, fix = "there is no adapter to fuse: every parameter trains", "speed.fused: auto"
            raise UserError(Problem(what, "speed.fused", found="adapter.type: full", fix=fix))
        return Choice("off", "no adapter: every parameter trains")
    if asked == "auto":
        if hardware.device == "cpu":
            return Choice("off", "auto: it is for GPUs; on the CPU PEFT's own forward runs")
        if model.dtype != torch.bfloat16:
            return Choice("off", f"auto: its kernels are measured in bf16, the model is in {model.dtype}")
        if qat.rounding(model):
            return Choice("off", "auto: quantisation-aware training has forwards of its own")
        return Choice("on", "auto")
    return Choice("on" if asked else "off", "asked for")


def add_fused(model: Any, layers: list[Any], chosen: Choice, ledger: Ledger) -> tuple[Choice, bool]:
    """Fuse, with a receipt; returns the choice with what was done, and whether every layer's MLP is fused.

    Raises:
        UserError: asked for, and no layer can be (exit 3).
    """
    from finetune.speed.fuse import Fused

    made = Fused(model, layers)
    left = "; ".join(f"{count} by PEFT: {reason}" for reason, count in sorted(made.left.items()))
    got = f"{made.served} linear layers" + (f"; {left}" if left else "")
    if chosen.reason == "asked for" and not made.served:
        what, fix = "none of the adapter's layers can be fused", "speed.fused: auto"
        raise UserError(Problem(what, "speed.fused", found=left, fix=fix), code=Exit.ENVIRONMENT)
    how = f"fast forwards on the live model, at most {made.worst:.1g} from the modules' own (relative)"
    ledger.add("speed.fused", "what can be fused", got, how, ok=True)
    value, whole = "on" if made.served else "off", made.mlps == len(layers)
    return chosen if chosen.reason == "asked for" else Choice(value, f"{chosen.reason}: {got}"), whole


def choose_recompute(asked: str | int, plan: Memory, hardware: Hardware) -> Choice:
    """`none`, `cheap` (the norms of all layers), or how many layers are recomputed whole beside the other
    layers' norms (`8 of 32`); `auto` takes the least that fits."""
    layers = plan.layers
    if asked in ("none", "cheap", "all"):
        return Choice(f"{layers} of {layers}" if asked == "all" else str(asked), "asked for")
    if isinstance(asked, int):
        return Choice(f"{min(asked, layers)} of {layers}", "asked for")
    if hardware.device == "cpu":
        return Choice("none", "auto: on the CPU memory is not what is short")
    text = f"auto: activations need about {plan.kept:.0f} GiB, {plan.room:.0f} GiB are free for them"
    if plan.kept <= plan.room:
        return Choice("none", text)
    kept = plan.kept - plan.norms
    if kept <= plan.room:
        return Choice("cheap", f"{text}; without what norms make {kept:.0f} GiB")
    saved = kept / layers - plan.entry
    count = min(layers, math.ceil((kept - plan.room) / saved) + 1)  # one is whole while it runs again
    return Choice(f"{count} of {layers}", text)


def add_recompute(model: Any, layers: list[Any], count: int, ledger: Ledger) -> None:
    """Recompute `count` of the layers, evenly spread, the first among them; of the others their norms."""
    chosen = {i * len(layers) // count for i in range(count)}
    if count:
        enable = getattr(model, "activation_checkpointing_enable", None)
        enable = enable or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen and isinstance(layer, GradientCheckpointingLayer)
        for norm in [] if index in chosen else norms_of(layer):
            norm.forward = functools.partial(
                checkpoint, norm.forward, use_reentrant=False, preserve_rng_state=False
            )
    total, wrapped = len(layers), sum(bool(layer.gradient_checkpointing) for layer in layers)
    alone = sum("forward" in vars(norm) for layer in layers for norm in norms_of(layer))
    got = f"{wrapped} of {total}" + (f", and {alone} norms" if alone else "")
    asked, how = (
        f"{count} of {total}" if count else "cheap",
        "layers with the flag set, norms with a forward that is checkpointed",
    )
    ledger.add("speed.recompute", asked, got, how, ok=wrapped == count)


def norms_of(layer: Any) -> list[Any]:
    """The norms of a decoder layer whose output its linear layers read, and so keep until backward."""
    return [m for m in layer.children() if "Norm" in type(m).__name__ and not list(m.children())]


def choose_offload(asked: str, model: Any) -> Choice:
    """As asked, with what there is to gain from the optimizer's part."""
    if asked not in ("optimizer", "all"):
        return Choice(asked, "not asked for" if asked == "none" else "asked for")
    state = 8 * sum(p.numel() for p in model.parameters() if p.requires_grad) / 2**30
    little = ", which is little: an adapter's" if hasattr(model, "peft_config") else ""
    return Choice(asked, f"AdamW's state takes {state:.2g} GiB{little}")


def choose_compile(asked: str | bool, work: Work | None, hardware: Hardware) -> Choice:
    """Whether each decoder layer is compiled: where the run is long enough for it to pay.

    Args:
        work: `None` where it is not known yet.
    """
    if asked != "auto":
        return Choice("on" if asked else "off", "asked for")
    if hardware.device == "cpu":
        return Choice("off", "auto: on the CPU it does not pay")
    if work is None:
        return Choice(
            "on", f"auto: in runs of more than {COMPILE_SECONDS} s, decided when the model is loaded"
        )
    seconds = work.flops / (0.4 * (hardware.peak_flops or 100e12))
    text = f"auto: about {seconds:,.0f} s of training"
    if seconds < COMPILE_SECONDS:
        return Choice("off", f"{text}, it pays from {COMPILE_SECONDS} s up")
    return Choice("on", text)


def decoder_layers(model: Any) -> list[Any]:
    """The decoder layers of a transformers or PEFT model, in order; none where they are not to be found."""
    layers = getattr(base_of(model).get_decoder(), "layers", None)
    return list(layers) if isinstance(layers, torch.nn.ModuleList) else []


def base_of(model: Any) -> Any:
    """The transformers model under an adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def memory(model: Any, tokens: int, hardware: Hardware, *, fused: bool, offload: str = "none") -> Memory:
    """The memory plan of `tokens` tokens on this model and device."""
    kept = kept_gib(model.config, tokens, fused=fused, dora=_is_dora(model)) + qat.kept_gib(model)
    hidden, layers = model.config.get_text_config().hidden_size, len(decoder_layers(model))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    each = 4 if offload in ("optimizer", "all") else 12  # gradient and two moments, fp32
    room = SPARE * free_gib(hardware) - HEAD_GIB - each * trained / 2**30
    row = tokens * hidden * 2 / 2**30
    return Memory(layers, kept, 2 * layers * row, 0.0 if offload in ("activations", "all") else row, room)


def kept_gib(config: Any, tokens: int, *, fused: bool, dora: bool = False) -> float:
    """Memory that backward keeps for `tokens` tokens with nothing recomputed, in GiB.

    Numbers a token and layer, of 2 bytes: fused, 5 hidden, q, k and v, 2 intermediate (gate and up); else
    5 hidden and 3 intermediate. DoRA keeps q, k, v and two hidden more. An 8B LoRA at 16,384 tokens: 54 and
    62 GiB (measured 54 and 60).
    """
    config = config.get_text_config()
    hidden, intermediate = config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size)
    heads = config.num_attention_heads + 2 * (config.num_key_value_heads or config.num_attention_heads)
    qkv = heads * (getattr(config, "head_dim", None) or hidden // config.num_attention_heads)
    kept = 5 * hidden + (qkv + 2 * intermediate if fused else 3 * intermediate)
    kept += qkv + 2 * hidden if dora else 0
    return tokens * config.num_hidden_layers * 2 * kept / 2**30


def _is_dora(model: Any) -> bool:
    return any("lora_magnitude_vector" in name for name, _ in model.named_parameters())


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
    linear = [module for module in adapted.modules() if isinstance(module, torch.nn.Linear)]
    return sum(m.in_features * m.out_features * (6.0 if m.weight.requires_grad else 4.0) for m in linear)
