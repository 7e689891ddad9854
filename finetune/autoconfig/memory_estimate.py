"""What training takes of memory, whether adapters are fused and layers compiled.

No torch is imported: a run and `finetune plan` ask the same functions, the one with the model in its hands,
the other with its config.

Numbers are of 2 bytes unless said otherwise. Every formula stands beside what it was compared with: an 8B
Llama at 16,384 tokens on an H200 (benchmarks/gpu.json), and a 1.1B shape on PEFT's own forwards
(benchmarks/adapters.json). benchmarks/plan.py holds all of it against every measured row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from finetune.core.model_config import ModelConfig

GIB = 2**30
SPARE = 0.92  # of the memory that is free: the allocator's gaps take the rest
MARGIN_GIB = 0.25
# Where the launch splits the weights, of the free memory: buffers that are gathered and freed in turns, on
# streams of their own, leave larger gaps. Without it an 8B on four H100s kept 62 GiB of activations, was to
# take 69 of 79 and ran out of memory with 74 allocated (2026-11-27)
SPLIT_SPARE = 0.85
LATER_GIB = 2.0  # there, what comes after the choice: NCCL's communicators and what compiled code works in
GATHERED_LAYERS = 3  # there, of which weights are whole: the one that runs, the next, and one on its way
# Of one chunk of the loss and its copies: rows enough for the products to run at full speed, little beside
# what training holds.
CHUNK_BYTES = 2**30
INT8 = (1 + 4 / 128) / 2  # bytes of a number rounded to int8 and its part of a scale, beside 2
# Over `hidden`: the time of keeping gate and up in int8 beside that of making them again, whose products go
# with it. An 8B Llama on an H200 (hidden 4,096): 16 and 100 ms of a step.
ROUNDING = 0.16 * 4096
# Hidden size from which what an fp8 layer keeps reaches the CPU, at 54 GB/s, while the next one is computed
COPIED = 7700
IN_FLIGHT = 3  # layers of those that leave the GPU: one that computes, one that leaves and one that comes
AVERAGES = 12  # bytes of AdaLoRA's averages of a number's importance, in fp32
EVALUATED_TOKENS = 16384  # in one forward without gradients: logits of 128k words take 4 GiB in bf16
LARGEST_BATCH = 64  # where `eval.batch_size: auto` begins
WHOLE_TILES = 256  # rows of a chunk are a multiple of it: the products' tiles are full


class Memory(NamedTuple):
    """What the activations of one forward pass take, in GiB."""

    layers: int
    kept: float  # until backward, if nothing is recomputed
    norms: float  # of that, what norms make, which is cheap to make again
    entry: float  # of that, a layer's input: all that the GPU keeps of a recomputed one
    room: float  # for all of it
    mlps: float = 0.0  # of what is kept, gate and up of fused MLPs, which can be made again
    host: float = math.inf  # of the CPU's memory, for what leaves the GPU
    away: float = 0.0  # share of the layers that leave what they keep in the CPU's memory
    rounding: float = math.inf  # time of keeping an MLP in int8 beside making it again; inf: not by `auto`
    beside: float = 0.0  # share of the layers that `auto` may copy to the CPU: no slower than they compute
    pinned: float = 1.0  # of the CPU's memory for one that leaves: torch takes powers of two
    unfused: str = ""  # why there are no such MLPs
    # Of the room, what CUDA graphs take: their pool and the loss share no memory, where passes without them
    # take the larger of the two; so the smaller comes on top
    graphs: float = 0.0


class Widths(NamedTuple):
    """Numbers a token, of a model's layers."""

    hidden: int
    intermediate: int
    queries: int
    qkv: int
    layers: int
    vocabulary: int


class Keeps(NamedTuple):
    """How a model is trained, as far as it decides what backward keeps."""

    fused: bool
    """Every MLP runs as one product and kernel, and adapters share their inputs (`speed.fused`)."""
    compiled: bool = True
    adapted: bool = True
    """Not full fine-tuning."""
    columns: bool = False
    """Each output is scaled by a trained vector: DoRA, IA3."""
    dropped: int = 0
    """Numbers a token and layer that adapters drop some of: the inputs of layers with a dropout."""
    repeated: bool = False
    """Keys and values are repeated for each head, as attention with a mask wants it."""
    multiplied: bool = True
    """Adapters multiply their layer's input, and so keep it: all but IA3."""
    four_bit: bool = False
    """On bitsandbytes' 4-bit base, whose layers in PEFT cast nothing under autocast."""
    uncast: bool = False
    """PEFT casts no input, and each adapter keeps what the layer before it has made: adapters run in 16 bits
    (FSDP2 gathers them so, but on a 4-bit base, where PEFT never casts; ZeRO keeps them so)."""
    fp8: bool = False
    """The base's products are in fp8."""
    head: bool = False
    """The output head trains, of `modules_to_save`."""


def split(checkpointing: str, layers: int) -> tuple[int, int]:
    """Layers that are recomputed whole, and others of which gate and up are: 8 and 24 for `full:8` of 32."""
    kind, _, some = checkpointing.partition(":")
    if kind == "full":
        count = min(int(some or layers), layers)
        return count, layers - count
    return 0, int(some) if some else layers * (kind == "mlp")


def widths(config: ModelConfig) -> Widths:
    """The widths of a transformers config. A state-space model has no heads: one as wide as `hidden_size`."""
    config = config.get_text_config()
    hidden, heads = largest(config, "hidden_size"), largest(config, "num_attention_heads") or 1
    size = largest(config, "head_dim") or hidden // heads
    all_heads = heads + 2 * (largest(config, "num_key_value_heads") or heads)
    intermediate = largest(config, "intermediate_size") or 4 * hidden
    sizes = hidden, intermediate, heads * size, all_heads * size
    return Widths(*sizes, largest(config, "num_hidden_layers"), largest(config, "vocab_size") or 1)


def largest(config: ModelConfig, key: str) -> int:
    """A number of a config, the largest where it has one for each layer; 0 where it has none."""
    value = getattr(config, key, None) or 0
    return max(value) if isinstance(value, list | tuple) else value


def kept_gib(config: ModelConfig, tokens: int, keeps: Keeps) -> float:
    """Memory that backward keeps for `tokens` tokens with nothing recomputed, in GiB.

    Compiled LoRA on an 8B Llama at 16,384 tokens: fused 54, else 62 (measured 54 and 60). PEFT's own
    forwards on the 1.1B shape at 16,384: LoRA 34.1 (35.5), DoRA 61.8 (61.8), full 38.3 (38.4).
    """
    one = widths(config)
    return tokens * one.layers * 2 * _kept(one, keeps) / GIB


def _kept(one: Widths, keeps: Keeps) -> float:
    """Numbers of 2 bytes that backward keeps of a token in a layer."""
    hidden, wide, queries, qkv = one.hidden, one.intermediate, one.queries, one.qkv
    dropped = 1.5 * keeps.dropped  # what is left of it, and which it is
    heads = 3 * queries if keeps.repeated else qkv
    if not keeps.adapted:  # a residual in fp32, and each layer's input for its weight
        return 7 * hidden + qkv + 3 * wide if keeps.compiled else 13 * hidden + heads + 2 * queries + 4 * wide
    outputs = qkv + 2 * hidden if keeps.multiplied else qkv - queries  # DoRA's of every layer; IA3's k and v
    outputs = outputs if keeps.columns else 0
    if keeps.compiled:
        return 5 * hidden + (qkv + 2 * wide if keeps.fused else 3 * wide) + outputs + dropped
    if keeps.fused:  # eager norms keep their input in fp32
        return 6 * hidden + queries + qkv + 2 * wide + outputs + dropped
    # each layer's adapter keeps an input of its own, where it is cast; PEFT's DoRA keeps two of each output,
    # and four on a 4-bit base (measured 2.2, 4.2; IA3 1.8). What attention without a mask made is kept once
    inputs = (2 if keeps.four_bit or keeps.uncast else 5) * hidden + queries + wide if keeps.multiplied else 0
    inputs -= 2 * queries if keeps.uncast and keeps.multiplied and not keeps.repeated else 0
    times = (4.2 if keeps.four_bit else 2.2) if keeps.multiplied else 1.8
    outputs = times * (qkv + 2 * hidden + 2 * wide) if keeps.columns else 0
    return 4 * hidden + heads + 2 * queries + 3 * wide + inputs + outputs + dropped


def backward_gib(config: ModelConfig, tokens: int, keeps: Keeps) -> float:
    """Gradients that are there at once while backward is in an MLP, the largest place, in GiB.

    8B at 16,384: 1.35 (1.33, from rows with all layers recomputed).
    """
    one = widths(config)
    wide = 3 if keeps.fused or keeps.compiled else 4
    return tokens * 2 * (wide * one.intermediate + one.hidden // 4) / GIB


def loss_gib(config: ModelConfig, tokens: int, *, compiled: bool = True, trained: bool = False) -> float:
    """What is there at once while the loss is computed, beside what layers keep, in GiB.

    A chunk's logits, the gradient of the hidden states, and those in and around the last norm. 8B at 16,384:
    1.73 (1.77). Of a head that trains its copy in 16 bits, a chunk's gradient, and their sum in fp32."""
    one = widths(config)
    held = logit_bytes(compiled=compiled, capped=softcap(config) is not None)
    rows = chunk_rows(tokens, CHUNK_BYTES // (one.vocabulary * held))
    head = 8 * one.vocabulary * one.hidden if trained else 0
    return (rows * one.vocabulary * held + 12 * tokens * one.hidden + head) / GIB


def usable_gib(free: float, *, sharded: bool) -> float:
    """GiB of the free memory that training may fill."""
    return SPLIT_SPARE * free - LATER_GIB if sharded else SPARE * free


def nccl_gib(processes: int) -> float:
    """GiB of a GPU that NCCL and other processes hold when the model is set up, where weights are split.

    Four H100s had 4.5 GiB less than one process alone; more GPUs were not measured.
    """
    return min(1.5 * (processes - 1), 4.5)


def zero3_gib(parameters: int) -> float:
    """GiB that ZeRO-3 holds in 16 bits of weights that are whole at once, and of gradients on their way.

    By DeepSpeed's defaults of `stage3_max_live_parameters` and `reduce_bucket_size`.
    """
    return 2 * (min(parameters, 1e9) + 5e8) / GIB


def logit_bytes(*, compiled: bool, capped: bool, narrow: int = 2, wide: int = 4) -> int:
    """Bytes that the loss holds of each logit of a chunk: its own, and those of eager softmax's copies.

    Args:
        narrow: of a logit; wide: of a number of the softmax.
    """
    return narrow + (0 if compiled else wide * (3 if capped else 2))


def softcap(config: ModelConfig) -> float | None:
    """A model's softcap of its logits, by the names that families have for it."""
    text = config.get_text_config()
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((value for name in names if (value := getattr(text, name, None)) is not None), None)


def chunk_rows(rows: int, most: int) -> int:
    """Rows of a chunk: as few chunks as `most` rows at once allow, and those of about one size."""
    most = max(WHOLE_TILES, most // WHOLE_TILES * WHOLE_TILES)
    chunks = max(1, math.ceil(rows / most))
    return max(1, min(rows, math.ceil(rows / chunks / WHOLE_TILES) * WHOLE_TILES))


def activations(
    config: ModelConfig, tokens: int, keeps: Keeps, *, usable: float, offload: str, extra: float = 0.0
) -> Memory:
    """The memory plan of `tokens` tokens.

    Args:
        usable: GiB that activations and what passes may fill (`usable_gib`, less what training adds).
        extra: GiB that is kept beside what this knows of (`qat.kept_gib`).
    """
    one = widths(config)
    loss = loss_gib(config, tokens, compiled=keeps.compiled, trained=not keeps.adapted or keeps.head)
    moments = loss, backward_gib(config, tokens, keeps)
    room = usable - max(moments) - MARGIN_GIB
    row = tokens * one.hidden * 2 / GIB
    kept = kept_gib(config, tokens, keeps) + extra
    gone = away(offload, one.layers)
    entry = (1 - gone) * row * (1 if keeps.adapted else 2)
    mlps = 4 * tokens * one.layers * one.intermediate / GIB if keeps.fused else 0.0
    pinned = 2 ** math.ceil(math.log2(row)) / row
    plan = Memory(one.layers, kept, 2 * one.layers * row, entry, room, mlps, away=gone, pinned=pinned)
    plan = plan._replace(graphs=min(moments))
    if not (keeps.fp8 and keeps.compiled and keeps.fused):
        return plan
    return plan._replace(rounding=ROUNDING / one.hidden, beside=min(1.0, one.hidden / COPIED))


def at_once(plan: Memory, checkpointing: str) -> tuple[float, float]:
    """GiB of activations when the loss is computed, and at the worst moment of backward after it.

    Recomputed layers are spread evenly, the first among them; each is whole while it runs again.
    """
    layers = plan.layers
    if checkpointing == "none":
        return plan.kept, plan.kept
    if checkpointing.startswith("mlp_int8"):
        kept = _stays(plan.kept - plan.norms - plan.mlps, plan)
        kept += INT8 * plan.mlps * (1 - split(checkpointing, layers)[1] / layers)
        return kept, kept + plan.norms / layers
    if checkpointing.startswith(
        "mlp:"
    ):  # the first layers: when they are made again, the last ones' are gone
        kept = plan.kept - plan.norms - int(checkpointing[4:]) * plan.mlps / layers
        return kept, kept + plan.norms / layers
    half = plan.norms + (0.0 if checkpointing == "norms" else plan.mlps)  # of layers that are not whole
    if checkpointing in ("norms", "mlp"):
        kept = _stays(plan.kept - half, plan)
        return kept, kept + half / layers
    count = split(checkpointing, layers)[0]
    each = (plan.kept - half) / layers if count < layers else plan.kept / layers
    kept = (layers - count) * each + count * plan.entry
    gone = (
        layers - 1 - (count - 1) * layers // count
    )  # layers after the last recomputed one: not needed any more
    return kept, max(kept, kept - gone * each + plan.kept / layers)


def _stays(kept: float, plan: Memory) -> float:
    """Of what layers keep, GiB on the GPU."""
    return kept * (1 - plan.away) + min(kept * plan.away, IN_FLIGHT * kept / plan.layers)


def away(offload: str, layers: int) -> float:
    """The share of the layers that leave what they keep in the CPU's memory."""
    kind, _, some = offload.partition(":")
    return 0.0 if kind not in ("activations", "all") else min(1.0, int(some) / layers) if some else 1.0
