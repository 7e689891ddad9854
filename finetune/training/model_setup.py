"""Set up the model of a run: base model, adapter, speed options, and a batch size that fits.

`pipeline.py` calls these functions in order.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.adapters import attach, initialization, trainable_parameters
from finetune.autoconfig import (
    compilation,
    cuda_graphs,
    memory_estimate,
    mixed_precision,
    optimizer_choice,
    packing_support,
)
from finetune.autoconfig.batch_size import with_micro_batch
from finetune.checkpointing import checkpoints, resume_contract, training_state
from finetune.core import run_checks
from finetune.core.errors import UserError, stage
from finetune.distributed import collectives, launch_environment, sharded_tensors, transformer_engine_layers
from finetune.models import fingerprint, loading, module_names, router_loss, tokenizer_setup
from finetune.preflight import choice_checks, gradient_probe
from finetune.quantization import qat
from finetune.recipe import adapter_types
from finetune.speed import apply_to_model, live_model_spec, lm_head_loss, packing_isolation
from finetune.training import auto_correction, batch_search, oom_recovery, optimizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl.trainer.sft_config import SFTConfig

    from finetune.autoconfig.batch_size import Batch
    from finetune.autoconfig.machine_setup import Setup
    from finetune.checkpointing.checkpoints import Found
    from finetune.core.console import Console
    from finetune.core.run_checks import RunChecks
    from finetune.data.audit import Report
    from finetune.recipe.schema import Model, Recipe
    from finetune.training.run_context import RunContext

AS_BEFORE = "as in the checkpoint's run"
PROOF_TOKENS = 128  # of the row that proves documents apart


def adapted_model(
    run: RunContext, arguments: SFTConfig, dataset: Any, tokenizer: PreTrainedTokenizerBase, steps: int
) -> Any:
    """The base in its storage, with the adapter on it; first the schedule that it will be trained by."""
    recipe, setup, ledger = run.recipe, run.setup, run.checks
    optimizers.check_schedule(arguments, steps)
    base = loading.load(recipe.model, setup, str(arguments.device), ledger)
    if problems := choice_checks.against_storage(setup.storage.value, module_names.of_model(base)):
        raise UserError(*problems)
    router_loss.check(base.config, arguments.router_aux_loss_coef)
    base = qat.prepare(base, recipe.speed.qat, ledger)
    batches = partial(initialization.calibration, dataset, base.device)
    added = tokenizer_setup.added_tokens(recipe.model, tokenizer)
    with stage("attached the adapter", "adapter.type"):
        adapted = attach.attach(base, recipe.adapter, steps, ledger, batches, added)
    with precision(setup):  # weights of full fine-tuning are fp32, which flash attention does not take
        gradient_probe.check(adapted, recipe.adapter, setup, ledger)
    return adapted


def make_fast(
    run: RunContext, adapted: Any, arguments: SFTConfig, work: compilation.Work
) -> dict[str, run_checks.Choice]:
    """`speed:` on the model, with attention proved before and after; what was chosen, by option."""
    recipe, setup, ledger = run.recipe, run.setup, run.checks
    kernel, flat = setup.attention.value, recipe.data.packing or recipe.data.padding_free
    proved = packing_isolation.twin(adapted, setup, str(arguments.device)) if work.sharded else adapted
    with precision(setup):  # before layers are compiled: they see no other shapes than training's
        packing_isolation.prove_same(proved, PROOF_TOKENS, kernel, flat, ledger)
    name = collectives.from_main(lambda: setup.hardware.name)  # another rank's GPU may be another
    section, before = resume_contract.as_chosen(recipe.speed, run.found, name)
    corrected = run.correction.choice(auto_correction.CHECKPOINTING)
    if corrected:
        section = section.model_copy(update={"activation_checkpointing": corrected.value})
    fast = apply_to_model.apply(adapted, section, work, setup.hardware, ledger).by_option()
    fast |= {auto_correction.CHECKPOINTING: corrected} if corrected else {}
    same = [f"speed.{key}" for key in before] + ["CUDA graphs"] * ("compile" in before)
    fast |= {name: fast[name]._replace(reason=AS_BEFORE) for name in same}
    fast["speed.loss"] = collectives.from_main(
        lambda: lm_head_loss.choose(recipe.speed.loss, adapted, arguments)
    )
    if flat:
        with precision(setup):
            tokens, off = min(PROOF_TOKENS, recipe.data.max_length), packing_support.switch_off(recipe.data)
            packing_isolation.prove_apart(proved, tokens, kernel, ledger, off)
    return fast


def work_of(adapted: Any, recipe: Recipe, setup: Setup, tokens: int, flops: float) -> compilation.Work:
    """What a process is to do, and what comes to its GPU when it trains.

    The memory to come depends on the launch:

    - FSDP: the shard of the process, the gathered layers, and the weights outside of layers
    - ZeRO-3: the buffers of DeepSpeed
    - full fine-tuning in one process: the copies that autocast makes of linear layers

    Each trainable parameter adds its gradient and its optimizer state.
    """
    launch, sharded, awaited = setup.launch, setup.launch.sharded, 0
    every = list(adapted.parameters())
    if not launch.splitter and not hasattr(adapted, "peft_config"):
        linear = (m.weight.numel() for m in adapted.modules() if isinstance(m, torch.nn.Linear))
        awaited += 2 * sum(linear) if launch.precision != "no" else 0
    if sharded == "FSDP":
        layers = [
            sum(p.nbytes for p in layer.parameters()) for layer in live_model_spec.decoder_layers(adapted)
        ]
        whole = sum(p.nbytes for p in every)
        outside = whole - sum(layers) if layers else 0
        count = len(layers) if launch_environment.keeps_layers() else memory_estimate.GATHERED_LAYERS
        awaited = whole // launch.processes + sum(layers[:count]) + outside
        awaited -= sum(p.nbytes for p in every if p.device.type == setup.hardware.device)  # codes: all of it
    if sharded == "DeepSpeed":
        awaited = (
            memory_estimate.zero3_gib(sum(sharded_tensors.shape(p).numel() for p in every))
            * memory_estimate.GIB
        )
    host = training_state.available() / 2 / int(launch_environment.said("LOCAL_WORLD_SIZE", "1"))
    parts = launch.processes if launch.splitter else 1
    each = 4 + parts * beside(recipe, setup)
    plain = hasattr(adapted, "peft_config") and setup.storage.value in mixed_precision.STORED
    eager = launch_environment.eager(plain=plain)
    kinds = {"attention": setup.attention.value, "storage": setup.storage.value}
    alone = cuda_graphs.alone(launch.processes)
    searched = recipe.train.per_device_train_batch_size == "auto"
    differs = cuda_graphs.differs(recipe, adapted.config, alone=alone, searched=searched, **kinds)
    return compilation.Work(
        tokens,
        flops,
        sharded=sharded,
        eager=eager,
        parts=parts,
        awaited=awaited / memory_estimate.GIB,
        host=host / memory_estimate.GIB,
        each=each,
        differs=differs,
        once=transformer_engine_layers.used(),
    )


def beside(recipe: Recipe, setup: Setup) -> float:
    """Bytes that a process holds of each number that trains, beside weight and gradient.

    The optimizer's state, the copy of the gradient that DDP sends, DeepSpeed's of the weight in fp32, and
    AdaLoRA's averages; of a state that is split, this process's part.
    """
    launch, held = (
        setup.launch,
        optimizer_choice.state_bytes(optimizer_choice.asked(recipe.train), recipe.speed),
    )
    held += 4 if launch.processes > 1 and not launch.splitter else 0
    held += 4 if launch.splitter == "DeepSpeed" and launch.precision != "no" else 0
    held += memory_estimate.AVERAGES if adapter_types.find(recipe.adapter.type).peft == "adalora" else 0
    return held / (launch.processes if launch.splitter else 1)


def tokens_of(recipe: Recipe, setup: Setup, batch: Batch, report: Report) -> tuple[int, float]:
    """Tokens of a process: of a forward pass, at most; of a step on average, without padding."""
    data, most = recipe.data, recipe.data.max_length
    full = data.packing or data.streaming  # as `finetune plan` takes them
    number = sum(report.lengths["counts"]) if report.lengths else report.kept  # a text's pieces are rows
    row = most if full else min(most, report.tokens / max(1, number))
    at_once = batch.per_device / setup.launch.sharing
    return int(at_once * most), at_once * row * batch.accumulation


def settle_batch(run: RunContext, batch: Batch, arguments: SFTConfig) -> Batch:
    """The batch with the micro-batch of a correction, of this run or of the one that it resumes."""
    size, share = run.correction.micro_batch, batch.per_device * batch.accumulation
    if run.found and run.recipe.train.per_device_train_batch_size is None:
        size = run.found.contract["chosen"].get(auto_correction.MICRO_BATCH)
    if not size or share % size:
        return batch
    smaller = with_micro_batch(batch, size)
    put_in_arguments(smaller, arguments)
    return smaller


def put_in_arguments(batch: Batch, arguments: SFTConfig) -> None:
    arguments.per_device_train_batch_size = batch.per_device
    arguments.gradient_accumulation_steps = batch.accumulation


def search_batch(
    run: RunContext, adapted: Any, batch: Batch, fast: dict[str, run_checks.Choice], rows: batch_search.Rows
) -> Batch:
    """As many rows at once as fit, or as the checkpoint's run took."""
    if run.found:
        return batch_search.as_before(batch, run.found.contract)
    compiled = fast["speed.compile"].value == "on" if fast["speed.loss"].value == "chunked" else None
    step = batch_search.StepKind(compiled, beside(run.recipe, run.setup))
    with precision(run.setup):
        return batch_search.search(adapted, rows, batch, step, run.checks)


def corrector(
    run: RunContext, adapted: Any, batch: Batch, fast: dict[str, run_checks.Choice]
) -> auto_correction.Corrector | None:
    """What starts the run again if its first step runs out of memory; `None`: no `auto` can take less."""
    layers = live_model_spec.decoder_layers(adapted)
    level = fast[auto_correction.CHECKPOINTING].value
    allowed = partial(choice_checks.allows, run.recipe, run.setup)
    change = auto_correction.next_change(
        run.recipe,
        level if layers and not transformer_engine_layers.used() else "full",
        batch,
        allowed,
        fused_mlps=bool(layers) and all(map(live_model_spec.fused_mlps, layers)),
        offloads=bool(memory_estimate.away(fast["speed.offload"].value, max(1, len(layers)))),
    )
    alone = run.setup.launch.processes == 1
    if change is None or not (alone or run.correction.restarts):
        return None
    following = run.correction._replace(changes=(*run.correction.changes, change))
    return auto_correction.Corrector(following, run.console, alone=alone)


def micro_batches(
    run: RunContext, batch: Batch, fast: dict[str, run_checks.Choice]
) -> oom_recovery.MicroBatches:
    """Those of the run, which know what to say where memory runs out."""
    recipe, setup = run.recipe, run.setup
    allowed = partial(choice_checks.allows, recipe, setup)
    graphs = fast["CUDA graphs"].value == "on"
    level = {"activation_checkpointing": fast["speed.activation_checkpointing"].value}
    asked = (
        recipe.speed.model_copy(update=level),
        recipe.model.quantization,
        recipe.adapter.type,
        recipe.data.max_length,
    )
    less = oom_recovery.fixes(*asked, allowed, graphs=graphs)
    tell = partial(oom_recovery.tell, batch.per_device, run.console, run.checks)
    length = recipe.data.max_length // setup.launch.sharing
    needs = partial(oom_recovery.needed, length, setup, fast, beside(recipe, setup))
    return oom_recovery.MicroBatches(batch.per_device, less, tell, needs)


def check_space(
    adapted: Any, recipe: Recipe, setup: Setup, where: str | None, groups: Path = training_state.GROUPS
) -> None:
    """Rank 0 looks whether its disk holds the run's checkpoints, and its memory one that is split.

    Args:
        groups: where the limits of this process's container stand.
    """
    section, evaluated = recipe.train, recipe.eval  # a checkpoint may hold the best weights so far, too
    if section.save_strategy == "no" or optimizer_choice.unsaved(section, setup.launch.keeper):
        return
    place, weights = (
        Path(where or "runs") / "checkpoints",
        trainable_parameters.trainable(adapted).values(),
    )
    sizes = [(sharded_tensors.shape(p).numel(), p.element_size()) for p in weights]
    trained, numbers = sum(count * size for count, size in sizes), sum(count for count, _ in sizes)
    masters = 4 if setup.launch.splitter == "DeepSpeed" else 0  # ZeRO's weights in fp32, beside the moments
    low = optimizer_choice.state_bytes(optimizer_choice.asked(section), recipe.speed)
    kept = round(numbers * ((low or 8) + masters))
    each = kept + trained * (2 if evaluated.eval_steps and evaluated.load_best_model_at_end else 1)
    collectives.from_main(lambda: checkpoints.check_space(place, trained, each, section.save_total_limit))
    if setup.launch.splitter:  # under ZeRO beside a copy of each process's part
        held = each + (kept if masters else 0)
        collectives.from_main(lambda: training_state.check_memory(held, training_state.available(groups)))


def frozen_fingerprint(adapted: Any, found: Found | None, ledger: RunChecks) -> str:
    """The fingerprint of the frozen weights; here a run that can't go on from `found` is refused, before
    anything in its folder is changed."""

    def look() -> str:
        return fingerprint.fingerprint(trainable_parameters.frozen(adapted))

    rebased = initialization.rebases(adapted)  # by rank 0: DDP hands it on
    if launch_environment.read_by_rank_0() or rebased:
        frozen = collectives.from_main(look)
    else:
        frozen = look()
        collectives.agree({"weights of the base": frozen})
    if found:
        ledger.check()
        resume_contract.check_base(found.contract, frozen, found.path, decomposed=rebased)
        training_state.structure(found.path)
    return frozen


def add_template_receipt(section: Model, tokenizer: Any, screen: Console, ledger: RunChecks) -> None:
    """Which chat template it is, beside the one in the base's repository; another one is said."""
    if tokenizer.chat_template is None:
        return
    own, used = (
        tokenizer_setup.digest(text) if text else "none"
        for text in (tokenizer_setup.own_template(section), tokenizer.chat_template)
    )
    ledger.add(
        "chat template", own, used, "sha256 of the base repository's own, and of the one in use", ok=True
    )
    screen.say(*(f"note: {said}" for said in tokenizer_setup.foreign_template(section, tokenizer)))


def precision(setup: Setup) -> contextlib.AbstractContextManager[Any]:
    """Autocast as the launch has it."""
    on = setup.launch.precision != "no"
    dtype = getattr(torch, mixed_precision.DTYPES[setup.launch.precision])
    return torch.autocast(setup.hardware.device, dtype, enabled=on)
