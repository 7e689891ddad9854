"""Read back from the first training step which kernels and dtypes ran."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from peft import PeftModel
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.core import upstream_private
from finetune.core.errors import Exit
from finetune.core.run_checks import RunChecks
from finetune.data.loss_mask import IGNORED, WEIGHTS
from finetune.distributed import collectives
from finetune.kernels import kernel_limits
from finetune.quantization import fp8_loading, qat
from finetune.speed import activation_offload, live_model_spec, lm_head_loss, loss_weights
from finetune.training import optimizers
from finetune.training.oom_recovery import MicroBatches
from finetune.training.run_context import RunContext, StepPlan


class FirstStep(TrainerCallback):
    """Run checks of the first optimizer step, from the operations and batches that ran."""

    first = 1
    """The first step of this process, which is later than 1 in a resumed run."""
    rounding: qat.Watch | None = None
    offloaded: activation_offload.Activations | None = None

    def __init__(
        self,
        run: RunContext,
        plan: StepPlan,
        loss: lm_head_loss.HeadLoss,
        optimizer: optimizers.OptimizerChoice,
        planned_batches: MicroBatches,
    ) -> None:
        setup, self.checks, self.plan = run.setup, run.checks, plan
        self.loss, self.optimizer, self.planned_batches = loss, optimizer, planned_batches
        self.compiled_graphs = 0
        self.processes = setup.launch.data_parallel_size
        self.dtype, self.attention = setup.compute_dtype, setup.attention.value
        self.seen_dtype = "none seen"
        # TransformerEngine's GEMMs are no torch operations
        self.own_fp8 = setup.storage.value == "fp8"
        self.fp8 = (self.own_fp8 or setup.launch.fp8 == "AO") and setup.hardware.device == "cuda"
        self.operations: dict[str, list[list[int]]] = {}
        self.rows = self.micro_batches = self.loss_tokens = self.fp8_gemms = 0
        self.loss_weight = 0.0
        self.flat = False

    @contextlib.contextmanager
    def watch(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Iterator[None]:
        """Count a micro-batch of this process, and profile the operations of the first one.

        A dispatch mode would prevent the compilation of attention. Hooks that are removed after the first
        forward pass would make every layer compile again.
        """
        self.micro_batches += 1
        self.rows += len(inputs["input_ids"])
        self.flat = "attention_mask" not in inputs
        has_label = inputs["labels"][:, 1:] != IGNORED
        self.loss_tokens += int(has_label.sum())
        if WEIGHTS in inputs:
            self.loss_weight += float((loss_weights.of_next(inputs[WEIGHTS])[:, :-1] * has_label).sum())
        if self.micro_batches > 1:
            yield
            return
        self.rounding = qat.Watch(model)
        try:
            with torch.autograd.profiler.profile(record_shapes=True) as profile:
                yield
        finally:
            for hook in self.rounding.hooks:
                hook.remove()
        # not `profile.function_events`, which needs seconds for a large model
        events = cast("Any", profile).kineto_results.events()
        self.seen_dtype = product_dtype(events)
        self.operations = {event.name(): event.shapes() for event in events}
        self.fp8_gemms = sum(event.name() == "aten::_scaled_mm" for event in events)

    def counts(self) -> tuple[int, int, int, float]:
        return self.micro_batches, self.rows, self.loss_tokens, self.loss_weight

    def restore_counts(self, counts: tuple[int, int, int, float]) -> None:
        """Restart the counts, because the step runs again."""
        self.micro_batches, self.rows, self.loss_tokens, self.loss_weight = counts
        if self.offloaded:
            self.offloaded.restart()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PreTrainedModel | PeftModel,
        **kwargs: object,
    ) -> None:
        self.first = state.global_step + 1
        self.offloaded = activation_offload.of(model)
        if self.offloaded:
            self.offloaded.restart()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step != self.first:
            return
        self._check_batch(state, kwargs["train_dataloader"])
        self._check_labels()
        self._check_operations(kwargs["model"])
        self.loss.add_run_check(sorted(self.operations), self.micro_batches, self.checks)
        if self.rounding:
            self.rounding.add_run_check(self.checks)
        if self.offloaded:
            self.offloaded.add_run_check(self.micro_batches, self.checks)
        # the value, because str() of transformers' enum differs
        optim = getattr(args.optim, "value", args.optim)
        optimizers.add_run_check(kwargs["optimizer"], optim, self.optimizer.kind, self.checks)
        if self.plan.is_on("speed.compile"):
            self._check_compilation(explicit=self.plan.choices["speed.compile"].reason == "asked for")
        self.checks.check()

    def _check_batch(self, state: TrainerState, loader: DataLoader[Any]) -> None:
        """Compare the sequences of the step and the number of steps with the plan."""
        rows = self.rows * self.processes
        if self.flat:  # a flattened batch is one row, but the loader knows its number of sequences
            micro_batch = getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size or 1
            loaded = len(self.planned_batches.kept[state.global_step])  # each may be divided
            rows = loaded * micro_batch * self.processes
        # A run may resume before the last step of an epoch, which has the remaining sequences.
        batch, ends_epoch = self.plan.batch.effective, self.first > 1 and float(state.epoch or 0).is_integer()
        self.checks.add(
            "train.effective_batch_size",
            expected=batch,
            actual=rows,
            how=f"step {self.first}: {self.micro_batches} micro-batches x {self.processes} processes",
            ok=rows == batch or (ends_epoch and rows < batch),
        )
        self.checks.add(
            "steps planned",
            expected=self.plan.steps,
            actual=state.max_steps,
            how="the Trainer's own count, before training",
        )

    def _check_labels(self) -> None:
        """Check that the step has labels, on all ranks together, because one rank's part may have none."""
        step, labels = f"step {self.first}", sum(collectives.gathered(self.loss_tokens))
        self.checks.add(
            f"loss tokens in {step}", "at least one", labels, "labels of all ranks", ok=labels > 0
        )
        if weight := sum(collectives.gathered(self.loss_weight)):
            how, ok = (
                "of all ranks, scaled to the number of labels",
                math.isclose(weight, labels, rel_tol=1e-6),
            )
            self.checks.add(f"sum of the loss weights in {step}", labels, round(weight, 3), how, ok=ok)

    def _check_operations(self, model: PreTrainedModel | PeftModel) -> None:
        """Check the dtype, the attention and the fp8 GEMMs in the profile of the first forward pass."""
        add, code, how = self.checks.add, Exit.ENVIRONMENT, "profile of the first forward pass"
        add(
            "dtype",
            self.dtype,
            self.seen_dtype,
            "the dtype of most GEMM FLOPs in the first forward pass",
            code=code,
        )
        ran = attention_that_ran(self.operations)
        if getattr(model.config.get_text_config(), "num_attention_heads", None):  # Mamba and RWKV have none
            add("model.attention", self.attention, str(ran), how, ok=self.attention in ran.names, code=code)
        if self.flat and self.attention in (*kernel_limits.IMPLEMENTATIONS, "flex_attention"):
            add("attention mask", "none", ran.mask or "none", f"{how}: shapes of its inputs", code=code)
        if self.fp8:
            actual, least = f"{self.fp8_gemms} fp8 GEMMs", self._fp8_products(model)
            add("fp8 GEMMs", f"at least {least}", actual, how, ok=self.fp8_gemms >= least, code=code)

    def _check_compilation(self, *, explicit: bool) -> None:
        """Count torch.compile's graphs. A graph break is an error if the recipe asks for compilation."""
        counters = upstream_private.compile_counters()
        breaks, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
        over = sum(n for text, n in counters["unimplemented"].items() if "recompile limit" in text)
        actual = f"{breaks} graph breaks, {graphs} graphs"
        actual += ", some layers in eager mode: over torch's recompile_limit" if over else ""
        self.compiled_graphs, how = graphs, "torch.compile's own count after the first step"
        self.checks.add(
            "speed.compile",
            expected="0 graph breaks",
            actual=actual,
            how=how,
            ok=not explicit or (not breaks and not over),
        )

    def _fp8_products(self, model: PreTrainedModel | PeftModel) -> int:
        """Return the number of fp8 GEMMs of a forward pass through the decoder, or 1 if it is not known."""
        layers = live_model_spec.decoder_layers(model)
        text = model.config.get_text_config() if layers else None
        if not self.own_fp8 or getattr(text, "num_kv_shared_layers", 0):
            return 1
        return max(1, fp8_loading.products(layers))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.offloaded = self.rounding = None  # they hold layers, and the model is loaded again
        if self.plan.is_on("CUDA graphs"):
            add_cuda_graphs_check(self.checks, len(live_model_spec.decoder_layers(kwargs["model"])))
        if self.compiled_graphs:
            graphs = upstream_private.compile_counters()["stats"]["unique_graphs"] - self.compiled_graphs
            self.checks.add(
                "graphs compiled after the first step",
                expected="as few as possible",
                actual=f"{graphs}",
                how="of batches of other lengths: data.packing and padding_free have one",
                ok=True,
            )


# Operations of GEMMs, and the index of their left input. fp8 GEMMs are counted separately.
PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
DTYPES = {"float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16"}


def product_dtype(events: Sequence[Any]) -> str:
    """Return the dtype with most FLOPs of the profiled GEMMs."""
    flops: Counter[str] = Counter()
    for event in events:
        if (operand := PRODUCTS.get(event.name())) is not None:
            shapes = event.shapes()
            flops[event.dtypes()[operand]] += math.prod(shapes[operand]) * shapes[operand + 1][-1]
    return DTYPES.get(dtype := max(flops, key=flops.__getitem__, default="none seen"), dtype)


class Ran(NamedTuple):
    """The attention that ran."""

    names: tuple[str, ...]
    """What a recipe may call it."""
    kernel: str
    mask: str
    """The shape of its mask of all tokens against all tokens; empty: no mask."""

    def __str__(self) -> str:
        return f"{self.names[0]} ({self.kernel})" if self.kernel else self.names[0]


# A part of an operation's name, and what a recipe calls that attention; the first that is found is it
OPERATIONS = {
    "finetune::flash_attention_4": ("flash_attention_4",),
    "flash_attn_3::": ("flash_attention_3",),
    "flash_attn::": ("flash_attention_2",),
    "torch_attn::_varlen_attn": ("varlen",),
    "_scaled_dot_product_cudnn": ("sdpa", "cudnn"),
    "_scaled_dot_product": ("sdpa",),
    "flex_attention": ("flex_attention",),
    "triton_tem": ("flex_attention",),  # Inductor's template kernels, which include no GEMMs
    "aten::_softmax": ("eager",),
}


def attention_that_ran(operations: dict[str, list[list[int]]]) -> Ran:
    """Find the attention and its kernel among the profiled operations with the shapes of their inputs."""
    for part, names in OPERATIONS.items():
        for name, shapes in operations.items():
            if part in name:
                kernel = "" if names == ("eager",) else name.rpartition("::")[2]
                kernel = kernel.removeprefix("_scaled_dot_product_")
                inputs = shapes[3:] if names[0] == "sdpa" else []  # after queries, keys and values
                masks = [shape for shape in inputs if len(shape) == 4]
                mask = " x ".join(map(str, masks[0])) if masks else ""
                return Ran(names, kernel.removesuffix("_attention").lstrip("_"), mask)
    return Ran(("none seen",), "", "")


def add_cuda_graphs_check(checks: RunChecks, layers: int) -> None:
    """Add a run check of the recorded CUDA graphs: one forward and one backward per layer."""
    recorded = upstream_private.recorded_cuda_graphs()
    skipped = upstream_private.compile_counters()["inductor"]["cudagraph_skips"]
    actual = f"{recorded} recorded" + f", {skipped} functions skipped" * bool(skipped)
    how = "torch's own counts when training ended; a run of one pass has none"
    if recorded > 2 * layers:
        how += "; recording again takes time: speed.compile: default records nothing"
    checks.add("CUDA graphs", f"{2 * layers} recorded", actual, how, ok=True)
