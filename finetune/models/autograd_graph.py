"""Which parameters an output depends on."""

from __future__ import annotations

from typing import Any


def parameters(output: Any) -> set[int]:
    """Ids of the parameters in a tensor's autograd graph."""
    found, seen = set[int](), set[Any]()
    stack: list[Any] = [output.grad_fn]
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):  # AccumulateGrad, one for each parameter
            found.add(id(function.variable))
        stack += [inner for inner, _ in function.next_functions]
    return found
