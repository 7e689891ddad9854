"""Verify on the model before training that packed examples can't attend to each other.

Each attention kernel separates the examples in its own way, and can fail in its own way, for example with an
all-ones mask or with a cache. So finetune changes one example and checks that the outputs of the other do not
change.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from accelerate.utils.memory import should_reduce_batch_size
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.autoconfig import attention_choice, packing_support
from finetune.autoconfig.machine_setup import Setup
from finetune.core import model_config, upstream_private
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.core.run_checks import RunChecks
from finetune.kernels.kernel_limits import IMPLEMENTATIONS
from finetune.speed.live_model_spec import decoder_layers, experts_of

# Allowed relative differences. A GPU may sum in another order each time. Experts process the tokens of both
# examples in one GEMM, whose order of summation depends on their number. A leak changes both by 2e-3 or more.
ALLOWED = {"cpu": (0.0, 0.0), "experts": (1e-6, 1e-5), "cuda": (1e-6, 1e-2)}
# Largest relative difference of one layer's output between two kernels with another order of summation, in
# 16 bits or fp8. A wrong scale or an additional token changes the output by more than 0.3.
SAME = 0.03


# Allowed ratio of the difference to the difference between two runs on the same input. Some kernels sum in
# any order, and fp8 layers amplify the last bit.
NOISE = 1.25


class Leak(NamedTuple):
    """The relative changes of the second example's logits and gradients."""

    logits: float
    gradients: float


def prove_apart(
    model: PreTrainedModel | PeftModel, tokens: int, attention: str, checks: RunChecks, switch_off: str = ""
) -> None:
    """Add a run check that packed examples can't attend to each other in this model.

    Args:
        tokens: the length of the test sequence.
        switch_off: the change of the recipe that switches packing off.

    Raises:
        UserError: the examples attend to each other, or the model's own code raises an error (exit 3).
    """
    switch_off = switch_off or "data.packing: false"
    of = attention
    routed = model_config.experts(model.config.get_text_config())
    limits = ALLOWED["experts" if routed and model.device.type == "cpu" else model.device.type]
    with as_trained(model, attention), deterministic():
        try:
            same, moved = leaks(model, tokens)
            if routed and model.device.type == "cuda" and not _within(limits, same, moved):
                with without_experts(model):
                    same, moved = leaks(model, tokens)
                of += ", without the experts"
        except Exception as error:  # a model's own forward may raise any error
            if should_reduce_batch_size(error):
                raise
            raise UserError(
                Problem(
                    "the forward pass of this model fails on packed examples",
                    "model.name",
                    found=f"{type(error).__name__}: {first_line(error)}",
                    fix=switch_off,
                    code="model-unsupported",
                ),
                code=Exit.ENVIRONMENT,
            ) from error
    ok = _within(limits, same, moved)
    actual = f"changes logits by {moved.logits:.1g}, gradients by {moved.gradients:.1g}"
    if same != Leak(0.0, 0.0):
        actual += f" (the same input twice: {same.logits:.1g}, {same.gradients:.1g})"
    checks.add(
        "packed examples isolated",
        expected="a change in one example changes nothing in the other",
        actual=actual,
        how=f"one of two examples in a sequence of {tokens} tokens changed, the other compared ({of})",
        ok=ok,
    )
    if not ok:
        masked = packing_support.MASKED  # if one mask leaks, the others do too
        raise UserError(
            Problem(
                f"packed examples attend to each other with attention {attention}",
                "model.attention",
                found=attention,
                why=f"a change in one example {actual} of the other example",
                fix=switch_off if attention in masked else f"set `model.attention: auto`, or `{switch_off}`",
                code="attention-kernel",
            ),
            code=Exit.ENVIRONMENT,
        )


def _within(limits: tuple[float, float], same: Leak, moved: Leak) -> bool:
    """Return whether the changes are within the limits, or within the noise of the same input."""
    return all(
        change <= max(limit, NOISE * noise) for limit, noise, change in zip(limits, same, moved, strict=True)
    )


@contextlib.contextmanager
def without_experts(model: nn.Module) -> Iterator[None]:
    """Let experts return zeros.

    An expert computes each token alone. But in 16 bits, the GEMM of an expert rounds differently if it has
    other tokens, and the next routers amplify this difference to the size of a leak.
    """

    def zeros(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(output)

    found = [one for layer in decoder_layers(model) for one in experts_of(layer)]
    called = [part for one in found for part in (one if isinstance(one, torch.nn.ModuleList) else [one])]
    with contextlib.ExitStack() as hooks:
        for module in called:
            hooks.callback(module.register_forward_hook(zeros).remove)
        yield


@contextlib.contextmanager
def as_trained(model: PreTrainedModel | PeftModel, attention: str) -> Iterator[None]:
    """Put the model into training mode without dropout, and into eager mode.

    Eager mode avoids the compilation of shapes that training does not use. flex_attention stays compiled,
    because transformers needs that.
    """
    training = model.training
    dropouts = [(m, m.p) for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    model.train(not _drops_by_numbers(model))
    for module, _ in dropouts:
        module.p = 0.0
    try:
        if attention == "flex_attention":
            yield
        else:
            with torch.compiler.set_stance("force_eager"):
                yield
    finally:
        model.train(training)
        for module, p in dropouts:
            module.p = p


def _drops_by_numbers(model: PreTrainedModel | PeftModel) -> bool:
    """Return whether the model drops values or layers by a number, such as OPT's `layerdrop`."""
    if attention_choice.read(model.config).dropout:
        return True
    rates = (value for m in model.modules() for name, value in vars(m).items() if "drop" in name)
    return any(isinstance(value, float) and value > 0 for value in rates)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic kernels where they exist, because fp8 layers amplify differences in the last bit."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        # torch warns for each operation without a deterministic kernel; these run as usual
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def leaks(model: PreTrainedModel | PeftModel, tokens: int, **extra: object) -> tuple[Leak, Leak]:
    """Return the changes in the second example for the same input again, and for another first example.

    Args:
        extra: further inputs of the model, to test inputs that break the isolation.
    """
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().vocab_size
    first, other, second = (torch.randint(size, (tokens // 2,), generator=generator) for _ in range(3))
    before, repeated, after = (
        _second_of(model, tokens_in, second, extra) for tokens_in in (first, first, other)
    )
    return _difference(before, repeated), _difference(before, after)


def prove_same(model: Any, tokens: int, attention: str, packed: bool, checks: RunChecks) -> None:
    """Add a run check that attention without a mask equals attention with a mask in this model.

    Args:
        tokens: the length of the longer test example. The other example is padded, or packed with it.

    Raises:
        UserError: the outputs differ (exit 3).
    """
    if attention not in IMPLEMENTATIONS:
        return
    generator, size = torch.Generator().manual_seed(0), model.get_input_embeddings().num_embeddings
    rows = [torch.randint(size, (length,), generator=generator).tolist() for length in (tokens // 2, tokens)]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=packed)
    batch = collate([{"input_ids": row, "labels": row} for row in rows])
    real = batch["attention_mask"].bool() if not packed else torch.ones_like(batch["input_ids"]).bool()
    batch.pop("labels")
    inputs: Any = send_to_device(batch, model.device)
    training, off = model.training, list[float]()
    with torch.no_grad(), masked(model.eval()) as name, contextlib.ExitStack() as hooks:
        compare = _Comparison(model, IMPLEMENTATIONS[attention], name, real, off).compare
        for layer in decoder_layers(model):
            if hasattr(layer, "self_attn"):
                hook = layer.self_attn.register_forward_hook(compare, with_kwargs=True)
                hooks.callback(hook.remove)
        model(**inputs, use_cache=False)
    model.train(training)
    worst, expected = max(off, default=math.inf), f"the result of {name} within {SAME:g}"
    ok = worst <= SAME
    checks.add(
        "attention without a mask",
        expected=expected,
        actual=f"{worst:.2g}",
        how=f"largest relative difference of a layer's attention on two random examples ({attention})",
        ok=ok,
    )
    if not ok:
        raise UserError(
            Problem(
                f"on this model, attention {attention} computes another result than {name}",
                "model.attention",
                found=f"a relative difference of {worst:.2g}",
                expected=f"{SAME:g} or less",
                why="the kernel does not compute this model's attention",
                code="attention-kernel",
                fix=f"model.attention: {name}",
            ),
            code=Exit.ENVIRONMENT,
        )


class _Comparison(NamedTuple):
    """The comparison of attention without a mask and attention with a mask."""

    model: Any
    ours: str
    name: str
    real: torch.Tensor
    """A mask of the tokens that are not padding."""
    differences: list[float]

    def compare(
        self,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: tuple[torch.Tensor, ...],
    ) -> None:
        """Run one layer's attention again on the same input without a mask, and record the difference.

        Later layers do not amplify this difference, because each layer gets its original input.
        """
        self.model.set_attn_implementation(self.ours)
        unmasked = layer.forward(*args, **{**kwargs, "attention_mask": None})[0]
        self.model.set_attn_implementation(self.name)
        here = self.real.to(unmasked.device)
        unmasked, wanted = unmasked[here].double(), output[0][here].double()
        self.differences.append(float((unmasked - wanted).norm() / wanted.norm()))


@contextlib.contextmanager
def masked(model: PreTrainedModel | PeftModel) -> Iterator[str]:
    """Switch to an attention that supports a mask and a cache, to evaluate a model in training."""
    name = upstream_private.attention_name(model.config)
    other, _ = attention_choice.for_evaluation(name, attention_choice.read(model.config))
    if name not in (*IMPLEMENTATIONS.values(), "flex_attention"):
        yield name
        return
    model.set_attn_implementation(other)
    try:
        yield other
    finally:
        model.set_attn_implementation(name)


def _second_of(
    model: PreTrainedModel | PeftModel, first: torch.Tensor, second: torch.Tensor, extra: dict[str, Any]
) -> tuple[torch.Tensor, list[Any]]:
    """Return the second example's logits, and the gradients of its loss for all trainable parameters.

    Each call draws the same random numbers, because some models have dropout outside of modules.
    """
    ids = torch.cat([first, second]).tolist()
    row = {"input_ids": ids, "labels": ids, "seq_lengths": [len(first), len(second)]}
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([row])
    batch.pop("labels")
    inputs: Any = send_to_device(batch, model.device)
    devices = [model.device.index or 0] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        logits = model(**inputs, **{"use_cache": False, **extra}).logits[0, len(first) :]
    loss = torch.nn.functional.cross_entropy(logits[:-1].float(), second[1:].to(model.device))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return logits.detach(), [gradient for gradient in gradients if gradient is not None]


def _difference(one: tuple[torch.Tensor, list[Any]], other: tuple[torch.Tensor, list[Any]]) -> Leak:
    def relative(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        norms = [torch.stack([t.double().norm() for t in ts]).norm() for ts in (a, b)]
        moved = torch.stack([(x.double() - y.double()).norm() for x, y in zip(a, b, strict=True)]).norm()
        return float(moved / max(float(norms[0]), float(norms[1]), 1e-300))

    return Leak(relative([one[0]], [other[0]]), relative(one[1], other[1]))


def twin(model: Any, setup: Setup, device: str) -> Any:
    """Return a model of the same architecture with two layers and random weights.

    If the weights of the model are sharded, the checks of attention run on this model.
    """
    import torch

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = copy.deepcopy(base.config)
    text = config.get_text_config()
    text.num_hidden_layers = 2
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        small_copy = type(base)(config)
    return small_copy.to(getattr(torch, setup.compute_dtype))
