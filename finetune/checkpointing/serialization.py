"""Convert the nested state of optimizers and callbacks to JSON and named tensors, and back, without code."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Exit, Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor


def flatten(value: Any, tensors: dict[str, Tensor], name: str, copy: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` as JSON, and add its tensors by name to `tensors`.

    Args:
        value: nested dicts, lists and tuples of tensors, NumPy arrays, numbers, strings and dtypes.
        tensors: the dict that receives the tensors.
        name: the prefix of the tensors' names.
        copy: returns the tensor to save for a tensor of `value`.

    Raises:
        UserError: a value has a class that `restore` can't create (exit 3).
    """
    import numpy as np
    import torch
    from torch.distributed.tensor import DTensor

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        parts = [flatten(part, tensors, f"{name}.{i}", copy) for i, part in enumerate(value)]
        return parts if isinstance(value, list) else {"tuple": parts}
    if isinstance(value, dict):
        pairs = value.items()
        return {"dict": [[key, flatten(part, tensors, f"{name}.{key}", copy)] for key, part in pairs]}
    if hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor):  # torchao's low-bit states
        if type(value).__name__ not in LOW_BITS:
            raise _unknown(name, value)
        inner, context = value.__tensor_flatten__()
        parts = {part: flatten(getattr(value, part), tensors, f"{name}.{part}", copy) for part in inner}
        return {"of": type(value).__name__, "parts": parts, "with": flatten(context, tensors, name, copy)}
    if isinstance(value, torch.Tensor):
        tensors[name] = copy(value)
        return {"tensor": name}
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(value.copy())
        return {"array": name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise _unknown(name, value)


def _unknown(name: str, value: object) -> UserError:
    return UserError(
        Problem(
            "a checkpoint can't store a value of the optimizer state",
            found=f"{name}: {type(value).__name__}",
            fix="choose another train.optim, or set train.save_strategy=no",
            code="checkpoint",
        ),
        code=Exit.ENVIRONMENT,
    )


def restore(value: object, tensors: dict[str, Tensor]) -> Any:
    """Return the value that was given to `flatten`."""
    import torch

    if isinstance(value, list):
        return [restore(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value))
    if kind == "tuple":
        return tuple(restore(part, tensors) for part in value[kind])
    if kind == "dict":
        return {key: restore(part, tensors) for key, part in value[kind]}
    if kind == "of":
        tensor_class = getattr(importlib.import_module(LOW_BITS[value[kind]]), value[kind])
        parts = {name: restore(part, tensors) for name, part in value["parts"].items()}
        return tensor_class.__tensor_unflatten__(parts, restore(value["with"], tensors))
    if kind == "dtype":
        dtype = getattr(torch, value[kind])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value[kind]} is not a dtype")
        return dtype
    tensor = tensors[value[kind]]
    return tensor.numpy() if kind == "array" else tensor


def check_alike(saved: object, live: object, name: str) -> None:
    """Check that a restored value and the numbers in it have the types of the live value.

    `None` stands for a number that is not known yet. Keys of only one of two dicts are not compared.

    Raises:
        TypeError: a value has another type. The text has its name.
    """
    number, is_alike = (int, float), isinstance(saved, type(live))
    if live is None or (isinstance(live, number) and not isinstance(live, bool)):
        is_alike = isinstance(saved, number) or saved is live
    elif isinstance(live, dict) and isinstance(saved, dict):
        for key in live.keys() & saved.keys():
            check_alike(saved[key], live[key], f"{name}.{key}")
    elif isinstance(live, list) and isinstance(saved, list):
        is_alike = all(isinstance(one, number) for one in saved)
    if not is_alike:
        raise TypeError(f"{name} has the type {type(saved).__name__}")


@contextlib.contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Refuse a checkpoint whose structure differs from finetune's own (exit 4)."""
    import torch

    try:
        yield
    except (UserError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # from any library, for values that finetune never writes
        raise refusal(path, error) from error


def refusal(
    path: Path, error: Exception, what: str = "finetune can't restore the checkpoint", why: str = ""
) -> UserError:
    """Return the error of a checkpoint that raised `error` when finetune used it."""
    return UserError(
        Problem(
            what,
            where=str(path),
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            fix="choose another checkpoint with --resume=step-N",
            why=why,
            code="checkpoint",
        ),
        code=Exit.ARTIFACT,
    )


LOW_BITS = {  # the only classes that `restore` creates
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
