"""Write a merged model as one GGUF file, and read it back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.core import progress, weight_files
from finetune.core.errors import Exit, Problem, UserError
from finetune.export.gguf_families import load_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from gguf import GGUFReader, GGUFWriter, ReaderTensor

    from finetune.export.gguf_families import GgufTensor

TYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
"""How the gguf package stores weights: the name, and the number in `general.file_type`."""
WIDE = ("ffn_gate_inp", "ffn_gate_inp_shexp", "rope_freqs", "rope_factors")
"""Tensors that llama.cpp wants in fp32: the router of experts and the factors of rotary embeddings."""


class Checkpoint(NamedTuple):
    """The tensors of a folder with safetensors files."""

    files: dict[str, Any]
    """Tensor name -> the open file."""

    def shape(self, name: str) -> list[int]:
        return list(self.files[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        return self.files[name].get_tensor(name).float()


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Checkpoint]:
    """Open all safetensors files of a folder."""
    with contextlib.ExitStack() as stack:
        files = {}
        for path in weight_files.find_weight_files(folder):
            file: Any = stack.enter_context(weight_files.opened(path))
            files |= dict.fromkeys(file.keys(), file)
        yield Checkpoint(files)


def write(
    path: Path, entries: dict[str, Any], tensors: list[GgufTensor], source: Checkpoint, kind: str
) -> None:
    """Write a GGUF file. One tensor at a time is in memory."""
    gguf = load_gguf()

    writer = gguf.GGUFWriter(path, entries["general.architecture"])
    for key, value in entries.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for tensor in tensors:
        shape = _shape(tensor, source)
        stored = stored_type(tensor.name, shape, kind)
        held = gguf.quant_shape_to_byte_shape(shape, stored) if stored.name in ("BF16", "Q8_0") else shape
        dtype = {"F32": "float32", "F16": "float16"}.get(stored.name, "uint8")
        writer.add_tensor_info(tensor.name, held, _numpy().dtype(dtype), _bytes(shape, stored), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in progress.track(tensors, len(tensors), lambda _: 1):
        array = computed(tensor, source)
        stored = stored_type(tensor.name, list(array.shape), kind)
        writer.write_tensor_data(gguf.quants.quantize(array, stored))
    writer.close()


def computed(tensor: GgufTensor, source: Checkpoint) -> np.ndarray[Any, Any]:
    """Return the values of a tensor in fp32."""
    return tensor.compute([source.tensor(name) for name in tensor.sources]).float().contiguous().numpy()


def stored_type(name: str, shape: list[int], kind: str) -> Any:
    """Return how a tensor is stored. Norms, biases and routers stay in fp32, as in llama.cpp's files."""
    gguf = load_gguf()

    if len(shape) == 1 or name.startswith(WIDE) or f".{name.split('.')[-2]}".endswith(WIDE):
        return gguf.GGMLQuantizationType.F32
    if kind == "q8_0" and shape[-1] % 32:
        return gguf.GGMLQuantizationType.F16
    return gguf.GGMLQuantizationType[TYPES[kind][0]]


def _shape(tensor: GgufTensor, source: Checkpoint) -> list[int]:
    empty = [torch.empty(source.shape(name), device="meta") for name in tensor.sources]
    return list(tensor.compute(empty).shape)


def _bytes(shape: list[int], stored: object) -> int:
    gguf = load_gguf()

    block, size = gguf.GGML_QUANT_SIZES[stored]
    return int(_numpy().prod(shape)) // block * size


def _numpy() -> Any:
    import numpy

    return numpy


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add one key. An integer is stored in 32 bits without a sign, as llama.cpp reads it."""
    gguf = load_gguf()

    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    kind = gguf.GGUFValueType[kinds[type(value)]]
    if kind is gguf.GGUFValueType.ARRAY:
        inner = {int: "INT32", float: "FLOAT32", str: "STRING"}[type(value[0])]
        writer.add_key_value(key, value, kind, gguf.GGUFValueType[inner])
    else:
        writer.add_key_value(key, value, kind)


def differences(
    path: Path, entries: dict[str, Any], tensors: list[GgufTensor], source: Checkpoint, kind: str
) -> list[str]:
    """Read a GGUF file back with gguf's reader, and return each difference from what it should hold."""
    try:
        return _differences(load_gguf().GGUFReader(path), entries, tensors, source, kind)
    except (ValueError, OSError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        return [f"the file can't be read: {type(error).__name__}: {error}"]


def _differences(
    reader: GGUFReader, entries: dict[str, Any], tensors: list[GgufTensor], source: Checkpoint, kind: str
) -> list[str]:
    found = [
        f"{key}: {_short(held)}, expected {_short(value)}"
        for key, value in entries.items()
        if not _equal(held := _held(reader, key), value)
    ]
    held_tensors = {tensor.name: tensor for tensor in reader.tensors}
    wanted = {tensor.name for tensor in tensors}
    found += [f"tensor {name} is missing" for name in sorted(wanted - held_tensors.keys())]
    found += [f"tensor {name} is too much" for name in sorted(held_tensors.keys() - wanted)]
    for tensor in tensors:
        if tensor.name in held_tensors:
            found += _tensor_difference(tensor, held_tensors[tensor.name], source, kind)
    return found


def _tensor_difference(tensor: GgufTensor, held: ReaderTensor, source: Checkpoint, kind: str) -> list[str]:
    """Compare one tensor with the weights that it was made from."""
    gguf = load_gguf()

    wanted = computed(tensor, source)
    shape = [int(size) for size in reversed(held.shape)]
    if kind not in TYPES and shape == [size for size in wanted.shape if size > 1]:
        shape = list(wanted.shape)  # llama.cpp drops dimensions of one
    if shape != list(wanted.shape):
        return [f"tensor {tensor.name} has the shape {shape}, expected {list(wanted.shape)}"]
    got = gguf.quants.dequantize(held.data, held.tensor_type).reshape(wanted.shape)
    if kind in TYPES:
        stored = stored_type(tensor.name, shape, kind)
        if held.tensor_type != stored:
            return [f"tensor {tensor.name} is stored in {held.tensor_type.name}, expected {stored.name}"]
        exact = gguf.quants.dequantize(gguf.quants.quantize(wanted, stored), stored).reshape(wanted.shape)
        equal = bool((got == exact).all())
        return [] if equal else [f"tensor {tensor.name} differs from the merged weights"]
    error = _error(got.ravel(), wanted.ravel())
    return [] if error < LOSSY else [f"tensor {tensor.name} differs from the merged weights by {error:.0%}"]


BLOCK = 256  # weights that k-quants quantize together
LOSSY = 0.8
"""The relative error above which a block of weights holds other weights: 2 bits lose about 40% of some."""


def _error(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    """Return the largest relative error of a block of weights."""
    numpy, starts = _numpy(), range(0, wanted.size, BLOCK)
    errors = numpy.add.reduceat((got - wanted) ** 2, starts)
    return float((errors / numpy.maximum(numpy.add.reduceat(wanted**2, starts), 1e-30)).max()) ** 0.5


def _held(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _equal(held: Any, value: object) -> bool:
    if isinstance(value, float) and isinstance(held, float):
        return abs(held - value) <= 1e-6 * abs(value)
    if isinstance(value, list) and value and isinstance(value[0], float):
        return held is not None and len(held) == len(value) and all(map(_equal, map(float, held), value))
    return bool(held == value)


def _short(value: object) -> str:
    return f"{len(value):,} values" if isinstance(value, list) else f"{value!r:.60}"


def refuse_damaged(path: Path, found: list[str]) -> None:
    """Raise a UserError if a file differs from what it should hold (exit 4)."""
    if found:
        raise UserError(
            Problem(
                "the exported file differs from the model",
                where=str(path),
                found="; ".join(found[:5]),
                fix="run the export again; if it fails, report it",
                code="export",
            ),
            code=Exit.ARTIFACT,
        )
