"""The subclass of TRL's trainer, with finetune's loss, checkpoints, run checks and AdaLoRA's regularizer."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sized
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from finetune.adapters import adalora, trainable_parameters
from finetune.checkpointing import training_state
from finetune.core import upstream_private
from finetune.distributed import collectives, gradient_reduction, transformer_engine_layers
from finetune.quantization import four_bit
from finetune.speed import chunked_cross_entropy, loss_weights, static_shapes
from finetune.training import expert_use, loader_workers, oom_recovery
from finetune.training.trainer_parts import TrainerParts


class Trainer(SFTTrainer):
    """TRL's trainer with finetune's loss, AdaLoRA's regularizer and run checks of step 1.

    AdaLoRA's regularizer is needed because TRL ignores `outputs.loss`. Saving and resuming use
    `training_state` instead of the files of transformers.
    """

    resumed: dict[str, Any] | None = None
    """The parts of the checkpoint that this run resumes."""
    batches_digest: Any = 0
    """Digest of all batches of this process so far."""
    epoch_rng: Any = None
    loader: Any = None
    """torch's loader of the training examples."""
    watched: loader_workers.Watched | None = None
    """Its batches of this epoch."""
    exchanged = 0
    """Bytes of gradients in the last step, if finetune exchanges them itself."""
    ends_step = False
    """Whether this forward pass is the last of its step."""
    modules_of: Any = None
    """The wrapped model of these `modules`."""
    modules: list[torch.nn.Module]

    def __init__(
        self,
        adapted: PreTrainedModel | PeftModel,
        arguments: SFTConfig,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        parts: TrainerParts,
    ) -> None:
        self.first_step, self.micro_batches, self.loss = parts.first_step, parts.micro_batches, parts.loss
        self.metrics, self.nonfinite, self.validations = parts.metrics, parts.nonfinite, parts.validations
        self.schedule, self.writer = parts.schedule, parts.schedule.writer
        self.contract, self.corrector, self.regularizer = parts.contract, parts.corrector, parts.regularizer
        self.fixed_shape, self.loader_timeout = parts.fixed_shape, parts.loader_timeout
        self.in_checkpoints = {type(part).__name__: part for part in parts.in_checkpoints}
        self.sums: dict[str, Any] = defaultdict(int)
        """The sums of the loss since the last log, as tensors that are read only when logged."""
        weights = {name: weight.data for name, weight in trainable_parameters.trainable(adapted).items()}
        super().__init__(
            model=adapted,
            args=arguments,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=list(parts.callbacks),
            optimizers=(parts.optimizer.instance, None),
            optimizer_cls_and_kwargs=None if parts.optimizer.instance else parts.optimizer.kind_and_options,
        )
        for name, weight in trainable_parameters.trainable(adapted).items():
            weight.data = weights[
                name
            ]  # TRL casts adapters on a 4-bit base to bf16, which loses small updates
        if (
            self.aux_loss_enabled
        ):  # TRL passes it in each forward pass; in a saved config it would break `generate`
            adapted.config.get_text_config().output_router_logits = False
        four_bit.use_policy(self.accelerator, adapted)
        self.remove_callback(PrinterCallback)
        # TRL's loss and finetune's loss count the labels of a step themselves
        self.model_accepts_loss_kwargs = True
        self.loss.install(adapted, balanced=self.aux_loss_enabled)
        self.data_collator = partial(loss_weights.collated, self.data_collator)
        if self.loss.installed and isinstance(dataset, Sized):  # streams join batches, of tensors alone
            self.data_collator = partial(chunked_cross_entropy.counted, self.data_collator)
        if self.nonfinite:
            self.nonfinite.follow(self)

    def _send_telemetry(self) -> None:
        """Let TRL report the run only if the user has switched telemetry on.

        huggingface_hub reads the variable when it is imported, which can be before `switch_off_telemetry`.
        """
        if os.environ.get("HF_HUB_DISABLE_TELEMETRY", "1").upper() not in ("1", "ON", "YES", "TRUE"):
            super()._send_telemetry()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        """Run one micro-batch, or the whole step again in smaller ones (see `oom_recovery`)."""
        step, last = self.state.global_step + 1, self.accelerator.sync_gradients
        batches = self.micro_batches.keep(step, inputs)
        if len(batches) == 1:
            collectives.watch()
            self.before, self.returned = _Before(self), 0.0
        value = self.attempt(model, batches[-1:], num_items_in_batch, last=last)
        if not last:
            self.returned = self.returned + value
            return value
        while self.micro_batches.again(step, self.describe_memory):
            self.before.put_back(self)
            value = self.attempt(model, batches, num_items_in_batch, last=True) - self.returned
        if gradient_reduction.ours(model):
            self.exchanged = gradient_reduction.average(model)
        return value

    def attempt(
        self, model: nn.Module, batches: list[dict[str, Any]], items: Tensor | int | None, *, last: bool
    ) -> Any:
        """Compute the gradients of micro-batches and return their summed loss, unless memory runs out.

        Args:
            last: whether these micro-batches end the step.
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
                with unsynced, self.without_repeated_train_calls(model):
                    if self.first_step.plan.is_on("CUDA graphs"):  # release the outputs of the previous pass
                        torch.compiler.cudagraph_mark_step_begin()
                    total = total + super().training_step(model, inputs, items)
        except torch.OutOfMemoryError as error:
            if self.corrector and self.in_first_step():
                raise  # `train_from` starts the run again
            parts.error = str(error)
            if not self.repeats(model, items):
                step = self.state.global_step + 1
                raise parts.too_large(step, parts.error, self.describe_memory()) from error
        if parts.error:
            torch.compiler.reset()  # CUDA graphs hold memory, and a second shape compiles for any shape
            clear_device_cache(garbage_collection=True)  # no error holds the attempt here
        return total

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step and the number of their labels, which the weights add up to."""
        if self.loader is not None and self.loader.timeout:
            if self.watched is None or self.watched.batches is not epoch_iterator:
                self.watched = loader_workers.Watched(epoch_iterator, self.loader_timeout)
            epoch_iterator = self.watched
        batches, labels = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches and loss_weights.WEIGHTS in batches[0]:
            loss_weights.normalize(batches, device, self.sum_of_divisor)
        return batches, labels

    def sum_of_divisor(self, totals: torch.Tensor) -> torch.Tensor:
        """Sum over the processes whose labels the loss is divided by."""
        together = self.args.average_tokens_across_devices and self.args.world_size > 1
        summed: Any = self.accelerator.reduce(totals, reduction="sum") if together else totals
        return summed

    def _set_signature_columns_if_needed(self) -> None:
        """Override TRL's list of columns, which lacks the weights of the loss."""
        super()._set_signature_columns_if_needed()
        if self._signature_columns is not None and loss_weights.WEIGHTS not in self._signature_columns:
            self._signature_columns.append(loss_weights.WEIGHTS)

    def describe_memory(self) -> str:
        return oom_recovery.held(self.model, self.optimizer, self.micro_batches)

    def in_first_step(self) -> bool:
        """Return whether this process has not finished a step yet."""
        return self.state.global_step < self.first_step.first

    @contextlib.contextmanager
    def without_repeated_train_calls(self, model: nn.Module) -> Iterator[None]:
        """Skip `model.train()`, which transformers calls before every forward pass, if all modules train
        already.

        It visits all modules, which takes 12 ms for 32 layers with LoRA while the GPU is idle. No module may
        be replaced after the first step.
        """
        if self.modules_of is not model:
            self.modules_of, self.modules = model, list(model.modules())

        def train(mode: bool = True) -> Any:
            still = mode and all(module.training for module in self.modules)
            return model if still else type(model).train(model, mode)

        model.train = train
        try:
            yield
        finally:
            del model.train

    def repeats(self, model: nn.Module, items: object) -> bool:
        """Return whether a step can run again in smaller parts.

        No other process may wait during the step, for gradients or for values that TRL's loss gathers. The
        loss must not depend on the number of forward passes.
        """
        alone = self.accelerator.num_processes == 1 and not hasattr(model, "backward")  # DeepSpeed's engine
        apart = alone or (gradient_reduction.ours(model) and self.loss.installed is not None)
        return apart and items is not None and not getattr(self, "aux_loss_enabled", False)

    def loss_of(self, inputs: dict[str, Any]) -> Any:
        with self.compute_loss_context_manager():
            return self.compute_loss(self.model, self._prepare_inputs(inputs))

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        inputs = dict(inputs)
        counts = inputs.pop("num_labels", None), inputs.pop("num_tokens", None)
        self.batches_digest = training_state.digest(self.batches_digest, inputs)
        if self.fixed_shape:
            _, documents, longest = self.fixed_shape
            part = static_shapes.tokens_of(self.fixed_shape, self.micro_batches.parts)
            inputs = static_shapes.fixed_shape(inputs, part, documents, longest)
        step = self.state.global_step + 1
        watch = self.first_step.watch(model, inputs) if step == self.first_step.first else None
        with watch or contextlib.nullcontext():
            if self.loss.installed and model.training and not return_outputs:
                value = self.chunked_loss(model, inputs, counts, num_items_in_batch)
            else:
                weights = inputs.pop(loss_weights.WEIGHTS, None)
                called: Any = model if weights is None else loss_weights.with_fused_head(model, weights)
                value = super().compute_loss(called, inputs, return_outputs, num_items_in_batch)
        step_ends = self.ends_step and model.training  # not each micro-batch: `adalora`
        if self.regularizer and step_ends and self.regularizer.is_due(step):
            penalty = adalora.orthogonality(self.regularizer.vectors)
            self._metrics["train"]["orthogonality"].append(penalty.detach())
            # `training_step` divides a loss without a token count. The logged value stays the loss per token.
            divided_by = 1 if num_items_in_batch is not None else self.current_gradient_accumulation_steps
            weight = self.regularizer.weight * self.regularizer.every * divided_by
            value = value + weight * (penalty - penalty.detach())
        return value

    def chunked_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        counts: tuple[Any, Any],
        num_items_in_batch: Tensor | int | None,
    ) -> Any:
        """Compute TRL's loss with the wrapped model, and sum the logged values on the device."""
        num_labels, num_tokens = chunked_cross_entropy.numbers(inputs) if None in counts else counts
        output = model(**inputs, num_labels=num_labels)
        items = num_labels if num_items_in_batch is None else num_items_in_batch
        value = output.nll / torch.as_tensor(items).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            value = value * self.accelerator.num_processes
        if output.aux_loss is not None:  # a mean of each micro-batch, as TRL adds it
            parts = 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
            value = value + self.router_aux_loss_coef * output.aux_loss / parts
            self.sums["aux_loss"] += output.aux_loss.detach()
            self.sums["passes"] += 1
        self.sums["labels"] += num_labels
        self.sums["tokens"] += num_tokens
        self.sums["correct"] += output.correct
        if output.entropy is not None:
            self.sums["entropy"] += output.entropy
        if output.router_rows is not None:
            self.sums["router_entropy"] += output.router_entropy
            self.sums["router_rows"] += output.router_rows
            self.sums[expert_use.TOKENS] += output.expert_tokens
        return value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self._metrics["train"]
        tokens = self.sums.pop(expert_use.TOKENS, None)  # a table, and of the whole run
        if self.loss.installed and self.sums:
            sums = [
                torch.as_tensor(n, dtype=torch.float64, device=self.args.device) for n in self.sums.values()
            ]
            totals: Any = self.accelerator.reduce(torch.stack(sums), "sum")
            totals_by_name = dict(zip(self.sums, totals.tolist(), strict=True))
            self.sums.clear()
            self._total_train_tokens += int(totals_by_name["tokens"])
            metrics["num_tokens"] = [self._total_train_tokens]
            for name, key in (("entropy", "entropy"), ("mean_token_accuracy", "correct")):
                if key in totals_by_name:
                    metrics[name] = [totals_by_name[key] / max(totals_by_name["labels"], 1)]
            if "aux_loss" in totals_by_name:
                metrics["aux_loss"] = [totals_by_name["aux_loss"] / totals_by_name["passes"]]
            if "router_rows" in totals_by_name:
                metrics["router_entropy"] = [
                    totals_by_name["router_entropy"] / max(totals_by_name["router_rows"], 1)
                ]
        if tokens is not None:
            self.sums[expert_use.TOKENS] = tokens
            share = expert_use.utilization(self.accelerator, tokens)
            metrics |= {} if share is None else {"expert_utilization": [share]}
        if "orthogonality" in metrics:
            metrics["orthogonality"] = torch.stack(metrics["orthogonality"]).tolist()
        super().log(logs, start_time)
        if "loss" in logs:  # transformers subtracts the logged sum, which would keep NaN
            self._tr_loss.zero_()

    def totals(self) -> dict[str, Any]:
        """Return the sums since the last logged step. The tensors are not copies."""
        return {
            "tokens": self._total_train_tokens,
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
            "sums": dict(self.sums),
        }

    def restore_totals(self, saved: dict[str, Any]) -> None:
        self._total_train_tokens = saved["tokens"]
        for live, values in ((self._metrics["train"], saved["metrics"]), (self.sums, saved["sums"])):
            live.clear()
            live.update(send_to_device(values, self.args.device))

    def log_state(self) -> dict[str, Any]:
        """Return all values of the next logged line. The tensors are not copies."""
        return {"loss": self._tr_loss.detach(), "step": self._globalstep_last_logged, **self.totals()}

    def restore_log(self, saved: dict[str, Any]) -> None:
        self._tr_loss = saved["loss"].to(self.args.device)
        self._globalstep_last_logged = saved["step"]
        self.restore_totals(saved)

    def restore_batches(self, saved: object) -> None:
        self.batches_digest = torch.as_tensor(saved, device=self.args.device)

    def train_from(self, path: Path | None, check: Callable[[], None] = lambda: None) -> None:
        """Train from the beginning, or resume from a checkpoint.

        Args:
            path: the checkpoint.
            check: called once the checkpoint is read.

        Raises:
            Stopped: the run was told to stop before the last step, and has saved a checkpoint.
            UserError: the run was told to stop and can't save, or a data loader worker hangs (exit 5).
            StartAgain: the first step ran out of memory, and `auto` has stronger settings.
        """
        self.resumed, no_memory = training_state.read(path) if path else None, ""
        check()
        try:
            with training_state.refusals(self, path):
                self.train(resume_from_checkpoint=str(path) if path else None)
        except Exception as error:  # out of memory has many types; any other error is raised again
            if self.loader is not None and self.loader.num_workers:
                loader_workers.stop_handler()
            if loader_workers.timed_out(error):
                raise loader_workers.end(self.loader_timeout) from error
            if lost := loader_workers.ended(error):
                raise lost from error
            if not (self.corrector and self.corrector.takes(error, first_step=self.in_first_step())):
                raise
            no_memory = str(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.schedule.stop.step_began = None
            self.watched = None  # it holds the loader's workers
            if self.loader is not None:
                upstream_private.end_loader_workers(self.loader)
        if self.corrector and no_memory:  # after the except block, no traceback holds the step's tensors
            self.accelerator.free_memory()
            self.corrector.start_again()
            raise self.micro_batches.too_large(self.first_step.first, no_memory, self.describe_memory())
        self.resumed = None
        self.writer.wait()
        collectives.any_of(False)  # a rank that exits earlier would end the others
        self.schedule.end_if_stopped(self.state.global_step)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> Any:
        """Override transformers' method, which looks for DeepSpeed's own files under DeepSpeed."""
        apart = resume_from_checkpoint if self.is_deepspeed_enabled else None
        with transformer_engine_layers.head_kept(self.model):
            theirs = None if apart else resume_from_checkpoint
            prepared = super()._prepare_for_training(max_steps, train_dataloader, theirs)
        if apart:
            self._load_from_checkpoint(apart)
            self._load_optimizer_and_scheduler(apart)
        return prepared

    def get_train_dataloader(self) -> Any:
        loader: Any = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)  # Accelerate's is around it
        loader_workers.restore_handler()
        inner.worker_init_fn = loader_workers.keep_workers(inner.worker_init_fn)
        inner.timeout = self.loader_timeout if inner.num_workers else 0
        # torch draws a seed when workers begin, also after a resume. With its own generator, this does not
        # change the order of rows
        inner.generator = torch.Generator()
        self.loader = inner  # not left to the garbage: there queues are closed first, and torch waits 20 s
        return loader

    def _save_checkpoint(self, model: object, trial: object) -> None:
        if self.nonfinite:
            self.nonfinite.check()  # on a GPU the norm of the step may not have been read yet
        self.store_flos()
        if self.args.device.type == "cuda":
            torch.cuda.synchronize()  # so that the time of the step does not count for the checkpoint
        started = time.monotonic()
        training_state.save(self)
        self.writer.waited.append(time.monotonic() - started)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.corrector:
            self.corrector.finish_first_step()
        trained: Any = self.model
        if not trained.training:  # TRL logs by this mode, and a callback of the user may have changed it
            trained.train()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.metrics:
            self.metrics.loads()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        training_state.put_back(self, "weights", "allocation", "callbacks")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint:
            training_state.put_back(self, "optimizer", "scheduler")

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint:
            training_state.put_back(self, "scaler")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random state. transformers calls this after the first batch is loaded."""
        if checkpoint:
            training_state.put_back(self, "rng")

    def _init_training_state(self, max_steps: int, *args: object, **kwargs: object) -> tuple[int, int]:
        place = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)  # of this recipe, not of the checkpoint's recipe
        return place

    def _run_epoch(self, *args: object, **kwargs: object) -> None:  # upstream calls it by name
        if kwargs["resume_from_checkpoint"] and kwargs["epoch"] == kwargs["epochs_trained"]:
            training_state.put_back(self, "log", "batches")
            inside = kwargs["steps_trained_in_current_epoch"]
            training_state.put_back(self, "epoch_rng" if inside else "rng")
            if self.state.global_step >= self.state.max_steps or self.schedule.complete:
                self.control.should_training_stop = True  # transformers would run one more step
                return
        self.epoch_rng = training_state.random_state()
        super()._run_epoch(**kwargs)


class _Before:
    """Save the state that a step changes before its update, to restore it if the step runs again."""

    def __init__(self, trainer: Trainer) -> None:
        self.random, self.batches_digest = training_state.random_state(), trainer.batches_digest
        self.totals = _with_copied_sums(trainer.totals())
        self.seen, self.computed = trainer.first_step.counts(), trainer.loss.counts()

    def put_back(self, trainer: Trainer) -> None:
        training_state.set_random_state(self.random)
        trainer.restore_totals(_with_copied_sums(self.totals))
        trainer.restore_batches(self.batches_digest)
        trainer.first_step.restore_counts(self.seen)
        trainer.loss.restore_counts(self.computed)
        if trainer.model is not None:
            trainer.model.zero_grad()


def _with_copied_sums(totals: dict[str, Any]) -> dict[str, Any]:
    """Copy the totals, because the loss adds to its sums in place."""
    sums = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in totals["sums"].items()}
    return {**totals, "sums": sums}
