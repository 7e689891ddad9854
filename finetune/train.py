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
    adapters,
    apart,
    callbacks,
    check,
    claim,
    evaluate,
    exchange,
    hardware,
    harness,
    launch_env,
    launch_receipts,
    loraplus,
    model,
    nonfinite,
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
    train_conflicts,
    upstream,
    validate,
    verify,
    zero,
)
from finetune.batch import Batch, count_steps, split_batch
from finetune.checkpoint import Writer
from finetune.errors import Exit, Stopped, UserError
from finetune.receipts import Ledger
from finetune.run_folder import RunFolder
from finetune.screen import Screen, quieten_libraries
from finetune.speed import apply as speed
from finetune.speed import attention_kernels
from finetune.trainer import Trainer, build

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from finetune.arguments import Until
    from finetune.checkpoint import Found
    from finetune.data.audit import Report
    from finetune.data.prepare import Prepared
    from finetune.hardware import Setup
    from finetune.recipe import Recipe
    from finetune.sections import Adapter, Data, Train
    from finetune.stopping import Stop


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
                return _run(check.pinned(recipe), where, stop, resumes, quiet, watchers)
        except Stopped as stopped:
            if stopped.together:
                ranks.end_together()
            raise


def _run(
    recipe: Recipe, where: str | None, stop: Stop, resumes: str | None, quiet: bool, watchers: Sequence[Any]
) -> RunFolder:
    setup = check.setup_of(recipe)
    attention_kernels.register(setup.attention.value)
    screen, ledger = Screen(quiet=quiet), Ledger()
    batch = split_batch(recipe.train, setup.launch.rows_apart)
    arguments = training_arguments(recipe.train, recipe.data, setup, batch)  # starts the process group
    folder = start_folder(where, arguments)
    harness.check(recipe.eval, recipe.model)
    set_seed(recipe.train.seed)

    tokenizer, prepared = prepare_in_turn(recipe, setup)
    data_report, rows = prepared.report, None if recipe.data.streaming else len(prepared.train)
    steps = count_steps(recipe.train, rows, batch, setup.launch.rows_apart)
    contract = contract_of(recipe, setup, batch, steps, tokenizer, prepared, arguments)
    found = find_checkpoint(recipe.train, resumes, contract, setup)

    adapted = stages.adapted_model(recipe, setup, arguments, prepared.train, tokenizer, steps, ledger)
    flops = speed.flops_per_token(adapted)
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
        choices = summary.choices(recipe, setup, batch, steps, adapted, fast, folder)
        initial = folder.staging / "initial"
        if setup.launch.main:
            summary.write_start(folder, recipe, choices, data_report, setup, arguments)
            summary.show_plan(screen, recipe, choices, data_report, ledger.notes)
            adapter_init.save_initial(adapted, initial)
            resume.begin(folder, found, contract, choices, screen)
        made = {"compiled": compile, "cudagraphs": fast["CUDA graphs"]}
        first_step = callbacks.FirstStep(ledger, setup, steps=steps, batch=batch.effective, **made)
        metrics = callbacks.Metrics(folder, screen, setup, batch=batch.effective, flops_per_token=flops)
        seed, ends = recipe.train.seed, model.declared_ends(recipe.model)
        validating = validate.asked(recipe.data, recipe.eval, tokenizer, adapted, metrics, seed, ends)
        writer = Writer(folder.checkpoints, recipe.train.save_total_limit)
        schedule = stopping.Schedule(recipe.train, stop, writer, setup.launch.keeper)
        unusable = nonfinite.watchers(recipe.train, setup.launch.precision, folder, screen, ledger)
        watching = [first_step, *unusable, metrics, *validating, schedule, *watchers]
        watching += callbacks.refreshing(adapted, ledger)
        trainer = build(adapted, recipe.adapter, recipe.speed, arguments, prepared.train, tokenizer, watching)
        trainer.install_loss(fast["speed.loss"].value, compiled=compiled)
        again = stages.micro_batches(recipe, setup, batch, fast, screen, ledger)
        trainer.remembers(schedule, contract, again, metrics, *unusable, *validating)
        tracked.follow(trainer)
        if (recipe.data.packing or recipe.data.padding_free) and (compiled or te.used()) and rows is not None:
            trainer.shape = stages.one_shape(batch, prepared.train, recipe.data.max_length)
        launch_receipts.add(trainer, setup.launch, ledger)
        add_data_receipts(recipe, tokenizer, data_report["train"], screen, ledger)
        with stop.later(), contextlib.closing(writer):
            train(trainer, recipe.adapter, validating, found, ledger)
            add_stream_receipt(prepared, screen, ledger)
            live = verify.remember(adapted, prepared.train, setup)
            save(adapted, tokenizer, folder, initial, screen)
        verify.add_file_receipts(folder, live, steps, ledger)
        trainer.accelerator.free_memory()
        del trainer, adapted
        screen.say("", "reopening what was saved, and evaluating base and tuned ...")
        result = reopen_and_evaluate(folder, live, validating, ledger, recipe, setup)
        summary.show_result(screen, folder, ledger, result)
    return folder


def prepare_in_turn(recipe: Recipe, setup: Setup) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """The data, which one process of each machine prepares for the others, once all mean the same run."""
    ranks.agree(check.facts(recipe, setup))
    if recipe.data.streaming:
        return check.prepare_data(recipe)
    first = PartialState().is_local_main_process
    if not first:
        ranks.wait()  # for as long as it takes: Accelerate's own way to take turns ends after half an hour
    made = check.prepare_data(recipe)
    if first:
        ranks.wait()
    return made


def training_arguments(train: Train, data: Data, setup: Setup, batch: Batch) -> SFTConfig:
    """SFTConfig from the recipe's `train:` and from what this project decides itself."""
    ranks.start(setup.hardware.device)
    new_name = "activation_checkpointing" in upstream.fields(upstream.SFT_CONFIG)  # transformers >= 5.23
    checkpointing = "activation_checkpointing" if new_name else "gradient_checkpointing"
    given = train.passed_on()
    epochs = {"num_train_epochs": train.num_train_epochs or 3.0}
    length = {"max_steps": train.max_steps} if train.max_steps else epochs
    decided: dict[str, Any] = {
        "per_device_train_batch_size": batch.per_device,
        "gradient_accumulation_steps": batch.accumulation,
        "learning_rate": train.learning_rate,
        "seed": train.seed,
        "bf16": setup.launch.precision == "bf16",  # TRL's default of True would overrule the launch
        "fp16": setup.launch.precision == "fp16",
        **launch_env.row_options(flat=data.packing or data.padding_free),
        **launch_env.device_options(setup.hardware.device),
        checkpointing: False,  # `speed.apply` does it
        "dataset_kwargs": {"skip_prepare_dataset": True},  # rows come as input_ids and labels
        "max_length": None,
        "padding_free": data.packing or data.padding_free,  # packed rows hold their documents' lengths
        **hardware.loader(setup.hardware, int(launch_env.said("LOCAL_WORLD_SIZE", "1")), given),
        "ddp_find_unused_parameters": False,  # True for every PeftModel otherwise
        "ddp_broadcast_buffers": False,  # an fp8 base's scales are the same everywhere from the start
        "ddp_timeout": launch_env.timeout_seconds() + launch_env.NCCL_LATER,
        "logging_nan_inf_filter": False,  # it would log an old average in place of NaN
        "disable_tqdm": True,
        "save_strategy": "no",  # a whole run is saved at its end
    }
    try:
        made = SFTConfig(**{**decided, **length, **given})
    except (ValueError, ImportError) as error:
        raise UserError(train_conflicts.refused("SFTConfig", error, given)) from error
    made._n_gpu = min(made.n_gpu, 1)  # the Trainer would spread one process over all GPUs (DataParallel)
    return made


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
    rounded = adapters.train_in_fp32(adapted) if section.type != "full" else {}
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
        same = model.fingerprint(adapters.frozen(adapted))
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
        loraplus.add_receipt(adapted, trainer.optimizer, trainer.args.learning_rate, ratio, ledger)
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
            for note in model.settle_generation(adapted.generation_config, stops):
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
    if setup.launch.processes > 1 and ranks.from_main(lambda: evaluate.too_large(recipe.model, setup)):
        return apart.evaluate(folder, live, ledger)
    result = verify.evaluated(live, folder, ledger)
    for validation in validating:
        validation.add_receipt(result["tuned"]["loss"], ledger)
    verify.check(folder, ledger)
    return result


def contract_of(
    recipe: Recipe,
    setup: Setup,
    batch: Batch,
    steps: int,
    tokenizer: Any,
    prepared: Prepared,
    arguments: SFTConfig,
) -> dict[str, Any]:
    """What a run that goes on from a checkpoint of this one must have in common with it; so must ranks."""
    counts = {"steps": steps, "rows": prepared.report["train"].kept, **batch._asdict()}
    if recipe.train.per_device_train_batch_size == "auto":  # what it became is with what was chosen
        counts = {name: counts[name] for name in ("steps", "rows", "effective")}
    if recipe.data.streaming:  # each worker reads its own shards: their number decides on the order of rows
        workers = ranks.gathered(arguments.dataloader_num_workers)  # as many as a machine's cores allow
        counts["train.dataloader_num_workers"] = workers[0] if len({*workers}) == 1 else workers
    made = resume.contract(recipe.model_dump(mode="json"), setup, counts, tokenizer, prepared.content)
    ranks.agree({name: str(fact) for name, fact in made["facts"].items() if name != "hardware"})
    return made


def find_checkpoint(
    section: Train, resumes: str | None, contract: dict[str, Any], setup: Setup
) -> Found | None:
    """The checkpoint to go on from, verified by rank 0 and held against this run by all."""
    stopping.check(section, resumes, setup.launch.keeper)
    folder = RunFolder(Path(section.output_dir or ""))
    found: Found | None = ranks.from_main(lambda: resume.find(folder, resumes))
    if found:
        found.notes.extend(resume.compare(found.contract, contract, found.path))
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


def add_data_receipts(recipe: Recipe, tokenizer: Any, report: Report, screen: Screen, ledger: Ledger) -> None:
    """Rows that don't teach the model to stop are why it will not; rows half empty are half the speed."""
    data = recipe.data
    stages.add_template_receipt(recipe.model, tokenizer, screen, ledger)
    without, allowed = report.counts.get("no_end_of_turn", 0), data.expect.no_end_of_turn
    how, ok = "rows whose last trained token ends the turn", without <= allowed * report.kept  # as audited
    got = f"{report.kept - without} rows"
    ledger.add("end of turn trained", f"{report.kept} rows", got, how, ok=ok, code=Exit.INPUT)
    if report.packing:
        got = f"{report.packing['rows']:.0f} rows, {report.packing['fill']:.2%} full"
        how = f"tokens of the packed rows over rows x {data.max_length}"
        ledger.add("data.packing", f"rows of {data.max_length} tokens", got, how, ok=True)


def add_stream_receipt(prepared: Prepared, screen: Screen, ledger: Ledger) -> None:
    """How many rows were left out of those read while training: the audit has seen the first ones alone."""
    if prepared.read is None:
        return
    read, left_out = map(sum, zip(*ranks.gathered(prepared.read.sum(0).tolist()), strict=True))
    got = f"{left_out:,} of {read:,}"
    how = "rows that loaders read in this process, ahead of the steps by what they prefetch"
    ledger.add("rows of the stream left out", "as few as data.expect allows of the first", got, how, ok=True)
    if left_out:
        screen.say(f"note: of {read:,} rows read while training {left_out:,} were left out")


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
