"""What needs a GPU: bf16, 4-bit and compiled runs of the embedded model, through the command."""

import pytest
import torch
from conftest import ADAPTERS, metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def receipts(run) -> dict[str, str]:
    rows = run.read("receipts.json")
    assert all(row["ok"] for row in rows), [row for row in rows if not row["ok"]]
    return {row["option"]: row["got"] for row in rows}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_adapter_trains_in_bf16(kind: str, train) -> None:
    rate = {"ia3": "5e-2", "full": "1e-3"}.get(kind, "5e-3")
    run = train(f"adapter.type={kind}", f"train.learning_rate={rate}", "train.max_steps=12")
    got = receipts(run)
    assert got["precision"] == "bf16" and got["dtype"] == "bfloat16"
    assert got["model.attention"].startswith("sdpa")
    lines = metrics(run)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["gpu_memory_gib"] > 0
    storage = "nf4" if kind in ("qlora", "qdora") else None
    assert storage is None or '# storage: "nf4"' in run.recipe.read_text()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_bf16_follows_fp32(kind: str, train, monkeypatch) -> None:
    half = train(f"adapter.type={kind}", "train.max_steps=12", name="bf16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    single = train(f"adapter.type={kind}", "train.max_steps=12", name="fp32")
    assert receipts(single)["dtype"] == "float32"
    for a, b in zip(metrics(half), metrics(single), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.03)


def test_compile_and_recompute_follow_the_plain_run(train) -> None:
    plain = train("train.max_steps=6", name="plain")
    for override in ("speed.compile=true", "speed.recompute=all"):
        other = train(override, "train.max_steps=6", name=override.replace("=", "_"))
        assert override.partition("=")[0] in receipts(other)
        for a, b in zip(metrics(plain), metrics(other), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=0.02)


def test_eager_attention_is_what_was_asked(train) -> None:
    plain = train("train.max_steps=4", name="plain")
    run = train("model.attention=eager", "train.max_steps=4", name="eager")
    assert receipts(run)["model.attention"] == "eager"
    for a, b in zip(metrics(plain), metrics(run), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)
