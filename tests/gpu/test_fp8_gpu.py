"""The fp8 base on a GPU that has fp8 GEMMs: against its emulation, compiled, loaded, trained and merged."""

import pytest
import torch
from accelerate.utils.memory import clear_device_cache

from finetune.evaluation import reopen
from finetune.export import merging
from finetune.kernels import ops
from finetune.kernels.kernel_limits import FP8_CAPABILITY
from finetune.quantization import fp8_linear
from finetune.recipe import loader
from support.paths import MODEL, QUICKSTART
from support.runs import metrics, run_checks
from support.soak import soak_except

CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CAPABLE, reason="no GPU with fp8 GEMMs")]


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    apart = torch.linalg.norm(got.detach().double() - wanted.double())
    return float(apart / torch.linalg.norm(wanted.double()))


def layer(out: int, width: int) -> fp8_linear.Fp8Linear:
    torch.manual_seed(0)
    plain = torch.nn.Linear(width, out, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight *= torch.logspace(-3, 1, out, device="cuda")[:, None]
    return fp8_linear.Fp8Linear.of(plain)


@pytest.mark.parametrize("rows", [1, 17, 512])
@pytest.mark.parametrize(("out", "width"), [(96, 128), (1024, 4096), (14336, 4096)])
def test_fp8_gemms_give_what_the_emulation_gives(rows: int, out: int, width: int) -> None:
    quantized = layer(out, width)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(rows, out, device="cuda", dtype=torch.bfloat16)
    y = quantized(x)
    (gradient,) = torch.autograd.grad(y, x, g)
    codes, scale = ops.quantize_rows(x.detach())
    wanted = (codes.double() * scale) @ quantized.dequantize().double().T + quantized.bias
    assert y.dtype == gradient.dtype == torch.bfloat16
    assert error(y, wanted) < 5e-3
    codes, scale = ops.quantize_rows(g.float() * quantized.weight_scale.T)
    assert error(gradient, (codes.double() * scale) @ quantized.weight.double()) < 5e-3


def test_a_gpu_quantizes_as_the_cpu_does() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 512) * torch.logspace(-20, 20, 256)[:, None]
    x[0], x[1, 3], x[2, 3] = 0, float("nan"), float("inf")
    (here, scale), (there, right) = ops.quantize_rows(x.cuda()), ops.quantize_rows(x)
    assert torch.allclose(scale.cpu()[2:], right[2:], rtol=1e-6, atol=0)
    assert (here.cpu().float() == there.float())[3:].float().mean() > 0.999
    assert here[0].float().eq(0).all() and (here.float() * scale)[1:3].isnan().any(dim=1).all()


@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (100, 37), (1024, 4096), (14336, 4096)])
def test_the_transposition_is_eager_s(shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda").view(ops.E4M3)
    got = ops.transpose(codes)
    assert got.is_contiguous() and got.dtype == ops.E4M3
    assert torch.equal(got.view(torch.uint8), codes.view(torch.uint8).t())


def test_it_compiles_whole_and_gives_the_same() -> None:
    quantized = layer(1024, 2048)
    x = torch.randn(4, 128, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(4, 128, 1024, device="cuda", dtype=torch.bfloat16)

    def run(x: torch.Tensor) -> torch.Tensor:
        return quantized(torch.nn.functional.silu(x))

    compiled = torch.compile(run, fullgraph=True)
    found = []
    for f in (compiled, run):
        y = f(x)
        found.append((y.detach(), torch.autograd.grad(y, x, g)[0]))
    for got, wanted in zip(*found, strict=True):  # a silu that is not rounded to bf16 gives other codes
        assert error(got, wanted) < 0.02


def test_loading_takes_the_memory_of_the_codes(tmp_path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16,
        vocab_size=4096, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    clear_device_cache(garbage_collection=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    base = reopen.open_base(loader.load(QUICKSTART, ["model.quantization=fp8", f"model.name={tmp_path}"]))
    peak, got = torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated() - before
    weights = 8 * (4 * 2048 * 2048 + 3 * 2048 * 5632)
    scales = 8 * (6 * 2048 + 2 * 5632) * 4
    wanted = weights + scales + 4096 * 2048 * 2
    assert abs(got - wanted) < 0.05 * wanted, f"{got / 2**20:.1f} MiB, computed {wanted / 2**20:.1f}"
    assert peak - before < 2 * weights, f"{(peak - before) / 2**20:.1f} MiB at the most"
    del base


@pytest.mark.parametrize(
    "kind", soak_except(["lora", "dora", "ia3"], ["lora", "rslora", "dora", "adalora", "ia3"])
)
def test_every_fast_type_trains_on_it_and_merges(kind: str, train) -> None:
    rate = {"ia3": "5e-2", "adalora": "2e-2"}.get(kind, "5e-3")
    options = [
        f"adapter.type={kind}",
        "model.quantization=fp8",
        f"train.learning_rate={rate}",
        "train.max_steps=12",
    ]
    run = train(*options)
    got, losses = run_checks(run), run.read("eval.json")
    assert all(check["passed"] for check in got.values())
    assert got["model.quantization"]["actual"].startswith("14 of 14 linear layers")
    # of two layers: q, k, v and gate, up are one each
    assert int(got["fp8 GEMMs"]["actual"].split()[0]) >= 8
    assert losses["tuned"]["loss"] < losses["base"]["loss"]
    assert merging.run(run.path)["against_tuned"]["relative"] < 0.1


def test_it_follows_bf16_and_compiles_in_a_run(train) -> None:
    options = ["train.max_steps=12", "train.logging_steps=1"]
    runs = [
        train("model.quantization=none", *options, name="bf16"),
        train("model.quantization=fp8", *options, name="fp8"),
        train("model.quantization=fp8", "speed.compile=true", *options, name="compiled"),
    ]
    for run in runs[1:]:
        for a, b in zip(metrics(runs[0]), metrics(run), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=0.03)
