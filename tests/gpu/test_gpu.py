"""What needs a GPU: bf16, 4-bit and compiled runs of the embedded model, through the command."""

from itertools import product

import pytest
import torch

from finetune.autoconfig import cuda_graphs
from finetune.experiments.runner import measured_run
from support.adapters import ADAPTERS
from support.faults import Fault, injected
from support.paths import MODEL
from support.runs import metrics
from support.soak import soak_except

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def run_checks(run) -> dict[str, str]:
    rows = run.read("checks.json")
    assert all(row["passed"] for row in rows), [row for row in rows if not row["passed"]]
    return {row["option"]: row["actual"] for row in rows}


@pytest.mark.parametrize("kind", soak_except(["lora", "qlora", "dora", "full"], ADAPTERS))
def test_every_adapter_trains_in_bf16(kind: str, train) -> None:
    rate = {"ia3": "5e-2", "adalora": "2e-2", "full": "1e-3"}.get(kind, "5e-3")
    run = train(f"adapter.type={kind}", f"train.learning_rate={rate}", "train.max_steps=12")
    got = run_checks(run)
    assert got["precision"] == "bf16" and got["dtype"] == "bfloat16"
    assert not got["model.attention"].startswith("eager")
    losses = run.read("eval.json")
    assert losses["tuned"]["loss"] < losses["base"]["loss"]
    assert metrics(run)[-1]["gpu_memory_gib"] > 0
    storage = "nf4" if kind in ("qlora", "qdora") else None
    assert storage is None or '# storage: "nf4"' in run.recipe.read_text()


@pytest.mark.parametrize("kind", soak_except(["lora"], ["lora", "dora"]))
def test_bf16_follows_fp32(kind: str, train, monkeypatch) -> None:
    half = train(f"adapter.type={kind}", "train.max_steps=12", name="bf16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    single = train(f"adapter.type={kind}", "train.max_steps=12", name="fp32")
    assert run_checks(single)["dtype"] == "float32"
    for a, b in zip(metrics(half), metrics(single), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.03)


def test_fp16_says_how_many_steps_its_scaler_left_out(train, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    run = train("train.max_steps=6")
    left_out = metrics(run)[-1]["skipped_steps"]
    got = run_checks(run)
    assert got["precision"] == "fp16" and left_out < 6
    assert got["steps skipped by fp16's loss scaler"] == f"{left_out} of 6"


def test_a_forked_process_reaches_the_gpu(tmp_path) -> None:
    """As runs of an ablation are started."""
    log = tmp_path / "doctor.log"
    assert measured_run.start(["doctor"], str(log), {}, cpu=False) == 0, log.read_text()
    assert torch.cuda.get_device_name() in log.read_text()


def test_compile_and_recompute_follow_the_plain_run(train, train_once) -> None:
    plain = train_once("train.max_steps=6")
    for override in ("speed.compile=true", "speed.activation_checkpointing=full"):
        other = train(override, "train.max_steps=6", name=override.replace("=", "_"))
        assert override.partition("=")[0] in run_checks(other)
        for a, b in zip(metrics(plain), metrics(other), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=0.02)


@pytest.mark.parametrize("checkpointing", soak_except(["mlp"], ["none", "norms", "mlp"]))
def test_cuda_graphs_follow_the_plain_run(checkpointing: str, train, train_once) -> None:
    rows = ["train.max_steps=6", "train.effective_batch_size=8", "train.per_device_train_batch_size=2"]
    rows += ["data.packing=true", "data.max_length=512"]  # one shape, four micro-batches a step
    plain = train_once(*rows)
    run = train(
        *rows,
        "speed.compile=reduce-overhead",
        f"speed.activation_checkpointing={checkpointing}",
        name="graphs",
    )
    assert run_checks(run)["speed.compile"]
    for a, b in zip(metrics(plain), metrics(run), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)


def packing() -> list[str]:
    """What keeps documents apart here without a mask."""
    from finetune.autoconfig.attention_choice import missing
    from finetune.hardware.detection import detect
    from finetune.kernels.kernel_limits import IMPLEMENTATIONS

    return [name for name in IMPLEMENTATIONS if name != "cudnn" and not missing(name, detect())]


GRAPHED = {
    **{kind: [f"adapter.type={kind}"] for kind in ("lora", "dora", "adalora", "ia3", "qlora", "full")},
    "fp8": ["model.quantization=fp8"],
    "int8": ["model.quantization=fp8", "speed.activation_checkpointing=mlp_int8"],
    "mlp": ["speed.activation_checkpointing=mlp:1"],
    "optimizer": ["adapter.type=full", "speed.offload=optimizer"],
    "padding-free": ["data.packing=false", "data.padding_free=true"],
    **{name: [f"model.attention={name}"] for name in packing() if name in cuda_graphs.ATTENTION},
}
OFTEN = ["lora", "dora", "full", "int8", "optimizer", "padding-free"]


@pytest.mark.parametrize("kind", soak_except(OFTEN, GRAPHED))
def test_small_passes_are_cuda_graphs_by_themselves(kind: str, train) -> None:
    """They follow the compiled run, with evaluations between the steps, and torch leaves none of them out."""
    rows = ["train.max_steps=7", "train.effective_batch_size=8", "train.per_device_train_batch_size=2"]
    rows += ["data.packing=true", "data.max_length=512", "eval.eval_steps=3"]
    rows += ["train.learning_rate=1e-3"] * (kind in ("full", "optimizer")) + GRAPHED[kind]
    plain = train(*rows, "speed.compile=default", name="plain")
    torch.compiler.reset()
    run = train(*rows, "speed.compile=true", name="graphs")
    got = run_checks(run)
    assert got["CUDA graphs"] == "4 recorded"  # of two layers: evaluations have none
    assert "CUDA graphs" not in run_checks(plain)
    assert 'graphs: "on"' in run.recipe.read_text()
    for a, b in zip(metrics(plain), metrics(run), strict=True):
        key = "loss" if "loss" in a else "eval_loss"
        assert a[key] == pytest.approx(b[key], rel=2e-3)


def test_graphs_are_recorded_again_in_smaller_passes_where_memory_ran_out(train) -> None:
    rows = ["train.max_steps=6", "train.effective_batch_size=8", "train.per_device_train_batch_size=4"]
    rows += ["data.packing=true", "data.max_length=512", "adapter.type=lora"]
    plain = train(*rows, "speed.compile=default", name="plain")
    torch.compiler.reset()
    with injected(Fault("oom", step=3)):
        run = train(*rows, "speed.compile=true", name="graphs")
    got = run_checks(run)
    assert got["micro-batch size"] == "2"
    assert got["CUDA graphs"] == "4 recorded"  # those of whole passes were given up
    for a, b in zip(metrics(plain), metrics(run), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-3)


def test_eager_attention_is_what_was_asked(train, train_once) -> None:
    plain = train_once("train.max_steps=6")
    run = train("model.attention=eager", "train.max_steps=6", name="eager")
    assert run_checks(run)["model.attention"] == "eager"
    for a, b in zip(metrics(plain), metrics(run), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)


@pytest.mark.parametrize("attention", ["eager", "sdpa", *packing()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_documents_do_not_see_each_other(attention: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    from finetune.core.run_checks import RunChecks
    from finetune.kernels.attention_functions import register
    from finetune.kernels.kernel_limits import IMPLEMENTATIONS
    from finetune.speed.packing_isolation import leaks, prove_apart

    if attention in IMPLEMENTATIONS and dtype == torch.float32:
        pytest.skip("it has no fp32")
    register(attention)
    name = IMPLEMENTATIONS.get(attention, attention)
    model = AutoModelForCausalLM.from_pretrained(
        str(MODEL), attn_implementation=name, dtype=dtype, device_map="cuda"
    )
    for tokens in (128, 2048):
        same, moved = leaks(model.eval(), tokens)
        print(attention, dtype, tokens, same, moved)
        assert moved.logits == 0 and moved.gradients <= 1e-2
        prove_apart(model, tokens, attention, RunChecks())
    if attention not in IMPLEMENTATIONS:
        mask = torch.ones(1, 128, dtype=torch.long, device="cuda")
        assert leaks(model.eval(), 128, attention_mask=mask)[1].logits > 1e-3


@pytest.mark.parametrize(
    ("attention", "compile"),
    soak_except(
        [("sdpa", "false"), *((name, "true") for name in packing())],
        product(["sdpa", *packing()], ["false", "true"]),
    ),
)
def test_packed_rows_train_as_padded_ones_do(attention: str, compile: str, train, train_once) -> None:
    """The same 96 documents in one step."""
    one = ["train.max_steps=1", "train.logging_steps=1", "data.validation=null"]
    padded = train_once(*one, "train.effective_batch_size=96")
    dense = [*one, "train.effective_batch_size=24", "data.packing=true", "data.max_length=512"]
    packed = train(*dense, f"model.attention={attention}", f"speed.compile={compile}", name="packed")
    got = run_checks(packed)
    print(attention, compile, got["packed examples isolated"], got["model.attention"])
    assert metrics(packed)[0]["loss"] == pytest.approx(metrics(padded)[0]["loss"], rel=5e-3)
