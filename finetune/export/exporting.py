"""Export a run or an adapter for a server: `finetune export RUN --to gguf`.

finetune merges the adapter and verifies the merge, as in `finetune merge`. Then the target writes its files.
Each export ends with the serving check.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, PreTrainedModel

from finetune.core import progress, safe_files
from finetune.evaluation import reopen
from finetune.export import (
    adapter_template,
    export_source,
    merged_files,
    merging,
    plain_base,
    serving_check,
    shared_weights,
    targets,
    verify_merge,
)
from finetune.export.export_job import ExportJob
from finetune.export.serving_check import Expected
from finetune.models import tokenizer_setup
from finetune.run_folder.run_folder import RunFolder

REPORT = "export.json"
PLAIN = {"text", "prompt_completion"}  # formats of data that use no chat template


def run(
    path: str | Path,
    to: str,
    overrides: Sequence[str] = (),
    *,
    quantize: str | None = None,
    output: str | None = None,
    adapter: bool = False,
) -> dict[str, Any]:
    """Export a run, check the exported files, and publish the folder with its report in export.json.

    Args:
        path: the run folder, a folder of PEFT, or the name of a run or an adapter on the Hub.
        to: the target: a key of `targets.MODULES`.
        overrides: overrides of the run's recipe, such as `model.name=...` on another machine.
        quantize: how the weights are stored. `None` means the target's default.
        output: the new folder. `None` means `export-gguf-f16` and so on in the run folder. For an adapter
            without a run, it means `NAME-export-gguf-f16` in the working directory.
        adapter: export the adapter alone instead of merged weights.

    Returns:
        The report: files, comparison with the fine-tuned model, serving check, commands, seconds.

    Raises:
        UserError: the target can't hold the model, or the folder is not empty (exit 2). A package or memory
            is missing (exit 3). The exported model differs from the fine-tuned model (exit 4).
    """
    started = time.monotonic()
    kind = targets.choose_kind(to, quantize)
    opened = export_source.open_source(path)
    folder = opened.folder
    if opened.has_run:
        folder.found(REPORT)  # a damaged file ends the command before a model is loaded
    recipe = export_source.recipe_of(opened, overrides)
    setup = reopen.setup_of(recipe)
    has_adapter = folder.weights == folder.adapter
    merged_files.check_one_process(setup, "export", folder)
    config = export_source.config_of(opened, recipe)
    targets.MODULES[to].check(config, kind)
    if adapter:
        targets.check_adapter(folder, to, quantize)
    else:
        shared_weights.check(folder, recipe)
    part = "adapter" if adapter else kind
    where, start = opened.output
    target = merging.free_target(where, f"{start}-{to}-{part}", output)
    left = [*opened.notes, *plain_base.changes(folder, recipe)]
    left += merged_files.note_interrupted(target, "export")
    tokenizer = export_source.tokenizer_of(opened, recipe)
    texts = serving_check.texts_of(opened, recipe, tokenizer)
    plain = plain_base.unrounded(recipe)
    stored_as = "as trained" if adapter and to != "compressed-tensors" else kind
    report: dict[str, Any] = {"target": to, "quantize": stored_as, "path": str(target)}
    with merging.staging(target) as (whole, packed), merging.located(folder, packed.parent, target):
        expected: list[Expected] = []

        def observe(model: PreTrainedModel | PeftModel) -> None:
            verify_merge.in_fp32(model.eval())
            expected.append(serving_check.expected_of(model, tokenizer, recipe, texts))

        source, merges = folder.weights, has_adapter and not adapter
        progress.expect(4 if merges else 2)
        running = progress.part("running the fine-tuned model")
        if not merges:
            with running:
                model = reopen.reopen(folder, plain)
                observe(model)
            verify_merge.refuse_non_finite(expected[0].logits, folder)
            if not has_adapter and kind == "bf16":  # full fine-tuning saves its weights in fp32
                source, report["dtype"] = whole, "bfloat16"
                merged_files.save(model.bfloat16(), tokenizer, whole)
                serving_check.with_rounding(expected, model)
            del model
        else:
            with running:
                tuned, base, _ = verify_merge.trained(folder, plain, texts.rows, observe)
            source, dtype = whole, "bfloat16" if kind == "bf16" else "float32"
            report["dtype"] = dtype
            with progress.part("merging the adapter"):
                report |= merged_files.write_merged(
                    folder, plain, setup, getattr(torch, dtype), tokenizer, whole
                )
            with progress.part("verifying the merged weights"):
                observed: Any = partial(serving_check.with_rounding, expected)
                merged, _ = verify_merge.reopened(whole, setup, texts.rows, observed)
            report["against_tuned"] = verify_merge.agreement(tuned, base, merged)
            verify_merge.refuse_lost(report, folder)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", opened.name)
        if source == whole:
            config = AutoConfig.from_pretrained(str(whole), trust_remote_code=False)
        job = ExportJob(
            name,
            source,
            config,
            tokenizer,
            expected[0],
            kind,
            recipe.model.name,
            recipe.model.revision,
            setup.quantized,
            chats=trained_on_chats(folder),
        )
        packed = safe_files.make_folder(packed.parent, packed.name)
        write = targets.MODULES[to].write_adapter if adapter else targets.MODULES[to].write
        with progress.part("writing the files and checking their answers"):
            report |= write(job, packed)
        if adapter and tokenizer_setup.foreign_template(recipe.model, tokenizer):
            ends = tokenizer.convert_ids_to_tokens(job.expected.stops)
            report = adapter_template.add(packed, tokenizer, ends, report)
        if notes := [*left, *report.get("notes", [])]:
            report["notes"] = notes
        report["seconds"] = round(time.monotonic() - started, 1)
        serving_check.write_report(packed, REPORT, report)
        merging.publish(packed, target, folder, report, REPORT)
    return report


def trained_on_chats(folder: RunFolder) -> bool:
    """Return whether a run trained on chats. For an adapter without a run, return true."""
    report = {} if folder.is_plain_adapter else folder.found("data_report.json")
    formats = {*report.get("train", {}).get("formats", {}).values()}
    return not formats or bool(formats - PLAIN)
