"""Find the functions and parameters that an output depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def functions(output: torch.Tensor) -> set[Any]:
    """Return the autograd functions that computed a tensor."""
    found = set[Any]()
    stack: list[Any] = [output.grad_fn]
    while stack:
        function = stack.pop()
        if function is not None and function not in found:
            found.add(function)
            stack += [inner for inner, _ in function.next_functions]
    return found


def parameters(of: set[Any]) -> set[int]:
    """Return the ids of the parameters that these functions read."""
    return {id(function.variable) for function in of if hasattr(function, "variable")}  # AccumulateGrad
