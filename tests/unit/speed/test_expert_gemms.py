"""The GEMMs of experts on fp8 values, next to the same GEMMs on the dequantized values, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.kernels import expert_ops
from finetune.quantization import stacked_experts
from finetune.speed.expert_gemms import Routing, StackedWeight, down, down_gradient, gate_up, gate_up_gradient

TOKENS, EACH, EXPERTS, HIDDEN, WIDTH = 150, 2, 5, 48, 32
BLOCKS = 128, 64  # sizes of whole 4-bit blocks


def relative(ours: torch.Tensor, right: torch.Tensor) -> float:
    return float((ours - right).norm() / right.norm())


@pytest.mark.parametrize(("storage", "hidden", "width"), [("fp8", HIDDEN, WIDTH), ("nf4", *BLOCKS)])
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("route", ["any", "an expert with no token", "one expert with all"])
def test_fp8_products_are_those_on_dequantized_values(
    rank: int, route: str, storage: str, hidden: int, width: int
) -> None:
    """Rows and 4-bit weights are rounded to fp8, which changes a result by 2 to 5%. An adapter's part is not
    rounded."""
    torch.manual_seed(0)
    ids = torch.rand(TOKENS, EXPERTS).topk(EACH).indices
    ids = {"any": ids, "an expert with no token": ids.clamp(min=1)}.get(route, torch.full_like(ids, 2))
    routing = Routing(*expert_ops.sort_by_expert(ids, EXPERTS), EACH)
    for inputs, outputs, below in ((hidden, 2 * width, True), (width, hidden, False)):
        stored: Any = stacked_experts.quantize(torch.randn(EXPERTS, outputs, inputs), storage)
        by = stored.dequantize_by
        thin = torch.randn(EXPERTS, *((rank, inputs) if below else (outputs, rank))) if rank else None
        held = [
            StackedWeight(thin, *by.stored(stored.detach()), *[None] * (by.storage == "fp8"), fp8)
            for fp8 in (True, False)
        ]
        forward, backward = (gate_up, gate_up_gradient) if below else (down, down_gradient)
        x = torch.randn(TOKENS if below else TOKENS * EACH, inputs + (0 if below else rank))
        ours, right = (forward(x, one, routing) for one in held)
        assert ours.shape == right.shape and 1e-3 < relative(ours[:, :outputs], right[:, :outputs]) < 0.05
        assert torch.allclose(ours[:, outputs:], right[:, outputs:], atol=1e-4)
        grad = torch.randn(TOKENS * EACH, outputs + rank) if below else torch.randn(TOKENS, outputs)
        ours, right = (backward(grad, one, routing) for one in held)
        assert ours.shape == right.shape and 1e-3 < relative(ours[:, :inputs], right[:, :inputs]) < 0.05
        assert torch.allclose(ours[:, inputs:], right[:, inputs:], atol=1e-4)


def test_rows_of_powers_of_two_are_multiplied_exactly() -> None:
    """Their codes are exact, so each difference is an error of the formula."""
    torch.manual_seed(0)
    routing = Routing(
        *expert_ops.sort_by_expert(torch.rand(TOKENS, EXPERTS).topk(EACH).indices, EXPERTS), EACH
    )
    weight = torch.randint(-8, 9, (EXPERTS, 2 * WIDTH, HIDDEN)).float()
    weight[..., 0] = 448.0  # the scale of each row is 1
    stored: Any = stacked_experts.quantize(weight, "fp8")
    x = 2.0 ** torch.randint(-2, 3, (TOKENS, HIDDEN))
    x[:, 0] = 448.0
    held = StackedWeight(None, stored.detach(), stored.dequantize_by.scale, None, True)
    ours = gate_up(x, held, routing)
    right = gate_up(x, held._replace(fp8=False), routing)
    assert torch.equal(ours, right)
