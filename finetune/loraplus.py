"""LoRA+ (arXiv 2402.12354): B learns faster than A. PEFT makes the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trl.trainer.sft_trainer import SFTTrainer

from finetune import adapters

if TYPE_CHECKING:
    import torch
    from trl.trainer.sft_config import SFTConfig

    from finetune.receipts import Ledger


def optimizer(adapted: Any, arguments: SFTConfig, ratio: float) -> torch.optim.Optimizer:
    """The recipe's optimizer, in which B learns `ratio` times as fast as A; so do one-dimensional weights,
    such as DoRA's magnitudes."""
    from peft.optimizers import create_loraplus_optimizer

    kind, options = SFTTrainer.get_optimizer_cls_and_kwargs(arguments, adapted)
    rate, decay = options.pop("lr"), arguments.weight_decay
    return create_loraplus_optimizer(
        adapted, kind, lr=rate, loraplus_lr_ratio=ratio, loraplus_weight_decay=decay, **options
    )


def add_receipt(adapted: Any, optimizer: Any, rate: float, ratio: float, ledger: Ledger) -> None:
    """How fast A and B learn, read from the optimizer that ran; `rate` is the peak learning rate."""
    groups = optimizer.param_groups
    rates = {id(p): group.get("initial_lr", group["lr"]) for group in groups for p in group["params"]}
    found = {
        part: {rates.get(id(p)) for name, p in adapters.trainable(adapted).items() if f".{part}." in name}
        for part in ("lora_A", "lora_B")
    }
    ok = found["lora_A"] == {rate} and found["lora_B"] == {rate * ratio}
    got = ", ".join(f"{part} {', '.join(map(str, values))}" for part, values in found.items())
    asked = f"lora_A {rate}, lora_B {rate * ratio}"
    ledger.add("adapter.loraplus_lr_ratio", asked, got, "peak rates in the optimizer's groups", ok=ok)
