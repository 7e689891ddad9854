"""The Triton kernels against plain torch, and fused layers compiled against PEFT's own, on a GPU."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from bitsandbytes import functional, nn
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.kernels import ops
from finetune.quantization import four_bit, fp8_linear
from finetune.speed.fused_layers import Fused
from finetune.speed.live_model_spec import decoder_layers
from support.four_bit import in_four_bits
from support.kernel_steps import apart, error, step
from support.soak import soak_except

if TYPE_CHECKING:
    from collections.abc import Callable

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TYPES = {
    "lora": lambda: LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    "dora": lambda: LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", use_dora=True),
    "adalora": lambda: AdaLoraConfig(init_r=24, target_r=16, total_step=100, target_modules=LINEAR),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}

# Of those that are fused and compiled: each type, and each base with two of them
OFTEN = [
    ("lora", "bf16"),
    ("lora", "nf4"),
    ("dora", "fp8"),
    ("adalora", "nf4"),
    ("ia3", "bf16"),
    ("ia3", "fp8"),
]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype)


def on_gpu(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


@pytest.mark.parametrize("shape", [(1, 16), (37, 4096), (64, 6144), (5, 14336), (3, 28672), (2, 40000)])
@pytest.mark.parametrize("scaled", [False, True])
def test_quantize_rows(shape: tuple[int, int], scaled: bool) -> None:
    torch.manual_seed(shape[1])
    x, column = random(*shape), torch.rand(shape[1]) + 0.5 if scaled else None
    x[0, :3] = torch.tensor([1e-30, -3.0, 700.0])
    codes, scale = ops.quantize_rows(*on_gpu(x, column))
    expected, right = ops.quantize_rows(x, column)
    assert torch.allclose(scale.cpu(), right, rtol=1e-6)
    value = (x.float() * (1.0 if column is None else column)).double()

    def lost(codes: torch.Tensor) -> float:  # of a value between two codes either is right
        return error(codes.cpu().double() * right.view(-1, 1), value)

    assert lost(codes) == pytest.approx(lost(expected), rel=1e-4)
    amax = (x.float() * (1.0 if column is None else column)).abs().amax(1)
    known, step = ops.quantize_rows(*on_gpu(x, column, amax))
    assert lost(known) == pytest.approx(lost(expected), rel=1e-4) and torch.allclose(
        step.cpu(), right, rtol=1e-6
    )


def test_zeros_and_broken_rows() -> None:
    x = torch.zeros(3, 64, dtype=torch.bfloat16, device="cuda")
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    codes, scale = ops.quantize_rows(x)
    assert not codes[0].float().any() and scale[0].isfinite()
    assert (codes.float() * scale).sum(1).isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("shape", [(16, 16, 16), (100, 4096, 16), (64, 6144, 64), (33, 200, 32)])
def test_add_product(shape: tuple[int, int, int]) -> None:
    tokens, size, rank = shape
    y, t, b = random(tokens, size), random(tokens, rank), random(size, rank)
    made = y.cuda()
    ops.add_product_(made, t.cuda(), b.cuda())
    assert error(made, y.double() + t.double() @ b.double().T) < 5e-3


@pytest.mark.parametrize("shape", [(1, 16, 16), (100, 4096, 32), (70, 352, 64), (33, 200, 128)])
@pytest.mark.parametrize("scaled", [False, True])
def test_quantize_product(shape: tuple[int, int, int], scaled: bool) -> None:
    rows, size, rank = shape
    x, b, column = random(rows, size), random(rank, size).t(), torch.rand(size) + 0.5 if scaled else None
    amax = (x.float() * (1.0 if column is None else column)).abs().amax(1)
    codes, scale, product = ops.quantize_product(*on_gpu(x, column, amax, b))
    expected, right = ops.quantize_rows(x, column)
    assert error(codes.float(), expected.float()) < 1e-2 and torch.allclose(scale.cpu(), right, rtol=1e-6)
    assert error(product, x.double() @ b.double()) < 5e-3


CASES = [
    (shape, act, rank, scaled)
    for shape in ((48, 128), (600, 352))
    for act in ("silu", "gelu_tanh")
    for rank in (0, 16, 32, 64, 128)
    for scaled in (False, True)
]


@pytest.mark.parametrize(
    ("shape", "act", "rank", "scaled"), [*CASES, ((1030, 14336), "silu", 16, True)], ids=str
)
def test_activation(shape: tuple[int, int], act: str, rank: int, scaled: bool) -> None:
    """Every output of both kernels against the same mathematics in float32 on the CPU."""
    tokens, size = shape
    gu, dh = random(tokens, 2 * size), random(tokens, size)
    t, b = (random(tokens, 2 * rank), random(2 * size, 2 * rank) * 0.1) if rank else (None, None)
    if b is not None:  # block-diagonal
        b[:size, rank:], b[size:, :rank] = 0, 0
    dt, a = (random(tokens, rank), random(rank, size) * 0.1) if rank else (None, None)
    column = torch.rand(2 * size) + 0.5 if scaled else None
    weight = torch.rand(2 * size) if scaled else None
    given = (gu, t, b, column)
    for rounded in (False, True):
        made = ops.activate(*on_gpu(*given), act, scaled, rounded)
        for ours, right in zip(made, ops.activate(*given, act, scaled, rounded), strict=True):
            assert ours.shape == right.shape and (not right.numel() or error(ours, right) < 5e-3)
        gu, scale = (made[2].cpu(), made[3].cpu()) if rounded else (gu, None)
        got = ops.activate_backward(*on_gpu(gu, t, b, column), act, *on_gpu(dh, dt, a, weight, scale))
        expected = ops.activate_backward(gu, t, b, column, act, dh, dt, a, weight, scale)
        names = ("dgu", "amax", "dcolumn", "db", "da_down")
        for name, ours, right in zip(names, got, expected, strict=True):
            assert ours.shape == right.shape, name
            if right.numel():
                assert error(ours, right) < 5e-3, name


def test_of_float32_they_are_as_exact_as_it_is() -> None:
    """Not TF32, which takes 13 of each factor's bits away."""
    tokens, size, rank = 70, 352, 16
    gu, dh = random(tokens, 2 * size, dtype=torch.float32), random(tokens, size, dtype=torch.float32)
    t, dt = random(tokens, 2 * rank, dtype=torch.float32), random(tokens, rank, dtype=torch.float32)
    b, a = random(2 * size, 2 * rank, dtype=torch.float32), random(rank, size, dtype=torch.float32)
    b[:size, rank:], b[size:, :rank] = 0, 0
    h = ops.activate(*on_gpu(gu, t, b, None), "silu", False, False)[0]
    assert error(h, ops.activate(gu, t, b, None, "silu", False, False)[0]) < 1e-5
    got = ops.activate_backward(*on_gpu(gu, t, b, None), "silu", *on_gpu(dh, dt, a, None, None))
    expected = ops.activate_backward(gu, t, b, None, "silu", dh, dt, a, None, None)
    for ours, right in zip(got, expected, strict=True):
        assert not right.numel() or error(ours, right) < 1e-5
    y = random(tokens, 2 * size, dtype=torch.float32)
    ours = y.cuda()
    ops.triton_linear.add_product_(ours, *on_gpu(t, b))
    assert error(ours, y.double() + t.double() @ b.double().T) < 1e-5


@pytest.mark.parametrize(
    "shape",
    [(1, 16, 1), (100, 4096, 16), (70, 14336, 24), (1030, 200, 64), (70, 4096, 128), (37, 200, 256)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_dora_norm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, size, rank = shape
    w, a, b = random(rows, size, dtype=dtype), torch.randn(rank, size), torch.randn(rows, rank)
    column = torch.rand(rows, 1) + 0.5 if dtype == torch.float8_e4m3fn else None
    got = ops.triton_linear.dora_norm(*on_gpu(w, column, a, b), 0.7)
    weight = w.double() * (1 if column is None else column)
    assert error(got, (weight + 0.7 * b.double() @ a.double()).norm(dim=1)) < 1e-6


def four_bit_layer(
    rows: int, columns: int, dtype: torch.dtype, quant_type: str, nested: bool, blocksize: int = 64
) -> torch.nn.Module:
    weight = (
        torch.randn(rows, columns, device="cuda").mul_(torch.rand(rows, 1, device="cuda").exp()).to(dtype)
    )
    codes, state = functional.quantize_4bit(
        weight, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type
    )
    made = nn.Linear4bit(columns, rows, bias=False, compute_dtype=dtype, quant_type=quant_type, device="cuda")
    made.weight = nn.Params4bit(codes, quant_state=state, blocksize=blocksize, bnb_quantized=True)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 512])
def test_dequantize(dtype: torch.dtype, quant_type: str, nested: bool, blocksize: int) -> None:
    """Every weight is bitsandbytes' own, also where a layer ends within a tile or a group of scales."""
    shapes = [(4096, 4096), (1024, 4096), (150, 512), (1, 512)]
    for columns in (4096, 512):
        layers = [four_bit_layer(*s, dtype, quant_type, nested, blocksize) for s in shapes if s[1] == columns]
        own = [functional.dequantize_4bit(one.weight.data, one.weight.quant_state) for one in layers]
        made = ops.dequantize([tensor for one in layers for tensor in four_bit.stored(one)], dtype)
        assert torch.equal(made, torch.cat(own))


def seconds(work: Callable[[], object]) -> float:
    """Of one call, the median of several."""
    found = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    return sorted(found)[len(found) // 2]


@pytest.mark.alone
def test_dequantizing_is_one_pass() -> None:
    """The gate and up of an 8B model; bitsandbytes makes the scales in two passes of their own first."""
    layers = [four_bit_layer(14336, 4096, torch.bfloat16, "nf4", nested=True) for _ in range(2)]
    stored = [tensor for one in layers for tensor in four_bit.stored(one)]
    count = 2 * 14336 * 4096
    moved = count * (0.5 + 1 / 64 + 2)
    source, target = (torch.empty(count, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    copy = 4 * count / seconds(lambda: target.copy_(source))
    ours = moved / seconds(lambda: ops.dequantize(stored, torch.bfloat16))
    theirs = moved / seconds(
        lambda: [functional.dequantize_4bit(one.weight.data, one.weight.quant_state) for one in layers]
    )
    print(f"NF4 to bf16: {ours / 1e9:,.0f} GB/s; bitsandbytes {theirs / 1e9:,.0f}; a copy {copy / 1e9:,.0f}")
    assert ours > theirs


def model(kind: str, stored: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=1000,
    )  # fmt: skip
    base = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    made = get_peft_model(in_four_bits(base) if stored == "nf4" else base, TYPES[kind]())
    for name, parameter in made.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data += 0.02 * torch.randn_like(parameter)
    if stored == "fp8":
        for name, module in list(made.get_base_model().get_decoder().layers.named_modules()):
            if type(module) is torch.nn.Linear and "lora" not in name:
                made.get_base_model().get_decoder().layers.set_submodule(
                    name, fp8_linear.Fp8Linear.of(module)
                )
    return made.train()


@pytest.mark.parametrize(("kind", "stored"), soak_except(OFTEN, product(TYPES, ["bf16", "fp8", "nf4"])))
def test_fused_and_compiled_is_pefts(kind: str, stored: str) -> None:
    """PEFT's own forward on the same storage, fused, and fused and compiled: no gradient is lost."""
    made = model(kind, stored)
    loss, gradients = step(made)
    fused = Fused(made, decoder_layers(made))
    assert fused.served >= 18 and not fused.left
    ours, our_gradients = step(made)
    assert abs(ours - loss) < 1e-2
    bound = 0.25 if stored == "fp8" else 0.06  # fp8 rounds activations and gradients to 3 bits
    assert apart(our_gradients, gradients) < bound
    torch._dynamo.reset()
    for layer in decoder_layers(made):
        layer.compile(fullgraph=True)
    compiled, compiled_gradients = step(made)
    assert abs(compiled - loss) < 1e-2
    assert apart(compiled_gradients, gradients) < bound
    assert all(gradient.any() for gradient in compiled_gradients.values())


def test_a_block_that_is_broken_comes_back_as_nan() -> None:
    gu = random(5, 512)
    gu[1, 3], gu[2, 300], gu[3, :128] = float("nan"), float("inf"), 0.0
    _, _, codes, scale = ops.activate(gu.cuda(), None, None, None, "silu", False, True)
    back = ops.expand(codes.cpu(), scale.cpu(), torch.float32).view(5, 4, 128)
    broken = torch.zeros(5, 4, dtype=torch.bool)
    broken[1, 0] = broken[2, 2] = True
    assert back[broken].isnan().all() and back[~broken].isfinite().all() and not back[3, 0].any()
    off = (back - gu.float().view(5, 4, 128)).abs().amax(-1)
    assert (off <= gu.float().view(5, 4, 128).abs().amax(-1) / 254 * 1.001)[~broken].all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_kernels_run_where_their_tensors_are() -> None:
    """Of a model over several GPUs, the current one among them or not."""
    x = torch.randn(64, 512, device="cuda:0").bfloat16()
    wanted = ops.quantize_rows(x)
    got = ops.quantize_rows(x.to("cuda:1"))
    assert torch.cuda.current_device() == 0 and all(tensor.get_device() == 1 for tensor in got)
    assert torch.equal(got[0].view(torch.uint8).cpu(), wanted[0].view(torch.uint8).cpu())
    assert torch.equal(ops.transpose(got[0]).cpu().view(torch.uint8), wanted[0].t().cpu().view(torch.uint8))
