"""The kernels of a mixture of experts against float64 references, and whole models, on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from finetune.core.run_checks import RunChecks
from finetune.kernels import attention_functions, fp8_expert_ops
from finetune.kernels import expert_ops as ops
from finetune.kernels.kernel_limits import IMPLEMENTATIONS
from finetune.quantization import mxfp4_experts, stacked_experts
from finetune.speed import fused_experts
from finetune.speed.expert_gemms import Routing, StackedWeight, down, down_gradient, gate_up, gate_up_gradient
from finetune.speed.fused_layers import Fused
from finetune.speed.live_model_spec import decoder_layers
from finetune.speed.packing_isolation import prove_apart
from support.kernel_steps import apart, error, step
from support.runs import metrics, run_checks
from support.tiny_models import save, sizes

if TYPE_CHECKING:
    from pathlib import Path

ROUTES = {
    "an expert with no token": lambda ids: ids.clamp(min=1),
    "one expert with all": lambda ids: torch.full_like(ids, 2),
    "any": lambda ids: ids,
}
SIZES = [
    (64, 2, 128, 64),
    (333, 1, 96, 40),
    (1000, 4, 256, 768),
    (37, 3, 2048, 72),
]  # tokens, each, hidden, width
COUNT = 6


def rounded(*shape: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers in bf16 on the GPU, and the same in float64 on the CPU."""
    made = (torch.randn(*shape) * scale).bfloat16()
    return made.cuda(), made.double()


def routed(route: str, tokens: int, each: int) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    ids = ROUTES[route](torch.rand(tokens, COUNT).topk(each).indices)
    ours, right = ops.sort_by_expert(ids.cuda(), COUNT), ops.sort_by_expert(ids, COUNT)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(ours, right, strict=True))
    return list(ours)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_rows_sums_and_grouped_products(route: str, shape: tuple[int, int, int, int]) -> None:
    tokens, each, hidden, width = shape
    order, places, ends, _ = routed(route, tokens, each)
    (x, exact), (weights, shares) = rounded(tokens, hidden), rounded(tokens, each)
    rows = ops.rows_of_experts(x, places)
    assert torch.equal(rows, x[order.long() // each])
    weight, right = rounded(COUNT, width, hidden, scale=0.1)
    made = ops.grouped_mm(rows, weight, ends, True)
    wanted = ops.grouped_mm(rows.cpu().double(), right, ends.cpu(), True)
    assert error(made, wanted) < 5e-3
    back = ops.grouped_mm(made, weight, ends, False)
    assert error(back, ops.grouped_mm(made.cpu().double(), right, ends.cpu(), False)) < 5e-3
    both = [(weights, shares), (weights.float(), shares), (None, None)]
    for given, exactly in both:
        made = ops.sum_of_experts(rows, places, given, tokens)
        times = float(each) if exactly is None else exactly.sum(1, keepdim=True)
        assert error(made, exact * times) < 5e-3


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize(("first", "last"), [(0, 0), (16, 0), (0, 16), (16, 32), (64, 16), (128, 128)])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_activation(route: str, shape: tuple[int, int, int, int], first: int, last: int, act: str) -> None:
    tokens, each, _, width = shape
    order, _, _, tiles = routed(route, tokens, each)
    rows = tokens * each
    z, b = (
        rounded(rows, 2 * width + first),
        rounded(COUNT, 2 * width, first, scale=0.1) if first else (None, None),
    )
    a = rounded(COUNT, last, width, scale=0.1) if last else (None, None)
    (grad, exact_grad), (weights, shares) = rounded(rows, width + last), rounded(tokens, each)
    made = ops.activate_experts(z[0], b[0], a[0], tiles, width, act)
    assert error(made, ops.activate_experts(z[1], b[1], a[1], tiles.cpu(), width, act)) < 6e-3
    got = ops.activate_experts_backward(z[0], b[0], a[0], grad, weights, order, tiles, width, act)
    right = ops.activate_experts_backward(
        z[1], b[1], a[1], exact_grad, shares, order.cpu(), tiles.cpu(), width, act
    )
    for name, ours, wanted in zip(("dz", "h", "thin", "dweights"), got, right, strict=True):
        assert ours.shape == wanted.shape, name
        assert not wanted.numel() or error(ours, wanted) < 8e-3, name


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("rank", [16, 64, 128])
def test_adapter_gradients(route: str, shape: tuple[int, int, int, int], rank: int) -> None:
    tokens, each, hidden, width = shape
    order, _, ends, _ = routed(route, tokens, each)
    z, exact = rounded(tokens * each, 2 * width + rank)
    x, right = rounded(tokens, hidden)
    thin, exact_thin = z[:, 2 * width :], exact[:, 2 * width :]
    for other, exactly, chosen in ((z[:, : 2 * width], exact[:, : 2 * width], None), (x, right, order)):
        made = ops.product_of_experts(thin, other, ends, chosen, each)
        places = None if chosen is None else chosen.cpu()
        wanted = ops.product_of_experts(exact_thin, exactly, ends.cpu(), places, each)
        assert made.dtype == torch.float32 and made.isfinite().all()
        assert error(made, wanted) < 1e-3


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", [*SIZES, (700, 2, 1408, 352)], ids=str)
@pytest.mark.parametrize("rank", [0, 16, 64])
def test_fp8_products_are_those_of_the_cpu(route: str, shape: tuple[int, int, int, int], rank: int) -> None:
    """Gate and up, down, and both gradients; the widths of some shapes are no multiple of a tile."""
    tokens, each, hidden, width = shape
    width = width // 16 * 16
    sorted_rows = routed(route, tokens, each)
    there = Routing(*sorted_rows, each)
    here = Routing(*(one.cpu() for one in sorted_rows), each)
    for inputs, outputs, below in ((hidden, 2 * width, True), (width, hidden, False)):
        stored = stacked_experts.quantize(rounded(COUNT, outputs, inputs)[0], "fp8")
        scale = stored.dequantize_by.scale
        thin = rounded(COUNT, *((rank, inputs) if below else (outputs, rank)))[0] if rank else None
        on_gpu = StackedWeight(thin, stored.detach(), scale, None, True)
        on_cpu = StackedWeight(*(None if one is None else one.cpu() for one in on_gpu[:4]), True)
        forward, backward = (gate_up, gate_up_gradient) if below else (down, down_gradient)
        rows = tokens if below else tokens * each
        x = rounded(rows, inputs + (0 if below else rank))[0]
        made = forward(x, on_gpu, there)
        assert error(made, forward(x.cpu(), on_cpu, here)) < 5e-3
        grad = rounded(tokens * each, outputs + rank)[0] if below else rounded(tokens, outputs)[0]
        made = backward(grad, on_gpu, there)
        assert error(made, backward(grad.cpu(), on_cpu, here)) < 5e-3


STORAGES = ["nf4", "fp4", "fp8", "int8"]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", [(3, 40, 64), (5, 1536, 2048), (2, 72, 768)], ids=str)
def test_dequantized_experts_are_those_of_the_cpu(storage: str, shape: tuple[int, int, int]) -> None:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    values = stacked_experts.quantize(weight, storage)
    stored = values.dequantize_by.stored(values)
    below, behind = torch.randn(shape[0], 16, shape[2]), torch.randn(shape[0], shape[1], 32)
    for thin, under in ((None, True), (below, True), (behind, False)):
        there = None if thin is None else thin.cuda().bfloat16()
        made = ops.dequantize_experts(stored, there, under, torch.bfloat16)
        here = None if thin is None else thin.bfloat16()
        wanted = ops.dequantize_experts([one.cpu() for one in stored], here, under, torch.bfloat16)
        assert torch.equal(made.cpu(), wanted)


@pytest.mark.parametrize("storage", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(3, 48, 64), (5, 1536, 2048), (2, 80, 768), (2, 16, 7168)], ids=str)
def test_four_bit_experts_in_fp8_are_those_of_the_cpu(storage: str, shape: tuple[int, int, int]) -> None:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    weight[0, 3] /= 100
    values = stacked_experts.quantize(weight, storage)
    stored = values.dequantize_by.stored(values.detach())
    codes, scale = fp8_expert_ops.four_bit_to_fp8(*stored)
    right, right_scale = fp8_expert_ops.four_bit_to_fp8(*(one.cpu() for one in stored))
    assert torch.allclose(scale.cpu(), right_scale, rtol=1e-6, atol=0)
    differing = (codes.cpu().float() != right.float()).float().mean()  # at the border between two codes
    assert error(codes.float() * scale, right.float() * right_scale) < 1e-3 and differing < 1e-3


def test_dequantized_mxfp4_experts_are_those_of_the_cpu() -> None:
    blocks = torch.randint(256, (3, 40, 5, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 40, 5), dtype=torch.uint8)
    made, right = (
        mxfp4_experts.quantized(blocks.to(device), scales.to(device), torch.bfloat16)
        for device in ("cuda", "cpu")
    )
    there, here = (one.dequantize_by(one.detach()) for one in (made, right))
    assert there.shape == (3, 160, 40) and torch.equal(there.cpu(), here)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("storage", ["nf4", "fp8"])
def test_a_step_of_quantized_experts_with_their_own_gate(storage: str, compiled: bool) -> None:
    """gpt-oss, beside transformers' own forward on the dequantized weights."""
    model, own = (mixture(None, storage=storage, family="gpt_oss") for _ in range(2))
    stacked_experts.dequantize(own)
    fused_experts.install_quantized(model)
    # In bf16, transformers' forward is 5.7% off float32 there, and this one 5.0% (measured on a CPU)
    assert_same_step(model, own, compiled, allowed=0.08)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("storage", "fp8_experts"), [*((storage, "auto") for storage in STORAGES), ("nf4", True), ("fp8", False)]
)
def test_a_quantized_model_s_step_is_pefts(storage: str, fp8_experts: Any, compiled: bool) -> None:
    """PEFT runs on the dequantized weights."""
    model, own = mixture(BOTH, storage=storage), mixture(BOTH, storage=storage)
    stacked_experts.dequantize(own)
    fused_experts.install_quantized(model)
    why = fused_experts.choose_fp8(model, fp8_experts)
    assert ("stored in neither" in why) == (storage == "int8")
    in_fp8 = fp8_experts is True or (fp8_experts == "auto" and storage == "fp8")
    assert ("with fp8 GEMMs" in Fused(model, decoder_layers(model)).summary()) == in_fp8
    # fp8 GEMMs round the rows to fp8, too
    assert_same_step(model, own, compiled, allowed=0.08 if in_fp8 else 0.03)


def assert_same_step(model: Any, own: Any, compiled: bool, allowed: float = 0.03) -> None:
    """The step is that of PEFT's own forward, and the same twice, to the last bit."""
    torch._dynamo.reset()
    for layer in decoder_layers(model) if compiled else []:
        layer.compile(fullgraph=True)
    (loss, gradients), (right, theirs) = step(model), step(own)
    assert abs(loss - right) < 5e-3 and apart(gradients, theirs) < allowed
    again, same = step(model)
    assert again == loss and all(torch.equal(same[name], gradients[name]) for name in same)


def mixture(parameters: Any, seed: int = 0, storage: str = "", family: str = "qwen3_moe") -> Any:
    """A PEFT model on the GPU, with quantized experts if `storage` is given."""
    torch.manual_seed(seed)
    experts = {"num_local_experts": 8, "intermediate_size": 96, "pad_token_id": 0}  # of gpt-oss
    if family == "qwen3_moe":
        experts = {"num_experts": 8, "moe_intermediate_size": 128}
    config = AutoConfig.for_model(
        family, hidden_size=256, num_experts_per_tok=2, head_dim=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=1000, **experts,
    )  # fmt: skip
    whole: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    whole.cuda()
    for name in stacked_experts.names(whole) if storage else ():
        owner, _, leaf = name.rpartition(".")
        values = stacked_experts.quantize(whole.get_parameter(name).detach(), storage)
        setattr(whole.get_submodule(owner), leaf, values)
    stacked_experts.parametrize_experts(whole)
    with stacked_experts.plain_parameters(whole):
        lora = LoraConfig(r=8, target_modules=targets, target_parameters=parameters)
        model = get_peft_model(whole, lora).cuda()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn_like(parameter)
    return model.train()


BOTH = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("parameters", [BOTH, None], ids=["both", "frozen"])
def test_a_model_s_step_is_pefts(parameters: Any, compiled: bool) -> None:
    """Compiled as one graph, too."""
    model, own = mixture(parameters), mixture(parameters)
    fused = Fused(model, decoder_layers(model))
    assert len(fused.experts.served) == 2 and 0 < fused.experts.worst < 1e-2
    assert_same_step(model, own, compiled)


# torch says that its mode does not find every wait (torch/csrc/cuda/Module.cpp)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_step_waits_for_the_gpu() -> None:
    model = mixture(BOTH)
    Fused(model, decoder_layers(model))
    experts = decoder_layers(model)[0].mlp.experts
    x = torch.randn(500, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids, weights = torch.rand(500, 8, device="cuda").topk(2).indices, torch.rand(500, 2, device="cuda")
    experts(x, ids, weights).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(x, ids, weights).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("storage", ["none", "nf4", "fp8"])
def test_small_passes_of_experts_are_cuda_graphs_by_themselves(
    storage: str, train: Any, tmp_path: Path
) -> None:
    """They follow the compiled run."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64}
    config = Qwen3MoeConfig(**sizes(hidden_size=256, num_key_value_heads=2, **experts))
    model = save(tmp_path / "model", AutoModelForCausalLM.from_config(config))
    given = [f"model.name={model}", "train.max_steps=7", "train.effective_batch_size=8"]
    given += ["train.per_device_train_batch_size=2", "data.packing=true", "data.max_length=512"]
    given += ["adapter.target_modules=all-linear-and-experts", f"model.quantization={storage}"]
    plain = train(*given, "speed.compile=default", name="plain")
    torch.compiler.reset()
    run = train(*given, "speed.compile=true", name="graphs")
    checks = run_checks(run)
    assert all(check["passed"] for check in checks.values())
    assert checks["CUDA graphs"]["actual"] == "4 recorded"
    assert "experts of 2 of 2 layers" in checks["speed.fused"]["actual"]
    for one, other in zip(metrics(plain), metrics(run), strict=True):
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=5e-3)


def test_packed_examples_of_plain_experts_are_isolated() -> None:
    """In bf16, an expert's GEMM rounds by the number of its tokens, which is no leak."""
    for_each = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "head_dim": 64}
    config = Qwen3MoeConfig(**sizes(hidden_size=256, num_hidden_layers=4, num_key_value_heads=2, **for_each))
    attention_functions.register("varlen")
    name = IMPLEMENTATIONS["varlen"]
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=name, dtype=torch.float32
    ).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        prove_apart(model, 512, "varlen", checks := RunChecks())
    assert checks.entries[0].passed
