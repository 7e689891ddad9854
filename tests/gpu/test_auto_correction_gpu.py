"""`auto` whose first choice does not fit the GPU's allocator: it takes the next stronger setting."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune.speed import apply_to_model
from support.paths import MODEL
from support.runs import metrics, run_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from finetune.run_folder.run_folder import RunFolder

pytestmark = [pytest.mark.gpu]
LENGTH, SEQUENCES = 1024, 8
CHECKPOINTING = "speed.activation_checkpointing"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A model whose activations are far more than its weights, and one long text."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=len(tokenizer), max_position_embeddings=LENGTH,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    text = "the quick brown fox jumps over the lazy dog " * 8 * LENGTH
    (folder / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    return (
        *(f"model.name={folder}/model", f"data.name={folder}/text.jsonl", "data.format=text"),
        *("data.train_on=all", "data.too_long=split", f"data.max_length={LENGTH}", "data.validation=null"),
        *("adapter.type=lora", "model.quantization=none", "speed.compile=false"),
        *(f"train.effective_batch_size={SEQUENCES}", "train.max_steps=3", "train.logging_steps=1"),
        *("eval.samples=0", "train.save_strategy=no"),
    )


@pytest.fixture
def allocator_of() -> Iterator[Callable[[float], None]]:
    """`allocator_of(bytes)`: the allocator has so many; after the test all of the GPU again."""
    total = torch.cuda.get_device_properties(0).total_memory
    yield lambda size: torch.cuda.set_per_process_memory_fraction(size / total)
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def measured(train: Callable[..., RunFolder], inputs: tuple[str, ...]) -> Callable[..., Any]:
    """`measured(*overrides, name=...)`: a run with stated settings, and the bytes that its steps took."""

    def run(*overrides: str, name: str) -> tuple[RunFolder, float]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        stated = f"train.per_device_train_batch_size={SEQUENCES}"
        made = train(*inputs, stated, *overrides, name=name)
        return made, metrics(made)[-1]["gpu_memory_gib"] * 2**30

    return run


@pytest.mark.parametrize("batch", [(), (f"train.per_device_train_batch_size={SEQUENCES}",)])
def test_auto_that_runs_out_of_memory_takes_more_checkpointing(
    batch: tuple[str, ...], inputs, train, measured, allocator_of, monkeypatch
) -> None:
    """The choice sees a GPU with room; then the allocator has less than a run without recomputation needs."""
    kept, most = measured(f"{CHECKPOINTING}=none", name="none")
    _, least = measured(f"{CHECKPOINTING}=full", name="full")
    assert most > 1.5 * least, "activations are most of it"
    monkeypatch.setattr(apply_to_model, "free_gib", lambda hardware: hardware.memory_gib)
    allocator_of(least + (most - least) / 2)
    run = train(*inputs, *batch)
    changes = [r for r in run.read("checks.json") if "auto after out of memory" in r["option"]]
    assert changes[0]["expected"] == "none"
    assert {change["option"].partition(",")[0] for change in changes} == {CHECKPOINTING}
    assert (run.path / "log.txt").read_text().count("note: the first step ran out of") == len(changes)
    assert run_checks(run)["train.effective_batch_size"]["actual"] == str(SEQUENCES)
    for a, b in zip(metrics(kept), metrics(run), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-3)


def test_auto_that_runs_out_of_memory_halves_the_micro_batch_last(
    inputs, train, measured, allocator_of, monkeypatch
) -> None:
    full, most = measured(f"{CHECKPOINTING}=full", name="full")
    half = f"train.per_device_train_batch_size={SEQUENCES // 2}"
    _, least = measured(f"{CHECKPOINTING}=full", half, name="half")
    monkeypatch.setattr(apply_to_model, "free_gib", lambda hardware: hardware.memory_gib)
    allocator_of((most + least) / 2)
    run = train(*inputs)
    changes = [r for r in run.read("checks.json") if "auto after out of memory" in r["option"]]
    assert changes[-1]["option"].startswith("train.per_device_train_batch_size")
    assert int(changes[-1]["actual"]) < SEQUENCES
    assert run_checks(run)["train.effective_batch_size"]["actual"] == str(SEQUENCES)
    for a, b in zip(metrics(full), metrics(run), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-3)


def test_stated_settings_that_do_not_fit_end_the_run(inputs, train, allocator_of, capsys) -> None:
    allocator_of(0.4 * 2**30)
    train(*inputs, "train.per_device_train_batch_size=1", f"{CHECKPOINTING}=none", code=5)
    assert "out of" in capsys.readouterr().err
