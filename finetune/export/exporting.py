"""Export a run for a server: `finetune export RUN --to gguf`.

finetune merges the adapter and verifies the merge, as in `finetune merge`. Then the target writes its files.
Each export ends with the serving check.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from finetune.autoconfig import mixed_precision
from finetune.core import safe_files
from finetune.core.errors import Problem, UserError, nearest
from finetune.data import encoding
from finetune.evaluation import reopen, scoring, validation_set
from finetune.export import (
    gguf_export,
    merged_files,
    merging,
    mlx_export,
    ollama_export,
    plain_base,
    serving_check,
    verify_merge,
    vllm_export,
)
from finetune.export.export_job import Job
from finetune.export.serving_check import Expected
from finetune.run_folder import run_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune.core.console import Console
    from finetune.data.examples import Example
    from finetune.recipe.schema import Recipe
    from finetune.run_folder.run_folder import RunFolder

REPORT = "export.json"
MODULES: dict[str, Any] = {
    "gguf": gguf_export,
    "ollama": ollama_export,
    "vllm": vllm_export,
    "mlx": mlx_export,
}
"""Target -> the module that writes it: `KINDS`, `check(config, kind)` and `write(job, folder)`."""
DEFAULTS = {"gguf": "f16", "ollama": "f16", "vllm": "bf16", "mlx": "bf16"}


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
        path: the run folder.
        to: the target: a key of `MODULES`.
        overrides: overrides of the run's recipe, such as `model.name=...` on another machine.
        quantize: how the weights are stored. `None` means the target's default.
        output: the new folder. `None` means `export-gguf-f16` and so on in the run folder.
        adapter: export the adapter alone instead of merged weights.

    Returns:
        The report: files, comparison with the fine-tuned model, serving check, commands, seconds.

    Raises:
        UserError: the target can't hold the model, or the folder is not empty (exit 2). A package or memory
            is missing (exit 3). The exported model differs from the fine-tuned model (exit 4).
    """
    started = time.monotonic()
    kind = choose_kind(to, quantize)
    folder = run_folder.open_run(path)
    recipe = run_folder.recipe_of(folder, overrides)
    setup = reopen.setup_of(recipe)
    has_adapter = folder.weights == folder.adapter
    merged_files.check_one_process(setup, "export", folder)
    MODULES[to].check(AutoConfig.from_pretrained(_config_of(folder, recipe), trust_remote_code=False), kind)
    if adapter:
        check_adapter(folder, to)
    part = "adapter" if adapter else kind
    target = merging.free_target(folder.path, f"export-{to}-{part}", output)
    tokenizer = reopen.tokenizer_of(folder)
    held_out, _ = validation_set.held_out(folder, recipe, tokenizer)
    plain = plain_base.unrounded(recipe)
    rows, _ = verify_merge.probes(recipe, tokenizer, held_out)
    examples = [row.example for row in held_out if row.example.asks][: serving_check.CHATS]
    report: dict[str, Any] = {"target": to, "quantize": kind, "path": str(target)}
    with merging.staging(target) as (whole, packed), merging.located(folder):
        expected: list[Expected] = []

        def observe(model: Any) -> None:
            verify_merge.in_fp32(model.eval())
            expected.append(expected_of(model, tokenizer, recipe, examples))

        source = folder.weights
        if not has_adapter or adapter:
            observe(reopen.reopen(folder, plain))
        else:
            tuned, base, _ = verify_merge.trained(folder, plain, rows, observe)
            source, dtype = whole, "bfloat16" if kind == "bf16" else "float32"
            report["dtype"] = dtype
            report |= merged_files.write_merged(folder, plain, setup, getattr(torch, dtype), tokenizer, whole)
            merged, _ = verify_merge.reopened(whole, setup, rows, lambda _: None)
            report["against_tuned"] = verify_merge.agreement(tuned, base, merged)
            verify_merge.refuse_lost(report, folder)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.path.absolute().name)
        config = AutoConfig.from_pretrained(_config_of(folder, recipe), trust_remote_code=False)
        if source == whole:
            config = AutoConfig.from_pretrained(str(whole), trust_remote_code=False)
        stored = "" if setup.storage.value in mixed_precision.STORED else setup.storage.value
        job = Job(name, source, config, tokenizer, expected[0], kind, recipe.model.name, stored)
        packed = safe_files.make_folder(packed.parent, packed.name)
        report |= (MODULES[to].write_adapter if adapter else MODULES[to].write)(job, packed)
        report["seconds"] = round(time.monotonic() - started, 1)
        safe_files.write_text(packed, REPORT, json.dumps(report, indent=1) + "\n")
        publish(packed, target, folder, report)
    return report


def check_adapter(folder: RunFolder, to: str) -> None:
    """Raise a UserError if the adapter alone can't be exported (exit 2)."""
    if folder.weights != folder.adapter:
        what, fix = "the run has no adapter", "remove --adapter"
        raise UserError(Problem(what, where=str(folder.path), fix=fix, code="export"))
    if not hasattr(MODULES[to], "check_adapter"):
        what, fix = f"--to {to} exports no adapter alone", "remove --adapter"
        raise UserError(Problem(what, fix=fix, code="export"))
    MODULES[to].check_adapter(folder.adapter)


def choose_kind(to: str, quantize: str | None) -> str:
    """Return how the weights are stored.

    Raises:
        UserError: the target does not have this quantization (exit 2).
    """
    kinds = MODULES[to].KINDS
    if quantize is None:
        return DEFAULTS[to]
    if quantize not in kinds:
        near = nearest(quantize, kinds)
        what, fix = f"--to {to} has no such quantization", f"--quantize {near or DEFAULTS[to]}"
        texts = {"found": f"--quantize {quantize}", "expected": ", ".join(kinds), "fix": fix}
        raise UserError(Problem(what, code="export", **texts))
    return quantize


def _config_of(folder: RunFolder, recipe: Recipe) -> str:
    """Return the folder or name of the model whose config the exported model has."""
    return str(folder.model) if folder.weights == folder.model else recipe.model.name


def expected_of(model: Any, tokenizer: Any, recipe: Recipe, examples: list[Example]) -> Expected:
    """Return the prompts and answers of the evaluation. A template that asks for the date gets today's."""
    stops = scoring.stop_ids(model, tokenizer)
    if not examples:
        return Expected([], [], [], [], stops)
    data = recipe.data.model_copy(update={"template_date": None})
    encoder = encoding.make_encoder(tokenizer, data, any(example.messages for example in examples))
    prompts = encoder.prompts(examples)
    answers, logits = serving_check.answers(model, prompts[: serving_check.ANSWERS], stops)
    return Expected(examples, prompts, answers, logits, stops)


def publish(staged: Path, target: Path, folder: RunFolder, report: dict[str, Any]) -> None:
    """Rename the checked folder to its final name, and add its report to the run's export.json."""
    where = target.absolute().parent
    name = target.name if where == folder.path.absolute() else str(target.absolute())
    folder.write(REPORT, {**folder.found(REPORT), name: report})
    safe_files.rename(where, str(staged.relative_to(where)), target.name)


def show(screen: Console, report: dict[str, Any]) -> None:
    """Print the files, the serving check and the command that serves the model."""
    sizes = [(name, f"{size / 1e6:.1f} MB") for name, size in report["files"].items()]
    lines = [("folder", report["path"]), ("weights", report["quantize"]), *sizes]
    screen.table(f"export to {report['target']}", ("", ""), lines)
    for note in report.get("notes", ()):
        screen.say(f"note: {note}")
    screen.table("serving check", ("", ""), check_lines(report["serving_check"]))
    screen.say("", f"next: cd {report['path']} and serve the model:")
    for line in report["serve"]:
        screen.say(f"  {line}")
    if client := report.get("client"):
        screen.say("", "ask the server:", *(f"  {line}" for line in client))


def check_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the serving check, each with what was compared or why it was not."""
    if not found.get("reader"):
        return [("not run", found.get("not_run", ""))]
    ids, stops, said = found["token_ids"], found["stop_tokens"], found["answers"]
    lines = [("reader", found["reader"])]
    equal = f"{ids.get('prompts')} prompts, {ids.get('different')} differ"
    lines += [("token ids", f"not run: {ids['not_run']}" if "not_run" in ids else equal)]
    lines += [("stop tokens", f"not run: {stops['not_run']}" if "not_run" in stops else "all present")]
    if "not_run" in said:
        return [*lines, ("answers", f"not run: {said['not_run']}")]
    shift = f"largest difference {said['largest_difference']:.2g}, allowed {said['tolerance']:.2g}"
    return [*lines, ("answers", f"{said['prompts']} prompts, {said['tokens']} tokens: {shift} (log-prob)")]
