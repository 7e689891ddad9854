"""Merge the adapter into its base model, and verify that nothing was lost: `finetune merge RUN`.

merge.run("runs/quickstart") writes runs/quickstart/merged, which Transformers loads without PEFT.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils.memory import clear_device_cache
from transformers.pytorch_utils import Conv1D

from finetune.adapters import continue_from
from finetune.autoconfig import mixed_precision
from finetune.core import command_lines, packages, run_checks, safe_files
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.core.paths import writing
from finetune.core.weight_files import find_weight_files
from finetune.evaluation import reopen, scoring, validation_set
from finetune.export import torchao_quantization, verify_merge
from finetune.models import fingerprint, generation_config, loading, model_files
from finetune.quantization import qat, stored_weights
from finetune.run_folder import run_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.autoconfig.machine_setup import Setup
    from finetune.core.console import Console
    from finetune.recipe.schema import Qat, Recipe
    from finetune.run_folder.run_folder import RunFolder

# Dtypes of weights that need no separate scale
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def run(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    dtype: str = "bfloat16",
    quantized: str | None = None,
    output: str | None = None,
) -> dict[str, Any]:
    """Merge a run's adapter, verify the saved weights, and publish the folder with its report in merge.json.

    Args:
        path: the run folder.
        overrides: overrides of the run's recipe, such as `model.name=...` on another machine.
        dtype: dtype of the saved weights (bfloat16, float32). With `quantized`, the dtype of the other
            weights.
        quantized: int8 | int4 | fp8, or `None`.
        output: the new folder. `None` means merged, merged-int8 and so on in the run folder.

    Returns:
        The report: figures, sizes in bytes, seconds.

    Raises:
        UserError: there is nothing to merge, PEFT cannot merge the adapter type, or the target is not empty
            (exit 2). A package or memory is missing (exit 3). The saved weights differ from the trained
            weights (exit 4). No files are left behind.
    """
    started = time.monotonic()
    folder = run_folder.open_run(path)
    recipe = run_folder.recipe_of(folder, overrides)
    setup = reopen.setup_of(recipe)
    check_asked(folder, setup, quantized, recipe.speed.qat)
    target = free_target(folder, quantized, output)
    tokenizer = reopen.tokenizer_of(folder)
    held_out, _ = validation_set.held_out(folder, recipe, tokenizer)
    rows, origin = verify_merge.probes(recipe, tokenizer, held_out)
    score = partial(scores, tokenizer, held_out if quantized else [], recipe)
    report: dict[str, Any] = {"path": str(target), "dtype": dtype, "quantized": quantized}
    report |= {"rows": {"from": origin, "rows": len(rows), "tokens": sum(map(len, rows))}, "scores": {}}
    trained_for, plain = recipe.speed.qat, unrounded(recipe)
    report |= {"trained_for": qat.describe(trained_for)} if trained_for else {}
    left = note_interrupted(target)
    with staging(target) as (whole, packed), located(folder):
        # Apply the rounding of QAT if the weights will be stored in that format
        asked = recipe if quantized else plain
        tuned, base, report["scores"]["tuned"] = verify_merge.trained(folder, asked, rows, score)
        merged, base_merged = tuned, base
        if trained_for and quantized:
            adapter = folder.weights == folder.adapter
            again = verify_merge.trained(folder, plain, rows, (lambda _: None) if adapter else score)
            merged, base_merged, report["scores"]["unrounded"] = again
        source = folder.model
        if folder.weights == folder.adapter:
            source = whole
            report |= write_merged(folder, plain, setup, getattr(torch, dtype), tokenizer, whole)
            wanted = merged
            merged, report["scores"]["merged"] = verify_merge.reopened(whole, setup, rows, score)
            report["against_tuned"] = verify_merge.agreement(wanted, base_merged, merged)
            verify_merge.refuse_lost(report, folder)
        report["bytes"] = size(source)
        if quantized:
            report |= {"bytes_before": size(source)}
            wanted_form = Target(quantized, getattr(torch, dtype), trained_for)
            report |= write_quantized(source, wanted_form, setup, tokenizer, packed)
            logits, report["scores"]["quantized"] = verify_merge.reopened(packed, setup, rows, score)
            report["against_tuned"] = verify_merge.agreement(tuned, base, logits)
            report["against_merged"] = verify_merge.agreement(merged, base, logits)
            report["bytes"] = size(packed)
            verify_merge.refuse_drowned(report, folder)
        report["scores"] = {name: found for name, found in report["scores"].items() if found}
        if notes := [*left, *report.get("notes", [])]:
            report["notes"] = notes
        report["seconds"] = round(time.monotonic() - started, 1)
        publish(packed if quantized else whole, target, folder, report)
    return report


def scores(
    tokenizer: PreTrainedTokenizerBase, rows: Any, recipe: Recipe, opened: nn.Module
) -> dict[str, Any] | None:
    """Score the model on the validation set, for a quantized merge only. Other merges compare logits."""
    return scoring.score(opened, tokenizer, rows, recipe.data, recipe.eval).as_json() if rows else None


def check_asked(folder: RunFolder, setup: Setup, quantized: str | None, trained: Qat | None) -> None:
    """Check everything that is known before weights are loaded."""
    if folder.weights == folder.model and not quantized:
        what, why = "the run has no adapter to merge", "full fine-tuning saved the whole model in model/"
        fix = "use model/, or quantize it with --quantize int8"
        raise UserError(Problem(what, where=str(folder.path), fix=fix, why=why, code="merge"))
    if setup.launch.processes > 1:
        what, found = "a merge runs in one process", f"{setup.launch.processes} processes"
        fix = command_lines.command("merge", str(folder.path))
        raise UserError(Problem(what, found=found, fix=fix, code="launch-config"))
    if quantized:
        packages.require("torchao", "quantize", "--quantize needs the package torchao")
    if quantized and trained and quantized != trained.weight_dtype:
        what, fix = "the run was trained for another quantization", f"--quantize {trained.weight_dtype}"
        texts = {"found": f"--quantize {quantized}", "expected": qat.describe(trained), "fix": fix}
        raise UserError(Problem(what, where=str(folder.path), **texts, code="quantize"))


def free_target(folder: RunFolder, quantized: str | None, output: str | None) -> Path:
    """Return the target folder.

    Raises:
        UserError: the target is not empty, or its parent folder does not exist (exit 2).
    """
    target = Path(output) if output else folder.path / (f"merged-{quantized}" if quantized else "merged")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        held = (
            ", ".join(sorted(entry.name for entry in target.iterdir())[:6]) if target.is_dir() else "a file"
        )
        what, fix = "the output folder is not empty", "choose a new folder with --output"
        texts = {"found": held, "fix": fix, "why": "finetune overwrites no files", "code": "merge"}
        raise UserError(Problem(what, where=str(target), **texts))
    if not target.absolute().parent.is_dir():
        what, fix = "the folder of the output does not exist", f"mkdir -p {target.parent}"
        raise UserError(Problem(what, where=str(target.parent), fix=fix, code="path"))
    return target


def note_interrupted(target: Path) -> list[str]:
    """Return a note on files that a killed merge left next to the target, because they use disk space."""
    left = sorted(target.absolute().parent.glob(f".{target.name}.*.tmp"))
    if not left:
        return []
    files = ", ".join(map(str, left[:3]))
    return [f"{files} is from another merge. Delete it if no other merge is running"]


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

    plain = plain_base(recipe, setup)
    continue_from.check_patterns(folder.adapter, plain)
    config: Any = PeftConfig.from_pretrained(str(folder.adapter))
    # If embeddings are tied, these rows belong to both
    rows = getattr(config, "trainable_token_indices", None)
    tied = False if rows else untie(plain)
    before = {name: fingerprint.fingerprint({"": p.to(dtype)}) for name, p in plain.named_parameters()}
    kind = "adapter"
    try:
        if hasattr(config, "fan_in_fan_out") and any(isinstance(m, Conv1D) for m in plain.modules()):
            config.fan_in_fan_out = True  # the adapter config of a quantized GPT-2 does not set this
        adapted: Any = PeftModel.from_pretrained(plain, str(folder.adapter), config=config)
        kind = str(getattr(adapted.peft_config["default"].peft_type, "value", kind))
        merged: Any = adapted.merge_and_unload(safe_merge=True)
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, ValueError, AttributeError, TypeError, RuntimeError) as error:
        what, fix = f"PEFT can't merge a {kind} adapter", "use the adapter with PEFT, without a merge"
        texts = {"found": first_line(error), "fix": fix, "code": "merge"}
        raise UserError(Problem(what, where=str(folder.adapter), **texts)) from error
    merged.to(dtype)
    after = {name: fingerprint.fingerprint({"": p}) for name, p in merged.named_parameters()}
    if tied:
        retie(merged)
    changed = sum(before.get(name) != digest for name, digest in after.items())
    notes = generation_config.settle_generation(merged.generation_config, scoring.stop_ids(merged, tokenizer))
    with writing(whole):
        merged.save_pretrained(str(whole))
        tokenizer.save_pretrained(str(whole))
    del plain, adapted, merged
    clear_device_cache(garbage_collection=True)
    tensors = {"changed": changed, "all": len(after)}
    return {"merged_onto": setup.storage.value, "tensors": tensors, "notes": notes}


def plain_base(recipe: Recipe, setup: Setup) -> PreTrainedModel:
    """Return the base model as it was in training, in fp32. Quantized weights are dequantized."""
    stored: Any = reopen.open_base(recipe)
    if setup.storage.value in mixed_precision.STORED:
        return stored.float()
    if setup.storage.value == "fp8":
        return stored.dequantize(torch.float32).float()
    from peft.utils.integrations import dequantize_module_weight

    verify_merge.in_fp32(stored)
    plain = unquantized_base(recipe, setup, stored)
    modules = dict(stored.named_modules())
    for name, parameter in plain.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = modules.get(owner)
        value: Any = dequantize_module_weight(module) if module and leaf == "weight" else None
        if value is not None and is_transposed(module):
            value = value.T
        value = getattr(module, leaf, None) if value is None else value
        if value is None or value.shape != parameter.shape or value.dtype not in FLOATS:
            what = f"finetune can't dequantize a base model in {setup.storage.value}"
            found, fix = f"{name}: {value!r:.60}", "train again with model.quantization: none"
            raise UserError(Problem(what, found=found, fix=fix, code="merge"))
        parameter.data = value.detach().float()
    del stored, modules
    clear_device_cache(garbage_collection=True)
    return plain


def is_transposed(module: Any) -> bool:
    """Return whether a quantized layer holds the transposed weight of GPT-2's Conv1D."""
    return issubclass(getattr(module, "source_cls", object), Conv1D)


def unquantized_base(recipe: Recipe, setup: Setup, stored: Any) -> Any:
    """Return a base model in fp32 that can take the weights of `stored`.

    A checkpoint that is already quantized has no fp32 weights, so the model is created without weights.
    """
    config = model_files.read_config(recipe.model)
    if not stored_weights.read(config):
        unquantised = replace(setup, storage=run_checks.Choice("fp32", "to merge into"))
        return loading.load(recipe.model, unquantised, str(stored.device)).eval()
    plain: Any = loading.without_weights(stored_weights.forget(config), torch.float32)
    plain.resize_token_embeddings(stored.get_input_embeddings().num_embeddings, mean_resizing=False)
    plain.generation_config = stored.generation_config
    return plain.to(stored.device)


def unrounded(recipe: Recipe) -> Recipe:
    """Return the recipe without `speed.qat`, because an adapter is merged into unrounded weights."""
    return recipe.model_copy(update={"speed": recipe.speed.model_copy(update={"qat": None})})


def untie(plain: Any) -> bool:
    """Give a tied output head its own weights, so that a merge does not change both.

    Return whether it was tied.
    """
    head, embedding = plain.get_output_embeddings(), plain.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    head.weight = torch.nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    say_tied(plain, False)
    return True


def retie(merged: Any) -> None:
    """Tie the head again, unless training made it different."""
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
        say_tied(merged, True)


def say_tied(opened: PreTrainedModel | PeftModel, tied: bool) -> None:
    for config in (opened.config, opened.config.get_text_config()):
        config.tie_word_embeddings = tied


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


def publish(staged: Path, target: Path, folder: RunFolder, report: dict[str, Any]) -> None:
    """Rename the verified folder to its final name, and add its report to merge.json."""
    with writing(target):
        where = target.absolute().parent
        reports = folder.found("merge.json")
        inside = where == folder.path.absolute()
        # merge.json resolves relative names against the run folder
        name = target.name if inside else str(target.absolute())
        # Write the report first, so that a killed merge leaves no weights without a report
        folder.write("merge.json", {**reports, name: report})
        # Rename also replaces an empty folder
        safe_files.rename(where, str(staged.relative_to(where)), target.name)


def show(screen: Console, report: dict[str, Any]) -> None:
    """Print the result, the verification and the next command."""
    rows, figures, path = report["rows"], report["against_tuned"], report["path"]
    before = f" (was {report['bytes_before'] / 1e6:.1f} MB)" if "bytes_before" in report else ""
    lines = [("weights", f"{report.get('storage', report['dtype'])}"), ("folder", path)]
    lines += [("size", f"{report['bytes'] / 1e6:.1f} MB{before}")]
    if "trained_for" in report:
        wanted = "quantized" if report["quantized"] else "not quantized: see --quantize"
        lines += [("trained for", f"{report['trained_for']} ({wanted})")]
    if report.get("merged_onto"):
        storage = report["merged_onto"]
        dequantized = "" if storage in mixed_precision.STORED else ", dequantized"
        lines += [("base model", f"as in training ({storage}{dequantized}), in fp32")]
    if report["quantized"]:
        left = f"{report['layers']['quantized']} linear layers; not quantized: {report['not_quantized']}"
        lines += [("quantized", left)]
    source = "validation" if rows["from"] == "held-out" else rows["from"]
    lines += [("compared on", f"{rows['rows']:,} {source} examples, {rows['tokens']:,} tokens")]
    screen.table("merge", ("", ""), lines)
    for note in report.get("notes", ()):
        screen.say(f"note: {note}")
    compared = {"fine-tuned model": figures}
    if "against_merged" in report:
        compared["weights before quantization"] = report["against_merged"]
    table = [
        (
            name,
            f"{f['largest']:.2g} of {f['scale']:.3g}",
            f"{f['kl']:.2g}",
            f"{f['same_top']:.2%}",
            f"{f['relative']:.2g}",
        )
        for name, f in compared.items()
    ]
    columns = (
        "compared with",
        "largest logit difference",
        "KL, nats per token",
        "same top token",
        "difference / update",
    )
    screen.table("verification of the saved weights", columns, table)
    if report["scores"]:
        scores = report["scores"].items()
        matched = ["-" if s["exact_match"] is None else f"{s['exact_match']:.1%}" for _, s in scores]
        table = [(name, f"{s['loss']:.4f}", share) for (name, s), share in zip(scores, matched, strict=True)]
        screen.table("validation set", ("", "loss", "exact match"), table)
    needs = "transformers and torchao" if report["quantized"] else "transformers"
    screen.say("", f"next: load the model with {needs}:")
    screen.say(f"  AutoModelForCausalLM.from_pretrained({path!r})")


def size(folder: Path) -> int:
    """Return the bytes of the weights in a folder."""
    return sum(file.stat().st_size for file in find_weight_files(folder))


@contextlib.contextmanager
def staging(target: Path) -> Iterator[tuple[Path, Path]]:
    """Create two staging folders next to the target. At the end they are deleted unless published."""
    where = target.absolute().parent
    with contextlib.ExitStack() as stack:
        with writing(target):
            private = stack.enter_context(safe_files.private_folder(where, target.name))
            safe_files.make_folder(where, f"{private.name}/whole")
        yield where / private.name / "whole", where / private.name / "packed"


@contextlib.contextmanager
def located(folder: RunFolder) -> Iterator[None]:
    """Add the run to errors, and explain that fp32 weights need more memory than bf16 weights."""
    try:
        yield
    except UserError as error:
        problems = [replace(problem, where=problem.where or str(folder.path)) for problem in error.problems]
        raise UserError(*problems, code=error.code) from error
    except torch.OutOfMemoryError as error:
        what, why = "the GPU has too little memory for the merge", "a merge needs the weights in fp32"
        fix = f"ACCELERATE_USE_CPU=true {command_lines.command('merge', str(folder.path))}"
        problem = Problem(what, found=first_line(error), fix=fix, why=why, code="out-of-memory")
        raise UserError(problem, code=Exit.ENVIRONMENT) from error
