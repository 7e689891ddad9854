"""Set up the micro-batch size of a run, its search, and the recovery from out of memory."""

from __future__ import annotations

from functools import partial
from typing import cast

from datasets import Dataset
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.sft_config import SFTConfig

from finetune.autoconfig import loss_support, memory_estimate
from finetune.autoconfig.batch_size import Batch, with_micro_batch
from finetune.distributed import transformer_engine_layers
from finetune.preflight import allowed_changes
from finetune.recipe.schema import Data
from finetune.speed import live_model_spec, static_shapes
from finetune.training import auto_correction, batch_search, oom_recovery, step_work
from finetune.training.run_context import RunContext, RunData, StepPlan


def settle_batch(run: RunContext, batch: Batch, arguments: SFTConfig) -> Batch:
    """Return the batch with the micro-batch size of a correction of this run or of the resumed run."""
    size, share = run.correction.micro_batch, batch.per_device * batch.accumulation
    if run.checkpoint and run.recipe.train.per_device_train_batch_size is None:
        size = run.checkpoint.contract["chosen"].get(auto_correction.MICRO_BATCH)
    if not size or share % size:
        return batch
    smaller = with_micro_batch(batch, size)
    put_in_arguments(smaller, arguments)
    return smaller


def put_in_arguments(batch: Batch, arguments: SFTConfig) -> None:
    arguments.per_device_train_batch_size = batch.per_device
    arguments.gradient_accumulation_steps = batch.accumulation


def search_batch(
    run: RunContext, data: RunData, adapted: PreTrainedModel | PeftModel, plan: StepPlan
) -> Batch:
    """Return the largest micro-batch size that fits, or the size of the checkpoint's run."""
    if run.checkpoint:
        return batch_search.as_before(plan.batch, run.checkpoint.contract)
    loss = plan.choices["speed.loss"].value
    compiled = plan.is_on("speed.compile") if loss in loss_support.CHUNKED else None
    state = step_work.optimizer_bytes_per_parameter(run.recipe, run.setup)
    step = batch_search.StepKind(compiled, state, fp8=loss == "chunked_fp8")
    pad_token = cast("int", data.tokenizer.pad_token_id)
    rows = batch_search.SearchData(data.prepared.train, run.recipe.data, pad_token)
    with run.setup.autocast():
        return batch_search.search(adapted, rows, plan.batch, step, run.checks)


def corrector(run: RunContext, adapted: nn.Module, plan: StepPlan) -> auto_correction.Corrector | None:
    """Return the correction for a first step that runs out of memory; `None` if no `auto` can use less."""
    layers = live_model_spec.decoder_layers(adapted)
    level = plan.choices[auto_correction.CHECKPOINTING].value
    share = memory_estimate.offloaded_share(plan.choices["speed.offload"].value, max(1, len(layers)))
    allowed = partial(allowed_changes.allows, run.recipe, run.setup)
    change = auto_correction.next_change(
        run.recipe,
        level if layers and not transformer_engine_layers.used() else "full",
        plan.batch,
        allowed,
        fused_mlps=bool(layers) and all(map(live_model_spec.fused_mlps, layers)),
        offloads=bool(share),
    )
    alone = run.setup.launch.processes == 1
    if change is None or not (alone or run.correction.restarts):
        return None
    following = run.correction._replace(changes=(*run.correction.changes, change))
    return auto_correction.Corrector(following, run.console, alone=alone)


def micro_batches(run: RunContext, plan: StepPlan) -> oom_recovery.MicroBatches:
    """Return the micro-batches of the run, with the texts for an out-of-memory error."""
    recipe, setup, per_device = run.recipe, run.setup, plan.batch.per_device
    allowed = partial(allowed_changes.allows, recipe, setup)
    level = {"activation_checkpointing": plan.choices["speed.activation_checkpointing"].value}
    settings = (
        recipe.speed.model_copy(update=level),
        recipe.model.quantization,
        recipe.adapter.type,
        recipe.data.max_length,
    )
    less = oom_recovery.fixes(*settings, allowed, graphs=plan.is_on("CUDA graphs"))
    tell = partial(oom_recovery.tell, per_device, run.console, run.checks)
    length = recipe.data.max_length // setup.launch.sharing
    needs = partial(
        oom_recovery.needed,
        length,
        setup,
        plan.choices,
        step_work.optimizer_bytes_per_parameter(recipe, setup),
    )
    return oom_recovery.MicroBatches(per_device, less, tell, needs)


def fixed_shape(data: Data, dataset: Dataset, plan: StepPlan) -> tuple[int, int, int] | None:
    """Tokens, documents and longest document that each flattened batch is filled up to.

    Compiled code and TransformerEngine want one shape. `None`: batches keep their own shapes.
    """
    needed = plan.is_on("speed.compile") or transformer_engine_layers.used()
    if data.streaming or not data.flat or not needed:
        return None
    return static_shapes.one_shape(plan.batch.per_device, dataset["where"], data.max_length)
