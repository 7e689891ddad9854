"""Train AdaLoRA (arXiv 2303.10512): the steps and the state that PEFT leaves to its caller.

The update of a module is P diag(E) Q (eq. 3). PEFT stores P (out, r) in `lora_B`, E (r, 1) in `lora_E` and
Q (r, in) in `lora_A`, in fp32 unless the caller changes the dtype. A rank is a triplet: a column of P, an
entry of E and a row of Q.

Pruning masks ranks and does not remove them. An allocation sets their E to zero, but P, E and Q keep
r = init_r rows, gradients and optimizer state. So pruning saves neither time nor memory during training.
This belongs to the method: a masked triplet still learns, and a later allocation may use it again
(section 3.2). `drop_masked_ranks` makes the adapter smaller after training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from transformers import TrainerCallback

from finetune.core import upstream_private
from finetune.core.errors import Exit, Problem, UserError

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.adalora.layer import RankAllocator
    from torch import Tensor, nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

    Vectors = list[tuple[bool, list[torch.nn.Parameter]]]

# PEFT's names of the allocator's moving averages
AVERAGES = ("ipt", "exp_avg_ipt", "exp_avg_unc")
# Tensors per call. The GPU then launches few kernels, and the tensors fit in a CPU's cache.
AT_ONCE = 32
# Tensors that an error lists
SHOWN = 5


class Regularizer(NamedTuple):
    """AdaLoRA's orthogonality term (eq. 4), and its interval."""

    weight: float
    every: int
    """Optimizer steps between two computations. The weight is multiplied by it."""
    vectors: Vectors

    def is_due(self, step: int) -> bool:
        return bool(self.weight) and step % self.every == 0


class AllocateRanks(TrainerCallback):
    """Call `allocate` at each optimizer step.

    transformers does not call PEFT's `update_and_allocate`. The Trainer calls this callback after the
    optimizer used the gradients and before it zeroes them. The gradients are summed over micro-batches,
    averaged over processes and clipped. They are equal bit for bit on all processes, so all processes
    allocate the same ranks. `global_step` increases later, so the current step is one more.

    Importance is |parameter x gradient| (eq. 8). Clipping by a factor scales all importances of the step by
    that factor, so their order stays the same. PEFT's example does not clip, but has the same order of calls.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PeftModel,
        **kwargs: object,
    ) -> None:
        self.tensors, self.masks = tensors(model), {}

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any,
        **kwargs: Any,
    ) -> None:
        step, config = state.global_step + 1, model.peft_config["default"]
        # NaN or Inf gradients would stay in the moving averages. The last allocation reads no gradients, and
        # no later allocation would replace it.
        if kwargs["optimizer"].step_was_skipped and step < config.total_step - config.tfinal:
            return
        allocate(model, step, self.tensors, self.masks)


def tensors(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """Return P, E and Q of every module, by the allocator's names. Call it once, because it is slow."""
    adalora: Any = model.base_model
    named = adalora.model.named_parameters()
    return {name: p for name, p in named if "lora_" in name and adalora.trainable_adapter_name in name}


def allocate(
    model: PeftModel, step: int, named: dict[str, torch.nn.Parameter], masks: dict[str, Tensor]
) -> None:
    """Update importances and masks after optimizer step `step` (from 1), as `update_and_allocate` does.

    The results are equal bit for bit to PEFT's, and this function is faster. PEFT visits all modules and
    waits for the device at each of them. Here only `ranks` and `allocation_state` wait for the device, and
    update PEFT's `rank_pattern`. The last allocation is at step total_step - tfinal for every deltaT.

    Args:
        named: the result of `tensors`. The tensors have gradients.
        masks: masks of the final ranks, with the names of E as keys. The last allocation fills the dict.

    Raises:
        UserError: the last allocation does not reach the budget (exit 5). PEFT masks all importances up to a
            threshold, so equal importances are masked together, for example if nothing was learned.
    """
    adalora: Any = model.base_model
    allocator = adalora.rankallocator
    config = allocator.peft_config
    last = config.total_step - config.tfinal
    if step > last:
        if not masks:
            masks |= {
                name: ~torch.tensor(flags, device=named[name].device)[:, None]
                for name, flags in _pattern(allocator, named).items()
            }
        with torch.no_grad():
            for name, mask in masks.items():
                named[name].masked_fill_(mask, 0.0)
        return
    if step < last:
        update_importance(allocator, named)
    budget, due = allocator.budget_schedule(step)
    # After tinit, the budget is below the initial ranks. An allocation can remove a rank as soon as one step
    # has updated the importances.
    if (step == last or due) and allocator.ipt:
        allocator.masked = mask_to_budget(allocator, named, budget)
    if step == last:
        allocator.reset_ipt()
        used, budget = ranks(model)
        if used != budget:
            raise UserError(
                Problem(
                    f"AdaLoRA misses its rank budget in its last allocation (step {step})",
                    found=f"{used} ranks",
                    expected=f"{budget} ranks",
                    fix="raise adapter.tinit, or lower train.warmup_steps",
                    why="AdaLoRA can only remove ranks of equal importance together",
                    code="adapter-option",
                ),
                code=Exit.TRAINING,
            )


@torch.no_grad()
def update_importance(allocator: RankAllocator, named: dict[str, torch.nn.Parameter]) -> None:
    """Update the averages of sensitivity and uncertainty (eq. 8 to 10), bit for bit as PEFT's `update_ipt`.

    Args:
        allocator: PEFT's RankAllocator, which holds three dicts of tensors with the parameters' shapes.
        named: the result of `tensors`. A parameter without a gradient gets no importance.
    """
    if not allocator.ipt:
        for kind in AVERAGES:
            setattr(allocator, kind, {name: torch.zeros_like(p) for name, p in named.items()})
    names = [name for name, parameter in named.items() if parameter.grad is not None]
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
        average = [allocator.exp_avg_ipt[name] for name in some]
        uncertainty = [allocator.exp_avg_unc[name] for name in some]
        sensitivity = upstream_private.foreach_mul([named[n] for n in some], [named[n].grad for n in some])
        upstream_private.foreach_abs_(sensitivity)
        upstream_private.foreach_mul_(average, allocator.beta1)
        # add_(alpha=...) would round once, but PEFT rounds twice.
        upstream_private.foreach_add_(average, upstream_private.foreach_mul(sensitivity, 1 - allocator.beta1))
        distance = upstream_private.foreach_sub(sensitivity, average)
        upstream_private.foreach_abs_(distance)
        upstream_private.foreach_mul_(distance, 1 - allocator.beta2)
        upstream_private.foreach_mul_(uncertainty, allocator.beta2)
        upstream_private.foreach_add_(uncertainty, distance)
        allocator.ipt.update(zip(some, sensitivity, strict=True))


@torch.no_grad()
def mask_to_budget(
    allocator: RankAllocator, named: dict[str, torch.nn.Parameter], budget: int
) -> tuple[list[str], Tensor]:
    """Mask the triplets of least importance, bit for bit as PEFT's method of this name.

    Returns:
        The names of E, and one mask for their concatenated ranks, on the device.
    """
    diagonals = [name for name in named if "lora_E" in name]
    means: list[Tensor] = []
    for vectors, over in (("lora_A", 1), ("lora_B", 0)):
        names = [name.replace("lora_E", vectors) for name in diagonals]
        for start in range(0, len(names), AT_ONCE):
            some = names[start : start + AT_ONCE]
            pairs = ([kind[n] for n in some] for kind in (allocator.exp_avg_ipt, allocator.exp_avg_unc))
            means += [product.mean(over) for product in upstream_private.foreach_mul(*pairs)]
    average, uncertainty = (
        torch.cat([kind[name].view(-1) for name in diagonals])
        for kind in (allocator.exp_avg_ipt, allocator.exp_avg_unc)
    )
    q, p = torch.cat(means).chunk(2)
    score = average * uncertainty + (q + p)  # one score per triplet (eq. 7)
    masked = score <= torch.kthvalue(score, allocator.init_bgt - budget)[0]
    values = [named[name].view(-1) for name in diagonals]
    sizes = [len(one) for one in values]
    upstream_private.foreach_copy_(values, torch.cat(values).masked_fill_(masked, 0.0).split(sizes))
    return diagonals, masked


def ranks(model: PeftModel) -> tuple[int, int]:
    """Return the ranks in use (unmasked rows of E), and the budget that they must sum to."""
    config: Any = model.peft_config["default"]
    diagonals = _diagonals(model)
    pattern = _pattern(cast("Any", model.base_model).rankallocator, diagonals)
    return sum(map(sum, pattern.values())), config.target_r * len(diagonals)


def drop_masked_ranks(model: PeftModel) -> None:
    """Remove masked ranks after training with PEFT's own function.

    The live adapter then equals the adapter that PEFT saves and loads. PEFT saves only the ranks in use. When
    it loads them, it rounds them to the dtype of the base model and casts them to fp32 (peft 0.21.2,
    `resize_modules_by_rank_pattern`). A module may keep no rank: its saved tensors are empty, and its update
    is exactly zero. Plain PEFT loads such an adapter with a warning about shards.
    """
    config: Any = model.peft_config["default"]
    base: Any = model.base_model
    base.resize_modules_by_rank_pattern(config.rank_pattern, "default")
    for name, parameter in model.named_parameters():
        if "lora_" in name or ".ranknum." in name:
            parameter.data = parameter.data.float()


def allocates(model: nn.Module) -> bool:
    """Return whether the model's adapter is AdaLoRA."""
    config: Any = getattr(model, "peft_config", {}).get("default")
    return config is not None and config.peft_type == "ADALORA"


def regularizer(model: Any, every: int) -> Regularizer | None:
    """Return AdaLoRA's orthogonality term, computed at every n-th step; `None` for other adapters."""
    if not allocates(model):
        return None
    return Regularizer(model.peft_config["default"].orth_reg_weight, every, singular_vectors(model))


def singular_vectors(model: PeftModel) -> Vectors:
    """Return P and Q of all modules, in groups of up to 32 tensors of one shape, each marked as P or Q."""
    groups: dict[tuple[bool, torch.Size], list[torch.nn.Parameter]] = {}
    for name, parameter in tensors(model).items():
        if "lora_E" not in name:
            groups.setdefault(("lora_A" in name, parameter.shape), []).append(parameter)
    return [
        (rows, group[start : start + AT_ONCE])
        for (rows, _), group in groups.items()
        for start in range(0, len(group), AT_ONCE)
    ]


def orthogonality(vectors: Vectors) -> Tensor:
    """Return AdaLoRA's regularizer (eq. 4), an fp32 scalar.

    It is the mean of ||P^T P - I||_F and ||Q Q^T - I||_F over all P and Q, as in PEFT. The paper squares the
    norms.

    Parameters do not change within an optimizer step, so the Trainer adds the term once per step, not once
    per micro-batch. If it is computed every n steps, its weight is n times as large, so the mean gradient
    over steps is the same. A run with n > 1 still differs from n = 1. Adam divides by the root of the mean
    square, clipping reduces the larger steps, and the importances of these steps count the term n times.

    Args:
        vectors: the result of `singular_vectors`.
    """
    count = sum(len(group) for _, group in vectors)
    with torch.autocast(vectors[0][1][0].device.type, enabled=False):
        sums: list[Any] = [_Deviation.apply(rows, *group) for rows, group in vectors]
    return torch.stack(sums).sum() / count


class _Deviation(torch.autograd.Function):
    """The sum of ||G - I||_F over the Gram matrices G (r, r) of tensors of one shape, in fp32.

    The gradient is explicit: (G - I) Q / ||G - I||_F x 2. Because G is symmetric, this needs half of
    autograd's work, and one GEMM for all tensors of the group. It is 0 if the norm is 0.
    """

    @staticmethod
    def forward(ctx: Any, rows: bool, *group: Tensor) -> Tensor:
        stack = torch.stack(group).float()
        gram = stack @ stack.mT if rows else stack.mT @ stack
        gram.diagonal(dim1=1, dim2=2).sub_(1)
        norms = torch.linalg.matrix_norm(gram, keepdim=True)
        ctx.rows, ctx.dtype = rows, group[0].dtype
        ctx.save_for_backward(stack, torch.where(norms > 0, gram / norms, 0))
        return norms.sum()

    @staticmethod  # torch declares `*grad_outputs`; there is one here
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's is *args)
        stack, direction = ctx.saved_tensors
        direction = direction * (2 * gradient)
        stacked = direction @ stack if ctx.rows else stack @ direction
        return None, *stacked.to(ctx.dtype).unbind()


def allocation_state(model: PeftModel) -> dict[str, Tensor]:
    """Return the tensors that an exact resume needs in addition to the optimizer state.

    The adapter that PEFT saves has only the ranks in use, and no importances.

    Returns:
        Tensors for `safetensors`. They are not copies, so write them before the next step. Their names are

        - `parameter.<name>`: every trainable tensor with all ranks.
        - `ipt.<name>`, `exp_avg_ipt.<name>` and `exp_avg_unc.<name>`: importances, from the first step to the
          last allocation.
        - `mask.<name>`: (r,) bool, true for ranks in use, after the first allocation.
    """
    allocator: Any = model.base_model.rankallocator
    state = {f"parameter.{n}": p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for kind in AVERAGES:
        state |= {f"{kind}.{name}": tensor for name, tensor in getattr(allocator, kind).items()}
    pattern = _pattern(allocator, tensors(model))
    return state | {f"mask.{name}": torch.tensor(flags) for name, flags in pattern.items()}


def _pattern(allocator: RankAllocator, named: dict[str, torch.nn.Parameter]) -> dict[str, list[bool]]:
    """Return the ranks in use by the names of E, and store them in PEFT's config.

    The dict is empty before the first allocation. Only this function waits for the device, because a wait in
    each allocation would leave the GPU idle.
    """
    if masked := vars(allocator).pop("masked", None):
        diagonals, flags = masked[0], (~masked[1]).cpu()
        flags_by_module = flags.split([len(named[name]) for name in diagonals])
        pairs = zip(diagonals, flags_by_module, strict=True)
        allocator.peft_config.rank_pattern = {name: some.tolist() for name, some in pairs}
    pattern = allocator.peft_config.rank_pattern or {}
    names = [name for name in named if "lora_E" in name] if pattern else []
    # PEFT's save removes the adapter's name from the keys of the live config. Later it accepts both forms.
    short = {name: name.replace(f".{allocator.adapter_name}", "") for name in names}
    return {name: pattern[name] if name in pattern else pattern[short[name]] for name in names}


@torch.no_grad()
def restore_allocation(model: PeftModel, state: dict[str, Tensor]) -> None:
    """Restore an `allocation_state` in a new model of the same recipe before the first step.

    The new model must have no rank_pattern. Otherwise PEFT would shrink the modules to that pattern, and the
    masks would not fit.

    Raises:
        UserError: tensors are missing, unknown, or have another shape or dtype (exit 4). The model stays
            unchanged.
    """
    allocator: Any = model.base_model.rankallocator
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    expected = {f"parameter.{n}": (tuple(p.shape), p.dtype) for n, p in trained.items()}
    kinds = {name.partition(".")[0] for name in state}
    named, diagonals = tensors(model), _diagonals(model)
    for kind in AVERAGES if kinds & set(AVERAGES) else ():
        expected |= {f"{kind}.{n}": (tuple(p.shape), p.dtype) for n, p in named.items()}
    if "mask" in kinds:
        expected |= {f"mask.{n}": ((len(p),), torch.bool) for n, p in diagonals.items()}
    saved_kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    wrong = sorted(n for n in expected.keys() | saved_kinds.keys() if expected.get(n) != saved_kinds.get(n))
    if wrong:
        what = f"the saved state of AdaLoRA does not fit this model ({len(wrong)} tensors)"
        problems = [
            Problem(
                what,
                where=n,
                found=_described(saved_kinds.get(n)),
                expected=_described(expected.get(n)),
                fix=(
                    "resume with the recipe of the checkpoint, or start a new run with another "
                    "train.output_dir"
                ),
                why="AdaLoRA would prune other ranks than in a run without a stop",
                code="checkpoint",
            )
            for n in wrong[:SHOWN]
        ]
        raise UserError(*problems, code=Exit.ARTIFACT)
    for name, parameter in trained.items():
        parameter.copy_(state[f"parameter.{name}"])
    allocator.reset_ipt()
    for kind in AVERAGES if kinds & set(AVERAGES) else ():
        memory = {n: state[f"{kind}.{n}"].to(p.device, copy=True) for n, p in named.items()}
        setattr(allocator, kind, memory)
    masks = {n: state[f"mask.{n}"].tolist() for n in diagonals} if "mask" in kinds else None
    vars(allocator).pop("masked", None)
    allocator.peft_config.rank_pattern = masks


def _diagonals(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in tensors(model).items() if "lora_E" in name}


def _described(kind: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "no such tensor" if kind is None else f"{kind[0]} {str(kind[1]).removeprefix('torch.')}"
