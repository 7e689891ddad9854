"""All model surgery for speed and memory, in one place and one order: recompute, then compile.

Recompute comes first because it wraps a layer's call, and compile must see the wrapped call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune import qat
from finetune.hardware import Choice

if TYPE_CHECKING:
    from finetune.hardware import Hardware
    from finetune.receipts import Ledger
    from finetune.sections import Speed

MEMORY_SHARE = 0.8  # of a device's memory that weights and activations may take before `auto` recomputes


def choose_recompute(asked: str, config: Any, weights_gib: float, tokens: int, hardware: Hardware) -> Choice:
    """`none` or `all`; `auto` asks whether the activations of `tokens` tokens fit beside the weights."""
    if asked != "auto":
        return Choice(asked, "asked for")
    if hardware.device == "cpu":
        return Choice("none", "auto: on the CPU memory is not what is short")
    need, room = weights_gib + activation_gib(config, tokens), MEMORY_SHARE * hardware.memory_gib
    text = f"auto: weights and activations need about {need:.0f} GiB, {room:.0f} GiB are there"
    return Choice("none" if need <= room else "all", text)


def choose_compile(asked: str | bool) -> Choice:
    if asked == "auto":
        return Choice("off", "auto: pays only in runs of many minutes; ask for it with speed.compile=true")
    return Choice("on" if asked else "off", "asked for")


def apply(model: Any, speed: Speed, tokens: int, hardware: Hardware, ledger: Ledger) -> dict[str, Choice]:
    """Change the model's own modules in place, read back what changed, and return what was chosen.

    Args:
        tokens: tokens of one forward pass, at most.
    """
    layers = decoder_layers(model)
    weights_gib = model.get_memory_footprint() / 2**30 + qat.kept_gib(model)
    recompute = choose_recompute(speed.recompute, model.config, weights_gib, tokens, hardware)
    if recompute.value == "all":
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
        wrapped = sum(bool(getattr(layer, "gradient_checkpointing", False)) for layer in layers)
        ledger.add(
            "speed.recompute",
            f"all of {len(layers)}",
            f"all of {wrapped}",
            "layers with the flag set",
        )
    compile = choose_compile(speed.compile)
    if compile.value == "on":
        for layer in layers:
            layer.compile()  # in place: torch.compile(layer) would rename every key
        compiled = sum(layer._compiled_call_impl is not None for layer in layers)
        ledger.add(
            "speed.compile",
            f"{len(layers)} layers",
            f"{compiled} layers",
            "layers with a compiled call",
        )
    return {"speed.compile": compile, "speed.recompute": recompute}


def decoder_layers(model: Any) -> list[Any]:
    """The decoder layers of a transformers or PEFT model, in order."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return list(base.get_decoder().layers)


def activation_gib(config: Any, tokens: int) -> float:
    """Memory that backward keeps for `tokens` tokens with nothing recomputed, in GiB.

    2 bytes x (5 hidden + 3 intermediate) a token and layer; an 8B LoRA at 16,384 tokens measures 60 GiB, this
    gives 62.
    """
    config = config.get_text_config()
    kept = 2 * (5 * config.hidden_size + 3 * config.intermediate_size)
    return tokens * config.num_hidden_layers * kept / 2**30
