"""Bases of which an adapter can take a part alone: towers beside a text model, MLPs beside experts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from finetune.cli import main
from finetune.models import architecture
from finetune.planning import adapter_size
from finetune.recipe import loader
from finetune.run_folder.run_folder import RunFolder
from support.paths import QUICKSTART
from support.runs import run_checks

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
RUNS: dict[str, RunFolder] = {}
# peft 0.21.2 looks among modules for patterns that it makes for experts' weights (tuners/tuners_utils.py)
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")


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


@pytest.fixture(scope="module")
def deepseek(two_layers: Path, tmp_path_factory) -> Path:
    """Experts in the second layer, with an MLP that they share; a dense MLP in the first."""
    torch.manual_seed(0)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    more = {"moe_intermediate_size": 32, "v_head_dim": 16, "first_k_dense_replace": 1}
    config = DeepseekV3Config(**text_of(two_layers), **experts, **ranks, **more, num_key_value_heads=4)
    return saved(DeepseekV3ForCausalLM(config), tmp_path_factory.mktemp("deepseek"), two_layers)


@pytest.fixture
def run_of(train, gemma: Path):
    """`run_of(options)`: a run of two steps, trained once for all tests."""

    def of(options: list[str]) -> RunFolder:
        key = " ".join(options)
        if key not in RUNS:
            RUNS[key] = train(f"model.name={gemma}", *options)
        return RUNS[key]

    return of


@pytest.mark.parametrize(
    "options",
    [
        ["adapter.type=lora"],
        ["adapter.type=dora", "adapter.target_modules=[q_proj, v_proj]", "adapter.exclude_modules=[v_proj]"],
        ["adapter.type=adalora"],
        ["adapter.type=ia3"],
        ["adapter.type=vera", "adapter.target_modules=[q_proj]"],
        ["adapter.type=lora", "adapter.bias=all"],
    ],
    ids=["lora", "names", "adalora", "ia3", "vera", "biases"],
)
def test_no_adapter_in_towers_that_no_text_runs_through(options: list[str], run_of) -> None:
    run = run_of(options)
    got = run_checks(run)
    assert all(check["passed"] for check in got.values())
    assert got["trained parameters in multi_modal_projector, vision_tower"]["actual"] == "none"
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    beside = [name for name in tensors if "vision_tower" in name]
    assert len(beside) < len(tensors)
    assert all(name.endswith(".bias") for name in beside), "PEFT saves all biases, moved or not"
    assert (
        "because the model does not use them: multi_modal_projector, vision_tower"
        in (run.path / "log.txt").read_text()
    )


def test_full_fine_tuning_leaves_towers_as_they_are(run_of, gemma: Path) -> None:
    run = run_of(["adapter.type=full"])
    got = run_checks(run)
    assert all(check["passed"] for check in got.values())
    assert got["trained parameters in multi_modal_projector, vision_tower"]["actual"] == "none"
    before, after = (load_file(folder / "model.safetensors") for folder in (gemma, run.model))
    same = {name for name in before if torch.equal(before[name], after[name].to(before[name].dtype))}
    assert same == {name for name in before if "language_model" not in name}


@pytest.mark.parametrize("kind", ["lora", "adalora", "ia3", "full"])
def test_a_plan_counts_what_a_run_trains(kind: str, run_of, gemma: Path) -> None:
    options = [f"adapter.type={kind}"]
    run = run_of(options)
    loaded = loader.load(QUICKSTART, [f"model.name={gemma}", *options, "train.max_steps=2"])
    planned = adapter_size.adapted(loaded.adapter, loaded.model, architecture.read(loaded.model), 4)
    trained = run_checks(run)["trainable parameters"]["actual"].partition(" of ")[0]
    assert f"{planned.trained:,}" == trained


def test_a_tower_s_layers_are_no_targets(gemma: Path, capsys) -> None:
    options = [f"model.name={gemma}", "adapter.target_modules=[fc1]"]
    assert main.main(["check", str(QUICKSTART), *options]) == 2
    assert '"fc1" matches no module' in capsys.readouterr().err


@pytest.mark.parametrize("targets", ["all-linear", "[o_proj, gate_proj, up_proj, down_proj]"])
def test_mlps_that_peft_takes_for_experts_are_said(targets: str, train, deepseek: Path) -> None:
    run = train(f"model.name={deepseek}", f"adapter.target_modules={targets}")
    got = run_checks(run)
    assert all(check["passed"] for check in got.values())
    assert (
        "proj 2" in got["adapter.target_modules"]["actual"]
        and "up_proj" not in got["adapter.target_modules"]["actual"]
    )
    said = " get no adapter, because PEFT takes their names for names of experts"
    assert said in " ".join((run.path / "log.txt").read_text().split())
