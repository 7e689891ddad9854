"""Documents in one row must not see each other: proved on the model that is about to be trained.

Every attention backend has its own way to keep them apart, and its own way to fail: an all-ones mask or a
cache in the wrong place, and they are one text. So one document is changed, and the other must not notice.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from accelerate.utils.memory import should_reduce_batch_size
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.autoconfig import attention_choice, packing_support
from finetune.core import upstream_private
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.kernels.kernel_limits import IMPLEMENTATIONS
from finetune.models import architecture
from finetune.speed.apply_to_model import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

    from finetune.autoconfig.machine_setup import Setup
    from finetune.core.run_checks import RunChecks

# What is allowed, relative: a GPU may not add up in the same order twice, and experts, on a CPU too, take the
# tokens of both documents in one product, whose sums go by their number. A leak moves both by 2e-3 up.
ALLOWED = {"cpu": (0.0, 0.0), "experts": (1e-6, 1e-5), "cuda": (1e-6, 1e-2)}
# Relative, of one layer's output by two kernels whose sums run in another order, in 16 bits or on fp8.
# What computes something else - another scale, a token too many - moves it by more than 0.3.
SAME = 0.03


# How much more than the same input twice another may move: where a kernel adds up in any order all the same,
# fp8 makes much of the last bit, layer by layer
NOISE = 1.25


class Leak(NamedTuple):
    """How far the second document's logits and gradients move, relative to their norms."""

    logits: float
    gradients: float


def prove_apart(
    model: PreTrainedModel | PeftModel, tokens: int, attention: str, ledger: RunChecks, switch_off: str = ""
) -> None:
    """RunCheck that the documents of a packed row do not see each other on this model.

    Args:
        tokens: length of the row that is tried.
        switch_off: the change of the recipe that packs no more.

    Raises:
        UserError: they do, or the model's own code refuses the row (exit 3).
    """
    switch_off = switch_off or "data.packing: false"
    with as_trained(model, attention), deterministic():
        try:
            same, moved = leaks(model, tokens)
        except Exception as error:  # whatever a model's own forward raises is the reason
            if should_reduce_batch_size(error):
                raise
            what, found = "this model can't be packed here", f"{type(error).__name__}: {first_line(error)}"
            problem = Problem(what, "model.name", found=found, fix=switch_off)
            raise UserError(problem, code=Exit.ENVIRONMENT) from error
    routed = model.device.type == "cpu" and architecture.experts(model.config.get_text_config())
    logits, gradients = ALLOWED["experts" if routed else model.device.type]
    ok = moved.logits <= max(logits, NOISE * same.logits)
    ok = ok and moved.gradients <= max(gradients, NOISE * same.gradients)
    got = f"moves logits by {moved.logits:.1g}, gradients by {moved.gradients:.1g}"
    if same != Leak(0.0, 0.0):
        got += f" (the same input twice: {same.logits:.1g}, {same.gradients:.1g})"
    how = f"one of two documents of a row of {tokens} tokens changed, the other looked at ({attention})"
    ledger.add("documents apart", "a change in one moves nothing in the other", got, how, ok=ok)
    if not ok:
        what = f"documents of a packed row see each other with attention {attention}"
        masked = packing_support.MASKED  # where one mask leaks, another does too
        fix = switch_off if attention in masked else f"model.attention: auto, or {switch_off}"
        raise UserError(Problem(what, "model.attention", found=got, fix=fix), code=Exit.ENVIRONMENT)


@contextlib.contextmanager
def as_trained(model: nn.Module, attention: str) -> Iterator[None]:
    """The model's forward in training, but without dropout, and in eager mode: no shape but training's is
    compiled. (flex_attention is compiled by transformers, and needs it.)"""
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


def _drops_by_numbers(model: nn.Module) -> bool:
    """Whether the model drops values or layers at random by a number, not by a module: OPT's `layerdrop`."""
    if attention_choice.read(model.config).dropout:
        return True
    held = (value for m in model.modules() for name, value in vars(m).items() if "drop" in name)
    return any(isinstance(value, float) and value > 0 for value in held)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Sums in one order, where a kernel can: on fp8 layers much comes of a last bit."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def leaks(model: PreTrainedModel | PeftModel, tokens: int, **extra: Any) -> tuple[Leak, Leak]:
    """What moves in the second document: for the same input once more, and for another first document.

    Args:
        extra: handed to the model, to try what would break the isolation.
    """
    made = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().vocab_size
    first, other, second = (torch.randint(size, (tokens // 2,), generator=made) for _ in range(3))
    before, again, after = (_second_of(model, given, second, extra) for given in (first, first, other))
    return _difference(before, again), _difference(before, after)


def prove_same(model: Any, tokens: int, attention: str, packed: bool, ledger: RunChecks) -> None:
    """RunCheck that attention without a mask computes on this model what attention with one does.

    Args:
        tokens: length of the row that is tried; the other row is padded to it, or stands beside it.

    Raises:
        UserError: it does not (exit 3).
    """
    if attention not in IMPLEMENTATIONS:
        return
    made, size = torch.Generator().manual_seed(0), model.get_input_embeddings().num_embeddings
    rows = [torch.randint(size, (length,), generator=made).tolist() for length in (tokens // 2, tokens)]
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
    worst, asked = max(off, default=math.inf), f"what {name} computes within {SAME:g}"
    how = f"||difference|| / ||output|| of each layer's attention on two rows of random tokens ({attention})"
    ok = worst <= SAME
    ledger.add("attention without a mask", asked, f"{worst:.2g}", how, ok=ok)
    if not ok:
        what = f"attention {attention} does not compute what {name} does on this model"
        problem = Problem(what, "model.attention", found=f"{worst:.2g}", fix=f"model.attention={name}")
        raise UserError(problem, code=Exit.ENVIRONMENT)


class _Comparison(NamedTuple):
    """Attention without a mask beside the attention with one that ran."""

    model: Any
    ours: str
    name: str
    real: torch.Tensor
    """Which tokens are no padding."""
    differences: list[float]

    def compare(self, layer: nn.Module, args: Any, given: Any, output: Any) -> None:
        """Run one layer's attention again on the same input, without its mask: what differs is its own doing,
        and not what the layers after it make of a last bit."""
        self.model.set_attn_implementation(self.ours)
        got = layer.forward(*args, **{**given, "attention_mask": None})[0]
        self.model.set_attn_implementation(self.name)
        here = self.real.to(got.device)
        got, wanted = got[here].double(), output[0][here].double()
        self.differences.append(float((got - wanted).norm() / wanted.norm()))


@contextlib.contextmanager
def masked(model: Any) -> Iterator[str]:
    """Attention that takes a mask and a cache, for evaluation of a model in training."""
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
    model: nn.Module, first: Any, second: Any, extra: dict[str, Any]
) -> tuple[torch.Tensor, list[Any]]:
    """Logits of the second document, and the gradients its loss gives to what is trained.

    Each call draws the same random numbers: some models have dropout that no module of theirs shows.
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
    """Two layers of a model's architecture, whole, with random weights.

    Where the model itself is in parts, what is to be proved of attention is proved on these.
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
        made = type(base)(config)
    return made.to(getattr(torch, setup.compute_dtype))
