"""A run, top to bottom: data -> model -> adapter -> SFTTrainer -> save -> reopen -> evaluate.

run_folder = train.run(recipe.load("recipes/quickstart.yaml"))
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, set_seed
from transformers import PrinterCallback
from trl.trainer.sft_config import SFTConfig

from finetune import (
    adalora,
    adapter_init,
    adapters,
    apart,
    callbacks,
    check,
    evaluate,
    exchange,
    hardware,
    harness,
    launch_env,
    launch_receipts,
    loraplus,
    model,
    optimizers,
    qat,
    ranks,
    report,
    run_folder,
    shards,
    summary,
    trackers,
    upstream,
    validate,
    verify,
)
from finetune.batch import Batch, count_steps, split_batch
from finetune.data.prepare import held_out
from finetune.errors import Exit, Problem, UserError
from finetune.receipts import Ledger
from finetune.screen import Screen, quieten_libraries
from finetune.speed import apply as speed
from finetune.speed import attention, attention_kernels, head, offload
from finetune.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from finetune.data.audit import Report
    from finetune.data.prepare import Prepared
    from finetune.hardware import Setup
    from finetune.recipe import Recipe
    from finetune.run_folder import RunFolder
    from finetune.sections import Adapter, Data, Speed, Train

PROOF_TOKENS = 128  # of the row that proves documents apart


def run(recipe: Recipe, *, quiet: bool = False, watchers: Sequence[Any] = ()) -> RunFolder:
    """Train (with `watchers`, more callbacks), save, reopen and evaluate one recipe; returns its run folder.

    Raises:
        UserError: its code tells user (2), environment (3), artefact (4) and training (5) apart.
    """
    quieten_libraries()
    run_folder.check_free(recipe.train.output_dir)
    flat = recipe.data.packing or recipe.data.padding_free
    setup = check.setup_of(recipe)
    attention_kernels.register(setup.attention.value)
    screen, ledger = Screen(quiet=quiet or not setup.launch.main), Ledger()
    batch = split_batch(recipe.train, setup.launch.rows_apart)
    arguments = training_arguments(recipe.train, recipe.data, setup, batch)  # starts the process group
    harness.check(recipe.eval)
    set_seed(recipe.train.seed)

    tokenizer, prepared = prepare_in_turn(recipe, setup)
    dataset: Any = prepared.train
    data_report, rows = prepared.report, None if recipe.data.streaming else len(dataset)
    steps = count_steps(recipe.train, rows, batch, setup.launch.rows_apart)

    base = model.load(recipe.model, setup, str(arguments.device), ledger)
    base = qat.prepare(base, recipe.speed.qat, ledger)
    batches = partial(adapter_init.calibration, dataset, base.device)
    added = model.added_tokens(recipe.model, tokenizer)
    adapted: Any = adapters.attach(base, recipe.adapter, steps, ledger, batches, added)
    exchange.prepare(adapted, arguments)
    tokens, flops = batch.per_device * recipe.data.max_length, flops_per_token(adapted)
    work = work_of(adapted, setup, tokens, flops * tokens * batch.accumulation * steps)
    fast = make_fast(adapted, recipe, setup, arguments, work, ledger)
    compiled = fast["speed.compile"].value == "on"

    folder = start_folder(recipe, setup, arguments)
    with recording(screen, ledger, folder, setup), trackers.running(arguments, folder) as tracked:
        choices = summary.choices(recipe, setup, batch, steps, adapted, fast, folder)
        initial = folder.staging / "initial"
        if setup.launch.main:
            summary.write_start(folder, recipe, choices, data_report, setup, arguments)
            summary.show_plan(screen, recipe, choices, data_report)
            adapter_init.save_initial(adapted, initial)

        first_step = callbacks.FirstStep(ledger, setup, steps=steps, batch=batch.effective)
        first_step.compiled = compiled
        metrics = callbacks.Metrics(folder, screen, setup, batch=batch.effective, flops_per_token=flops)
        validating = validation(recipe, tokenizer, adapted, metrics)
        watching = [first_step, metrics, *validating, *watchers]
        if norms := getattr(adapted, "finetune_norms", None):
            watching.append(callbacks.RefreshNorms(norms, ledger))
        sections = recipe.adapter, recipe.speed
        trainer = build_trainer(adapted, *sections, arguments, dataset, tokenizer, watching)
        trainer.install_loss(fast["speed.loss"].value, compiled=compiled)
        tracked.follow(trainer)
        if flat and compiled and rows is not None:
            documents = batch.per_device * max(map(len, dataset["where"])) + 1
            trainer.shape = (tokens, documents, recipe.data.max_length)
        launch_receipts.add(trainer, setup.launch, ledger)
        add_data_receipts(recipe.data, data_report["train"], ledger)
        train(trainer, recipe.adapter, validating, ledger)

        live = verify.remember(adapted, dataset, setup.hardware.device == "cpu")
        save(adapted, tokenizer, folder, initial)
        verify.add_file_receipts(folder, live, steps, ledger)
        trainer.accelerator.free_memory()
        del trainer, adapted, base
        evaluate.release()
        screen.say("", "reopening what was saved, and evaluating base and tuned ...")
        result = reopen_and_evaluate(folder, live, validating, ledger, recipe, setup)
        summary.show_result(screen, recipe, folder, ledger, result)
    return folder


def prepare_in_turn(recipe: Recipe, setup: Setup) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """The data, which one process of each machine prepares for the others, once all mean the same run."""
    ranks.agree(check.facts(recipe, setup))
    if recipe.data.streaming:
        return check.prepare_data(recipe)
    with PartialState().local_main_process_first():
        return check.prepare_data(recipe)


def training_arguments(train: Train, data: Data, setup: Setup, batch: Batch) -> SFTConfig:
    """SFTConfig from the recipe's `train:` and from what this project decides itself."""
    new_name = "activation_checkpointing" in upstream.fields(upstream.SFT_CONFIG)  # transformers >= 5.23
    checkpointing = "activation_checkpointing" if new_name else "gradient_checkpointing"
    epochs = {"num_train_epochs": train.num_train_epochs or 3.0}
    length = {"max_steps": train.max_steps} if train.max_steps else epochs
    decided: dict[str, Any] = {
        "per_device_train_batch_size": batch.per_device,
        "gradient_accumulation_steps": batch.accumulation,
        "learning_rate": train.learning_rate,
        "seed": train.seed,
        "bf16": setup.launch.precision == "bf16",  # TRL's default of True would overrule the launch
        "fp16": setup.launch.precision == "fp16",
        "use_cpu": setup.hardware.device == "cpu",
        checkpointing: False,  # `speed.apply` does it
        "dataset_kwargs": {"skip_prepare_dataset": True},  # rows come as input_ids and labels
        "max_length": None,
        "padding_free": data.packing or data.padding_free,  # packed rows hold their documents' lengths
        **hardware.loader(setup.hardware, setup.launch.processes),
        "ddp_timeout": launch_env.timeout_seconds(),
        "logging_nan_inf_filter": False,  # it would log an old average in place of NaN
        "disable_tqdm": True,
        "save_strategy": "no",  # a whole run is saved at its end
    }
    try:
        return SFTConfig(**{**decided, **length, **train.passed_on()})
    except (ValueError, ImportError) as error:
        said = " ".join(str(error).split())
        raise UserError(Problem("SFTConfig refuses it", "train", found=said)) from error


def build_trainer(
    adapted: Any,
    section: Adapter,
    fast: Speed,
    arguments: SFTConfig,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    watching: list[Any],
) -> Trainer:
    """The trainer with our callbacks, and with the adapter's weights as PEFT made them."""
    config: Any = getattr(adapted, "peft_config", {}).get("default")
    allocates: bool = config is not None and config.peft_type == "ADALORA"
    if not arguments.fp16:  # there the loss scaler skips such steps
        watching = [*watching, callbacks.StopOnNonFinite()]
    if allocates:
        watching = [*watching, adalora.AllocateRanks()]
    ratio = section.ours("loraplus_lr_ratio")
    made_by = optimizers.kind_and_options(arguments, adapted, fast)
    if fast.offload in ("optimizer", "all"):
        watching = [*watching, offload.SendGradients()]
    made = {name: parameter.data for name, parameter in adapters.trainable(adapted).items()}
    trainer = Trainer(
        model=adapted,
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=watching,
        optimizers=(
            loraplus.optimizer(adapted, made_by, ratio, arguments.weight_decay) if ratio else None,
            None,
        ),
        optimizer_cls_and_kwargs=None if ratio else made_by,
    )
    exchange.reduce_in_fp32(trainer.accelerator)
    trainer.remove_callback(PrinterCallback)
    (trainer.first_step,) = (one for one in watching if isinstance(one, callbacks.FirstStep))
    trainer.first_step.optimizer = made_by[1].get("optimizer_class", made_by[0])
    for name, parameter in adapters.trainable(adapted).items():
        parameter.data = made[name]  # TRL casts adapters on a 4-bit base to bf16, which loses small updates
    if allocates:
        trainer.orthogonality_weight = adapted.peft_config["default"].orth_reg_weight
        trainer.orthogonality_every = section.ours("orth_reg_every") or 1
        trainer.singular_vectors = adalora.singular_vectors(adapted)
    return trainer


def make_fast(
    adapted: Any, recipe: Recipe, setup: Setup, arguments: SFTConfig, work: speed.Work, ledger: Ledger
) -> dict[str, hardware.Choice]:
    """`speed:` on the model, with attention proved before and after; what was chosen, by option."""
    kernel, flat = setup.attention.value, recipe.data.packing or recipe.data.padding_free
    proved = model.twin(adapted, setup, str(arguments.device)) if work.sharded else adapted
    with precision(setup):  # before layers are compiled: they see no other shapes than training's
        attention.prove_same(proved, PROOF_TOKENS, kernel, flat, ledger)
    fast = speed.apply(adapted, recipe.speed, work, setup.hardware, ledger)
    fast["speed.loss"] = ranks.from_main(lambda: head.choose(recipe.speed.loss, adapted, arguments))
    if flat:
        with precision(setup):
            attention.prove_apart(proved, PROOF_TOKENS, kernel, ledger)
    return fast


def work_of(adapted: Any, setup: Setup, tokens: int, flops: float) -> speed.Work:
    """What a process is to do, and what FSDP brings to its GPU at the start: its part, and two layers."""
    sharded, awaited = setup.launch.sharded, 0
    if launch_env.read_by_rank_0():
        awaited = sum(p.nbytes for p in adapted.parameters()) // setup.launch.processes
        awaited += sum(p.nbytes for layer in speed.decoder_layers(adapted)[:2] for p in layer.parameters())
    return speed.Work(tokens, flops, sharded, launch_env.eager(), awaited / 2**30)


def validation(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, adapted: Any, metrics: callbacks.Metrics
) -> list[validate.Validate]:
    """The evaluation while training, if the recipe asks for one."""
    if recipe.eval.every is None:
        return []
    rows = held_out(recipe.data, tokenizer, recipe.train.seed)
    config: Any = getattr(adapted, "peft_config", {}).get("default")
    allocates: bool = config is not None and config.peft_type == "ADALORA"
    # before its budget is reached it has more ranks than were asked for
    in_budget: int = config.total_step - config.tfinal if allocates and config else 0
    return [validate.Validate(rows, tokenizer, recipe.data, recipe.eval, metrics, in_budget)]


def train(trainer: Trainer, section: Adapter, validating: list[validate.Validate], ledger: Ledger) -> None:
    """Train, with the ledger checked before, and the weights compared with what they were after."""
    ledger.check()
    adapted: Any = trainer.model

    def look() -> str:
        return model.fingerprint(adapters.frozen(adapted))

    frozen = ranks.from_main(look) if launch_env.read_by_rank_0() else look()
    rounded = adapters.train_in_fp32(adapted) if section.type != "full" else {}
    before = verify.fingerprints(adapted)
    trainer.train()
    exchange.add_receipt(trainer.model_wrapped, ledger)
    if trainer.chunked:
        trainer.chunked.undo()
    if section.type != "full":
        same = model.fingerprint(adapters.frozen(adapted))
        ledger.add(
            "base weights after training",
            frozen,
            same,
            "hash of every frozen tensor, before and after",
        )
    after = verify.fingerprints(adapted)
    moved = Counter(verify.family(name) for name in after if after[name] != before[name])
    asked = Counter(map(verify.family, after))
    got = ", ".join(f"{name} {moved[name]} of {asked[name]}" for name in sorted(asked))
    how = "hash of every trainable tensor, before and after"
    # LoRA's A stands still until B has moved, and nothing moves in a first step of warm-up
    long = trainer.state.global_step >= 4
    ok = (all if long else any)(moved[name] for name in asked)
    ledger.add("trained weights moved", "some of each kind" if long else "some", got, how, ok=ok)
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


def save(adapted: Any, tokenizer: PreTrainedTokenizerBase, folder: RunFolder, initial: Path) -> None:
    """Adapter (or model) and tokenizer, by rank 0; the others wait, once they gave their parts."""
    state, tensors = PartialState(), shards.gathered(adapted)
    if state.is_main_process:
        target = folder.adapter if hasattr(adapted, "peft_config") else folder.model
        adapter_init.save(adapted, target, initial, tensors)
        tokenizer.save_pretrained(str(target))
    state.wait_for_everyone()


def reopen_and_evaluate(
    folder: RunFolder,
    live: verify.Live,
    validating: list[validate.Validate],
    ledger: Ledger,
    recipe: Recipe,
    setup: Setup,
) -> dict[str, Any]:
    """The content of eval.json; what is evaluated is proved to be what was trained, and the best of it."""

    def same_as_live(reopened: Any) -> None:
        verify.check_reopened(live, reopened, folder, ledger)

    if setup.launch.sharded and evaluate.too_large(recipe.model, setup):
        return apart.evaluate(folder, live, ledger)
    result = evaluate.run(folder.path, inspect=same_as_live)
    for validation in validating:
        validation.add_receipt(result["tuned"]["loss"], ledger)
    ledger.check()
    return result


def start_folder(recipe: Recipe, setup: Setup, arguments: SFTConfig) -> RunFolder:
    """The run folder, named by rank 0 for all, and the Trainer's own place in it."""
    name = [recipe.train.output_dir or run_folder.default_path(recipe.origin.path)]
    if setup.launch.processes > 1:
        broadcast_object_list(name)
    folder = run_folder.create(name[0]) if setup.launch.main else run_folder.RunFolder(Path(name[0]))
    arguments.output_dir = str(folder.staging)
    arguments.run_name = arguments.run_name or folder.path.name  # as trackers call it
    return folder


def add_data_receipts(data: Data, report: Report, ledger: Ledger) -> None:
    """Rows that don't teach the model to stop are why it will not; rows half empty are half the speed."""
    ends, allowed = report.kept - report.counts.get("no_end_of_turn", 0), data.expect.no_end_of_turn
    how, ok = "rows whose last trained token ends the turn", ends >= (1 - allowed) * report.kept
    ledger.add("end of turn trained", f"{report.kept} rows", f"{ends} rows", how, ok=ok, code=Exit.INPUT)
    if report.packing:
        got = f"{report.packing['rows']:.0f} rows, {report.packing['fill']:.2%} full"
        how = f"tokens of the packed rows over rows x {data.max_length}"
        ledger.add("data.packing", f"rows of {data.max_length} tokens", got, how, ok=True)


def precision(setup: Setup) -> contextlib.AbstractContextManager[Any]:
    """Autocast as the launch has it."""
    on = setup.launch.precision != "no"
    dtype = getattr(torch, hardware.DTYPES[setup.launch.precision])
    return torch.autocast(setup.hardware.device, dtype, enabled=on)


@contextlib.contextmanager
def recording(screen: Screen, ledger: Ledger, folder: RunFolder, setup: Setup) -> Iterator[None]:
    """Keep log.txt from here on, and leave receipts.json behind however the run ends."""
    if setup.launch.main:
        screen.log_to(folder.path / "log.txt")
    try:
        yield
    except UserError as error:
        screen.log(str(error))
        raise
    finally:
        if setup.launch.main:
            folder.write("receipts.json", ledger.as_json())
            report.after(folder.path, screen)
        screen.close()


def flops_per_token(adapted: torch.nn.Module) -> float:
    """FLOPs of one token's forward and backward through the linear layers (attention's own is not counted).

    A frozen weight costs 2 FLOPs an element in forward and 2 for its input's gradient; a trained one 2 more.
    """
    linear = [module for module in adapted.modules() if isinstance(module, torch.nn.Linear)]
    return sum(m.in_features * m.out_features * (6.0 if m.weight.requires_grad else 4.0) for m in linear)
