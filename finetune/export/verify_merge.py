"""The proof of a merge: what saved weights say of a few rows, beside what the trained model says of them.

What is compared is what was stored: the reopened weights and the adapter on its base both compute in fp32,
so the figures are those of the weights' rounding, not of bf16 arithmetic. Only weights that torchao holds
compute in their own dtype.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.memory import clear_device_cache

from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.distributed import collectives
from finetune.evaluation import reopen
from finetune.export import torchao_quantization
from finetune.models import model_class
from finetune.quantization import fp8_loading
from finetune.speed.lm_head_loss import base_of
from finetune.training import load_data

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.autoconfig.machine_setup import Setup
    from finetune.data.preparation import HeldOut
    from finetune.recipe.schema import Recipe
    from finetune.run_folder.run_folder import RunFolder

PROBE_ROWS, PROBE_TOKENS = 32, 512
PROBE_LOGITS = 2**29  # of one model in memory: 2 GiB in fp32; a large vocabulary means fewer tokens
# The largest ||merged - tuned|| / ||tuned - base||, in logits. The base itself scores 1. Below 0.5 the merged
# model is nearer to the tuned one than to the base whatever the direction of the error (triangle inequality),
# above it that is no longer certain. An update that bf16 rounds away scores about 1.
LOST = 0.5


def probes(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, held_out: list[HeldOut]
) -> tuple[list[list[int]], str]:
    """Token ids of the rows that prove the merge, and where they are from: held-out, else training."""
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


def trained(
    folder: RunFolder, recipe: Recipe, rows: list[list[int]], score: Callable[[Any], dict[str, Any] | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any] | None]:
    """Logits of the run's model and of its base, reopened as evaluation does, and the model's scores.

    Raises:
        UserError: logits that are not finite, or that are the base's (exit 4).
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
    if not all(bool(row.isfinite().all()) for row in [*tuned, *base]):
        what = "what was trained gives logits that are not finite"
        raise UserError(Problem(what, where=str(folder.weights)), code=Exit.ARTEFACT)
    if all(map(torch.equal, tuned, base)):
        what = "training changed nothing: there is nothing to merge"
        fix = "more steps, or a higher learning rate"
        found = f"the base's own logits, bit for bit, on {len(rows)} rows"
        raise UserError(Problem(what, where=str(folder.weights), found=found, fix=fix), code=Exit.ARTEFACT)
    return tuned, base, scores


def logits(opened: PreTrainedModel | PeftModel, rows: list[list[int]]) -> list[torch.Tensor]:
    """Logits of each row of ids alone, (tokens, vocabulary), fp32 on the CPU; the model is left in fp32."""
    in_fp32(opened.eval())
    device = opened.device
    with torch.inference_mode():
        return [opened(input_ids=torch.tensor([ids], device=device)).logits[0].float().cpu() for ids in rows]


def in_fp32(opened: Any) -> None:
    """Change a model such that it computes in fp32, which loses nothing; one with torchao's weights stays.

    An fp8 base becomes the weights that its codes stand for: inputs are not rounded either. 4-bit weights
    stay, and are no longer rounded to bf16 where they are unpacked.
    """
    if any(torchao_quantization.is_quantised(parameter) for parameter in opened.parameters()):
        return
    base = base_of(opened)
    if getattr(base, "quantization_method", None) == fp8_loading.METHOD:
        base.dequantize(torch.float32)
    for parameter in opened.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    for module in opened.modules():
        packed = getattr(getattr(module, "weight", None), "quant_state", None)
        if packed is not None:  # bitsandbytes' 4-bit layers
            module.compute_dtype = packed.dtype = torch.float32


def reopened(
    folder: Path, setup: Setup, rows: list[list[int]], score: Callable[[Any], dict[str, Any] | None]
) -> tuple[list[torch.Tensor], dict[str, Any] | None]:
    """Logits and scores of a saved folder, opened as any user of transformers would.

    Raises:
        UserError: a folder that lacks weights, that lost its tie, or whose logits are not finite (exit 4).
    """
    try:
        loaded: Any = model_class.open_folder(
            folder, output_loading_info=True, use_safetensors=True, **placed(setup)
        )
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(
            Problem("what was saved does not open", found=first_line(error)), code=Exit.ARTEFACT
        ) from error
    opened, found = loaded
    wrong = sorted(found["missing_keys"]) + sorted(found["unexpected_keys"])
    if wrong:
        what = "what was saved does not hold this model's weights"
        raise UserError(Problem(what, found=", ".join(wrong[:6])), code=Exit.ARTEFACT)
    head, embedding = opened.get_output_embeddings(), opened.get_input_embeddings()
    same = head is not None and head.weight.data_ptr() == embedding.weight.data_ptr()
    if model_class.has_tied_head(opened.config) and not same:
        what, found = "the output head is no longer the embeddings", "two tensors, where the config says one"
        raise UserError(Problem(what, found=found), code=Exit.ARTEFACT)
    scores = score(opened)
    result = logits(opened, rows)
    del opened, loaded, head, embedding
    clear_device_cache(garbage_collection=True)
    if not all(bool(row.isfinite().all()) for row in result):
        raise UserError(Problem("the saved weights give logits that are not finite"), code=Exit.ARTEFACT)
    return result, scores


def agreement(
    wanted: list[torch.Tensor], base: list[torch.Tensor], got: list[torch.Tensor]
) -> dict[str, float]:
    """How far logits are from those wanted, over all tokens of all rows, summed in fp64.

    Returns:
        largest: of |got - wanted|; scale: the largest |wanted|; kl: mean KL(wanted || got) in nats a token;
        kl_base: mean KL(wanted || base); same_top: share of tokens with the same first choice;
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
        "kl": max(0.0, kl / tokens),  # rounding may leave -1e-17
        "kl_base": max(0.0, kl_base / tokens),
        "same_top": same / tokens,
        "relative": (error / update) ** 0.5,
    }


def refuse_lost(report: dict[str, Any], folder: RunFolder) -> None:
    """Merged weights in which what was trained is not there (exit 4)."""
    figures, tensors = report["against_tuned"], report["tensors"]
    if tensors["changed"] and figures["relative"] < LOST:
        return
    lost = f"||merged - tuned|| is {figures['relative']:.3g} of ||tuned - base||"
    found = f"{lost}; {tensors['changed']} of {tensors['all']} tensors differ from the base"
    fix = "--dtype float32" if report["dtype"] != "float32" else f"finetune evaluate {folder.path}"
    what, expected = f"merging in {report['dtype']} loses what training changed", f"less than {LOST:g}"
    problem = Problem(what, where=str(folder.adapter), found=found, expected=expected, fix=fix)
    raise UserError(problem, code=Exit.ARTEFACT)


def refuse_drowned(report: dict[str, Any], folder: RunFolder) -> None:
    """Quantised weights that are no nearer to what was trained than the base is (exit 4)."""
    figures, kind = report["against_tuned"], report["quantized"]
    if figures["kl"] < figures["kl_base"]:
        return
    found = f"KL(tuned || {kind}) is {figures['kl']:.3g} nats a token"
    expected = f"less than {figures['kl_base']:.3g}: KL(tuned || base)"
    fix = "without --quantize" if kind == "int8" else "--quantize int8, or without"
    what = f"{kind} changes the model by more than training did"
    problem = Problem(what, where=str(folder.weights), found=found, expected=expected, fix=fix)
    raise UserError(problem, code=Exit.ARTEFACT)


def placed(setup: Setup) -> dict[str, Any]:
    """`from_pretrained`'s options for where a model computes and how it attends, as evaluation has them."""
    device: Any = collectives.joined(setup.hardware.device).device
    place = {} if device.type == "cpu" else {"device_map": {"": str(device)}}
    return {"attn_implementation": setup.attn_implementation, **place}
