"""Load the base model of a run and attach the adapter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from finetune.adapters import attach, initialization
from finetune.autoconfig import fp8_support
from finetune.core.errors import Exit, UserError, raise_if_any, stage
from finetune.models import loading, model_files, module_names, router_loss, tokenizer_setup
from finetune.preflight import adapter_names, gradient_probe
from finetune.quantization import qat
from finetune.speed import fused_experts
from finetune.training.run_context import RunContext, RunData


def adapted_model(run: RunContext, data: RunData, steps: int) -> Any:
    """Load the base model in its quantization, and attach the adapter."""
    recipe, setup, checks = run.recipe, run.setup, run.checks
    base = loading.load(recipe.model, setup, str(data.arguments.device), checks)
    names = module_names.of_model(base)
    storage, kind = setup.storage.value, recipe.adapter.type
    stored = adapter_names.check_storage(storage, names, model_files.read_config(recipe.model), kind)
    raise_if_any([*stored, *adapter_names.check_noise(recipe, names)])
    requested = data.arguments.router_aux_loss_coef
    if note := router_loss.check(base.config, requested, kind, len(names.routers)):
        data.arguments.router_aux_loss_coef = 0.0
        if not Path(recipe.model.name).is_dir():  # the checks have shown the note of a local model
            checks.notes.append(note)
    base = qat.prepare(base, recipe.speed.qat, checks)
    batches = partial(initialization.calibration, data.prepared.train, base.device)
    added = tokenizer_setup.added_tokens(recipe.model, data.tokenizer)
    with stage("attached the adapter", "adapter.type"):
        adapted = attach.attach(base, recipe.adapter, steps, checks, batches, added)
        fused_experts.install_quantized(adapted)
        reason = fused_experts.choose_fp8(adapted, recipe.speed.fp8_experts)
    if reason and recipe.speed.fp8_experts is True:
        raise UserError(fp8_support.experts_refusal(reason), code=Exit.ENVIRONMENT)
    with setup.autocast():  # full fine-tuning has fp32 weights, which flash attention does not support
        gradient_probe.check(adapted, recipe.adapter, setup, checks)
    return adapted
