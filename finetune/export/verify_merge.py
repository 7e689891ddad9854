"""Verify a merge: compare the logits of the saved weights with those of the trained model on a few examples.

Both the reloaded weights and the adapter on its base model compute in fp32. So the figures show the rounding
of the stored weights, not of bf16 arithmetic. Only weights that torchao stores compute in their own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.autoconfig.machine_setup import Setup
from finetune.core import progress
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.data.preparation import HeldOut
from finetune.distributed import collectives
from finetune.evaluation import reopen
from finetune.export import torchao_quantization
from finetune.models import model_class
from finetune.quantization import fp8_loading, stacked_experts
from finetune.recipe.schema import Recipe
from finetune.run_folder.run_folder import RunFolder
from finetune.speed.lm_head_loss import base_model_of
from finetune.training import load_data

PROBE_ROWS, PROBE_TOKENS = 32, 512
# Limit of logits in memory for one model: 2 GiB in fp32. A large vocabulary means fewer tokens.
PROBE_LOGITS = 2**29
# Limit of ||merged - tuned|| / ||tuned - base||, in logits. The base model itself scores 1. By the triangle
# inequality, a merged model below 0.5 is always nearer to the fine-tuned model than to the base model. An
# update that is lost in bf16 rounding scores about 1.
LOST = 0.5


def probes(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, held_out: list[HeldOut]
) -> tuple[list[list[int]], str]:
    """Return the token ids of the examples to compare on, and whether they are validation examples."""
    if held_out:
        found = [document.ids for row in held_out[:PROBE_ROWS] for document in row.documents][:PROBE_ROWS]
    else:
        _, prepared = load_data.prepare_data(recipe)
        found = [row["input_ids"] for row in islice(prepared.train, PROBE_ROWS)]
    rows, room = [], max(PROBE_TOKENS, PROBE_LOGITS // max(1, len(tokenizer)))
    for ids in found:
        ids = list(ids[: min(PROBE_TOKENS, room)])
        room -= len(ids)
        if ids:
            rows.append(ids)
    return rows, "held-out" if held_out else "training"


def refuse_non_finite(rows: Sequence[torch.Tensor], folder: RunFolder) -> None:
    """Raise a UserError if logits of the fine-tuned model are NaN or Inf (exit 4)."""
    if not all(bool(row.isfinite().all()) for row in rows):
        raise UserError(
            Problem(
                "the logits of the fine-tuned model are NaN or Inf",
                where=str(folder.weights),
                found="NaN or Inf",
                fix="train again with a lower learning rate",
                code="non-finite",
            ),
            code=Exit.ARTIFACT,
        )


def trained(
    folder: RunFolder, recipe: Recipe, rows: list[list[int]], score: Callable[[Any], dict[str, Any] | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any] | None]:
    """Return the logits of the fine-tuned model and of its base model, and the former's scores.

    Raises:
        UserError: logits are NaN or Inf, or training did not change the logits (exit 4).
    """
    model_of_run: Any = reopen.reopen(folder, recipe)
    scores = score(model_of_run)
    tuned = logits(model_of_run, rows)
    if reopen.base_stands(model_of_run):
        with model_of_run.disable_adapter():
            base = logits(model_of_run, rows)
    else:
        del model_of_run
        clear_device_cache(garbage_collection=True)
        base = logits(reopen.open_base(recipe), rows)
    refuse_non_finite([*tuned, *base], folder)
    if all(map(torch.equal, tuned, base)):
        raise UserError(
            Problem(
                "the fine-tuned model equals the base model, so the merge would change nothing",
                where=str(folder.weights),
                found=f"equal logits on {len(rows):,} examples",
                fix="train more steps, or raise train.learning_rate",
                code="merge",
            ),
            code=Exit.ARTIFACT,
        )
    return tuned, base, scores


def logits(opened: PreTrainedModel | PeftModel, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of each example: (tokens, vocabulary), fp32 on the CPU. The model stays in fp32."""
    in_fp32(opened.eval())
    device = opened.device
    with torch.inference_mode():
        return [
            opened(input_ids=torch.tensor([ids], device=device)).logits[0].float().cpu()
            for ids in progress.track(rows, sum(map(len, rows)))
        ]


def in_fp32(opened: Any) -> None:
    """Make a model compute in fp32, which changes no weight. A model with torchao weights is not changed.

    An fp8 base model is dequantized, so its inputs are not rounded either. 4-bit weights stay, but are
    dequantized to fp32 instead of bf16.
    """
    if any(torchao_quantization.is_quantized(parameter) for parameter in opened.parameters()):
        return
    base = base_model_of(opened)
    if getattr(base, "quantization_method", None) == fp8_loading.METHOD:
        base.dequantize(torch.float32)
    for parameter in opened.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    for _, by in stacked_experts.all_of(opened):
        by.dtype = torch.float32  # `Experts.refresh` notices it
    for module in opened.modules():
        packed = getattr(getattr(module, "weight", None), "quant_state", None)
        if packed is not None:  # a 4-bit layer of bitsandbytes
            module.compute_dtype = packed.dtype = torch.float32


def reopened(
    folder: Path, setup: Setup, rows: list[list[int]], score: Callable[[Any], dict[str, Any] | None]
) -> tuple[list[torch.Tensor], dict[str, Any] | None]:
    """Return the logits and scores of a saved folder, loaded with plain Transformers.

    Raises:
        UserError: the folder lacks weights, the head is no longer tied, or logits are NaN or Inf (exit 4).
    """
    try:
        loaded: Any = model_class.open_folder(
            folder, output_loading_info=True, use_safetensors=True, **placed(setup)
        )
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(_unverified("can't be loaded", first_line(error)), code=Exit.ARTIFACT) from error
    opened, found = loaded
    wrong = sorted(found["missing_keys"]) + sorted(found["unexpected_keys"])
    if wrong:
        raise UserError(_unverified("do not fit the model", ", ".join(wrong[:6])), code=Exit.ARTIFACT)
    head, embedding = opened.get_output_embeddings(), opened.get_input_embeddings()
    same = head is not None and head.weight.data_ptr() == embedding.weight.data_ptr()
    if model_class.has_tied_head(opened.config) and not same:
        raise UserError(
            _unverified(
                "lost the tied output head",
                "two tensors for output head and embeddings; the config says that they are tied",
            ),
            code=Exit.ARTIFACT,
        )
    scores = score(opened)
    result = logits(opened, rows)
    del opened, loaded, head, embedding
    clear_device_cache(garbage_collection=True)
    if not all(bool(row.isfinite().all()) for row in result):
        raise UserError(_unverified("give logits that are NaN or Inf", "NaN or Inf"), code=Exit.ARTIFACT)
    return result, scores


def _unverified(fault: str, found: str) -> Problem:
    """Return the problem of merged weights that fail the verification, which deletes them."""
    return Problem(
        f"the merged weights {fault}",
        found=found,
        fix="run the merge again; if it fails again, report a bug",
        code="merge",
    )


def agreement(
    wanted: list[torch.Tensor], base: list[torch.Tensor], got: list[torch.Tensor]
) -> dict[str, float]:
    """Return the distance of logits from the wanted logits, over all tokens of all examples, summed in fp64.

    Returns:
        largest: maximum of |got - wanted|.
        scale: maximum of |wanted|.
        kl: mean KL(wanted || got) in nats per token.
        kl_base: mean KL(wanted || base) in nats per token.
        same_top: share of tokens with the same most likely token.
        relative: ||got - wanted|| / ||wanted - base||.
    """
    largest = scale = kl = kl_base = same = error = update = 0.0
    for w, b, g in zip(wanted, base, got, strict=True):
        largest, scale = max(largest, float((g - w).abs().max())), max(scale, float(w.abs().max()))
        said = w.double().log_softmax(-1)
        kl += float((said.exp() * (said - g.double().log_softmax(-1))).sum())
        kl_base += float((said.exp() * (said - b.double().log_softmax(-1))).sum())
        same += int((w.argmax(-1) == g.argmax(-1)).sum())
        error += float((g - w).double().square().sum())
        update += float((w - b).double().square().sum())
    tokens = sum(map(len, wanted))
    return {
        "largest": largest,
        "scale": scale,
        "kl": max(0.0, kl / tokens),  # rounding can give a value such as -1e-17
        "kl_base": max(0.0, kl_base / tokens),
        "same_top": same / tokens,
        "relative": (error / update) ** 0.5,
    }


def refuse_lost(report: dict[str, Any], folder: RunFolder) -> None:
    """Raise a UserError if the merged weights have lost the training update (exit 4)."""
    figures, tensors = report["against_tuned"], report["tensors"]
    if tensors["changed"] and figures["relative"] < LOST:
        return
    lost = f"||merged - fine-tuned|| / ||fine-tuned - base|| = {figures['relative']:.3g}"
    raise UserError(
        Problem(
            f"a merge in {report['dtype']} loses the training update",
            where=str(folder.adapter),
            found=f"{lost}; {tensors['changed']} of {tensors['all']} tensors differ from the base model",
            expected=f"less than {LOST:g}",
            fix="--dtype float32"
            if report["dtype"] != "float32"
            else "use the adapter with PEFT, without a merge",
            why=f"{report['dtype']} rounds changes of this size",
            code="merge",
        ),
        code=Exit.ARTIFACT,
    )


def refuse_drowned(report: dict[str, Any], folder: RunFolder) -> None:
    """Raise a UserError if quantization changed the model by more than training did (exit 4)."""
    figures, kind = report["against_tuned"], report["quantized"]
    if figures["kl"] < figures["kl_base"]:
        return
    raise UserError(
        Problem(
            f"quantization to {kind} changes the model more than training did",
            where=str(folder.weights),
            found=f"KL(fine-tuned || {kind}) = {figures['kl']:.3g} nats per token",
            expected=f"less than KL(fine-tuned || base) = {figures['kl_base']:.3g}",
            fix="remove --quantize" if kind == "int8" else "--quantize int8, or remove --quantize",
            code="quantize",
        ),
        code=Exit.ARTIFACT,
    )


def placed(setup: Setup) -> dict[str, Any]:
    """Return the options of `from_pretrained` for device and attention, as in evaluation."""
    device: Any = collectives.joined(setup.hardware.device).device
    place = {} if device.type == "cpu" else {"device_map": {"": str(device)}}
    return {"attn_implementation": setup.attn_implementation, **place}
