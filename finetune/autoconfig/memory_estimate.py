"""Estimate the memory of training from a model's config.

A run and `finetune plan` call the same functions, so this module imports no torch.

Values have 2 bytes unless stated otherwise. Docstrings state the measurements that the formulas were
compared with. They are from an 8B Llama at 16,384 tokens on an H200 (benchmarks/gpu.json), and from a 1.1B
model in PEFT's own forwards (benchmarks/adapters.json). `benchmarks/plan.py` compares the estimates with all
measurements.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from finetune.core import model_config
from finetune.core.model_config import ModelConfig

GIB = 2**30
# Share of the free memory that training may fill. Fragmentation of the allocator takes the rest.
SPARE = 0.92
MARGIN_GIB = 0.25
# The same share if the launch shards the weights. Buffers that are gathered and freed on streams of their own
# cause more fragmentation. With the larger share, an 8B model ran out of memory on four H100s.
SPLIT_SPARE = 0.85
# Memory that sharded runs allocate later, for NCCL's communicators and compiled code.
LATER_GIB = 2.0
# Layers that sharded runs gather at the same time: the running layer, the next one, and one on its way.
GATHERED_LAYERS = 3
# Bytes of one chunk of the loss with its copies. GEMMs of that size run at full speed, and the chunk is small
# compared with the memory of training.
CHUNK_BYTES = 2**30
# Size of an int8 value with its part of a scale, relative to a 16-bit value.
INT8 = (1 + 4 / 128) / 2
# Divided by the hidden size: the time to store gate and up in int8, relative to the time to recompute them.
# An 8B Llama with hidden size 4,096 takes 16 and 100 ms per step on an H200.
ROUNDING = 0.16 * 4096
# Hidden size from which an fp8 layer's activations reach the CPU at 54 GB/s while the next layer runs.
COPIED = 7700
# Offloaded layers whose activations are still on the GPU: one computes, one leaves and one arrives.
IN_FLIGHT = 3
# Bytes of AdaLoRA's averages of the importance of one parameter, in fp32.
AVERAGES = 12
# Tokens of one forward pass in evaluation. Logits of a vocabulary of 128k take 4 GiB in bf16.
EVALUATED_TOKENS = 16384
# The first batch size that `eval.batch_size: auto` tries.
LARGEST_BATCH = 64
# Weights of experts plus B A, which PEFT's forward keeps until backward, relative to gate and up.
STACKS_KEPT = 1.5
# Rows of a chunk are a multiple of this number, so that the tiles of the GEMMs are full.
WHOLE_TILES = 256


class Memory(NamedTuple):
    """The memory plan of the activations of one forward pass, in GiB unless stated otherwise."""

    layers: int
    """Number of decoder layers."""
    kept: float
    """All activations until backward, if nothing is recomputed."""
    norms: float
    """The part of `kept` that norms produce, which is cheap to recompute."""
    entry: float
    """The input of one layer. A recomputed layer keeps nothing else on the GPU."""
    room: float
    """Memory available for activations."""
    mlps: float = 0.0
    """The part of `kept` in gate and up of fused MLPs, which can be recomputed."""
    host: float = math.inf
    """CPU memory available for offloading."""
    offloaded: float = 0.0
    """Share of the layers that offload their activations."""
    rounding: float = math.inf
    """Time to store an MLP in int8, relative to recomputing it; inf: `auto` does not use int8."""
    offloadable: float = 0.0
    """Share of the layers that `auto` may offload, so that copies are not slower than the layers."""
    pinned: float = 1.0
    """Pinned CPU memory per offloaded byte. torch rounds it up to powers of two."""
    unfused: str = ""
    """Why there are no fused MLPs."""
    graphs: float = 0.0
    """Additional memory of CUDA graphs: their pool can't share memory with the loss."""


class Widths(NamedTuple):
    """Values per token in the layers of a model."""

    hidden: int
    intermediate: int
    """Intermediate size of the MLP. With experts: of all experts of a token together."""
    queries: int
    qkv: int
    layers: int
    vocabulary: int
    routed: int = 0
    """Experts of a token; 0 in a dense model."""
    stack: int = 0
    """Values of gate and up of all experts of a layer. `down_proj` has half as many."""


class Keeps(NamedTuple):
    """The properties of a training that decide which activations backward keeps."""

    fused: bool
    """Every MLP runs as one fused function, and adapters share their inputs (`speed.fused`)."""
    compiled: bool = True
    adapted: bool = True
    """An adapter trains; False: full fine-tuning."""
    columns: bool = False
    """The adapter scales each output by a trained vector: DoRA, IA3."""
    dropped: int = 0
    """Values per token and layer to which adapters apply dropout."""
    repeated: bool = False
    """Keys and values are repeated for each query head, as attention with a mask needs them."""
    multiplied: bool = True
    """Adapters multiply their layer's input, so they keep it: all but IA3."""
    four_bit: bool = False
    """The base model is in bitsandbytes' 4 bits. PEFT casts nothing there under autocast."""
    uncast: bool = False
    """Adapters run in 16 bits because FSDP2 or ZeRO holds them in 16 bits, so PEFT casts no input.

    Each adapter then keeps the output of the previous layer without a copy.
    """
    fp8: bool = False
    """The GEMMs of the base model run in fp8."""
    loss_fp8: bool = False
    """The gradient of the hidden states is computed in fp8 (`speed.loss: chunked_fp8`)."""
    head: bool = False
    """The output head trains (`modules_to_save`)."""
    experts: str = ""
    """How experts run: `fused`, `peft` (PEFT adds B A to the weights), or empty without an adapter."""
    dequantized: bool = False
    """The experts' weights are quantized, and each layer dequantizes them."""


def recomputed_layers(checkpointing: str, layers: int) -> tuple[int, int]:
    """Return the number of layers that are recomputed whole, and of those that recompute only gate and up.

    For example, `full:8` of 32 layers gives 8 and 24.
    """
    kind, _, some = checkpointing.partition(":")
    if kind == "full":
        count = min(int(some or layers), layers)
        return count, layers - count
    return 0, int(some) if some else layers * (kind == "mlp")


def widths(config: ModelConfig) -> Widths:
    """Return the widths of a transformers config.

    A state-space model has no heads. It counts as one head of width `hidden_size`.
    """
    config = config.get_text_config()
    hidden, heads = largest(config, "hidden_size"), largest(config, "num_attention_heads") or 1
    size = largest(config, "head_dim") or hidden // heads
    all_heads = heads + 2 * (largest(config, "num_key_value_heads") or heads)
    intermediate = largest(config, "intermediate_size") or 4 * hidden
    layers, vocabulary = largest(config, "num_hidden_layers"), largest(config, "vocab_size") or 1
    one = Widths(hidden, intermediate, heads * size, all_heads * size, layers, vocabulary)
    experts = model_config.expert_sizes(config)
    if experts is None:
        return one
    return one._replace(
        intermediate=experts.active, routed=experts.each, stack=2 * experts.number * experts.width * hidden
    )


def routed_size(config: ModelConfig) -> int:
    """Return the parameters of the experts that one token passes in all layers, without shared experts."""
    one, sizes = widths(config), model_config.expert_sizes(config.get_text_config())
    return 3 * sizes.each * sizes.width * one.hidden * one.layers if sizes else 0


def largest(config: ModelConfig, key: str) -> int:
    """Return an integer of a config: the largest if there is one per layer, 0 if there is none."""
    value = getattr(config, key, None) or 0
    return max(value) if isinstance(value, list | tuple) else value


def kept_gib(config: ModelConfig, tokens: int, keeps: Keeps) -> float:
    """Return GiB of activations that backward keeps for `tokens` tokens if nothing is recomputed.

    Estimates and measurements at 16,384 tokens, in GiB:

    - 8B Llama, compiled LoRA: 54 fused, measured 54. 62 unfused, measured 60.
    - 1.1B model, PEFT's own LoRA: 34.1, measured 35.5.
    - 1.1B model, PEFT's own DoRA: 61.8, measured 61.8.
    - 1.1B model, full fine-tuning: 38.3, measured 38.4.
    """
    one = widths(config)
    changed = STACKS_KEPT * one.stack if keeps.experts == "peft" else 0
    return one.layers * 2 * (tokens * _kept(one, keeps) + changed) / GIB


def _kept(one: Widths, keeps: Keeps) -> float:
    """Return the 2-byte values that backward keeps per token and layer."""
    hidden, wide, queries, qkv = one.hidden, one.intermediate, one.queries, one.qkv
    dropped = 1.5 * keeps.dropped  # the output of dropout and its mask
    if one.routed and keeps.experts != "fused":  # rows of each expert, before its outputs are weighted
        dropped += one.routed * hidden + (one.routed * hidden + wide) * (keeps.experts == "peft")
    heads = 3 * queries if keeps.repeated else qkv
    if not keeps.adapted:  # the residual in fp32, and each layer's input for its weight's gradient
        return 7 * hidden + qkv + 3 * wide if keeps.compiled else 13 * hidden + heads + 2 * queries + 4 * wide
    outputs = qkv + 2 * hidden if keeps.multiplied else qkv - queries  # DoRA: all layers; IA3: k and v
    outputs = outputs if keeps.columns else 0
    fused = keeps.fused or keeps.experts == "fused"
    if keeps.compiled:
        return 5 * hidden + (qkv + 2 * wide if fused else 3 * wide) + outputs + dropped
    if fused:  # eager norms keep their input in fp32
        return 6 * hidden + queries + qkv + 2 * wide + outputs + dropped
    # Each adapter keeps its own copy of its input if PEFT casts it. PEFT's DoRA keeps each output twice, or
    # four times on a 4-bit base model (measured 2.2 and 4.2; IA3 1.8). The output of attention without a mask
    # is kept once.
    inputs = (2 if keeps.four_bit or keeps.uncast else 5) * hidden + queries + wide if keeps.multiplied else 0
    inputs -= 2 * queries if keeps.uncast and keeps.multiplied and not keeps.repeated else 0
    times = (4.2 if keeps.four_bit else 2.2) if keeps.multiplied else 1.8
    outputs = times * (qkv + 2 * hidden + 2 * wide) if keeps.columns else 0
    return 4 * hidden + heads + 2 * queries + 3 * wide + inputs + outputs + dropped


def backward_gib(config: ModelConfig, tokens: int, keeps: Keeps) -> float:
    """Return GiB of gradients that exist at the same time in the backward pass of an MLP, its peak.

    An 8B Llama at 16,384 tokens: 1.35 GiB. Runs that recompute all layers measured 1.33 GiB.
    """
    one = widths(config)
    wide = 3 if keeps.fused or keeps.compiled else 4
    values = tokens * (wide * one.intermediate + one.hidden // 4)
    if one.routed:  # the gradient of gate, up and both products, and of each expert's input
        values += tokens * (one.intermediate + one.routed * one.hidden)
    if keeps.dequantized:
        values += one.stack  # in fp8 on Hopper, transposed in place of dequantized: half as many bytes
    if keeps.experts == "peft":  # the gradients of B A and of its sum with the weights
        values += 2 * one.stack
    return 2 * values / GIB


def loss_gib(
    config: ModelConfig, tokens: int, *, compiled: bool = True, trained: bool = False, fp8: bool = False
) -> float:
    """Return GiB that the loss needs in addition to the layers' activations.

    They hold a chunk's logits, the gradient of the hidden states, and the tensors of the last norm. A trained
    head adds its copy in 16 bits, the gradient of a chunk, and the sum of the gradients in fp32. An 8B Llama
    at 16,384 tokens needs 1.73 GiB, measured 1.77 GiB. `chunked_fp8` holds an fp8 copy of the head.

    Args:
        fp8: `Keeps.loss_fp8`.
    """
    one = widths(config)
    bytes_per_token = logit_bytes(compiled=compiled, capped=softcap(config) is not None)
    rows = chunk_rows(tokens, CHUNK_BYTES // (one.vocabulary * bytes_per_token))
    head = (8 if trained else 1 if fp8 else 0) * one.vocabulary * one.hidden
    return (rows * one.vocabulary * bytes_per_token + 12 * tokens * one.hidden + head) / GIB


def usable_gib(free: float, *, sharded: bool) -> float:
    """Return GiB of the free memory that training may fill."""
    return SPLIT_SPARE * free - LATER_GIB if sharded else SPARE * free


def nccl_gib(processes: int) -> float:
    """Return GiB of a GPU that NCCL and other processes hold when a sharded model is set up.

    Each of four H100s had 4.5 GiB less than with a single process. More GPUs were not measured.
    """
    return min(1.5 * (processes - 1), 4.5)


def zero3_gib(parameters: int) -> float:
    """Return GiB of gathered weights and of gradients in reduction under ZeRO-3, both in 16 bits.

    They follow DeepSpeed's defaults of `stage3_max_live_parameters` and `reduce_bucket_size`.
    """
    return 2 * (min(parameters, 1e9) + 5e8) / GIB


def logit_bytes(*, compiled: bool, capped: bool, narrow: int = 2, wide: int = 4) -> int:
    """Return the bytes that the loss holds per logit of a chunk, including the copies of an eager softmax.

    Args:
        capped: whether the model has a softcap of its logits.
        narrow: bytes of a logit.
        wide: bytes of a value in the softmax.
    """
    return narrow + (0 if compiled else wide * (3 if capped else 2))


def softcap(config: ModelConfig) -> float | None:
    """Return the softcap of a model's logits, whose key differs by family; `None` if it has none."""
    text = config.get_text_config()
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((value for name in names if (value := getattr(text, name, None)) is not None), None)


def chunk_rows(rows: int, most: int) -> int:
    """Return the rows of a chunk, so that there are few chunks of about the same size.

    Args:
        rows: the rows to split into chunks.
        most: the largest number of rows of a chunk.
    """
    most = max(WHOLE_TILES, most // WHOLE_TILES * WHOLE_TILES)
    chunks = max(1, math.ceil(rows / most))
    return max(1, min(rows, math.ceil(rows / chunks / WHOLE_TILES) * WHOLE_TILES))


def activations(
    config: ModelConfig, tokens: int, keeps: Keeps, *, usable: float, offload: str, extra: float = 0.0
) -> Memory:
    """Plan the memory of the activations of `tokens` tokens.

    Args:
        usable: GiB that activations and temporary tensors may fill (`usable_gib` minus the optimizer's part).
        offload: `speed.offload`, or the choice for it.
        extra: GiB of additional activations, from quantization-aware training (`qat.kept_gib`).
    """
    one = widths(config)
    trained = not keeps.adapted or keeps.head
    loss = loss_gib(config, tokens, compiled=keeps.compiled, trained=trained, fp8=keeps.loss_fp8)
    moments = loss, backward_gib(config, tokens, keeps)
    room = usable - max(moments) - MARGIN_GIB
    row = tokens * one.hidden * 2 / GIB
    saved_gib = kept_gib(config, tokens, keeps) + extra
    gone = offloaded_share(offload, one.layers)
    entry = (1 - gone) * row * (1 if keeps.adapted else 2)
    mlps = 4 * tokens * one.layers * one.intermediate / GIB if keeps.fused else 0.0
    plan = Memory(
        one.layers,
        saved_gib,
        2 * one.layers * row,
        entry,
        room,
        mlps,
        offloaded=gone,
        pinned=2 ** math.ceil(math.log2(row)) / row,
    )
    plan = plan._replace(graphs=min(moments))
    if not (keeps.fp8 and keeps.compiled and keeps.fused):
        return plan
    return plan._replace(rounding=ROUNDING / one.hidden, offloadable=min(1.0, one.hidden / COPIED))


def peak_activations_gib(plan: Memory, checkpointing: str) -> tuple[float, float]:
    """Return GiB of activations at the loss, and at the peak of the backward pass.

    Recomputed layers are spread evenly and include the first layer. Backward holds all activations of the
    layer that it recomputes.
    """
    layers = plan.layers
    if checkpointing == "none":
        return plan.kept, plan.kept
    if checkpointing.startswith("mlp_int8"):
        saved_gib = _stays(plan.kept - plan.norms - plan.mlps, plan)
        saved_gib += INT8 * plan.mlps * (1 - recomputed_layers(checkpointing, layers)[1] / layers)
        return saved_gib, saved_gib + plan.norms / layers
    # `mlp:N` recomputes the first N layers. By then, backward has freed the activations of the last layers.
    if checkpointing.startswith("mlp:"):
        saved_gib = plan.kept - plan.norms - int(checkpointing[4:]) * plan.mlps / layers
        return saved_gib, saved_gib + plan.norms / layers
    # Memory that is saved in layers that are not recomputed whole.
    half = plan.norms + (0.0 if checkpointing == "norms" else plan.mlps)
    if checkpointing in ("norms", "mlp"):
        saved_gib = _stays(plan.kept - half, plan)
        return saved_gib, saved_gib + half / layers
    count = recomputed_layers(checkpointing, layers)[0]
    per_layer = (plan.kept - half) / layers if count < layers else plan.kept / layers
    saved_gib = (layers - count) * per_layer + count * plan.entry
    # Backward has freed the layers after the last recomputed layer.
    gone = layers - 1 - (count - 1) * layers // count
    return saved_gib, max(saved_gib, saved_gib - gone * per_layer + plan.kept / layers)


def _stays(saved_gib: float, plan: Memory) -> float:
    """Return the part of the layers' activations that stays on the GPU, in GiB."""
    return saved_gib * (1 - plan.offloaded) + min(
        saved_gib * plan.offloaded, IN_FLIGHT * saved_gib / plan.layers
    )


def offloaded_share(offload: str, layers: int) -> float:
    """Return the share of the layers that offload their activations to CPU memory."""
    kind, _, some = offload.partition(":")
    return 0.0 if kind not in ("activations", "all") else min(1.0, int(some) / layers) if some else 1.0
