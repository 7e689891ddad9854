"""What training needs of a GPU's memory, before anything is loaded: does each GPU hold a copy of the base?

An estimate from the model's config alone, with every layer recomputed unless the recipe says otherwise;
how much is really recomputed is decided when the model is there (`speed/apply.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.estimate import HEAD_GIB, SPARE, Keeps, kept_gib

if TYPE_CHECKING:
    from finetune.hardware import Hardware

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "torchao_int8": 1.0}  # of a number
CODED = ("fp8", "nf4", "fp4")
FOUR_BITS = 0.53  # bytes: a half, and the scale of each block of 64, itself in 8 bits
STATE = 12.0  # bytes a trained number has beside itself: gradient and two moments in fp32


class Need(NamedTuple):
    """GiB of one process."""

    base: float  # weights
    trained: float  # adapter, gradients, optimizer
    work: float  # activations and the head's products
    coded: bool = False  # the base is stored in codes, which FSDP2 splits by a config of its own

    @property
    def all(self) -> float:
        return self.base + self.trained + self.work


def needs(config: Any, storage: str, rank: int | None, tokens: int, *, recompute: bool) -> Need:
    """Memory of one process that holds the whole base.

    Args:
        config: transformers' config of the model.
        storage: of the base's linear layers; embeddings and head stay in 16 bits.
        rank: of an adapter on all linear layers; `None`: every weight trains.
        tokens: of one forward pass.
        recompute: whether layers may be recomputed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    layers, total = sum(m.weight.numel() for m in linear), sum(p.numel() for p in model.parameters())
    size = BYTES.get(storage, FOUR_BITS)
    base = layers * size + (total - layers) * max(size, 2.0)
    count = total if rank is None else rank * sum(m.in_features + m.out_features for m in linear)
    trained = count * (STATE if rank is None else STATE + 4)
    text = config.get_text_config()
    kept, depth = (
        kept_gib(config, tokens, Keeps(fused=False, adapted=rank is not None)),
        text.num_hidden_layers,
    )
    inputs = tokens * text.hidden_size * 2 * depth / 2**30
    work = (inputs + kept / depth if recompute else kept) + HEAD_GIB
    return Need(base / 2**30, trained / 2**30, work, storage in CODED)


def choose(need: Need, machine: Hardware) -> tuple[str, str]:
    """The shipped config for all of a machine's GPUs, `ddp_8`, `fsdp2_8` or `fsdp2_8_quantised`, and why.

    Each GPU with the whole base exchanges an adapter's gradients alone, a few MB a step; splitting the base
    (FSDP2, ZeRO-3) moves all of it over the wires in each pass, so it is for what does not fit.
    """
    room, count = SPARE * machine.memory_gib, machine.count
    text = f"training needs about {need.all:.0f} GiB of a GPU's {machine.memory_gib:.0f}"
    if need.all <= room:
        return "ddp_8", f"{count} GPUs: {text}, so each holds the whole base (DDP)"
    split = need._replace(base=need.base / count, trained=need.trained / count)
    text = f"{count} GPUs: {text} with the whole base on it, so it is split: {split.all:.0f} GiB each (FSDP2)"
    if split.all > room:
        other = "adapter.type=qlora" if need.coded else "speed.base=fp8, or --accelerate fsdp2_8_offload"
        text += f"; that may not fit either: {other}"
    return "fsdp2_8_quantised" if need.coded else "fsdp2_8", text
