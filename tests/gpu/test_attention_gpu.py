"""Every attention kernel that is here: forward and gradients against plain operations in float32, documents
apart, one compiled graph, and its speed."""

from itertools import product

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from finetune.autoconfig.attention_choice import _has_flash, broken, missing
from finetune.core.run_checks import RunChecks
from finetune.hardware import detection
from finetune.kernels.attention_functions import KERNELS, register, without_mask
from finetune.kernels.kernel_limits import FLASH, IMPLEMENTATIONS
from finetune.speed.packing_isolation import prove_apart, prove_same
from support.paths import MODEL
from support.plain_attention import batch, by_document, loss_and_gradients, tiny
from support.runs import run_checks
from support.soak import soak_except

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
HERE = [name for name in IMPLEMENTATIONS if not missing(name, detection.detect())]
VARLEN = [name for name in HERE if name != "cudnn"]
TRAINED = [(name, name != "cudnn") for name in [*HERE, "flex_attention"]]  # each kernel once
ERROR = 1e-2  # ||bf16 - float32|| / ||float32||: bf16 rounds by up to 2^-9, probabilities once more
DENSE = {"rows": 2, "tokens": 384}
ROWS = {
    "dense": DENSE,
    "odd": {"rows": 3, "tokens": 201},
    "packed": {"rows": 1, "tokens": 640, "lengths": [1, 300, 64, 17, 258]},
    "window": {**DENSE, "sliding_window": 100},
    "packed window": {"rows": 1, "tokens": 640, "lengths": [1, 300, 339], "sliding_window": 100},
    "softcap": {**DENSE, "softcap": 20.0},
}


class Layer(torch.nn.Module):
    is_causal = True


def inputs_of(size: int, rows: int, tokens: int, lengths: list[int] | None = None, heads=(8, 2), **settings):
    """Queries, keys and values as a layer hands them on, and what else it says."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(rows, tokens, n, size, device="cuda").bfloat16().transpose(1, 2).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    )
    if lengths:
        borders = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        settings |= {"cu_seq_lens_q": borders, "max_length_q": max(lengths)}
    return (q, k, v), {"attention_mask": None, "scaling": size**-0.5, **settings}


def out_and_gradients(attend, given, settings) -> list[torch.Tensor]:
    out, _ = attend(Layer(), *given, **settings)
    made = torch.Generator("cuda").manual_seed(1)
    gradient = torch.randn(out.shape, generator=made, device="cuda").to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, gradient)]


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def cases() -> list[tuple[str, str]]:
    without = {"cudnn": ["packed", "window", "packed window", "softcap"], "varlen": ["softcap"]}
    if "flash_attention_3" in HERE:  # whose builds may leave out what takes long to compile
        from flash_attn_config import CONFIG  # type: ignore[reportMissingImports]  (GPU only)

        off = [flag for flag, is_off in CONFIG["build_flags"].items() if is_off]
        windows = ["window", "packed window"] if "FLASHATTENTION_DISABLE_LOCAL" in off else []
        softcap = ["softcap"] if "FLASHATTENTION_DISABLE_SOFTCAP" in off else []
        without["flash_attention_3"] = windows + softcap
    return [(name, rows) for name in HERE for rows in ROWS if rows not in without.get(name, ())]


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("name", "rows"), cases())
def test_it_computes_what_plain_operations_do(name: str, rows: str, size: int) -> None:
    given, settings = inputs_of(size, **ROWS[rows])
    got = out_and_gradients(without_mask(KERNELS[name]()), given, settings)
    plain = [tensor.detach().float().requires_grad_() for tensor in given]
    wanted = out_and_gradients(without_mask(by_document), plain, settings)
    found = [off(a, b) for a, b in zip(got, wanted, strict=True)]
    print(f"{name} {rows} d={size}: out, dq, dk, dv off by " + ", ".join(f"{x:.1e}" for x in found))
    assert max(found) < ERROR


@pytest.mark.parametrize("rows", ["dense", "packed"])
@pytest.mark.parametrize("name", HERE)
def test_it_compiles_into_one_graph(name: str, rows: str) -> None:
    if (name, rows) == ("cudnn", "packed"):
        pytest.skip("cuDNN takes no documents")
    given, settings = inputs_of(64, **ROWS[rows])
    attend = without_mask(KERNELS[name]())
    wanted = out_and_gradients(attend, given, settings)
    torch._dynamo.reset()
    got = out_and_gradients(torch.compile(attend, fullgraph=True), given, settings)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and off(a, b) < 5e-3  # sums of gradients run in no fixed order


@pytest.mark.parametrize(
    ("name", "packed"), soak_except(TRAINED, product([*HERE, "flex_attention"], [False, True]))
)
def test_compiled_layers_train_as_eager_in_float32(name: str, packed: bool) -> None:
    """A whole model: padding on the right without a mask, or documents end to end."""
    if name == "cudnn" and packed:
        pytest.skip("cuDNN keeps no documents apart")
    model = tiny("llama", hidden_size=256, head_dim=64).cuda().train()
    inputs = {key: v.cuda() if isinstance(v, torch.Tensor) else v for key, v in batch(packed).items()}
    wanted = loss_and_gradients(model, inputs)
    register(name)
    model.bfloat16().set_attn_implementation(IMPLEMENTATIONS.get(name, name))
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    got = loss_and_gradients(model, inputs)
    pairs = [(a, b) for a, b in zip(got[1], wanted[1], strict=True) if b is not None]
    total = (sum(float((a.float() - b).norm()) ** 2 for a, b in pairs)) ** 0.5
    share = total / sum(float(b.norm()) ** 2 for _, b in pairs) ** 0.5
    losses = f"{float(got[0]):.5f} / {float(wanted[0]):.5f}"
    print(f"{name} packed={packed}: loss {losses}, gradients off by {share:.1e}")
    assert abs(float(got[0] - wanted[0])) < 5e-3 * float(wanted[0]) and share < 3e-2


@pytest.mark.parametrize("name", HERE)
def test_it_is_proved_on_the_model_before_training(name: str) -> None:
    register(name)
    model = AutoModelForCausalLM.from_pretrained(
        str(MODEL), attn_implementation=IMPLEMENTATIONS[name], dtype=torch.bfloat16, device_map="cuda"
    )
    checks = RunChecks()
    for packed in (False, True) if name in VARLEN else (False,):
        prove_same(model, 128, name, packed, checks)
    if name in VARLEN:
        prove_apart(model, 128, name, checks)
    print([check["actual"] for check in checks.as_json()])


@pytest.mark.parametrize(
    ("name", "packed"), [(n, p) for n in HERE for p in (False, True) if p is False or n in VARLEN]
)
def test_a_run_shows_the_kernel_and_no_mask(name: str, packed: bool, train) -> None:
    flat = ["data.packing=true", "data.max_length=512"] if packed else []
    run = train(f"model.attention={name}", *flat)
    got = run_checks(run)
    assert all(check["passed"] for check in got.values())
    print(name, packed, got["model.attention"]["actual"], got["attention without a mask"]["actual"])
    assert not packed or got["attention mask"]["actual"] == "none"


def milliseconds(run, times: int = 20) -> float:
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


@pytest.mark.parametrize("name", FLASH)
def test_what_is_installed_can_be_imported(name: str) -> None:
    """Here too, where warnings are errors: else nothing below would be of it."""
    if not _has_flash(name):
        pytest.skip(f"{name} is not installed")
    assert broken(name) == ""


@pytest.mark.alone
@pytest.mark.parametrize("length", [None, 2048, 512])
@pytest.mark.parametrize("name", ["sdpa", *HERE])
def test_its_speed(name: str, length: int | None) -> None:
    """TFLOP/s of Llama-3.1-8B's attention: 4 rows of 4096, or their tokens as documents."""
    if length and name in ("sdpa", "cudnn"):
        pytest.skip("takes no documents")
    rows = (
        {"rows": 4, "tokens": 4096}
        if not length
        else {"rows": 1, "tokens": 16384, "lengths": [length] * (16384 // length)}
    )
    given, settings = inputs_of(128, heads=(32, 8), **rows)
    if name == "sdpa":

        def attend(_, q, k, v, **__):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), None
    else:
        attend = without_mask(KERNELS[name]())
    flops = 4 * 16384 * (length or 4096) * 128 * 32 / 2
    out, _ = attend(Layer(), *given, **settings)
    gradient = torch.randn_like(out)
    forward = milliseconds(lambda: attend(Layer(), *given, **settings))
    both = milliseconds(lambda: torch.autograd.grad(attend(Layer(), *given, **settings)[0], given, gradient))
    of = f"documents of {length}" if length else "rows of 4096"
    speeds = f"{flops / forward / 1e9:.0f} / {2.5 * flops / (both - forward) / 1e9:.0f}"
    print(f"{name} {of}: {speeds} TFLOP/s forward / backward")
    assert both > forward > 0
