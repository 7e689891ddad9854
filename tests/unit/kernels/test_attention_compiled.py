"""Attention kernels and torch.compile: one graph, shapes that they state, one order of sums where asked."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.kernels.attention_functions import (
    flash,
    flash4_backward,
    flash4_forward,
    flash4_kernel,
    register,
    varlen,
    without_mask,
)
from finetune.speed.packing_isolation import deterministic
from support.plain_attention import batch, loss_and_gradients, tiny


def test_a_layer_compiles_whole() -> None:
    register("cudnn")
    model = tiny("llama").train()
    for name in ("eager", "finetune_cudnn"):
        model.set_attn_implementation(name)
        inputs = batch(packed=False)
        if name == "finetune_cudnn":
            for layer in model.model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
            got = loss_and_gradients(model, inputs)
        else:
            wanted = loss_and_gradients(model, inputs)
    assert torch.allclose(wanted[0], got[0], rtol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", [flash4_kernel, varlen()])
def test_kernels_of_a_gpu_trace_into_one_graph(kernel, packed: bool) -> None:
    """Without running: shapes alone, which the operations state themselves."""
    graphs = []

    def traced(graph, inputs):
        graphs.append(graph)
        return lambda *_: (torch.zeros(1, 40, 8, 16),)

    query, key, value = (torch.zeros(1, heads, 40, 16) for heads in (8, 2, 2))
    said = {"cu_seq_lens_q": torch.tensor([0, 10, 40]).int(), "max_length_q": 30} if packed else {}
    attend = torch.compile(without_mask(kernel), fullgraph=True, backend=traced)
    attend(torch.nn.Identity(), query, key, value, None, sliding_window=8, **said)
    (graph,) = graphs
    assert "flash_attention_4" in graph.code or "varlen_attn" in graph.code
    torch._dynamo.reset()


class _Documents(torch.autograd.Function):
    """What torch.compile meets in FlashAttention 2 and 3: a Function that is given the borders
    of queries and those of keys."""

    @staticmethod
    def forward(ctx, query, key, value, of_queries, of_keys):
        ctx.save_for_backward(query, key, value, of_queries, of_keys)
        return query * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors[1:3]), None, None


def test_flash_attention_2_and_3_compile_on_documents() -> None:
    package = SimpleNamespace(flash_attn_varlen_func=lambda *given, **_: _Documents.apply(*given[:5]))
    query, key, value = (torch.randn(1, n, 40, 16, requires_grad=True) for n in (8, 2, 2))
    said = {"cu_seq_lens_q": torch.tensor([0, 10, 40]).int(), "max_length_q": 30}
    attend = torch.compile(without_mask(flash(package)), fullgraph=True, backend="aot_eager")
    out, _ = attend(torch.nn.Identity(), query, key, value, None, **said)
    assert torch.equal(out, query.transpose(1, 2) * 2)
    torch._dynamo.reset()


@pytest.mark.parametrize("packed", [False, True])
def test_flash_attention_4_s_operation_states_its_shapes(packed: bool) -> None:
    with FakeTensorMode():
        tokens, heads = ((640,), (8, 640)) if packed else ((2, 320), (2, 8, 320))
        given = [torch.empty(*tokens, n, 64, requires_grad=True) for n in (8, 2, 2)]
        borders = torch.empty(5, dtype=torch.int32) if packed else None
        out, sums = flash4_forward(*given, borders, 320, 0.125, None, 0.0)
        gradients = torch.autograd.grad(out, given, torch.empty_like(out))
        assert out.shape == (*tokens, 8, 64) and sums.shape == heads and sums.dtype == torch.float32
        assert [g.shape for g in gradients] == [t.shape for t in given]


@pytest.mark.parametrize(("capability", "asked"), [((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_flash_attention_4_adds_in_one_order_where_it_can(capability, asked: bool, monkeypatch) -> None:
    """The proof that documents are apart asks for it; on RTX 50 its backward would end the run."""
    told = []

    def backward(query, *given, **options):
        told.append(options["deterministic"])
        return query, query, query

    package: Any = ModuleType("interface")
    package._flash_attn_fwd, package._flash_attn_bwd = None, backward
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    with deterministic():
        flash4_backward._init_fn(*[torch.zeros(1, 4, 2, 16)] * 6, None, 4, 0.25, None, 0.0)
    assert told == [asked]
