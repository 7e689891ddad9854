"""A run, top to bottom: data -> model -> adapter -> SFTTrainer -> save -> reopen -> evaluate.

run_folder = train.run(recipe.load("recipes/quickstart.yaml"))
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from accelerate.utils.memory import clear_device_cache
from trl.trainer.sft_config import SFTConfig

from finetune import (
    adalora,
    adapter_init,
    adapters_trainable_parameters,
    apart,
    callbacks,
    checkpointing_resume_contract,
    claim,
    evaluation_reopen,
    exchange,
    harness,
    launch_receipts,
    loraplus,
    models_fingerprint,
    models_generation_config,
    models_tokenizer,
    nonfinite,
    preflight_choice_checks,
    ranks,
    report,
    resume,
    scoring,
    shards,
    stages,
    stopping,
    summary,
    te,
    trackers,
    training_first_step,
    training_resolved_recipe,
    training_resume_facts,
    training_training_arguments,
    training_training_data,
    validate,
    verify,
    zero,
)
from finetune.batch import count_steps, split_batch
from finetune.checkpoint import Writer
from finetune.errors import Stopped, UserError
from finetune.receipts import Ledger
from finetune.run_folder import RunFolder
from finetune.screen import Screen, quieten_libraries
from finetune.speed import apply, attention_kernels, dora
from finetune.trainer import Trainer, build

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from finetune.checkpoint import Found
    from finetune.hardware import Setup
    from finetune.sections import Adapter, Recipe, Train
    from finetune.stopping import Stop
    from finetune.training_stop_condition import Until


def run(
    recipe: Recipe,
    *,
    quiet: bool = False,
    resumes: str | None = None,
    until: Until | None = None,
    watchers: Sequence[Any] = (),
) -> RunFolder:
    """Train, save, reopen and evaluate one recipe; returns its run folder.

    Args:
        resumes: the checkpoint to go on from: newest, auto (which may also be none) or step-<n>. A finished
            run is left as it is.
        until: when to end before the last step.
        watchers: more callbacks.

    Raises:
        UserError: its code tells user (2), environment (3), artefact (4) and training (5) apart.
        Stopped: told to end, by a signal or `until`.
    """
    where, quiet = recipe.train.output_dir, quiet or os.environ.get("RANK", "0") != "0"
    if resume.nothing_to_do(where, resumes, recipe.model_dump(mode="json")):
        Screen(quiet=quiet).say(f"{where} is finished: nothing to do")
        return RunFolder(Path(str(where)))
    quieten_libraries()
    claimed = claim.claimed(where, recipe.origin.path.stem)
    with stopping.Stop(until).listening() as stop:
        try:
            with claimed as where:
                return _run(preflight_choice_checks.pinned(recipe), where, stop, resumes, quiet, watchers)
        except Stopped as stopped:
            if stopped.together:
                ranks.end_together()
            raise


def _run(
    recipe: Recipe, where: str | None, stop: Stop, resumes: str | None, quiet: bool, watchers: Sequence[Any]
) -> RunFolder:
    setup = preflight_choice_checks.setup_of(recipe)
    attention_kernels.register(setup.attention.value)
    screen, ledger = Screen(quiet=quiet), Ledger()
    batch = split_batch(recipe.train, setup.launch.rows_apart)
    arguments = training_training_arguments.training_arguments(
        recipe.train, recipe.data, setup, batch
    )  # starts the process group
    folder = start_folder(where, arguments)
    harness.check(recipe.eval, recipe.model)
    set_seed(recipe.train.seed)

    tokenizer, prepared = training_training_data.prepare_in_turn(recipe, setup)
    data_report, rows = prepared.report, None if recipe.data.streaming else len(prepared.train)
    steps = count_steps(recipe.train, rows, batch, setup.launch.rows_apart)
    contract = training_resume_facts.contract_of(recipe, setup, batch, steps, tokenizer, prepared, arguments)
    found = find_checkpoint(recipe.train, resumes, contract, setup)

    adapted = stages.adapted_model(recipe, setup, arguments, prepared.train, tokenizer, steps, ledger)
    flops = apply.flops_per_token(adapted)
    most, whole = stages.tokens_of(recipe, setup, batch, data_report["train"])
    work = stages.work_of(adapted, recipe, setup, most, flops * whole * steps)
    fast = stages.make_fast(adapted, recipe, setup, arguments, work, found, ledger)
    compile, compiled = fast["speed.compile"], fast["speed.compile"].value == "on"
    stages.check_space(adapted, recipe.train, recipe.speed, setup, where, recipe.eval)
    contract["base"] = stages.frozen_fingerprint(adapted, found, ledger)
    if recipe.train.per_device_train_batch_size == "auto":
        batch = stages.search_batch(
            adapted, recipe, setup, batch, found, prepared.train, tokenizer, fast, arguments, ledger
        )

    with recording(screen, ledger, folder, setup, found), trackers.running(arguments, folder) as tracked:
        choices = training_resolved_recipe.choices(recipe, setup, batch, steps, adapted, fast, folder)
        initial = folder.staging / "initial"
        if setup.launch.main:
            training_resolved_recipe.write_start(folder, recipe, choices, data_report, setup, arguments)
            summary.show_plan(screen, recipe, choices, data_report, ledger.notes)
            adapter_init.save_initial(adapted, initial)
            resume.begin(folder, found, contract, choices, screen)
        made = {"compiled": compile, "cudagraphs": fast["CUDA graphs"]}
        first_step = training_first_step.FirstStep(ledger, setup, steps=steps, batch=batch.effective, **made)
        metrics = callbacks.Metrics(folder, screen, setup, batch=batch.effective, flops_per_token=flops)
        seed, ends = recipe.train.seed, models_tokenizer.declared_ends(recipe.model)
        validating = validate.asked(recipe.data, recipe.eval, tokenizer, adapted, metrics, seed, ends)
        writer = Writer(folder.checkpoints, recipe.train.save_total_limit)
        schedule = stopping.Schedule(recipe.train, stop, writer, setup.launch.keeper)
        unusable = nonfinite.watchers(recipe.train, setup.launch.precision, folder, screen, ledger)
        watching = [first_step, *unusable, metrics, *validating, schedule, *watchers]
        watching += dora.refreshing(adapted, ledger)
        trainer = build(adapted, recipe.adapter, recipe.speed, arguments, prepared.train, tokenizer, watching)
        trainer.install_loss(fast["speed.loss"].value, compiled=compiled)
        again = stages.micro_batches(recipe, setup, batch, fast, screen, ledger)
        trainer.remembers(schedule, contract, again, metrics, *unusable, *validating)
        tracked.follow(trainer)
        if (recipe.data.packing or recipe.data.padding_free) and (compiled or te.used()) and rows is not None:
            trainer.shape = stages.one_shape(batch, prepared.train, recipe.data.max_length)
        launch_receipts.add(trainer, setup.launch, ledger)
        training_training_data.add_data_receipts(recipe, tokenizer, data_report["train"], screen, ledger)
        with stop.later(), contextlib.closing(writer):
            train(trainer, recipe.adapter, validating, found, ledger)
            training_training_data.add_stream_receipt(prepared, screen, ledger)
            live = verify.remember(adapted, prepared.train, setup)
            save(adapted, tokenizer, folder, initial, screen)
        verify.add_file_receipts(folder, live, steps, ledger)
        trainer.accelerator.free_memory()
        del trainer, adapted
        screen.say("", "reopening what was saved, and evaluating base and tuned ...")
        result = reopen_and_evaluate(folder, live, validating, ledger, recipe, setup)
        summary.show_result(screen, folder, ledger, result)
    return folder


def train(
    trainer: Trainer,
    section: Adapter,
    validating: list[validate.Validate],
    found: Found | None,
    ledger: Ledger,
) -> None:
    """Train, with the ledger checked before, and the weights compared with what they were after."""
    ledger.check()
    adapted: Any = trainer.model
    rounded = adapters_trainable_parameters.train_in_fp32(adapted) if section.type != "full" else {}
    if zero.used() and section.type != "full":
        zero.cast(adapted, trainer.accelerator.mixed_precision)
    before = verify.fingerprints(adapted)
    trainer.train_from(found.path if found else None)
    if trainer.state.global_step >= trainer.first_step.first:  # a run may go on after its last step
        exchange.add_receipt(trainer.model_wrapped, trainer.exchanged, ledger)
    if trainer.chunked:
        trainer.chunked.undo()
        trainer.chunked = trainer.first_step.add_loss = None  # they hold the model, which is opened again
    if section.type != "full":
        same = models_fingerprint.fingerprint(adapters_trainable_parameters.frozen(adapted))
        ledger.add(
            "base weights after training",
            trainer.contract["base"],
            same,
            "hash of every frozen tensor, before and after",
        )
    verify.add_moved_receipt(before, adapted, trainer.state.global_step, ledger)
    trainer.writer.add_receipt(ledger)
    for validation in validating:
        validation.restore(adapted, trainer.state, ledger)
    for name, dtype in rounded.items():
        adapted.get_parameter(name).data = adapted.get_parameter(name).data.to(dtype)
    ratio = section.ours("loraplus_lr_ratio")
    if ratio:
        loraplus.add_loraplus_receipt(adapted, trainer.optimizer, trainer.args.learning_rate, ratio, ledger)
    if hasattr(trainer, "singular_vectors"):
        used, budget = adalora.ranks(adapted)
        ledger.add("AdaLoRA ranks", budget, used, "ranks left by the masks, summed over modules")
        adalora.drop_masked_ranks(adapted)
    ledger.check()


def save(
    adapted: Any, tokenizer: PreTrainedTokenizerBase, folder: RunFolder, initial: Path, screen: Screen
) -> None:
    """Adapter (or model) and tokenizer, by rank 0; the others wait, once they gave their parts."""
    processes, tensors = PartialState(), te.weights(adapted) if te.used() else shards.gathered(adapted)
    target = folder.adapter if hasattr(adapted, "peft_config") else folder.model
    if processes.is_main_process:
        if target == folder.model:
            stops = scoring.stop_ids(adapted, tokenizer)
            for note in models_generation_config.settle_generation(adapted.generation_config, stops):
                screen.say(f"note: {note}")
        adapter_init.save(adapted, target, initial, tensors)
        tokenizer.save_pretrained(str(target))
    processes.wait_for_everyone()
    ranks.appears(target / "tokenizer_config.json")  # what is saved last


def reopen_and_evaluate(
    folder: RunFolder,
    live: verify.Live,
    validating: list[validate.Validate],
    ledger: Ledger,
    recipe: Recipe,
    setup: Setup,
) -> dict[str, Any]:
    """The content of eval.json; what is evaluated is proved to be what was trained, and the best of it."""
    torch._dynamo.reset()  # CUDA graphs hold the weights that they read
    clear_device_cache(garbage_collection=True)  # of what was trained, which is read back
    if setup.launch.processes > 1 and ranks.from_main(
        lambda: evaluation_reopen.too_large(recipe.model, setup)
    ):
        return apart.evaluate(folder, live, ledger)
    result = verify.evaluated(live, folder, ledger)
    for validation in validating:
        validation.add_receipt(result["tuned"]["loss"], ledger)
    verify.check(folder, ledger)
    return result


def find_checkpoint(
    section: Train, resumes: str | None, contract: dict[str, Any], setup: Setup
) -> Found | None:
    """The checkpoint to go on from, verified by rank 0 and held against this run by all."""
    stopping.check(section, resumes, setup.launch.keeper)
    folder = RunFolder(Path(section.output_dir or ""))
    found: Found | None = ranks.from_main(lambda: resume.find(folder, resumes))
    if found:
        found.notes.extend(checkpointing_resume_contract.compare(found.contract, contract, found.path))
    return found


def start_folder(where: str | None, arguments: SFTConfig) -> RunFolder:
    """The run folder, which rank 0 has claimed and names for all, and the Trainer's own place in it.

    Raises:
        UserError: not all processes see it (exit 3).
    """
    folder = RunFolder(Path(ranks.from_main(lambda: where)))
    ranks.on_one_disk(folder.path)
    arguments.output_dir = str(folder.staging)
    arguments.run_name = arguments.run_name or folder.path.name  # as trackers call it
    return folder


@contextlib.contextmanager
def recording(
    screen: Screen, ledger: Ledger, folder: RunFolder, setup: Setup, found: Found | None
) -> Iterator[None]:
    """Keep log.txt from here on, and leave receipts.json behind however the run ends."""
    if setup.launch.main:
        screen.log_to(folder.path / "log.txt", again=found is not None)
    ended = ""  # why, where it does not come to its end
    try:
        yield
    except Stopped as stopped:
        stopped.folder, ended = str(folder.path), str(stopped)
        if folder.weights.exists():
            stopped.args = (f"{ended}; what was trained is saved: finetune evaluate {folder.path}",)
        raise
    except UserError as error:
        ended = str(error)
        raise
    except Exception as error:  # of whatever kind: the page tells a crash from a run that goes on
        ended = f"error: {type(error).__name__}: {error}"
        raise
    finally:
        # On a disk that is full nothing more can be left, and why is on its way already
        with contextlib.suppress(*[OSError] * bool(ended)), contextlib.closing(screen):
            if ended:
                screen.log(ended)
            if setup.launch.main:
                folder.write("receipts.json", ledger.as_json())
                report.after(folder.path, screen)
