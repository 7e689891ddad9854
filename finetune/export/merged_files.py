"""Write the files of a merged model."""

from __future__ import annotations

from glob import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils.memory import clear_device_cache
from transformers.pytorch_utils import Conv1D

from finetune.adapters import continue_from
from finetune.core import command_lines
from finetune.core.errors import Problem, UserError, first_line
from finetune.core.paths import writing
from finetune.core.weight_files import find_weight_files
from finetune.evaluation import scoring
from finetune.export import plain_base, torchao_quantization, verify_merge
from finetune.models import fingerprint, generation_config
from finetune.quantization import qat

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.autoconfig.machine_setup import Setup
    from finetune.recipe.schema import Qat, Recipe
    from finetune.run_folder.run_folder import RunFolder


def write_merged(
    folder: RunFolder,
    recipe: Recipe,
    setup: Setup,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    whole: Path,
) -> dict[str, Any]:
    """Merge in fp32 into the base model as it was in training, cast to `dtype`, and save to `whole`.

    Returns:
        The number of saved tensors that differ from the base model, the storage of the base model, and notes.
    """
    from peft import PeftConfig, PeftModel

    continue_from.check_config(folder.adapter)
    plain = plain_base.plain_base(recipe, setup)
    continue_from.check_patterns(folder.adapter, plain)
    config: Any = PeftConfig.from_pretrained(str(folder.adapter))
    # If embeddings are tied, these rows belong to both
    rows = getattr(config, "trainable_token_indices", None)
    tied = False if rows else plain_base.untie(plain)
    before = {name: fingerprint.fingerprint({"": p.to(dtype)}) for name, p in plain.named_parameters()}
    kind = "adapter"
    try:
        if hasattr(config, "fan_in_fan_out") and any(isinstance(m, Conv1D) for m in plain.modules()):
            config.fan_in_fan_out = True  # the adapter config of a quantized GPT-2 does not set this
        adapted: Any = PeftModel.from_pretrained(plain, str(folder.adapter), config=config)
        kind = str(getattr(adapted.peft_config["default"].peft_type, "value", kind))
        folder.check_weights()  # once more: another program may have replaced a file meanwhile
        merged: Any = adapted.merge_and_unload(safe_merge=True)
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise UserError(
            Problem(
                f"PEFT can't merge a {kind} adapter",
                where=str(folder.adapter),
                found=first_line(error),
                fix="use the adapter with PEFT, without a merge",
                code="merge",
            )
        ) from error
    merged.to(dtype)
    after = {name: fingerprint.fingerprint({"": p}) for name, p in merged.named_parameters()}
    if tied:
        plain_base.retie(merged)
    changed = sum(before.get(name) != digest for name, digest in after.items())
    notes = generation_config.settle_generation(merged.generation_config, scoring.stop_ids(merged, tokenizer))
    save(merged, tokenizer, whole)
    del plain, adapted, merged
    clear_device_cache(garbage_collection=True)
    tensors = {"changed": changed, "all": len(after)}
    return {"merged_onto": setup.storage.value, "tensors": tensors, "notes": notes}


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, whole: Path) -> None:
    """Save a model and its tokenizer as transformers does."""
    with writing(whole):
        model.save_pretrained(str(whole))
        tokenizer.save_pretrained(str(whole))


class Target(NamedTuple):
    """The storage format of quantized weights."""

    kind: str
    dtype: torch.dtype
    trained: Qat | None
    """The QAT settings of the training run."""


def write_quantized(
    source: Path, target: Target, setup: Setup, tokenizer: PreTrainedTokenizerBase, packed: Path
) -> dict[str, Any]:
    """Quantize the weights in `source` as training prepared them, and save them to `packed`."""
    kind, dtype, trained = target
    options = verify_merge.placed(setup)
    small: Any = torchao_quantization.load(source, kind, dtype, setup.hardware, trained, **options)
    layers, plain = torchao_quantization.left_out(small)
    notes = generation_config.settle_generation(small.generation_config, scoring.stop_ids(small, tokenizer))
    with writing(packed):
        small.save_pretrained(str(packed))
        tokenizer.save_pretrained(str(packed))
    _, storage = torchao_quantization.choose(kind, dtype, setup.hardware, trained)
    kept = torchao_quantization.kept(small, size(packed))
    del small
    clear_device_cache(garbage_collection=True)
    found = {"storage": storage, "not_quantized": kept, "layers": {"quantized": layers, "plain": plain}}
    return {**found, "notes": notes} if notes else found


def note_interrupted(target: Path, command: str) -> list[str]:
    """Return a note on files that a killed command left next to the target, because they use disk space."""
    left = sorted(target.absolute().parent.glob(f".{escape(target.name)}.*.tmp"))
    if not left:
        return []
    files = ", ".join(map(str, left[:3]))
    return [f"{files} is from another {command}. Delete it if no other {command} is running"]


def check_asked(folder: RunFolder, setup: Setup, quantized: str | None, trained: Qat | None) -> None:
    """Check everything that is known before weights are loaded."""
    if folder.weights == folder.model and not quantized:
        raise UserError(
            Problem(
                "the run has no adapter to merge",
                where=str(folder.path),
                fix="use model/, or quantize it with --quantize int8",
                why="full fine-tuning saved the whole model in model/",
                code="merge",
            )
        )
    check_one_process(setup, "merge", folder)
    if quantized:
        torchao_quantization.check_installed()
    if quantized and trained and quantized != trained.weight_dtype:
        raise UserError(
            Problem(
                "the run was trained for another quantization",
                where=str(folder.path),
                found=f"--quantize {quantized}",
                expected=qat.describe(trained),
                fix=f"--quantize {trained.weight_dtype}",
                code="quantize",
            )
        )


def check_one_process(setup: Setup, command: str, folder: RunFolder) -> None:
    """Raise a UserError if a command that writes a whole model runs in several processes (exit 2)."""
    if setup.launch.processes > 1:
        raise UserError(
            Problem(
                f"`finetune {command}` runs in one process",
                found=f"{setup.launch.processes} processes",
                fix=command_lines.command(command, str(folder.path)),
                code="launch-config",
            )
        )


def size(folder: Path) -> int:
    """Return the bytes of the weights in a folder."""
    return sum(file.stat().st_size for file in find_weight_files(folder))
