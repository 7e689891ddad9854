"""Check how a checkpoint describes the 4-bit weights of bitsandbytes. Imports no torch.

Each weight has tables, and a tensor with JSON that gives its shape and the size of its blocks. The kernels of
bitsandbytes trust these sizes: with other sizes they would read memory outside of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import ceil, isfinite, prod
from typing import Any, NamedTuple

STATE = ".quant_state.bitsandbytes__"
DTYPES = ("bfloat16", "float16", "float32")
BLOCKS = [2**power for power in range(5, 13)]  # values
NUMBERS, NESTED_NUMBERS = [16], [256]  # shapes of the tables of values


class StoredTensor(NamedTuple):
    """A tensor in the header of a weight file."""

    dtype: str
    """As safetensors names it, such as `F8_E4M3`."""
    shape: list[int]
    content: bytes = b""
    """Only for a tensor with a description of 4-bit weights."""


def faults(storage: str, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Find the weights whose description does not fit their tensors.

    Args:
        storage: nf4 or fp4.
    """
    for name, tensor in tensors.items():
        stem, state, kind = name.partition(STATE)
        if state and (fault := _fault(stem, kind if kind == storage else "", tensor.content, tensors)):
            yield f"{name}: {fault}"
        elif name.endswith(".weight.absmax") and not any(
            f"{name.removesuffix('.absmax')}{STATE}{one}" in tensors for one in ("nf4", "fp4")
        ):
            yield f"{name} has no {STATE.strip('.')}{storage}"


def shape_of(name: str, tensors: Mapping[str, StoredTensor]) -> list[int]:
    """Return the shape of a weight before it was quantized, or the shape in the file."""
    for kind in ("nf4", "fp4"):
        if state := tensors.get(f"{name}{STATE}{kind}"):
            return json.loads(state.content)["shape"]
    return tensors[name].shape


def _fault(stem: str, kind: str, content: bytes, tensors: Mapping[str, StoredTensor]) -> str:
    """Return what is wrong with one weight, or the empty string."""
    try:
        state: Any = json.loads(content)
        shape, block = state["shape"], state["blocksize"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return "no description of a weight"
    if not kind or state.get("quant_type") != kind:
        return f"the type {str(state.get('quant_type'))[:20]!r}, other than in config.json"
    if state.get("dtype") not in DTYPES or not _is_shape(shape) or not _is_block(block):
        return "a dtype, a shape or a block size that bitsandbytes does not write"
    packed, count = tensors.get(stem), ceil(prod(shape) / block)
    if packed is None or packed.dtype != "U8" or prod(packed.shape) != ceil(prod(shape) / 2):
        return f"the shape {shape} does not fit the packed weight"
    nested = f"{stem}.nested_absmax" in tensors
    expected = {"absmax": ("U8" if nested else "F32", [count]), "quant_map": ("F32", NUMBERS)}
    if nested:
        block, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if not _is_block(block) or state.get("nested_dtype") != "float32" or not _is_number(offset):
            return "the scales of its scales are not as bitsandbytes writes them"
        expected |= {
            "nested_absmax": ("F32", [ceil(count / block)]),
            "nested_quant_map": ("F32", NESTED_NUMBERS),
        }
    for table, wanted in expected.items():
        found = tensors.get(f"{stem}.{table}")
        if found is None or (found.dtype, found.shape) != wanted:
            text = f"{found.dtype} {found.shape}" if found else "missing"
            return f"{table} is {text}, not {wanted[0]} {wanted[1]}"
    return ""


def _is_shape(value: object) -> bool:
    sizes = value if isinstance(value, list) else []
    return len(sizes) == 2 and all(type(size) is int and 0 < size < 2**31 for size in sizes)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _is_block(value: object) -> bool:
    return type(value) is int and value in BLOCKS
