"""Less GPU memory for the CPU's: inputs of recomputed layers, and the optimizer's state.

Of a recomputed layer nothing but its input is kept until backward: tokens x hidden, 2 bytes a number in
bf16. These inputs are what is offloaded (as Unsloth does; TRL's `activation_offloading` moves all that
backward keeps, 20 times as much, at PCIe's speed). Copies run on a stream of their own, beside the layers.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import TrainerCallback

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from finetune.receipts import Ledger

LEAVING = 1  # inputs whose copies forward does not wait for; each is GPU memory


class Kept:
    """A layer's input in CPU memory, and on its way back."""

    def __init__(self, host: Tensor, like: Tensor, before: Kept | None) -> None:
        self.host, self.device = host, like.device
        self.before = weakref.ref(before) if before else None  # whose turn in backward is next
        self.arriving: Tensor | None = None
        self.arrived: Any = None  # the event of that copy


class Activations:
    """Keeps the inputs of recomputed layers in CPU memory, pinned where they come from a GPU.

    Around each layer's checkpoint, which saves the layer's input through the hooks that it stands in and all
    else through its own. The layer itself, compiled or not, is not touched, and what comes back is what left,
    bit for bit: loss and gradients are those of `offload: none`.

    In backward the input of the layer that comes next is fetched while a layer is computed: two inputs are
    on the GPU at a time, whatever the number of layers.
    """

    def __init__(self, layers: list[Any], device: torch.device) -> None:
        self.layers, self.gpu = len(layers), torch.get_device_module(device)
        self.stream = self.gpu.Stream()
        self.leaving: list[tuple[Tensor, Any]] = []
        self.last: weakref.ref[Kept] | None = None
        self.restart()
        for layer in layers:
            layer._gradient_checkpointing_func = partial(self.run, layer._gradient_checkpointing_func)

    def restart(self) -> None:
        """Count from here on."""
        self.out = self.back = self.bytes = self.pinned = 0

    def run(self, checkpoint: Callable[..., Any], layer: Callable[..., Any], *inputs: Any) -> Any:
        """A layer's checkpoint, by transformers' own call."""
        with saved_tensors_hooks(self.keep, self.give_back):
            return checkpoint(layer, *inputs)

    def keep(self, tensor: Tensor) -> Tensor | Kept:
        """Start to copy a layer's input into CPU memory; masks and the like stay."""
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        self.wait_for_leaving(LEAVING)
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.stream.wait_stream(self.gpu.current_stream())
        with self.gpu.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        kept = Kept(host, tensor, self.last() if self.last else None)
        self.last = weakref.ref(kept)
        self.leaving.append((tensor, self.mark()))
        self.out, self.pinned = self.out + 1, self.pinned + host.is_pinned()
        self.bytes += host.nbytes
        return kept

    def give_back(self, kept: Tensor | Kept) -> Tensor:
        """The input again, for its layer's backward; starts to fetch the one that comes after it."""
        if not isinstance(kept, Kept):
            return kept
        self.wait_for_leaving(0)
        if kept.arriving is None:
            self.fetch(kept)
        kept.arrived.wait(self.gpu.current_stream())
        tensor, kept.arriving = kept.arriving, None
        before = kept.before() if kept.before else None
        if before and before.arriving is None:
            self.fetch(before)
        self.back += 1
        assert tensor is not None
        return tensor

    def fetch(self, kept: Kept) -> None:
        """Start to copy back, into memory of the stream that computes, once that stream is here."""
        kept.arriving = torch.empty_like(kept.host, device=kept.device)
        self.stream.wait_stream(self.gpu.current_stream())
        with self.gpu.stream(self.stream):
            kept.arriving.copy_(kept.host, non_blocking=True)
        kept.arrived = self.mark()

    def wait_for_leaving(self, most: int) -> None:
        """Let go of inputs whose copy is done: what computes waits for it (the CPU does not)."""
        while len(self.leaving) > most:
            self.leaving.pop(0)[1].wait(self.gpu.current_stream())

    def mark(self) -> Any:
        event = self.gpu.Event()
        event.record(self.stream)
        return event

    def add_receipt(self, micro_batches: int, ledger: Ledger) -> None:
        """What left in the first step and came back."""
        asked = self.layers * micro_batches
        got = f"{self.out} out, {self.back} back, {self.bytes / 2**20:.1f} MiB, {self.pinned} pinned"
        how = f"copies made in step 1: {self.layers} recomputed layers x {micro_batches} micro-batches"
        ledger.add("speed.offload", f"{asked} inputs", got, how, ok=self.out == self.back == asked)


def of(model: torch.nn.Module) -> Activations | None:
    """What stands around this model's layers, if anything does."""
    for module in model.modules():
        around = getattr(getattr(module, "_gradient_checkpointing_func", None), "func", None)
        owner = getattr(around, "__self__", None)
        if isinstance(owner, Activations):
            return owner
    return None


class SendGradients(TrainerCallback):
    """Gradients as they are when the optimizer steps, for torchao's CPUOffloadOptimizer.

    It copies each gradient to the CPU as backward makes it, which is before `max_grad_norm` clips it, and
    would step with what was not clipped. So they are copied once more, on its stream and in its order: one
    tensor's step on the CPU runs beside the next one's copy.
    """

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.max_grad_norm:
            return
        wrapped = kwargs["optimizer"]
        optimizer = getattr(wrapped, "optimizer", wrapped)
        optimizer.stream.wait_stream(torch.cuda.current_stream())
        for parameter in list(optimizer.queue):
            with torch.cuda.stream(optimizer.stream):
                optimizer.param_d2h_map[parameter].grad.copy_(parameter.grad, non_blocking=True)
            optimizer.queue[parameter] = optimizer.stream.record_event()
