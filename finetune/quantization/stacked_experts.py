"""Quantize the stacked experts of a mixture while they are read, and dequantize them where they are used.

transformers stacks the weights of a layer's experts in two parameters [E, out, in]. After loading, each
quantized parameter is parametrized (`torch.nn.utils.parametrize`). The module then holds the quantized
values, and a read of the parameter dequantizes all of them. `speed.fused_experts` reads the quantized values.

    nf4, fp4    bitsandbytes' format: blocks of 64 weights, scales that are quantized again (arXiv 2305.14314)
    fp8         e4m3 with a float32 scale for each output
    int8        int8 with a float32 scale for each output
"""

from __future__ import annotations

import contextlib
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from finetune.core.errors import Problem, UserError
from finetune.kernels import expert_ops, kernel_limits, ops
from finetune.kernels.kernel_limits import EXPERTS_BLOCK, STACKED
from finetune.recipe.adapter_types import FOUR_BIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

LARGEST_INT8 = 127
# Rows that are quantized to int8 at once.
ROWS = 2**14


class Dequantize(nn.Module):
    """A parametrization: dequantize the values of a parameter.

    Attributes:
        storage: The value of `model.quantization`.
        shape: The shape of the weights [E, out, in].
        dtype: The dtype of the dequantized weights.
        transposed: Whether the values are [E, out, in] for weights [E, in, out].
    """

    def __init__(
        self,
        storage: str,
        shape: torch.Size,
        dtype: torch.dtype,
        scales: list[torch.Tensor],
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.storage, self.shape, self.dtype, self.transposed = storage, shape, dtype, transposed
        for name, scale in zip(("scale", "table"), scales, strict=False):
            self.register_buffer(name, scale, persistent=False)

    def stored(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors for `expert_ops.dequantize_experts`."""
        return [values, *self.buffers()]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Dequantize:
        """Move the scales between devices.

        Raises:
            TypeError: the call was `.to(dtype)`, which would round the scales.
        """
        before = [scale.dtype for scale in self.buffers()]
        super()._apply(fn, recurse)
        if [scale.dtype for scale in self.buffers()] != before:
            raise TypeError("quantized experts can't be cast: load the base model without quantization")
        return self

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight = expert_ops.dequantize_experts(self.stored(values), None, True, self.dtype)
            return weight.transpose(1, 2) if self.transposed else weight


def names(model: PreTrainedModel) -> set[str]:
    """Return the full names of the parameters that can be quantized."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if kernel_limits.quantizing_unsupported_reason(model.config, shapes):
        return set()
    stacks = {name for name, shape in shapes.items() if len(shape) == 3 and name.endswith(STACKED)}
    # Set by transformers' decorator of experts, whose forward can be chosen
    return {
        name for name in stacks if hasattr(model.get_submodule(name.rpartition(".")[0]), "is_concatenated")
    }


@torch.no_grad()
def quantize(weight: torch.Tensor, storage: str) -> nn.Parameter:
    """Return the quantized values of a stacked weight, for `parametrize_experts`."""
    if storage in FOUR_BIT:
        values, scales = _four_bit(weight, storage)
    else:
        rows = weight.reshape(-1, weight.shape[2])
        quantized, scale = ops.quantize_rows(rows) if storage == "fp8" else _int8(rows)
        values, scales = quantized.view(weight.shape), [scale.view(*weight.shape[:2], 1)]
    made: Any = nn.Parameter(values, requires_grad=False)
    made.dequantize_by = Dequantize(storage, weight.shape, weight.dtype, scales)
    return made


def _four_bit(weight: torch.Tensor, storage: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    from bitsandbytes.functional import quantize_4bit

    # Blocks in rows of their own: bitsandbytes on the CPU reads other rows incorrectly (0.50.2)
    blocks = weight.reshape(-1, EXPERTS_BLOCK)
    packed, state = quantize_4bit(
        blocks, blocksize=EXPERTS_BLOCK, compress_statistics=True, quant_type=storage
    )
    second, offset = state.state2, state.offset
    assert second is not None and offset is not None and second.blocksize == ops.NESTED
    parts = [state.code, second.code, offset.view(1), second.absmax]
    table = torch.cat([part.float() for part in parts])
    return packed.view(*weight.shape[:2], weight.shape[2] // 2), [state.absmax, table]


def _int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (rows.abs().amax(1, keepdim=True).float() / LARGEST_INT8).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    values = torch.empty_like(rows, dtype=torch.int8)
    for start in range(0, len(rows), ROWS):  # a float32 copy of the whole stack would be large
        part = slice(start, start + ROWS)
        values[part] = (rows[part].float() / scale[part]).round().to(torch.int8)
    return values, scale


def parametrize_experts(model: nn.Module) -> None:
    """Let each parameter that `quantize` made dequantize itself where it is read."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(by := getattr(parameter, "dequantize_by", None), Dequantize):
                delattr(parameter, "dequantize_by")
                parametrize.register_parametrization(module, name, by, unsafe=True)
    _share_classes(model)


def _share_classes(model: nn.Module) -> None:
    """Give the quantized experts of all layers one class.

    torch makes a class for each parametrized module. torch.compile takes modules of different classes for
    different code, and compiles each layer again.
    """
    classes: dict[Any, type] = {}
    for module in model.modules():
        if quantized := tuple(name for name in STACKED if of(module, name)):
            key = parametrize.type_before_parametrizations(module), quantized
            module.__class__ = classes.setdefault(key, type(module))


def _remove(module: nn.Module, name: str) -> None:
    """Make a parameter plain again. torch changes the class for this, so the module gets one of its own."""
    shared: Any = type(module)
    module.__class__ = type(shared.__name__, shared.__bases__, dict(vars(shared)))
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)


@contextlib.contextmanager
def plain_parameters(model: nn.Module) -> Iterator[None]:
    """Let PEFT see quantized experts as plain parameters of their shape and dtype, while it adds an adapter.

    PEFT nests its wrappers of parametrized parameters in another order, so that an adapter would not fit on
    the unquantized model (peft 0.21.2, BaseTuner._inject_parameters).
    """
    held = [
        (module, name, *one) for module in model.modules() for name in STACKED if (one := of(module, name))
    ]
    for module, name, values, by in held:
        _remove(module, name)
        unread = torch.full((1, 1, 1), torch.nan, device=values.device, dtype=by.dtype).expand(by.shape)
        setattr(module, name, nn.Parameter(unread, requires_grad=False))
    try:
        yield
    finally:
        for module, name, values, by in held:
            setattr(module, name, values)
            parametrize.register_parametrization(module, name, by, unsafe=True)
        _share_classes(model)


def of(module: nn.Module, name: str) -> tuple[nn.Parameter, Dequantize] | None:
    """Return the quantized values of a module's parameter and what dequantizes them, or `None`."""
    lists: Any = getattr(module, "parametrizations", None)
    if lists is None or name not in lists or not isinstance(lists[name][0], Dequantize):
        return None
    return lists[name].original, lists[name][0]


def all_of(model: nn.Module) -> list[tuple[nn.Parameter, Dequantize]]:
    """Return the quantized stacks of a model."""
    found = (of(module, name) for module in model.modules() for name in STACKED)
    return [one for one in found if one is not None]


def sizes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of a model's quantized experts, and what their weights take in 16 bits."""
    stacks = all_of(model)
    held = sum(t.nbytes for values, by in stacks for t in by.stored(values))
    return held, sum(2 * prod(by.shape) for _, by in stacks)


def dequantize(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace quantized experts by their dequantized weights."""
    for module in list(model.modules()):
        for name in STACKED:
            if held := of(module, name):
                weight = getattr(module, name).to(dtype or held[1].dtype)
                _remove(module, name)
                setattr(module, name, nn.Parameter(weight, requires_grad=False))


def merge_refusal() -> UserError:
    """Return the error of PEFT's `merge`, which would add the adapter to a temporary copy of the weights."""
    return UserError(
        Problem(
            "an adapter can't be merged into quantized experts",
            "model.quantization",
            fix="finetune merge RUN",
            code="merge",
        )
    )
