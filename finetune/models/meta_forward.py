"""Run a model on the meta device, where tensors have shapes and no values."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from finetune.core import upstream_private
from finetune.recipe import upstream_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peft import PeftModel
    from transformers import PreTrainedModel

TOKENS = 16
# Causal language models whose forward needs real tensor values (transformers 5.22). The other families run on
# the meta device with every valid config.
READ_VALUES = ("blt", "gemma3n_text", "jetmoe", "xlnet")


def runs(family: str) -> bool:
    """Return whether causal language models of a family run on the meta device with every valid config."""
    return family in upstream_options.model_classes("CAUSAL_LM") and family not in READ_VALUES


@contextlib.contextmanager
def guessed_values() -> Iterator[None]:
    """Within the context, a forward pass on the meta device completes, with guesses for tensor values."""
    with upstream_private.operations_through(_answer), upstream_private.reference_layers():
        yield


def _answer(operation: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Answer what a forward asks about the values of meta tensors.

    Conditions are false, such as whether a layer is dropped at random. Numbers are 0. One entry of a
    tensor is nonzero, so that one expert gets one token. The result shows which modules a model calls, and
    which weights its output depends on.
    """
    first = args[0] if args else None
    if isinstance(first, torch.Tensor) and first.device.type == "meta":
        if upstream_private.reads_a_value(operation):
            return False if first.dtype == torch.bool else 0
        if operation is torch.ops.aten.nonzero.default:
            return torch.empty((1, first.dim()), dtype=torch.long, device="meta")
    return operation(*args, **options)


def choose_computations(model: PreTrainedModel) -> None:
    """Choose computations of attention and experts that do not depend on values."""
    with contextlib.suppress(ValueError):  # of a model without attention
        model.set_attn_implementation("eager")
    model.set_experts_implementation("batched_mm")


def inputs(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return the first inputs with which a model runs on the meta device; `None` if all of them fail."""
    choose_computations(model)
    ids = tokens(model)
    mask = torch.ones_like(ids)
    for options in ({"attention_mask": mask, "use_cache": False}, {"use_cache": False}, {"use_cache": True}):
        given = {"input_ids": ids, **options}
        with contextlib.suppress(Exception), torch.no_grad():  # any error means: try the next inputs
            logits(model, given)
            return given
    return None


def logits(model: PreTrainedModel, given: dict[str, Any]) -> torch.Tensor:
    """Return the output of the training forward pass on the meta device."""
    with torch.device("meta"), guessed_values():
        return model.train()(**given).logits


def tokens(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    """Return some token ids on the model's device."""
    return torch.arange(TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
