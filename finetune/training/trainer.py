"""TRL's trainer, subclassed once: our loss, AdaLoRA's regulariser, an eye on step 1, our checkpoints."""

from __future__ import annotations

import contextlib
import faulthandler
import time
import weakref
from collections import defaultdict
from collections.abc import Sized
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import PrinterCallback
from trl.trainer.sft_trainer import SFTTrainer

from finetune.adapters import adalora, trainable_parameters
from finetune.autoconfig import optimizer_choice
from finetune.checkpointing import training_state
from finetune.core.errors import Exit, Problem, Stopped, UserError
from finetune.distributed import collectives, gradient_reduction, sharded_tensors, transformer_engine_layers
from finetune.quantization import four_bit
from finetune.speed import chunked_cross_entropy, lm_head_loss, static_shapes
from finetune.training import (
    first_step_checks,
    loader_workers,
    nan_detection,
    oom_recovery,
    optimizers,
    step_metrics,
    stopping,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from datasets import Dataset
    from torch import nn
    from transformers import PreTrainedTokenizerBase
    from trl.trainer.sft_config import SFTConfig

    from finetune.checkpointing.checkpoints import Writer
    from finetune.recipe.schema import Recipe
    from finetune.training.auto_correction import Corrector
    from finetune.training.stopping import Schedule


class Trainer(SFTTrainer):
    """TRL's trainer, with our loss, AdaLoRA's regulariser (TRL ignores `outputs.loss`), an eye on step 1.

    It saves and resumes by `training_state`, where upstream does, and does not write upstream's files.
    """

    schedule: Schedule
    writer: Writer
    contract: dict[str, Any]
    """What must be the same when a checkpoint of this run is resumed."""
    remembering: dict[str, Any]
    """Callbacks with `state_dict` and `load_state_dict`, by name."""
    resumed: dict[str, Any] | None = None
    """The parts of the checkpoint that this run goes on from."""
    batches: Any = 0
    """Digest of all batches of this process so far."""
    epoch_rng: Any = None
    loader: Any = None
    """torch's loader of the rows to train on."""
    loader_timeout = 0
    """Seconds to wait for a batch of one of its workers; 0: without a limit."""
    sums: dict[str, Any]
    """What the loss has counted since the last log: tensors that are read then, not before."""
    micro_batches: oom_recovery.MicroBatches
    corrector: Corrector | None = None
    """Starts the run again with what `auto` takes next, if its first step runs out of memory."""
    nonfinite: nan_detection.NonFinite | None = None
    exchanged = 0
    """Bytes of gradients in the last step, where we exchange them."""
    ends_step = False
    """Whether this forward is the last of its step."""
    walked: Any = None
    """The model, as it is wrapped, whose `modules` these are."""
    modules: list[torch.nn.Module]

    timed: list[step_metrics.Metrics]
    """Told when a step's end is over."""
    first_step: first_step_checks.FirstStep
    orthogonality_weight = 0.0
    orthogonality_every = 1
    """Optimizer steps from one computation of the regulariser to the next; its weight is multiplied by it."""
    singular_vectors: adalora.Vectors
    shape: tuple[int, int, int] | None = None
    """Tokens, documents and longest document of each flattened batch, where compiled code wants one shape."""

    chunked: lm_head_loss.Installed | None = None
    """Our loss, in place of TRL's fused head."""

    def install_loss(self, chosen: str, *, compiled: bool) -> None:
        """Use the loss that `lm_head_loss.choose` has chosen."""
        # TRL's and ours count a step's labels themselves, whatever the model's own forward takes
        self.model_accepts_loss_kwargs = True
        self.chunked = lm_head_loss.install(self.model, compiled=compiled) if chosen == "chunked" else None
        self.first_step.add_loss = partial(lm_head_loss.add_receipt, chosen, self.chunked)
        if self.chunked and isinstance(self.train_dataset, Sized):  # streams join batches, of tensors alone
            self.data_collator = partial(chunked_cross_entropy.counted, self.data_collator)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """One micro-batch, or the whole step again in smaller ones (see `oom_recovery`)."""
        step, last = self.state.global_step + 1, self.accelerator.sync_gradients
        batches = self.micro_batches.keep(step, inputs)
        if len(batches) == 1:
            collectives.watch()
            self.before, self.returned = oom_recovery.Before(self), 0.0
        value = self.attempt(model, batches[-1:], num_items_in_batch, last=last)
        if not last:
            self.returned = self.returned + value
            return value
        while self.micro_batches.again(step):
            self.before.put_back(self)
            value = self.attempt(model, batches, num_items_in_batch, last=True) - self.returned
        self.first_step.loaded = len(batches)
        if gradient_reduction.ours(model):
            self.exchanged = gradient_reduction.average(model)
        return value

    def attempt(self, model: nn.Module, batches: Any, items: Any, *, last: bool) -> Any:
        """The gradients of some micro-batches, unless memory runs out, or has before; their summed loss.

        Args:
            last: whether they end the step.
        """
        total, parts = torch.zeros((), device=self.args.device), self.micro_batches
        if parts.error:
            return total
        divided = list(parts.divided(batches, getattr(self.args, "pad_to_multiple_of", None)))
        try:
            for number, inputs in enumerate(divided, start=1):
                self.ends_step = last and number == len(divided)
                apart = gradient_reduction.ours(model) or last != self.ends_step
                unsynced = self.accelerator.no_sync(model) if apart else contextlib.nullcontext()
                with unsynced, self.in_training(model):
                    if self.first_step.cudagraphs:  # what the pass before has made is given up
                        torch.compiler.cudagraph_mark_step_begin()
                    total = total + super().training_step(model, inputs, items)
        except torch.OutOfMemoryError as error:
            if self.corrector and self.in_first_step():
                raise  # `train_from` starts the run again
            parts.error = str(error)
            if not self.repeats(model, items):
                raise parts.too_large(self.state.global_step + 1, parts.error) from error
        if parts.error:
            torch._dynamo.reset()  # CUDA graphs hold memory, and a second shape is taken for any
            clear_device_cache(garbage_collection=True)  # no error holds the attempt here
        return total

    def in_first_step(self) -> bool:
        """Whether this process has not finished a step yet."""
        return self.state.global_step < self.first_step.first

    @contextlib.contextmanager
    def in_training(self, model: nn.Module) -> Iterator[None]:
        """`model.train()`, which upstream calls before every forward, does nothing where nothing is to do: it
        walks all modules, 12 ms of Python for 32 layers with LoRA, in which a GPU stands still.

        No module may be replaced after the first step.
        """
        if self.walked is not model:
            self.walked, self.modules = model, list(model.modules())

        def train(mode: bool = True) -> Any:
            still = mode and all(module.training for module in self.modules)
            return model if still else type(model).train(model, mode)

        model.train = train
        try:
            yield
        finally:
            del model.train

    def repeats(self, model: nn.Module, items: object) -> bool:
        """Whether a step can be made again, in parts: no other process waits in the middle of it, for its
        gradients or for what TRL's loss gathers; and nothing in the loss goes by the number of passes."""
        alone = self.accelerator.num_processes == 1 and not hasattr(model, "backward")  # DeepSpeed's engine
        apart = alone or (gradient_reduction.ours(model) and self.chunked is not None)
        return apart and items is not None and not getattr(self, "aux_loss_enabled", False)

    def look_again(self, step: int) -> str:
        """What is not finite in a step that was not."""
        batches, model = self.micro_batches.kept.get(step, []), cast("Any", self.model)
        if sharded_tensors.sharded(model) or hasattr(self.model_wrapped, "backward"):
            return "not looked for: the launch splits the weights or their state"
        if transformer_engine_layers.used():
            return "not looked for: processes meet in each of TransformerEngine's passes"
        parts = self.micro_batches.divided(batches, getattr(self.args, "pad_to_multiple_of", None))
        try:
            found = [nan_detection.first_not_finite(model, partial(self.loss_of, part)) for part in parts]
        except torch.OutOfMemoryError:
            return "not found: no memory to look again"
        said = [f"{what} (micro-batch {n} of {len(found)})" for n, what in enumerate(found, start=1) if what]
        return next(iter(said), "finite when the step was made again: what was not has passed")

    def loss_of(self, inputs: dict[str, Any]) -> Any:
        with self.compute_loss_context_manager():
            return self.compute_loss(self.model, self._prepare_inputs(inputs))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        counts = inputs.pop("num_labels", None), inputs.pop("num_tokens", None)
        self.batches = training_state.digest(self.batches, inputs)
        if self.shape:
            _, documents, longest = self.shape
            part = static_shapes.tokens_of(self.shape, self.micro_batches.parts)
            inputs = static_shapes.fixed_shape(inputs, part, documents, longest)
        step = self.state.global_step + 1
        watch = self.first_step.watch(model, inputs) if step == self.first_step.first else None
        with watch or contextlib.nullcontext():
            if self.chunked and model.training and not return_outputs:
                value = self.chunked_loss(model, inputs, counts, num_items_in_batch)
            else:
                value = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        step_ends = self.ends_step and model.training  # not each micro-batch: `adalora`
        due = step % self.orthogonality_every == 0
        if self.orthogonality_weight and step_ends and due:
            regulariser = adalora.orthogonality(self.singular_vectors)
            self._metrics["train"]["orthogonality"].append(regulariser.detach())
            # `training_step` divides a loss that no token count went into; the value logged stays the tokens'
            divided_by = 1 if num_items_in_batch is not None else self.current_gradient_accumulation_steps
            weight = self.orthogonality_weight * self.orthogonality_every * divided_by
            value = value + weight * (regulariser - regulariser.detach())
        return value

    def chunked_loss(
        self, model: nn.Module, inputs: dict[str, Any], counts: Any, num_items_in_batch: Any
    ) -> Any:
        """TRL's loss to rounding, from the wrapped model; what TRL logs is summed where it is."""
        num_labels, num_tokens = chunked_cross_entropy.numbers(inputs) if None in counts else counts
        found = model(**inputs, num_labels=num_labels)
        items = num_labels if num_items_in_batch is None else num_items_in_batch
        value = found.nll / torch.as_tensor(items).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            value = value * self.accelerator.num_processes
        self.sums["labels"] += num_labels
        self.sums["tokens"] += num_tokens
        self.sums["correct"] += found.correct
        if found.entropy is not None:
            self.sums["entropy"] += found.entropy
        return value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self._metrics["train"]
        if self.chunked and self.sums:
            given = [
                torch.as_tensor(n, dtype=torch.float64, device=self.args.device) for n in self.sums.values()
            ]
            totals: Any = self.accelerator.reduce(torch.stack(given), "sum")
            found = dict(zip(self.sums, totals.tolist(), strict=True))
            self.sums.clear()
            self._total_train_tokens += int(found["tokens"])
            metrics["num_tokens"] = [self._total_train_tokens]
            for name, key in (("entropy", "entropy"), ("mean_token_accuracy", "correct")):
                if key in found:
                    metrics[name] = [found[key] / max(found["labels"], 1)]
        if "orthogonality" in metrics:
            metrics["orthogonality"] = torch.stack(metrics["orthogonality"]).tolist()
        super().log(logs, start_time)
        if "loss" in logs:  # upstream takes from the sum what it has logged, which leaves NaN as NaN
            self._tr_loss.zero_()

    def remembers(
        self, schedule: Schedule, contract: dict[str, Any], again: oom_recovery.MicroBatches, *callbacks: Any
    ) -> None:
        """What checkpoints hold beside the training itself: who makes them, for which run, callbacks."""
        self.schedule, self.writer, self.contract = schedule, schedule.writer, contract
        # Weak: who keeps `again` must not keep the model, which is opened again after training
        self.micro_batches, again.held = again, partial(oom_recovery.held, weakref.proxy(self))
        self.remembering = {type(one).__name__: one for one in (schedule, again, *callbacks)}

    def train_from(self, checkpoint: Path | None) -> None:
        """Train, from the beginning or from where a checkpoint was taken.

        Raises:
            Stopped: told to end before the last step; a checkpoint is published.
            UserError: the same where none can be made, or a data loader worker hangs (exit 5).
            StartAgain: the first step ran out of memory, and `auto` has stronger settings.
        """
        self.resumed, no_memory = training_state.read(checkpoint) if checkpoint else None, ""
        try:
            self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except Exception as error:  # out of memory has many types; any other error is raised again
            if loader_workers.timed_out(error):
                raise loader_workers.end(self.loader_timeout) from error
            if not (self.corrector and self.corrector.takes(error, first_step=self.in_first_step())):
                raise
            no_memory = str(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.schedule.stop.step_began = None
            if self.loader is not None:
                self.loader._iterator = None  # ends workers that persist
        if self.corrector and no_memory:  # here no traceback holds the step's tensors
            self.accelerator.free_memory()
            self.corrector.start_again()
            raise self.micro_batches.too_large(self.first_step.first, no_memory)
        self.resumed = None
        self.writer.wait()
        collectives.any_of(False)  # a rank that leaves earlier takes the others with it
        if self.schedule.stopped and self.schedule.parts:
            what = f"stopped by {self.schedule.stopped} after step {self.state.global_step}; nothing is saved"
            found = f"state that {self.schedule.parts} keeps, of which no checkpoints are made"
            fix = optimizer_choice.saved_instead(self.schedule.parts)
            raise UserError(Problem(what, found=found, fix=fix), code=Exit.TRAINING)
        if self.schedule.stopped:
            saved = self.writer.published
            where = f"; saved: {saved}" if saved else ""
            ended = Stopped(f"stopped by {self.schedule.stopped} after step {self.state.global_step}{where}")
            ended.together = True
            raise ended

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        """Upstream calls it by name. Under DeepSpeed it would look for DeepSpeed's own files."""
        apart = resume_from_checkpoint if self.is_deepspeed_enabled else None
        with transformer_engine_layers.head_kept(self.model):
            theirs = None if apart else resume_from_checkpoint
            found = super()._prepare_for_training(max_steps, train_dataloader, theirs)
        if apart:
            self._load_from_checkpoint(apart)
            self._load_optimizer_and_scheduler(apart)
        return found

    def get_train_dataloader(self) -> Any:
        loader: Any = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)  # Accelerate's is around it
        inner.worker_init_fn = stopping.keep_workers(inner.worker_init_fn)
        inner.timeout = self.loader_timeout if inner.num_workers else 0
        # torch draws a seed for workers when they begin, in each life of a run where they persist: from this
        # one, that the generator which decides on the order of rows is where it would be without a stop
        inner.generator = torch.Generator()
        self.loader = inner  # not left to the garbage: there queues are closed first, and torch waits 20 s
        return loader

    def _save_checkpoint(self, model: object, trial: object) -> None:
        if self.nonfinite:
            self.nonfinite.check()  # on a GPU the step's norm may still be on its way
        self.store_flos()
        if self.args.device.type == "cuda":
            torch.cuda.synchronize()  # the step's own work is not the checkpoint's
        started = time.monotonic()
        training_state.save(self)
        self.writer.waited.append(time.monotonic() - started)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.corrector:
            self.corrector.finish_first_step()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        for each in self.timed:
            each.loads()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        training_state.put_back(self, "weights", "allocation", "callbacks")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint:
            training_state.put_back(self, "optimizer", "scheduler")

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint:
            training_state.put_back(self, "scaler")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Upstream calls it when the first batch has been read: what a loader draws is drawn by then."""
        if checkpoint:
            training_state.put_back(self, "rng")

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        place = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)  # of this recipe, not of the checkpoint's
        return place

    def _run_epoch(self, *args: object, **given: Any) -> None:  # upstream calls it by name
        if given["resume_from_checkpoint"] and given["epoch"] == given["epochs_trained"]:
            training_state.put_back(self, "log", "batches")
            inside = given["steps_trained_in_current_epoch"]
            training_state.put_back(self, "epoch_rng" if inside else "rng")
            if self.state.global_step >= self.state.max_steps or self.schedule.complete:
                self.control.should_training_stop = True  # upstream would take one step more
                return
        self.epoch_rng = training_state.random_state()
        super()._run_epoch(**given)


def build(
    adapted: Any,
    recipe: Recipe,
    arguments: SFTConfig,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    watching: list[Any],
) -> Trainer:
    """The trainer with our callbacks, and with the adapter's weights as PEFT made them."""
    section, fast = recipe.adapter, recipe.speed
    config: Any = getattr(adapted, "peft_config", {}).get("default")
    allocates: bool = config is not None and config.peft_type == "ADALORA"
    if allocates:
        watching = [*watching, adalora.AllocateRanks()]
    ratio = section.ours("loraplus_lr_ratio")
    made_by = optimizers.kind_and_options(arguments, adapted, fast)
    if fast.offload in ("optimizer", "all"):
        watching = [*watching, optimizers.SendGradients()]
    made = {name: parameter.data for name, parameter in trainable_parameters.trainable(adapted).items()}
    trainer = Trainer(
        model=adapted,
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=watching,
        optimizers=(
            optimizers.loraplus_optimizer(adapted, made_by, ratio, arguments.weight_decay) if ratio else None,
            None,
        ),
        optimizer_cls_and_kwargs=None if ratio else made_by,
    )
    if trainer.aux_loss_enabled:  # TRL asks for it in each forward; saved, it would end every `generate`
        adapted.config.get_text_config().output_router_logits = False
    four_bit.use_policy(trainer.accelerator, adapted)
    trainer.remove_callback(PrinterCallback)
    trainer.micro_batches = oom_recovery.MicroBatches(arguments.per_device_train_batch_size)
    trainer.sums = defaultdict(int)
    for one in watching:
        if isinstance(one, nan_detection.NonFinite):
            one.trainer, trainer.nonfinite = trainer, one
    trainer.timed = [one for one in watching if isinstance(one, step_metrics.Metrics)]
    (trainer.first_step,) = (one for one in watching if isinstance(one, first_step_checks.FirstStep))
    trainer.first_step.optimizer = made_by[1].get("optimizer_class", made_by[0])
    for name, parameter in trainable_parameters.trainable(adapted).items():
        parameter.data = made[name]  # TRL casts adapters on a 4-bit base to bf16, which loses small updates
    if allocates:
        trainer.orthogonality_weight = adapted.peft_config["default"].orth_reg_weight
        trainer.orthogonality_every = section.ours("orth_reg_every") or 1
        trainer.singular_vectors = adalora.singular_vectors(adapted)
    return trainer
