"""Bases of which an adapter can take a part alone: towers beside a text model."""

from pathlib import Path

import pytest
import torch
from conftest import QUICKSTART, receipts
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from finetune import architecture, cli, plan_memory, recipe

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def text_of(folder: Path) -> dict[str, int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        **size,
        "vocab_size": len(tokenizer) + 8,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }


def saved(model, folder: Path, tokenizer: Path) -> Path:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gemma(two_layers: Path, tmp_path_factory) -> Path:
    """A multimodal Gemma 3 whose vision tower has layers called as its text model's are."""
    torch.manual_seed(0)
    text = {**text_of(two_layers), "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 64}
    vision = {**VISION, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return saved(Gemma3ForConditionalGeneration(config), tmp_path_factory.mktemp("gemma"), two_layers)


@pytest.mark.parametrize(
    "options",
    [
        ["adapter.type=lora"],
        ["adapter.type=dora", "adapter.target_modules=[q_proj, v_proj]", "adapter.exclude_modules=[v_proj]"],
        ["adapter.type=adalora"],
        ["adapter.type=ia3", "train.learning_rate=0.1"],
        ["adapter.type=vera", "adapter.target_modules=[q_proj]"],
        ["adapter.type=lora", "adapter.bias=all"],
    ],
    ids=["lora", "names", "adalora", "ia3", "vera", "biases"],
)
def test_no_adapter_in_towers_that_no_text_runs_through(options: list[str], train, gemma: Path) -> None:
    run = train(f"model.name={gemma}", "train.max_steps=5", *options)
    got = receipts(run)
    assert all(receipt["ok"] for receipt in got.values())
    assert got["trained in multi_modal_projector, vision_tower"]["got"] == "nothing"
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    beside = [name for name in tensors if "vision_tower" in name]
    assert len(beside) < len(tensors)
    assert all(name.endswith(".bias") for name in beside), "PEFT saves all biases, moved or not"
    assert (
        "no text runs through them: multi_modal_projector, vision_tower" in (run.path / "log.txt").read_text()
    )


def test_full_fine_tuning_leaves_towers_as_they_are(train, gemma: Path) -> None:
    run = train(f"model.name={gemma}", "train.max_steps=4", "adapter.type=full")
    got = receipts(run)
    assert all(receipt["ok"] for receipt in got.values())
    assert got["trained in multi_modal_projector, vision_tower"]["got"] == "nothing"
    before, after = (load_file(folder / "model.safetensors") for folder in (gemma, run.model))
    same = {name for name in before if torch.equal(before[name], after[name].to(before[name].dtype))}
    assert same == {name for name in before if "language_model" not in name}


@pytest.mark.parametrize("kind", ["lora", "adalora", "ia3", "full"])
def test_a_plan_counts_what_a_run_trains(kind: str, train, gemma: Path) -> None:
    options = [f"model.name={gemma}", f"adapter.type={kind}", "train.max_steps=4"]
    run = train(*options)
    loaded = recipe.load(QUICKSTART, options)
    planned = plan_memory.adapted(loaded.adapter, loaded.model, architecture.read(loaded.model), 4)
    trained = receipts(run)["trainable parameters"]["got"].partition(" of ")[0]
    assert f"{planned.trained:,}" == trained


def test_a_tower_s_layers_are_no_targets(gemma: Path, capsys) -> None:
    options = [f"model.name={gemma}", "adapter.target_modules=[fc1]"]
    assert cli.main(["check", str(QUICKSTART), *options]) == 2
    assert '"fc1" matches no module' in capsys.readouterr().err
