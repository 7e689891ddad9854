"""Read tensor names and shapes from safetensors headers, without torch."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from finetune.core import strict_json
from finetune.core.errors import Problem, UserError, raise_if_any
from finetune.core.paths import refuse_lfs_pointer
from finetune.core.weight_files import DOWNLOAD, find_weight_files
from finetune.quantization import four_bit_state, stored_tensors, stored_weights
from finetune.quantization.four_bit_state import StoredTensor

if TYPE_CHECKING:
    from finetune.models.module_names import Names

MOST_DIMENSIONS = 16
# Weights of a model for each weight in its files. A model can use the same weights several times
MOST_SHARED = 4
# In bytes. bitsandbytes describes a tensor in about 100 bytes
LARGEST_STATE = 2**14
# In all files of a model. The largest models have about 200,000 tensors
MOST_TENSORS = 300_000
# JSON values in one header. A tensor has 8
MOST_PARTS = 2_000_000
# In bytes. `sample` reads so much of each end of a tensor
SAMPLE = 2**12
# In bytes. safetensors reads no larger header
LARGEST_HEADER = 100_000_000
# Bits per value, by dtype names of the safetensors format
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_LAYER = re.compile(r"\.\d+\.")
_IN_LAYER = re.compile(r"(.*?)\.(0|[1-9][0-9]{0,5})\.(.+)")
# Modules of layers that predict further tokens (DeepSeek-V3, GLM-4.5). transformers drops them on purpose
_PREDICTS_MORE = re.compile(r"(.*?\.\d+)\.(eh_proj|enorm|hnorm)\.")
_EXPERT = re.compile(r"(.*\.experts)\.(0|[1-9][0-9]{0,5})\.(.+)")


def tensors(folder: Path, key: str = "model.name") -> dict[str, list[int]]:
    """Return the shape of each tensor, by name, in the weight files that transformers reads from a folder.

    This reads only the headers, which takes milliseconds for any size.

    Raises:
        UserError: a file is missing, truncated or not safetensors (exit 2).
    """
    return {name: tensor.shape for name, tensor in stored(folder, key).items()}


def stored(folder: Path, key: str = "model.name") -> dict[str, StoredTensor]:
    """Return the dtype and shape of each tensor, as `tensors` does."""
    found: dict[str, StoredTensor] = {}
    for path in find_weight_files(folder, key):
        with _refused(path, key):
            header = _header(path)
        if twice := sorted(found.keys() & header.keys()):
            raise UserError(
                Problem(
                    "two weight files hold the same tensor",
                    key,
                    where=str(path),
                    found=", ".join(twice[:3]),
                    fix=DOWNLOAD,
                    why="transformers could load another tensor than the one that the index names",
                    code="model-files",
                )
            )
        found |= header
        if len(found) > MOST_TENSORS:
            raise UserError(
                Problem(
                    "the weight files have too many tensors together",
                    key,
                    where=str(folder),
                    found=f"{len(found):,} up to {path.name}",
                    expected=f"at most {MOST_TENSORS:,}",
                    fix=DOWNLOAD,
                    code="model-files",
                )
            )
    return found


@contextlib.contextmanager
def _refused(path: Path, key: str) -> Iterator[None]:
    """Refuse a file that is not a safetensors file (exit 2)."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        refuse_lfs_pointer(path, key)
        raise UserError(
            Problem(
                "the file is damaged or is not a safetensors file",
                key,
                where=str(path),
                found=str(error),
                fix=DOWNLOAD,
                code="model-files",
            )
        ) from error


def missing_weights(missing: Collection[str]) -> Problem:
    """Return the problem of missing weights, which transformers would initialize at random."""
    return Problem(
        f"the files lack {len(missing)} of the model's weights",
        "model.name",
        found=f"no {', '.join(sorted(missing)[:6])}",
        fix=DOWNLOAD,
        why="transformers would set these weights to random values",
        code="model-files",
    )


def check_used(extra: Collection[str], parameters: Collection[str], *, same_names: bool) -> None:
    """Check that the model has a place for each weight of its decoder layers (exit 2).

    transformers would drop the other weights, so the model would compute something else.

    Args:
        extra: the names of tensors in the files.
        parameters: the names of the model's parameters.
        same_names: whether the files have the names of the model or of its base model. Otherwise only the
            number of layers is checked.
    """
    if lost := _without_place(extra, parameters, same_names=same_names):
        raise UserError(
            Problem(
                f"the model of config.json does not use {len(lost)} weights of the files",
                "model.name",
                found=", ".join(sorted(lost)[:3]),
                fix=f"{DOWNLOAD}. To drop them, load the model with transformers and save it again",
                why="config.json is damaged, or from another model",
                code="model-files",
            )
        )


def _without_place(extra: Collection[str], parameters: Collection[str], *, same_names: bool) -> list[str]:
    """Return the weights of decoder layers for which the model has no place. Arguments: `check_used`."""
    last: dict[str, int] = {}  # name of a list of layers -> number of its last layer
    for name in parameters:
        if found := _IN_LAYER.fullmatch(name):
            last[found[1]] = max(last.get(found[1], 0), int(found[2]))
    full = {**{layers.partition(".")[2]: layers for layers in last}, **{layers: layers for layers in last}}
    parents = {name.rsplit(".", 2)[0] for name in parameters}
    predicts_more = {found[1] for name in extra if (found := _PREDICTS_MORE.match(name))}
    lost = []
    for name in extra:
        found = _IN_LAYER.fullmatch(name)
        if not found or found[1] not in full:
            continue
        layers, number, rest = full[found[1]], found[2], found[3]
        if int(number) > last[layers]:
            has_place = f"{found[1]}.{number}" in predicts_more
        else:
            has_place = not same_names or _has_place(f"{layers}.{number}.{rest}", parameters, parents)
        if not has_place:
            lost.append(name)
    return lost


def _has_place(name: str, parameters: Collection[str], parents: Collection[str]) -> bool:
    """Return whether the model has this parameter, or may have had this buffer, as GPT-2's `attn.bias`."""
    module, _, kind = name.rpartition(".")
    return (
        name in parameters
        or kind not in ("weight", "bias")
        or (module in parents and f"{module}.weight" not in parameters)
    )


def lacks(stored: Collection[str], names: Names, *, same_names: bool) -> list[str]:
    """Return parameters that the files lack.

    Args:
        same_names: Whether the files have the names of the model or of its base model, such as `layers.0` for
            `model.layers.0`. Otherwise a parameter is missing only if the files have the
            same parameter of another layer.
    """
    missing = [name for name in names.shapes if name not in stored]
    if same_names:
        tied = [f"{name}.weight" for name in (names.embedding, names.head) if names.tied]
        held = tied if any(name in stored for name in tied) else []
        return [name for name in missing if name.partition(".")[2] not in stored and name not in held]
    layered = {_LAYER.sub(".*.", name) for name in stored if _LAYER.search(name)}
    return [name for name in missing if _LAYER.sub(".*.", name) in layered]


def check_size(stored: Mapping[str, StoredTensor], names: Names, declared: dict[str, Any]) -> None:
    """Check that the files can hold the weights of config.json, before a model of this size takes the memory.

    Args:
        stored: the tensors of all files.
        declared: the `quantization_config` of the model; empty if it has none.

    Raises:
        UserError: the files hold fewer than 1 of 4 weights, or less than 1 bit for each weight of a quantized
            model (exit 2).
    """
    wanted = sum(prod(shape) for shapes in (names.shapes, names.tower_shapes) for shape in shapes.values())
    bits = sum(prod(tensor.shape) * _BITS[tensor.dtype] for tensor in stored.values())
    held = bits if declared else sum(prod(tensor.shape) for tensor in stored.values())
    unit = "bits" if declared else "weights"
    if wanted > (held if declared else MOST_SHARED * held):
        raise UserError(
            Problem(
                "the files are too small for the model of config.json",
                "model.name",
                found=f"{held:,} {unit} in the files, {wanted:,} weights by config.json",
                fix=DOWNLOAD,
                why="config.json is damaged, or from another model",
                code="model-files",
            )
        )


def check_tensors(folder: Path, declared: dict[str, Any]) -> dict[str, StoredTensor]:
    """Check scales of quantized weights and the numbers of experts, and return the tensors by name.

    Args:
        declared: the `quantization_config` of the model; empty if it has none.

    Raises:
        UserError: a scale is missing or does not fit, an expert is missing, or a file is damaged (exit 2).
    """
    found = stored(folder)
    raise_if_any(stored_tensors.problems(stored_weights.format_of(declared), declared, found))
    if faults := list(expert_faults(found, quantized=bool(declared))):
        raise UserError(unlike_experts(faults, "model.name", DOWNLOAD))
    return found


def unlike_experts(faults: list[str], key: str, fix: str) -> Problem:
    """Return the problem of `expert_faults`."""
    return Problem(
        "the files do not hold the same weights of every expert",
        key,
        found="; ".join(faults[:3]),
        fix=fix,
        why="the place of this expert would get the weights of another one",
        code="model-files",
    )


def _experts(stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, dict[int, list[int]]]]:
    """Return the shapes of experts that have tensors of their own: layer -> kind of tensor -> number."""
    held: dict[str, dict[str, dict[int, list[int]]]] = {}
    for name, tensor in stored.items():
        if found := _EXPERT.fullmatch(name):
            layer, number, kind = found.groups()
            held.setdefault(layer, {}).setdefault(kind, {})[int(number)] = tensor.shape
    return held


def expert_faults(stored: Mapping[str, StoredTensor], *, quantized: bool) -> Iterator[str]:
    """Find experts that lack a weight, or have a weight of another shape than the first expert.

    transformers and PEFT stack experts in the order of their numbers. They do not look for gaps.
    """
    for layer, kinds in _experts(stored).items():
        if quantized:  # some experts of a layer may not be quantized, so their tensors have other names
            kinds = _by_module(kinds)
        last = max(number for shapes in kinds.values() for number in shapes)
        for kind, shapes in kinds.items():
            if len(shapes) <= last:
                first = next(number for number in range(last + 1) if number not in shapes)
                yield f"no {layer}.{first}.{kind}"
            elif not quantized and any(shape != shapes[0] for shape in shapes.values()):
                other = next(number for number in shapes if shapes[number] != shapes[0])
                yield f"{layer}.{other}.{kind}: {shapes[other]}, and {shapes[0]} of expert 0"


def _by_module(kinds: dict[str, dict[int, list[int]]]) -> dict[str, dict[int, list[int]]]:
    """Join the tensors of each linear layer of an expert."""
    joined: dict[str, dict[int, list[int]]] = {}
    for kind, shapes in kinds.items():
        joined.setdefault(kind.rpartition(".")[0], {}).update(shapes)
    return joined


def check_experts(stored: Mapping[str, StoredTensor], names: Names) -> None:
    """Check that the files have the experts of config.json, stacked or one by one (exit 2).

    transformers may transpose stacked experts. It may also split the experts of a layer into equal parts, as
    those for text and for images.
    """
    stacked = {f"{holder}.{name}": names.shapes[f"{holder}.{name}"] for holder, name in names.stacked_experts}
    for name, wanted in stacked.items():
        if (blocks := stored.get(f"{name}_blocks")) and 2 * prod(blocks.shape) != prod(wanted):
            raise UserError(_other_shape(1, f"{name}_blocks", blocks.shape, wanted))
        held = stored[name].shape if name in stored else list(wanted)
        if held[:1] != [wanted[0]] or sorted(held) != sorted(wanted):
            raise UserError(_other_shape(1, name, held, wanted))
    numbers = {shape[0] for shape in stacked.values()}
    for layer, kinds in _experts(stored).items():
        count = max(map(len, kinds.values()))
        if stacked and (fewer := [kind for kind, shapes in kinds.items() if len(shapes) < count]):
            faults = [f"{layer}: {fewer[0]} of {len(kinds[fewer[0]])} of {count} experts"]
            raise UserError(unlike_experts(faults, "model.name", DOWNLOAD))
        twice = [name for name in stacked if name.rpartition(".")[0] == layer and name in stored]
        if twice and len(twice) == len([name for name in stacked if name.rpartition(".")[0] == layer]):
            raise UserError(
                Problem(
                    "the files hold the experts of a layer twice",
                    "model.name",
                    found=f"{', '.join(twice)} and {layer}.0",
                    fix=DOWNLOAD,
                    code="model-files",
                )
            )
        if len(numbers) == 1 and count % min(numbers):
            raise UserError(
                Problem(
                    "the files have another number of experts than config.json",
                    "model.name",
                    found=f"{layer}: {count} experts",
                    expected=f"{min(numbers)} experts",
                    fix=DOWNLOAD,
                    code="model-files",
                )
            )


def check_shapes(stored: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that the weights have the shapes of config.json (exit 2).

    Skip tensors of three and more dimensions, which transformers may stack or transpose.
    """
    differ = [
        (name, stored[name], shape)
        for name, shape in shapes.items()
        if name in stored and len(shape) <= 2 and list(stored[name]) != list(shape)
    ]
    if not differ:
        return
    name, held, wanted = differ[0]
    raise UserError(_other_shape(len(differ), name, held, wanted))


def _other_shape(count: int, name: str, held: Sequence[int], wanted: Sequence[int]) -> Problem:
    return Problem(
        f"{count} weights of the model have other shapes than its config.json gives",
        "model.name",
        found=f"{name}: {list(held)} in the files, {list(wanted)} by config.json",
        fix=DOWNLOAD,
        code="model-files",
    )


def _header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the header of a file (format: https://huggingface.co/docs/safetensors).

    `safe_open` of safetensors would import numpy, which takes a fifth of the time of `finetune check`.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        text = _text(file, size)
        length = len(text)
        header = json.loads(text.decode())  # the format is UTF-8 without a mark, and json reads others
        if text.count(b'"__metadata__"') > 1:
            json.loads(text, object_pairs_hook=_with_metadata_once)
        states = _states(file, header, 8 + length)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in entries.items():
        _check_entry(name, entry)
    if not all(isinstance(text, str) for text in (header.get("__metadata__") or {}).values()):
        raise ValueError("a value of its metadata is no text")
    end = 0
    for start, after in sorted(entry["data_offsets"] for entry in entries.values()):
        if start != end:
            raise ValueError(f"its tensors overlap or have a gap at byte {8 + length + end:,}")
        end = after
    if 8 + length + end != size:
        raise ValueError(f"its tensors end at byte {8 + length + end:,}, the file is {size:,}")
    return {
        name: StoredTensor(entry["dtype"], entry["shape"], states.get(name, b""))
        for name, entry in entries.items()
    }


def _text(file: IO[bytes], size: int) -> bytes:
    """Read the text of a header, after which the tensors start (ValueError if it is too large)."""
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise ValueError(f"its header would be {length:,} bytes, the file is {size:,}")
    if length > LARGEST_HEADER:
        raise ValueError(f"its header has {length:,} bytes, more than {LARGEST_HEADER:,}")
    text = file.read(length)
    strict_json.check_size(text, MOST_PARTS)
    return text


def sample(path: Path) -> str:
    """Return a hash of the header of a file, and of the first and the last bytes of each tensor.

    It takes milliseconds for a large file. A change in the middle of a tensor alone leaves the hash as it is.

    Raises:
        UserError: the file is not a safetensors file (exit 2).
    """
    import xxhash

    size = path.stat().st_size
    with _refused(path, "model.name"), path.open("rb") as file:
        text = _text(file, size)
        digest, start = xxhash.xxh3_128(text), 8 + len(text)
        entries = [entry for name, entry in json.loads(text).items() if name != "__metadata__"]
        # One block at each border holds the end of a tensor and the start of the next
        for border in sorted({0, *(entry["data_offsets"][1] for entry in entries)}):
            file.seek(start + max(0, border - SAMPLE))
            digest.update(file.read(2 * SAMPLE))
    return digest.hexdigest()


def _with_metadata_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a second `__metadata__`, as safetensors does."""
    if sum(name == "__metadata__" for name, _ in pairs) > 1:
        raise ValueError("its header has two entries __metadata__")
    return dict(pairs)


def _states(file: IO[bytes], header: dict[str, Any], start: int) -> dict[str, bytes]:
    """Return the content of tensors in which bitsandbytes describes 4-bit weights, by name.

    Args:
        start: the position of the first tensor in the file.
    """
    found = dict[str, bytes]()
    for name in header:
        if four_bit_state.STATE in name:
            first, end = header[name]["data_offsets"]
            file.seek(start + first)
            found[name] = file.read(max(0, min(end - first, LARGEST_STATE)))
    return found


def _check_entry(name: str, entry: dict[str, Any]) -> None:
    """Check that the shape of a tensor fits its bytes in the file (ValueError)."""
    name.encode()  # not half of a surrogate pair
    start, end = entry["data_offsets"]
    bits, shape = _BITS.get(entry["dtype"]), entry["shape"]
    if bits is None:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}"[:200])
    if len(shape) > MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError(f"{name} has the shape {shape}"[:200])
    if not (type(start) is type(end) is int and 0 <= start <= end) or prod(shape) * bits != (end - start) * 8:
        raise ValueError(f"{name} has the shape {shape}, and {end - start:,} bytes"[:200])


def adapter_problems(saved: Mapping[str, StoredTensor]) -> list[Problem]:
    """Return the problem of an adapter whose weights are no floating-point numbers of 16 bits or more.

    VB-LoRA, SHiRA and FRoD also save indices and sizes, which are integers.
    """
    odd = [
        f"{name} has the dtype {tensor.dtype}"
        for name, tensor in saved.items()
        if tensor.dtype not in stored_tensors.FLOATS and not re.search(r"_(indices|s_size)\b", name)
    ]
    if not odd:
        return []
    what = "weights of the adapter are no floating-point numbers of 16 bits or more"
    fix = "save the adapter again in float32"
    return [Problem(what, found="; ".join(odd[:3]), fix=fix, code="adapter-files")]
