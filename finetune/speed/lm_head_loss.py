"""Compute a model's loss in chunks, if the chunked loss equals the model's own loss."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_outputs import MoeModelOutputWithPast
from trl.trainer.utils import add_fused_lm_head

from finetune.autoconfig import loss_support, memory_estimate
from finetune.core import formatting, upstream_private
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.core.run_checks import Choice, RunChecks
from finetune.data.loss_mask import IGNORED, WEIGHTS
from finetune.distributed import launch_environment
from finetune.kernels.kernel_limits import FP8_WIDTH
from finetune.quantization.fp8_linear import Fp8Linear
from finetune.speed import fp8_cross_entropy, loss_weights, router_balance
from finetune.speed.chunked_cross_entropy import Head, TokenLoss, computes_all, token_loss
from finetune.speed.forward_comparison import ALLOWED, allowed_difference

TRIED = 16  # tokens of the example on which TRL's loss is tested
LOGIT_SPREAD = 20.0  # standard deviation of the test logits, large enough to show a softcap of 30


class Formula(NamedTuple):
    """The formula of a family's logits: softcap * tanh(scale * (h W^T + b) / softcap)."""

    scale: float
    softcap: float | None


@dataclass
class Installed:
    """The way to remove the loss from a model, and counts for the run check of the first step."""

    undo: Callable[[], None]
    calls: int = 0
    rows: int = 0
    """Number of hidden states that the loss received."""
    computed: int = 0
    """Number of hidden states that the head processed."""
    kept: int = 0
    """Bytes that the first call saved for the backward pass."""
    logits_kept: bool = False
    """Whether a saved tensor is as wide as the vocabulary."""
    routers: list[str] = field(default_factory=list)
    """Names of the routers of a mixture of experts."""


class HeadLoss:
    """The loss of a run: `chunked` or `chunked_fp8` on the model's head, or `trl` for TRL's fused head."""

    def __init__(self, chosen: str, *, compiled: bool = False) -> None:
        """Args: compiled: whether softmax and its gradient are compiled."""
        self.chosen, self.compiled = chosen, compiled
        self.installed: Installed | None = None

    def install(self, model: nn.Module, *, balanced: bool = False) -> None:
        """Args: balanced: whether it also computes the auxiliary loss of a mixture's routers."""
        if self.chosen in loss_support.CHUNKED:
            fp8 = self.chosen == "chunked_fp8"
            self.installed = install(model, compiled=self.compiled, balanced=balanced, fp8=fp8)

    def remove(self) -> None:
        """Restore the model's own forward, and release the model."""
        if self.installed:
            self.installed.undo()
        self.installed = None

    def counts(self) -> dict[str, Any]:
        return dict(vars(self.installed)) if self.installed else {}

    def restore_counts(self, counts: dict[str, Any]) -> None:
        if self.installed:
            vars(self.installed).update(counts)

    def add_run_check(self, operations: Collection[str], micro_batches: int, checks: RunChecks) -> None:
        """Add a run check of the loss in step 1, by the profiled autograd functions and the saved tensors."""
        names = {"_OutputHead": "chunked", "Fp8OutputHead": "chunked_fp8", "ChunkedLogProbFunction": "trl"}
        ran = " and ".join(loss for name, loss in names.items() if name in operations) or "none seen"
        how, code, installed = "profile of the first forward", Exit.ENVIRONMENT, self.installed
        if installed is None:
            checks.add("speed.loss", self.chosen, ran, how, code=code)
            return
        kept = "logits" if installed.logits_kept else f"{formatting.size(installed.kept)} and no logits"
        ok = ran == self.chosen and installed.calls == micro_batches and not installed.logits_kept
        how += "; calls and tokens of step 1; tensors that the first call saved for the backward pass"
        checks.add(
            "speed.loss",
            expected=f"{self.chosen}, {micro_batches} calls; no logits saved",
            actual=(
                f"{ran}, {installed.calls} calls, {installed.computed} of {installed.rows} "
                f"tokens; saved {kept}"
            ),
            how=how,
            ok=ok,
            code=code,
        )


def choose(asked: str, model: nn.Module, arguments: TrainingArguments) -> Choice:
    """Choose `chunked`, `chunked_fp8` or `trl`, TRL's fused head.

    `auto` takes `chunked` if it gives the model's own loss, and `chunked_fp8` on an fp8 base model.

    Raises:
        UserError: the requested loss does not work here, or is not this model's loss (exit 3).
    """
    base = base_model_of(model)
    unsupported_reason = run_unsupported_reason(model, arguments) or head_unsupported_reason(base)
    fp8_reason = unsupported_reason or _fp8_unsupported_reason(base)
    if asked == "trl":
        prove_fused(model, unsupported_reason)
        return Choice("trl", "asked for")
    if asked in loss_support.CHUNKED:
        if reason := fp8_reason if asked == "chunked_fp8" else unsupported_reason:
            raise UserError(loss_support.refusal(asked, reason), code=Exit.ENVIRONMENT)
        return Choice(asked, "asked for")
    if unsupported_reason:
        return Choice("trl", f"auto: {unsupported_reason}; {prove_fused(model, unsupported_reason)}")
    if not any(isinstance(module, Fp8Linear) for module in base.modules()):
        return Choice("chunked", "auto: less memory, the same loss")
    if fp8_reason or base.config.get_text_config().hidden_size < FP8_WIDTH:
        return Choice(
            "chunked", f"auto: not in fp8, because {fp8_reason or 'the model is too small to gain'}"
        )
    return Choice("chunked_fp8", "auto: the base model is in fp8")


def _fp8_unsupported_reason(base: PreTrainedModel) -> str:
    head: Any = base.get_output_embeddings()
    return fp8_cross_entropy.unsupported_reason(
        head.weight, bias=head.bias is not None, softcap=formula(base.config).softcap
    )


def prove_fused(model: nn.Module, unsupported_reason: str) -> str:
    """Verify that TRL's fused head gives the loss of the model's own logits on random tokens.

    TRL multiplies the output of `base_model` with the head, and knows the formulas of some families.

    Args:
        unsupported_reason: why the chunked loss does not work; empty if it works.

    Raises:
        UserError: TRL's head gives another loss or an error (exit 3).
    """
    if is_deepspeed_zero3_enabled() or launch_environment.parallel("CP") > 1:
        return "TRL's loss is not tested on sharded weights"
    problem = Problem(
        "TRL's fused head does not compute this model's loss",
        "speed.loss",
        why=unsupported_reason,
        fix="use another base model" if unsupported_reason else "speed.loss: auto",
        code="model-unsupported",
    )
    try:
        with trying(model):
            wanted, got = own_losses(base_model_of(model)), fused_losses(base_model_of(model))
    except Untried as error:
        return f"TRL's loss could not be tested: {error}"
    except Exception as error:  # a head that TRL does not know may raise any error
        problem = replace(problem, found=f"{type(error).__name__}: {first_line(error)}")
        raise UserError(problem, code=Exit.ENVIRONMENT) from error
    difference = float((got - wanted).norm() / wanted.norm())
    if difference <= allowed_difference(base_model_of(model).get_output_embeddings().weight.dtype):
        return f"TRL's loss equals this model's own loss (relative difference {difference:.1g})"
    raise UserError(
        replace(problem, found=f"a relative difference of {difference:.1g} on random tokens"),
        code=Exit.ENVIRONMENT,
    )


class Untried(Exception):
    """The model's own forward does not run here, so no comparison is possible."""


@contextlib.contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation and eager mode, and restore its mode and its own forward afterwards."""
    base, training = base_model_of(model), model.training
    before, compiles = (
        vars(base).get("forward"),
        upstream_private.attention_name(base.config) == "flex_attention",
    )
    eager = contextlib.nullcontext() if compiles else torch.compiler.set_stance("force_eager")
    model.eval()
    try:
        with torch.no_grad(), eager:
            yield
    finally:
        model.train(training)
        if "forward" in vars(base):
            restore(base, before)


def row_of(base: Any) -> Tensor:
    """Return random tokens on the device of the model's embeddings."""
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(base.config.get_text_config().vocab_size, (1, TRIED), generator=made)
    return ids.to(base.get_input_embeddings().weight.device)


def own_losses(base: nn.Module) -> Tensor:
    """Return the cross-entropy of each token from the model's own logits."""
    ids = row_of(base)
    try:
        logits = base(input_ids=ids, use_cache=False).logits[0, :-1].double()
    except Exception as error:  # a model's own forward may raise any error
        raise Untried(f"{type(error).__name__}: {first_line(error)}") from error
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:].to(logits.device), reduction="none")


def fused_losses(base: PreTrainedModel) -> Tensor:
    """Return the cross-entropy of each token from TRL's fused head."""
    ids = row_of(base)
    add_fused_lm_head(base)
    return -base(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[0].double()


def run_unsupported_reason(model: Any, arguments: Any) -> str:
    """Return a setting of this run that needs another loss or hides the head; else the empty string."""
    config = model.config.get_text_config()
    coefficient = arguments.router_aux_loss_coef
    if coefficient is None:
        coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    adapter: Any = getattr(model, "peft_config", {}).get("default")
    unbalanced = hasattr(config, "output_router_logits") and coefficient
    unbalanced = unbalanced and not router_balance.routers_of(base_model_of(model))
    if reason := loss_support.run_unsupported_reason(
        virtual_tokens=adapter is not None and adapter.is_prompt_learning,
        label_smoothing=arguments.label_smoothing_factor,
        loss_type=arguments.loss_type,
        fp16=arguments.fp16,
    ):
        return reason
    if unbalanced:
        return "the loss includes the router's auxiliary loss, and the routers keep no logits"
    return ""


def head_unsupported_reason(base: PreTrainedModel | PeftModel) -> str:
    """Return why the loss can't be computed from this model's head; the empty string if it can.

    The check compares the logits of `formula` with the logits of the model's own forward for the same hidden
    states. No layer runs.
    """
    if reason := wrapped_reason(base):
        return reason
    head: Any = base.get_output_embeddings()
    if head.weight.is_meta:
        return "the output head is offloaded"
    if head.weight.dtype not in ALLOWED:
        return f"the output head is in {str(head.weight.dtype).removeprefix('torch.')}"
    if base.base_model is base:
        return "the model has no backbone without a head"
    try:
        difference = formula_error(base)
    except Exception as error:  # a model's own forward may raise any error
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"the head can't be tested without the layers ({reason})"
    if difference > ALLOWED[head.weight.dtype]:
        return (
            f"this model's logits differ from the logits of its head (relative difference {difference:.1g})"
        )
    return ""


def wrapped_reason(base: Any) -> str:
    """Return why a head that is no nn.Linear, such as PEFT's wrapper, excludes the chunked loss; else ""."""
    head = base.get_output_embeddings()
    plain = type(head) is torch.nn.Linear
    return "" if plain else f"the output head is not a plain nn.Linear ({type(head).__name__})"


@torch.no_grad()
def formula_error(base: Any) -> float:
    """Return the relative difference of `formula`'s logits and the model's own for four hidden states."""
    weight = base.get_output_embeddings().weight
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, weight.shape[1], generator=made).to(weight)
    hidden = hidden * (LOGIT_SPREAD / (hidden @ weight.T).float().std()).to(hidden)
    with last_hidden_state(base.base_model, hidden):
        own = base(
            input_ids=torch.zeros(1, 4, dtype=torch.long, device=weight.device), use_cache=False
        ).logits
    scale, cap = formula(base.config)
    ours = torch.nn.functional.linear(hidden * scale, weight, scaled_bias(base, scale)).to(own.dtype)
    ours = ours if cap is None else cap * torch.tanh(ours / cap)
    return float((ours - own).double().norm() / own.double().norm())


class _Given(MoeModelOutputWithPast):
    """The output of a backbone. Other fields, such as Gemma 3's hidden states of images, are `None`."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextlib.contextmanager
def last_hidden_state(backbone: Any, hidden: Tensor) -> Iterator[None]:
    """Make `backbone` return `hidden` for any input while the context is open."""
    before, output = (
        vars(backbone).get("forward"),
        _Given(last_hidden_state=cast("Any", hidden)),
    )
    backbone.forward = lambda *args, **inputs: output
    try:
        yield
    finally:
        restore(backbone, before)


def formula(config: PreTrainedConfig) -> Formula:
    """Return scale and softcap by the names that families use. `head_unsupported_reason` verifies them."""
    config = config.get_text_config()
    named = ("logit_scale", "output_multiplier", "lm_head_multiplier")
    scale = next((value for name in named if (value := getattr(config, name, None)) is not None), None)
    scaling = getattr(config, "logits_scaling", None)
    if scale is None and scaling is not None:  # Granite and MiniCPM3 divide by it
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    return Formula(1.0 if scale is None else scale, memory_estimate.softcap(config))


def scaled_bias(base: Any, scale: float) -> Tensor | None:
    bias = base.get_output_embeddings().bias
    return None if bias is None else bias * scale


def base_model_of(model: Any) -> Any:
    """Return the transformers model under an adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def install(model: nn.Module, *, compiled: bool, balanced: bool = False, fp8: bool = False) -> Installed:
    """Make `model(input_ids=..., labels=..., num_labels=n)` compute the chunked loss.

    Call the wrapped model, so that the hooks of DDP, FSDP2 and autocast run. Without `num_labels`, the model
    works as before, for logits, generation and TRL's own loss.

    Args:
        compiled: whether softmax and its gradient are compiled, which reads a chunk fewer times.
        balanced: whether it also computes the auxiliary loss of a mixture's routers.
        fp8: whether the gradient of the hidden states is computed in fp8.

    Returns:
        An object that counts the calls. Its `undo` restores the model's own forward.
    """
    base, found = base_model_of(model), formula(base_model_of(model).config)
    routers = router_balance.names_of(base)
    before, balance = base.forward, router_balance.RouterBalance(base, balanced=balanced) if routers else None
    ran = Installed(functools.partial(_undo, base, vars(base).get("forward"), balance), routers=routers)

    @functools.wraps(type(base).forward)  # generation checks its arguments against the signature
    def forward(self: Any, *args: object, num_labels: int | None = None, **inputs: Any) -> Any:
        if num_labels is None:
            return before(*args, **inputs)
        labels, weights = inputs.pop("labels"), inputs.pop(WEIGHTS, None)
        hidden = self.base_model(*args, **{**inputs, "use_cache": False}).last_hidden_state
        head = self.get_output_embeddings()
        weight, bias = (
            t.full_tensor().to(hidden.device) if isinstance(t, DTensor) else t  # the shard may be on the CPU
            for t in (head.weight, head.bias)
        )
        result = token_loss(
            hidden * found.scale if found.scale != 1 else hidden,
            Head(weight, bias if bias is None else bias * found.scale, found.softcap, fp8),
            torch.nn.functional.pad(
                labels[:, 1:], (0, 1), value=IGNORED
            ),  # a copy of ids, not of hidden states
            weights=None if weights is None else loss_weights.of_next(weights),
            num_labels=num_labels,
            compiled=compiled,
        )
        if balance and self.training:
            result.aux_loss, use = balance.read(inputs.get("attention_mask"))
            result.router_entropy, result.router_rows, result.expert_tokens = use
        count(ran, result, labels.numel(), num_labels, weight.shape)
        return result

    base.forward = types.MethodType(forward, base)
    return ran


def _undo(base: nn.Module, forward: Callable[..., Any], balance: router_balance.RouterBalance | None) -> None:
    restore(base, forward)
    if balance:
        balance.remove()


def restore(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Restore an instance's own forward, or the class's forward if it had none."""
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def count(ran: Installed, result: TokenLoss, rows: int, num_labels: int, head: tuple[int, ...]) -> None:
    """Count a call of the loss, and the bytes that it saved for the backward pass."""
    ran.calls += 1
    ran.rows += rows
    ran.computed += rows if computes_all(rows, num_labels) else num_labels
    node: Any = result.nll.grad_fn if result.nll is not None else None
    if ran.calls == 1 and node is not None:
        held = [tensor for tensor in node.saved_tensors if tensor is not None]
        ran.kept = sum(tensor.nbytes for tensor in held)
        vocabulary, hidden = head
        ran.logits_kept = hidden != vocabulary and any(t.shape[1:] == (vocabulary,) for t in held)
