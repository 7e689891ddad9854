"""Check that each quantized weight of a checkpoint has its scales, and that they fit. Imports no torch.

transformers reads a quantized weight without a scale as a plain weight, and a scale of another shape as the
scale of other blocks. Training would then run on other weights than those of the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core.errors import Problem
from finetune.core.weight_files import DOWNLOAD
from finetune.quantization import four_bit_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from finetune.quantization.four_bit_state import StoredTensor
    from finetune.quantization.stored_weights import Stored

FLOATS = ("F64", "F32", "F16", "BF16")
PACKED = ("I8", "U8", "F4")  # dtypes whose values may hold two weights, so the shape is another one
NO_FLOATS = ("BOOL", "C64", *(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)))
FP8 = ("F8_E4M3", "F8_E5M2")
BLOCKS = (128, 128)  # transformers' default of `weight_block_size`
UNDECLARED = (".weight_scale", "_scale_inv", ".SCB", ".absmax")


class Format(NamedTuple):
    """How a method names and stores quantized tensors and their scales."""

    endings: tuple[tuple[str, str], ...]
    """The end of a scale's name, and the end of its tensor's name."""
    values: tuple[str, ...]
    """The dtypes of quantized tensors."""
    scales: tuple[str, ...]
    """The dtypes of scales."""


_FP8 = Format(
    (("_scale_inv", ""), (".qscale_weight", ".weight"), (".scale", ".weight")),
    ("F8_E4M3", "F8_E5M2", "I8", "F4"),
    (*FLOATS, "F8_E8M0", "U8"),
)
FORMATS = {
    "fp8": _FP8,
    "mxfp8": _FP8,
    "mxfp4": Format((("_scales", "_blocks"),), ("U8",), ("U8",)),
    "compressed-tensors": Format(((".weight_scale", ".weight"),), ("F8_E4M3",), FLOATS),
    "int8": Format(((".SCB", ".weight"),), ("I8",), ("F32",)),
    "4-bit": Format(((".weight.absmax", ".weight"),), ("U8",), ("F32", "U8")),
}


def problems(
    stored: Stored | None, declared: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> list[Problem]:
    """Return the problem of quantized weights without scales, and of scales that do not fit their weights.

    Args:
        stored: the storage format that the config declares, or `None` if it declares none.
        declared: the `quantization_config`.
        tensors: the tensors in the headers of the weight files, by name.
    """
    if stored is None:
        mxfp4 = [name for name in tensors if f"{name.removesuffix('_scales')}_blocks" in tensors]
        scales = sorted([*mxfp4, *(name for name in tensors if name.endswith(UNDECLARED))])
        what, why = "the weights are quantized, but config.json has no quantization_config", ""
        found = [", ".join(scales[:3])] if scales else []
        if not scales:
            what, found = "weights of the model are no floating-point numbers", list(_integers(tensors))
        if not found and (narrow := list(_without_scales(tensors))):
            what, found = "weights of the model are quantized, and have no scales", narrow
            why = "training would run on other weights than those of the checkpoint"
    else:
        found = list(_faults(stored, declared, tensors))
        what = f"{len(found)} quantized weights of the model do not fit their scales"
        why = "training would run on other weights than those of the checkpoint"
    return (
        [Problem(what, "model.name", found="; ".join(found[:3]), fix=DOWNLOAD, why=why, code="model-files")]
        if found
        else []
    )


def _integers(tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Find weights that libraries would read as floating-point numbers although they are none."""
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dtype in NO_FLOATS:
            yield f"{name} has the dtype {tensor.dtype}"


def _without_scales(tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Find weights of 8 bits and fewer. Every method that quantizes to these dtypes writes scales."""
    for name, tensor in tensors.items():
        if tensor.dtype.startswith(("F8", "F6", "F4")):
            yield f"{name} has the dtype {tensor.dtype}"


def _faults(
    stored: Stored, declared: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Iterator[str]:
    by_bitsandbytes = "int8" if stored.storage == "int8" else "4-bit"
    method = by_bitsandbytes if stored.method == "bitsandbytes" else stored.method
    form = FORMATS.get(method)
    if form is None:
        return
    if method == "4-bit":
        yield from four_bit_state.faults(stored.storage, tensors)
    pairs = _pairs(form, tensors)
    if stored.method == "bitsandbytes" and not pairs:
        yield "no weight is quantized"
    scales = set(pairs.values())
    for name, tensor in tensors.items():
        quantized = tensor.dtype in form.values or tensor.dtype in FP8
        if quantized and name not in pairs and name not in scales and _is_weight(name):
            yield f"{name} has no scale"
    for name, scale in pairs.items():
        if name not in tensors:
            yield f"{scale} has no weight"
        elif tensors[name].dtype not in form.values:
            yield f"{name} has a scale, and the dtype {tensors[name].dtype}"
        elif tensors[scale].dtype not in form.scales:
            yield f"{scale} has the dtype {tensors[scale].dtype}"
        elif stored.method == "bitsandbytes" and (skip := _skip_of(name, declared)):
            yield f"{name} is quantized, but llm_int8_skip_modules has {skip}"
        elif method != "4-bit" and not _fits(method, declared, tensors[name], tensors[scale].shape):
            yield f"{scale} has the shape {tensors[scale].shape}, and its weight {tensors[name].shape}"


def _skip_of(name: str, declared: Mapping[str, Any]) -> str:
    """Return the entry for which transformers would load a quantized weight as a plain one; else nothing."""
    module = name.removesuffix(".weight")
    skips = declared.get("llm_int8_skip_modules") or ()
    return next((one for one in skips if f"{module}.".startswith(f"{one}.") or module.endswith(one)), "")


def _is_weight(name: str) -> bool:
    """Whether a tensor is a weight, and not a part of bitsandbytes' state."""
    return ".weight." not in name and not name.endswith((".weight_format", ".SCB"))


def _pairs(form: Format, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return each name of a tensor that has a scale -> the name of its scale."""
    found = dict[str, str]()
    for scale in tensors:
        for end, own in form.endings:
            if not scale.endswith(end):
                continue
            name = scale.removesuffix(end) + own
            # A layer may have a parameter `scale` of its own
            if end != ".scale" or (name in tensors and tensors[name].dtype in form.values):
                found[name] = scale
    return found


def _fits(method: str, declared: Mapping[str, Any], weight: StoredTensor, scale: list[int]) -> bool:
    """Whether a scale has the shape that its weight needs."""
    shape = weight.shape
    if method == "compressed-tensors":
        return len(shape) == 2 and scale in ([], [1], [1, 1], shape[:1], [shape[0], 1])
    if method == "int8":
        return len(shape) == 2 and scale == shape[:1]
    if method == "mxfp4":
        return scale == shape[:-1] and shape[-1:] == [16]
    return _fits_blocks(declared.get("weight_block_size", BLOCKS), weight, scale)


def _fits_blocks(blocks: Sequence[int] | None, weight: StoredTensor, scale: list[int]) -> bool:
    """Whether transformers dequantizes a weight with the blocks that the config declares.

    It divides each side of a weight by the side of its scale (transformers 5.22, `Fp8Dequantize`). If the
    last block of a side is smaller than the others, all blocks would be wrong.
    """
    if len(weight.shape) < 2:
        return False
    *outer, rows, columns = weight.shape
    if blocks is None and scale in ([], outer, [1] * len(scale)):
        return True
    if len(scale) != len(weight.shape) or scale[:-2] != outer or 0 in scale:
        return False
    sides = list(zip((rows, columns * (2 if weight.dtype in PACKED else 1)), scale[-2:], strict=True))
    if any(side % count for side, count in sides):
        return False
    if blocks is None or weight.dtype in PACKED:  # one scale for each row, or blocks of another size
        return True
    expected = [max(1, side // block) for (side, _), block in zip(sides, blocks, strict=True)]
    found = [count for _, count in sides]
    fused = [max(2, expected[0]), expected[1]]  # transformers gives two projections a block each
    exact = all(side <= block or side % block == 0 for (side, _), block in zip(sides, blocks, strict=True))
    return exact and (found == expected or (bool(outer) and found == fused))
