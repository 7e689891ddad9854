"""The load-balancing loss of a mixture of experts, next to the chunked loss.

transformers captures router logits with forward hooks, which break the graph of torch.compile. Here each
router keeps its logits on the instance, which torch.compile can trace. The loss reads them after the forward
pass.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers.utils.output_capturing import OutputRecorder

from finetune.models import architecture, module_names

LOGITS = "finetune_router_logits"


def routers_of(base: Any) -> list[tuple[Any, int]]:
    """Return the routers of a transformers model, and the index of the logits in the output of each."""
    decoder = module_names.decoder_of(base)
    specs = getattr(decoder, "can_record_outputs", {}).get("router_logits", [])
    found = list[tuple[Any, int]]()
    for name, module in decoder.named_modules():
        for spec in specs if isinstance(specs, list) else [specs]:
            # A class alone means the second output (transformers 5.22, utils/output_capturing.py).
            one = spec if isinstance(spec, OutputRecorder) else OutputRecorder(spec, index=1)
            named = one.layer_name is None or f".{one.layer_name}." in f".{name}."
            if one.target_class is not None and isinstance(module, one.target_class) and named:
                found.append((module, one.index))
    return found


class RouterBalance:
    """The load-balancing loss of all routers of a model (arXiv 2101.03961, equations 4 to 6)."""

    def __init__(self, base: Any) -> None:
        text = base.config.get_text_config()
        self.experts, self.each = architecture.experts(text), architecture.experts_of_a_token(text)
        self.routers = routers_of(base)
        for router, index in self.routers:
            router.finetune_router_index = index
            router.forward = MethodType(_keep_logits, router)

    def remove(self) -> None:
        for router, _ in self.routers:
            for name in ("forward", "finetune_router_index", LOGITS):
                vars(router).pop(name, None)

    def loss(self, mask: torch.Tensor | None) -> torch.Tensor:
        """Compute the loss of the last forward pass, as transformers' `load_balancing_loss_func` does.

        It does not wait for the GPU.

        Args:
            mask: 1 for tokens and 0 for padding [rows, tokens]. Without it or of another shape, all tokens
                count.
        """
        flat: Any = [vars(router).pop(LOGITS).flatten(0, -2) for router, _ in self.routers]
        counts = shares = rows = torch.zeros((), device=flat[0].device)
        for logits in flat:
            probabilities = torch.softmax(
                logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)
            )
            real = torch.ones_like(probabilities[:, 0])
            if mask is not None and mask.dim() == 2:
                real = mask.flatten().to(probabilities)
            chosen = probabilities.detach().topk(self.each, dim=-1).indices
            each = real.repeat_interleave(self.each)
            counts = counts + torch.zeros_like(probabilities[0]).scatter_add_(0, chosen.flatten(), each)
            shares = shares + (probabilities * real[:, None]).sum(0)
            rows = rows + real.sum()
        return self.experts * torch.sum((counts / rows) * (shares / rows))


def _keep_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a router's own forward, and keep its logits in training."""
    output = type(self).forward(self, *args, **kwargs)
    if self.training:
        logits = output[self.finetune_router_index] if isinstance(output, tuple) else output
        self.finetune_router_logits = logits
    return output
