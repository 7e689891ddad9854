"""Offload saved activations of layers to CPU memory.

Under `activation_checkpointing: mlp` or `mlp_int8`, a layer saves 4 to 6 times its input (tokens x hidden) in
addition to the activations that are recomputed or rounded. finetune offloads these if CPU memory is large
enough. For a layer that is recomputed whole, it offloads only the input, as Unsloth does. TRL's
`activation_offloading` moves all saved activations, 20 times as much. Copies run on a separate stream at the
same time as the layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from finetune.core import formatting, upstream_private
from finetune.core.run_checks import RunChecks

LEAVING = 1  # passes whose copies may still run in the forward pass; their tensors still use GPU memory
SMALL = 8  # tensors smaller than 1/8 of a layer's input stay, such as adapter outputs and attention's sums


class Kept:
    """A tensor in CPU memory, and its copy that arrives on the GPU."""

    def __init__(self, host: Tensor, device: torch.device, owner: Pass) -> None:
        self.host, self.device, self.owner = host, device, owner
        self.arriving: Tensor | None = None


class Pass:
    """One pass through a layer, and its tensors in CPU memory, which live as long as autograd holds them."""

    def __init__(self, layer: torch.nn.Module, least: int, before: Pass | None) -> None:
        self.layer, self.least = layer, max(least, 1)  # smallest number of elements to offload
        self.weights: set[int] | None = None  # addresses of the weights, which stay on the GPU
        self.before = weakref.ref(before) if before else None  # the next pass in the backward pass
        self.kept: list[weakref.ref[Kept]] = []
        self.leaving: list[Tensor] = []  # GPU memory that copies still read
        self.gone: Any = None  # the event of the last copy
        self.arrived: Any = None  # the event of the last copy back
        self.asked = False

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor stays, because it is small, a weight or a view of another tensor."""
        if not tensor.is_floating_point() or tensor.element_size() < 2 or tensor.numel() < self.least:
            return True
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            return True
        if self.weights is None:  # FSDP2 gathers the weights at each call of the layer, at another address
            weights = (*self.layer.parameters(), *self.layer.buffers())
            whole = (one for one in weights if not isinstance(one, DTensor))
            self.weights = {one.untyped_storage().data_ptr() for one in whole}
        return tensor.untyped_storage().data_ptr() in self.weights


class Activations:
    """Offload saved tensors of layers to CPU memory, which is pinned for tensors of a GPU.

    The hooks are around the call of each layer. A checkpointed layer saves only its input through these
    hooks. Another layer saves all large tensors through them. The layer itself, compiled or not, does not
    change. The tensors come back bit for bit, so loss and gradients equal those of `offload: none`.

    In the backward pass, the tensors of the next layer are copied while a layer runs. So the GPU holds the
    tensors of two layers at a time. The backward pass begins with `last`. If `last` is not offloaded, the
    first copy runs at the same time as `last`.
    """

    def __init__(self, layers: list[Any], device: torch.device, last: nn.Module | None = None) -> None:
        self.layers, self.gpu = layers, torch.get_device_module(device)
        self.stream = self.gpu.Stream()
        self.restart()
        for layer in layers if last is None or last in layers else [*layers, last]:
            own = upstream_private.checkpoint_function(layer) if layer.gradient_checkpointing else _straight
            layer.gradient_checkpointing = True  # transformers then calls the layer through this function
            around = partial(self.run, own, layer) if layer in layers else partial(self.ahead, own)
            upstream_private.set_checkpoint_function(layer, around)

    def restart(self) -> None:
        """Restart the counts, and release the tensors of a failed pass."""
        self.out = self.back = 0  # passes
        self.tensors = self.bytes = self.pinned = 0
        self.leaving: list[Pass] = []
        self.current: Pass | None = None
        self.last: weakref.ref[Pass] | None = None

    def run(
        self, around: Callable[..., Any], layer: nn.Module, call: Callable[..., Any], *inputs: Any
    ) -> Any:
        """Call a layer as transformers does, with hooks for its saved tensors."""
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

    def ahead(self, around: Callable[..., Any], call: Callable[..., Any], *inputs: object) -> Any:
        """Call a layer that is not offloaded. Its backward pass starts the first copy back."""
        output, owner = around(call, *inputs), self.last() if self.last else None
        hidden = output[0] if isinstance(output, tuple) else output
        if owner and hidden.requires_grad:
            hidden.register_hook(lambda _: self.fetch(owner))
        return output

    def keep(self, tensor: Tensor) -> Tensor | Kept:
        """Start to copy a saved tensor to CPU memory. Weights, masks and small tensors stay."""
        if self.current is None or self.current.holds(tensor):
            return tensor
        owner, host = self.current, torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.stream.wait_stream(self.gpu.current_stream())
        with self.gpu.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        owner.leaving.append(tensor)
        owner.gone = self.mark()
        offloaded = Kept(host, tensor.device, owner)
        owner.kept.append(weakref.ref(offloaded))
        self.tensors, self.pinned = self.tensors + 1, self.pinned + host.is_pinned()
        self.bytes += host.nbytes
        return offloaded

    def give_back(self, offloaded: Tensor | Kept) -> Tensor:
        """Return a saved tensor for the backward pass, and start to copy the tensors of the next layer."""
        if not isinstance(offloaded, Kept):
            return offloaded
        self.wait_for_leaving(0)
        owner = offloaded.owner
        if offloaded.arriving is None:
            self.fetch(owner)
        owner.arrived.wait(self.gpu.current_stream())
        tensor, offloaded.arriving = offloaded.arriving, None
        before = owner.before() if owner.before else None
        if before and before.arrived is None:
            self.fetch(before)
        self.back, owner.asked = self.back + (not owner.asked), True
        assert tensor is not None
        return tensor

    def fetch(self, owner: Pass) -> None:
        """Start to copy the tensors of a pass back, when the compute stream has reached this point."""
        coming = [offloaded for one in owner.kept if (offloaded := one()) and offloaded.arriving is None]
        for offloaded in coming:
            offloaded.arriving = torch.empty_like(offloaded.host, device=offloaded.device)
        self.stream.wait_stream(self.gpu.current_stream())
        with self.gpu.stream(self.stream):
            for offloaded in coming:
                assert offloaded.arriving is not None
                offloaded.arriving.copy_(offloaded.host, non_blocking=True)
        owner.arrived = self.mark()

    def wait_for_leaving(self, most: int) -> None:
        """Release the tensors that passes have copied. The compute stream waits for the copies."""
        while len(self.leaving) > most:
            gone = self.leaving.pop(0)
            gone.gone.wait(self.gpu.current_stream())
            gone.leaving.clear()

    def mark(self) -> Any:
        event = self.gpu.Event()
        event.record(self.stream)
        return event

    def add_run_check(self, micro_batches: int, checks: RunChecks) -> None:
        """Add a run check of the tensors that were offloaded and copied back in the first step."""
        expected = len(self.layers) * micro_batches
        actual = f"{self.out} out, {self.back} back: {self.tensors} tensors, {formatting.size(self.bytes)}"
        checks.add(
            "speed.offload",
            expected=f"{expected} forward passes",
            actual=f"{actual}, {self.pinned} pinned",
            how=f"copies made in step 1: {len(self.layers)} layers x {micro_batches} micro-batches",
            ok=self.out == self.back == expected,
        )


def _straight(layer: Callable[..., Any], *inputs: object) -> Any:
    """Call a layer that is not recomputed whole, in place of a checkpoint."""
    return layer(*inputs)


def of(model: torch.nn.Module) -> Activations | None:
    """Return the `Activations` of this model's layers, or `None`."""
    for module in model.modules():
        around = getattr(upstream_private.checkpoint_function(module), "func", None)
        owner = getattr(around, "__self__", None)
        if isinstance(owner, Activations):
            return owner
    return None
