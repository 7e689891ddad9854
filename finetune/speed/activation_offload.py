"""Less GPU memory for the CPU's: what backward keeps of layers, and the optimizer's state.

Under `activation_checkpointing: mlp` or `mlp_int8` layers keep 4 to 6 times their input, tokens x hidden,
beside what is recomputed or rounded. That is offloaded where the CPU has room for it. Of a layer that is
recomputed whole, it is the input alone, as in Unsloth: less to copy, more to recompute. TRL's
`activation_offloading` moves all that backward keeps, 20 times as much.
Copies run on a stream of their own, beside the layers.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from finetune.core import formatting, upstream_private

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from finetune.core.run_checks import RunChecks

LEAVING = 1  # passes whose copies forward does not wait for; what they copy is GPU memory
SMALL = 8  # what is less than this part of a layer's input stays: factors of adapters, attention's sums


class Kept:
    """A tensor in CPU memory, and on its way back."""

    def __init__(self, host: Tensor, device: torch.device, owner: Pass) -> None:
        self.host, self.device, self.owner = host, device, owner
        self.arriving: Tensor | None = None


class Pass:
    """One pass through a layer: what it keeps in CPU memory, which lives as long as autograd holds it."""

    def __init__(self, layer: torch.nn.Module, least: int, before: Pass | None) -> None:
        self.layer, self.least = layer, max(least, 1)  # numbers of a tensor that leaves
        self.weights: set[int] | None = None  # where they lie, from the first tensor on: they stay
        self.before = weakref.ref(before) if before else None  # whose turn in backward is next
        self.kept: list[weakref.ref[Kept]] = []
        self.leaving: list[Tensor] = []  # GPU memory that copies still read
        self.gone: Any = None  # the event of the last copy
        self.arrived: Any = None  # that of the last copy back
        self.asked = False

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor stays: small, a weight, or a part of another, which would hold its memory."""
        if not tensor.is_floating_point() or tensor.element_size() < 2 or tensor.numel() < self.least:
            return True
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            return True
        if self.weights is None:  # FSDP2's are whole from a layer's call on, and elsewhere at each call
            held = (*self.layer.parameters(), *self.layer.buffers())
            whole = (one for one in held if not isinstance(one, DTensor))
            self.weights = {one.untyped_storage().data_ptr() for one in whole}
        return tensor.untyped_storage().data_ptr() in self.weights


class Activations:
    """Keeps what backward needs of layers in CPU memory, pinned where it comes from a GPU.

    Around each layer's call: of a checkpointed layer the checkpoint saves the input through the hooks that it
    stands in and all else through its own; of another all large tensors pass. The layer itself, compiled or
    not, is not touched, and what comes back is what left, bit for bit: loss and gradients are those of
    `offload: none`.

    In backward what the layer that comes next needs is fetched while a layer is computed: that of two layers
    is on the GPU at a time, whatever their number. Backward begins with `last`: where that one stays, the
    first fetch runs beside it.
    """

    def __init__(self, layers: list[Any], device: torch.device, last: Any = None) -> None:
        self.layers, self.gpu = layers, torch.get_device_module(device)
        self.stream = self.gpu.Stream()
        self.restart()
        for layer in layers if last is None or last in layers else [*layers, last]:
            own = upstream_private.checkpoint_function(layer) if layer.gradient_checkpointing else _straight
            layer.gradient_checkpointing = True  # transformers calls the layer through what follows
            around = partial(self.run, own, layer) if layer in layers else partial(self.ahead, own)
            upstream_private.set_checkpoint_function(layer, around)

    def restart(self) -> None:
        """Count from here on, and let go of what a pass that failed has left."""
        self.out = self.back = 0  # passes
        self.tensors = self.bytes = self.pinned = 0
        self.leaving: list[Pass] = []
        self.current: Pass | None = None
        self.last: weakref.ref[Pass] | None = None

    def run(
        self, around: Callable[..., Any], layer: nn.Module, call: Callable[..., Any], *inputs: Any
    ) -> Any:
        """A layer's call, by transformers' own."""
        self.wait_for_leaving(LEAVING)
        self.current = Pass(layer, inputs[0].numel() // SMALL, self.last() if self.last else None)
        try:
            with saved_tensors_hooks(self.keep, self.give_back):
                return around(call, *inputs)
        finally:
            if self.current.kept:
                self.out += 1
                self.last = weakref.ref(self.current)
                self.leaving.append(self.current)
            self.current = None

    def ahead(self, around: Callable[..., Any], call: Callable[..., Any], *inputs: Any) -> Any:
        """The call of a layer that stays, in whose backward the first fetch begins."""
        made, owner = around(call, *inputs), self.last() if self.last else None
        hidden = made[0] if isinstance(made, tuple) else made
        if owner and hidden.requires_grad:
            hidden.register_hook(lambda _: self.fetch(owner))
        return made

    def keep(self, tensor: Tensor) -> Tensor | Kept:
        """Start to copy what a layer keeps into CPU memory; weights, masks and what is small stay."""
        if self.current is None or self.current.holds(tensor):
            return tensor
        owner, host = self.current, torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.stream.wait_stream(self.gpu.current_stream())
        with self.gpu.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        owner.leaving.append(tensor)
        owner.gone = self.mark()
        kept = Kept(host, tensor.device, owner)
        owner.kept.append(weakref.ref(kept))
        self.tensors, self.pinned = self.tensors + 1, self.pinned + host.is_pinned()
        self.bytes += host.nbytes
        return kept

    def give_back(self, kept: Tensor | Kept) -> Tensor:
        """What was kept, for its layer's backward; starts to fetch what the layer after it needs."""
        if not isinstance(kept, Kept):
            return kept
        self.wait_for_leaving(0)
        owner = kept.owner
        if kept.arriving is None:
            self.fetch(owner)
        owner.arrived.wait(self.gpu.current_stream())
        tensor, kept.arriving = kept.arriving, None
        before = owner.before() if owner.before else None
        if before and before.arrived is None:
            self.fetch(before)
        self.back, owner.asked = self.back + (not owner.asked), True
        assert tensor is not None
        return tensor

    def fetch(self, owner: Pass) -> None:
        """Start to copy back, into memory of the stream that computes, once that stream is here."""
        coming = [kept for one in owner.kept if (kept := one()) and kept.arriving is None]
        for kept in coming:
            kept.arriving = torch.empty_like(kept.host, device=kept.device)
        self.stream.wait_stream(self.gpu.current_stream())
        with self.gpu.stream(self.stream):
            for kept in coming:
                assert kept.arriving is not None
                kept.arriving.copy_(kept.host, non_blocking=True)
        owner.arrived = self.mark()

    def wait_for_leaving(self, most: int) -> None:
        """Let go of what passes have copied: what computes waits for it (the CPU does not)."""
        while len(self.leaving) > most:
            gone = self.leaving.pop(0)
            gone.gone.wait(self.gpu.current_stream())
            gone.leaving.clear()

    def mark(self) -> Any:
        event = self.gpu.Event()
        event.record(self.stream)
        return event

    def add_receipt(self, micro_batches: int, ledger: RunChecks) -> None:
        """What left in the first step and came back."""
        asked = len(self.layers) * micro_batches
        got = f"{self.out} out, {self.back} back: {self.tensors} tensors, {formatting.size(self.bytes)}"
        how = f"copies made in step 1: {len(self.layers)} layers x {micro_batches} micro-batches"
        ok = self.out == self.back == asked
        ledger.add("speed.offload", f"{asked} passes", f"{got}, {self.pinned} pinned", how, ok=ok)


def _straight(layer: Callable[..., Any], *inputs: Any) -> Any:
    """In a checkpoint's place, where the layer is not recomputed whole."""
    return layer(*inputs)


def of(model: torch.nn.Module) -> Activations | None:
    """What stands around this model's layers, if anything does."""
    for module in model.modules():
        around = getattr(upstream_private.checkpoint_function(module), "func", None)
        owner = getattr(around, "__self__", None)
        if isinstance(owner, Activations):
            return owner
    return None
