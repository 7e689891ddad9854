"""CUDA graphs of compiled layers: where Python, which launches a layer's kernels, takes longer than the GPU.

A graph launches all kernels of a layer with one call, and holds one shape: batches have to be alike. In
passes of 2,048 tokens on an 8B's fp8 base that is 2.5 times the tokens/s (24gb_fastest of
benchmarks/README.md); where the GPU is what is waited for it is nothing, and recording takes some seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.autoconfig import activation_checkpointing, compilation, memory_estimate
from finetune.core.run_checks import Choice
from finetune.distributed import launch_environment
from finetune.recipe import adapter_types

if TYPE_CHECKING:
    from finetune.autoconfig.memory_estimate import Memory
    from finetune.core.model_config import ModelConfig
    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Recipe, Speed

# Seconds in which Python launches a compiled layer, forward and backward. Between what machines differ in:
# 4.0 to 6.3 ms (135m-bf16), 2.8 to 3.2 (135m-full) and 6.2 to 7.9 on fp8 (24gb_fastest, benchmarks/LOG.md)
LAUNCHED = {"adapter": 4.8e-3, "full": 3.2e-3, "fp8": 7.0e-3}
REPLAYED = 2.4e-3  # and a layer's two graphs, with its gradients' copies (135m-bf16-packed, a slow machine)
SHARE = 0.70  # of the GPU's peak in bf16, that products of frozen weights reach on an H200
# What was recorded and followed the plain run (tests/gpu/test_gpu.py): attention, adapters, stored bases
ATTENTION = ("flash_attention_3", "flash_attention_4", "varlen")  # without a mask, which would move
ADAPTERS = ("", "lora", "adalora", "ia3")  # PEFT's types; "": every weight trains
STORED = ("fp32", "bf16", "fp8", "nf4")
FAMILIES = ("llama",)
MADE_AGAIN = "layers are made again whole, or what they keep leaves the GPU, where no graph would find it"


def alone(processes: int) -> bool:
    """Whether a launch is one process, splits nothing and has no fp8 of its own: there graphs were tried."""
    return (
        processes == 1
        and not launch_environment.splitter()
        and launch_environment.fp8().kind in ("", launch_environment.FROZEN)
    )


def differs(
    recipe: Recipe, config: ModelConfig, *, alone: bool, attention: str, storage: str, searched: bool
) -> str:
    """Why passes of a run are not alike enough, or not known to be, for `auto` to record them; or nothing.

    Args:
        alone: of `alone`.
        searched: the rows of a pass are found by trying.
    """
    data, adapter, speed = recipe.data, recipe.adapter, recipe.speed
    if not (data.packing or data.padding_free):
        return "rows are padded to lengths of their own"
    if data.streaming:
        return "batches of a stream are of lengths of their own"
    if searched:
        return "how many rows a pass has is searched for"
    if not alone:
        return "not tried on several GPUs, nor under a launch that changes layers"
    text = config.get_text_config()
    drops = [getattr(text, key, 0) for key in ("resid_pdrop", "embd_pdrop", "hidden_dropout")]
    if adapter.options().get("lora_dropout") or any(drops):
        return "dropout would draw other numbers in the passes that record"
    tried = {
        text.model_type: text.model_type in FAMILIES,
        attention: attention in ATTENTION,
        f"adapter.type: {adapter.type}": adapter_types.find(adapter.type).peft in ADAPTERS,
        f"a base in {storage}": storage in STORED,
        "quantization-aware training": speed.qat is None,
    }
    asked = f"speed.compile: {compilation.GRAPHS[0]} makes them"
    return next((f"not tried with {what}; {asked}" for what, proved in tried.items() if not proved), "")


def choose(asked: str | bool, compile: Choice, *, differs: str, products: float, kind: str) -> Choice:
    """Whether compiled layers run as CUDA graphs: asked for by a mode of torch.compile, or where it pays.

    Args:
        compile: what was chosen for `speed.compile`.
        differs: why passes can't be graphs.
        products: seconds that a pass's products with a layer take.
        kind: of `LAUNCHED`.
    """
    if compile.value != "on":
        return Choice("off", "layers are not compiled")
    if asked not in ("auto", True):
        return Choice("on" if asked in compilation.GRAPHS else "off", "asked for")
    launched, text = LAUNCHED[kind], f"{products * 1e3:.1f} ms of products in each layer of a pass"
    if differs:
        return Choice("off", f"auto: {differs}")
    if products >= launched:
        return Choice("off", f"auto: the GPU has {text}, it is not Python that is waited for")
    return Choice("on", f"auto: {text}, which Python takes about {launched * 1e3:.1f} ms to launch")


def beside(
    chosen: Choice, speed: Speed, checkpointing: str, plan: Memory, hardware: Hardware
) -> tuple[Choice, Choice, Choice, Memory]:
    """What is made again, what leaves the GPU, whether layers are graphs beside that, and the memory plan so.

    By itself nothing makes graphs of layers that are made again whole, nor where memory has no room for them.
    Those that were asked for stay, whether or not there is.
    """
    asked = checkpointing, speed.offload
    if chosen.value == "on":
        again, offload, left = activation_checkpointing.choose(
            *asked, plan._replace(room=plan.room - plan.graphs), hardware
        )
        against = compilation.against_graphs(compilation.GRAPHS[0], again.value, offload.value)
        fits = max(memory_estimate.at_once(left, again.value)) <= left.room
        if fits and not against:
            return again, offload, chosen, left
        if speed.compile not in compilation.GRAPHS:
            room = f"memory has no room for the {plan.graphs:.2g} GiB that they take"
            chosen = Choice("off", f"auto: {MADE_AGAIN if against else room}")
    again, offload, plan = activation_checkpointing.choose(*asked, plan, hardware)
    return again, offload, chosen, plan


def products(config: ModelConfig, tokens: int, peak: float | None, *, kind: str) -> float:
    """Seconds of a pass's products with the weights of one layer, on a GPU of `peak` FLOP/s in bf16."""
    one = memory_estimate.widths(config)
    size = one.hidden * (one.qkv + one.queries + 3 * one.intermediate)
    rate = SHARE * (peak or 100e12) * (2 if kind == "fp8" else 1)
    return (6 if kind == "full" else 4) * size * tokens / rate
