"""Read the routers of a mixture of experts next to the chunked loss: their load-balancing loss and their use.

transformers captures router logits with forward hooks, which break the graph of torch.compile. Here each
router keeps its outputs on the instance, which torch.compile can trace. They are read after the forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from finetune.core import model_config
from finetune.models import module_names

KEPT = "finetune_router_output"
# Doge's experts score two sets of keys, of which each pair is an expert, and keep no logits of the experts
PRODUCT_KEYS = ("DogeCDMoE",)


class RouterUse(NamedTuple):
    """What the routers chose in one forward pass, summed over the tokens that are no padding."""

    entropy: torch.Tensor
    """Entropy of the routers' probabilities in nats, summed over tokens and routers, float64."""
    rows: torch.Tensor
    """Number of tokens times the number of routers, int64."""
    tokens: torch.Tensor
    """Number of tokens of each expert [routers, experts], int64. Empty if the routers return no choice."""


def routers_of(base: PreTrainedModel) -> list[tuple[Any, int]]:
    """Return the routers of a transformers model, and the index of the logits in the output of each."""
    return [(module, index) for _, module, index in _named_routers(base)]


def names_of(base: PreTrainedModel) -> list[str]:
    """Return the names of the routers, in the order of `routers_of`."""
    return [name for name, _, _ in _named_routers(base)]


def _named_routers(base: PreTrainedModel) -> list[tuple[str, Any, int]]:
    decoder = module_names.decoder_of(base)
    specs = getattr(decoder, "can_record_outputs", {}).get("router_logits", [])
    found = list[tuple[str, Any, int]]()
    for name, module in decoder.named_modules():
        for spec in specs if isinstance(specs, list) else [specs]:
            # A class alone means the second output (transformers 5.22, utils/output_capturing.py).
            one = spec if isinstance(spec, OutputRecorder) else OutputRecorder(spec, index=1)
            named = one.layer_name is None or f".{one.layer_name}." in f".{name}."
            is_router = one.target_class is not None and isinstance(module, one.target_class)
            if is_router and named and type(module).__name__ not in PRODUCT_KEYS:
                found.append((name, module, one.index))
    return found


class RouterBalance:
    """The routers of a model: their load-balancing loss (arXiv 2101.03961, equations 4 to 6), their use."""

    def __init__(self, base: PreTrainedModel, *, balanced: bool = True) -> None:
        """Args: balanced: whether the loss is computed, which keeps the graph of the logits."""
        text = base.config.get_text_config()
        self.experts, self.each = model_config.experts(text), model_config.experts_of_a_token(text)
        self.routers, self.balanced = routers_of(base), balanced
        for router, index in self.routers:
            router.finetune_router_index, router.finetune_router_balanced = index, balanced
            router.forward = MethodType(_keep_output, router)

    def remove(self) -> None:
        for router, _ in self.routers:
            for name in ("forward", "finetune_router_index", "finetune_router_balanced", KEPT):
                vars(router).pop(name, None)

    def read(self, mask: torch.Tensor | None) -> tuple[torch.Tensor | None, RouterUse]:
        """Return the loss of the last forward pass, if it is wanted, and the routers' use.

        It does not wait for the GPU.

        Args:
            mask: 1 for tokens and 0 for padding [rows, tokens]. Without it or of another shape, all tokens
                count.
        """
        kept: Any = [vars(router).pop(KEPT) for router, _ in self.routers]
        flat = [(logits.flatten(0, -2), chosen) for logits, chosen in kept]
        loss = self._loss([logits for logits, _ in flat], mask) if self.balanced else None
        return loss, _use(flat, mask)

    def _loss(self, flat: list[torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
        """Compute what transformers' `load_balancing_loss_func` does."""
        counts = shares = rows = torch.zeros((), device=flat[0].device)
        for logits in flat:
            probabilities = torch.softmax(
                logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)
            )
            real = _real(probabilities[:, 0], mask)
            chosen = probabilities.detach().topk(self.each, dim=-1).indices
            each = real.repeat_interleave(self.each)
            counts = counts + torch.zeros_like(probabilities[0]).scatter_add_(0, chosen.flatten(), each)
            shares = shares + (probabilities * real[:, None]).sum(0)
            rows = rows + real.sum()
        return self.experts * torch.sum((counts / rows) * (shares / rows))


@contextlib.contextmanager
def recomputation(routers: list[tuple[Any, int]]) -> Iterator[None]:
    """Recompute a layer. Its router keeps its outputs again, which would hold the layer's activations."""
    try:
        yield
    finally:
        for router, _ in routers:
            vars(router).pop(KEPT, None)


def _real(like: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return 1 for each token and 0 for padding, in the dtype of `like` [tokens]."""
    if mask is not None and mask.dim() == 2:
        return mask.flatten().to(like)
    return torch.ones_like(like)


@torch.no_grad()
def _use(kept: list[tuple[torch.Tensor, torch.Tensor | None]], mask: torch.Tensor | None) -> RouterUse:
    device = kept[0][0].device
    entropy = torch.zeros((), dtype=torch.float64, device=device)
    rows, tokens = torch.zeros((), dtype=torch.int64, device=device), list[torch.Tensor]()
    for logits, chosen in kept:
        logs = torch.log_softmax(logits.float(), dim=-1)
        real = _real(logs[:, 0], mask)
        entropy -= ((logs.exp() * logs).sum(-1) * real).sum()
        rows += real.sum().long()
        if chosen is not None:
            each = real.long().repeat_interleave(chosen.shape[-1])
            empty = torch.zeros(logits.shape[-1], dtype=torch.int64, device=device)
            tokens.append(empty.scatter_add_(0, chosen.flatten(), each))
    whole = len(tokens) == len(kept)
    return RouterUse(entropy, rows, torch.stack(tokens) if whole else torch.empty(0, device=device))


def _is_choice(part: object, logits: torch.Tensor) -> bool:
    """Return whether a part of a router's output holds the chosen experts of each token."""
    if not isinstance(part, torch.Tensor) or part.dtype != torch.int64 or part.dim() < 2:
        return False
    return part.numel() * logits.shape[-1] == logits.numel() * part.shape[-1]


def _keep_output(self: Any, *args: object, **kwargs: object) -> Any:
    """Run a router's own forward. In training, keep its logits and the experts that it chose."""
    output = type(self).forward(self, *args, **kwargs)
    if self.training:
        parts = output if isinstance(output, tuple) else (output,)
        logits = output[self.finetune_router_index] if isinstance(output, tuple) else output
        chosen = next((part for part in parts if _is_choice(part, logits)), None)
        self.finetune_router_output = (
            logits if self.finetune_router_balanced else logits.detach(),
            chosen,
        )
    return output
