"""Register functions as operators of torch, so that torch.compile does not trace into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., object]")


def operator(schema: str) -> Callable[[Function], Function]:
    """Register a function as the operator `finetune::NAME`, and return the operator.

    `torch.library.custom_op` does the same, and looks for aliases among the tensors of each call. This takes
    50 to 200 microseconds, and a layer calls about 40 operators.

    Args:
        schema: NAME(arguments) -> results. An operator that changes an argument in place must call
            `torch.autograd.graph.increment_version`. No operator has a gradient of its own.
    """
    name = f"finetune::{schema.partition('(')[0]}"

    def registered(function: Function) -> Function:
        torch.library.define(name, schema[schema.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "CompositeExplicitAutograd")(function)
        made: Function = getattr(torch.ops.finetune, name.partition("::")[2]).default
        return made

    return registered


def shapes_of(name: str) -> Callable[[Function], Function]:
    """Register a function that returns empty results of an operator, for torch.compile."""

    def registered(function: Function) -> Function:
        torch.library.register_fake(f"finetune::{name}", function)
        return function

    return registered
