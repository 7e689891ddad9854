"""LoRA+ (arXiv 2402.12354): B learns faster than A. PEFT makes the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from finetune import adapters

if TYPE_CHECKING:
    import torch

    from finetune.receipts import Ledger


def optimizer(
    adapted: Any, made_by: tuple[Any, dict[str, Any]], ratio: float, decay: float
) -> torch.optim.Optimizer:
    """The recipe's optimizer, in which B learns `ratio` times as fast as A; so do one-dimensional weights,
    such as DoRA's magnitudes.

    Args:
        made_by: its class and options, of `optimizers.kind_and_options`.
        decay: weight decay.
    """
    from peft.optimizers import create_loraplus_optimizer

    kind, options = made_by[0], dict(made_by[1])
    rate = options.pop("lr")
    made = create_loraplus_optimizer(
        adapted,
        kind,
        lr=rate,
        loraplus_lr_ratio=ratio,
        loraplus_weight_decay=decay,
        loraplus_lr_embedding=rate,  # PEFT's 1e-6 would leave LoRA on embeddings where it began
        **options,
    )
    if options.get("optim_bits") == 8:  # as the Trainer does; PEFT only for classes that are named so
        from bitsandbytes.optim.optimizer import GlobalOptimManager

        for module in adapted.modules():
            if isinstance(module, nn.Embedding):
                GlobalOptimManager.get_instance().register_module_override(
                    module, "weight", {"optim_bits": 32}
                )
    return made


def add_receipt(adapted: Any, optimizer: Any, rate: float, ratio: float, ledger: Ledger) -> None:
    """How fast A and B learn, read from the optimizer that ran; `rate` is the peak learning rate."""
    groups = optimizer.param_groups
    rates = {id(p): float(group.get("initial_lr", group["lr"])) for group in groups for p in group["params"]}
    fast, slow, other = set(), set(), set()
    for name, parameter in adapters.trainable(adapted).items():
        faster = ".lora_B." in name or parameter.ndim == 1
        (fast if faster else slow if "lora_" in name else other).add(rates.get(id(parameter)))
    got = f"A {_said(slow)}, B {_said(fast)}" + (f", others {_said(other)}" if other else "")
    asked = f"A {rate:g}, B {rate * ratio:g}" + (f", others {rate:g}" if other else "")
    ledger.add("adapter.loraplus_lr_ratio", asked, got, "peak rates in the optimizer's groups")


def _said(rates: set[float | None]) -> str:
    return ", ".join("not in the optimizer" if rate is None else f"{rate:g}" for rate in rates)
