"""Adapters on stacked experts after training: plain PEFT, merges, lost tensors, the other layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.run_folder.run_folder import RunFolder
from finetune.training import verify_saved
from support.expert_families import config_of
from support.paths import MODEL
from support.soak import soak_except
from support.tiny_models import recipe, save

if TYPE_CHECKING:
    from pathlib import Path

IDS = torch.arange(5, 37).view(2, 16)
EXPERTS = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear-and-experts"}


def model_in(folder: Path, model_type: str) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = config_of(model_type, vocab_size=len(tokenizer), **ids)
    return save(folder / "model", AutoModelForCausalLM.from_config(config))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize(
    "model_type", soak_except(["qwen3_moe"], ["qwen3_moe", "gpt_oss", "deepseek_v3", "phimoe"])
)
def test_saved_adapter_of_experts_is_plain_peft_and_merges(
    model_type: str, tmp_path: Path, capsys: Any
) -> None:
    folder = model_in(tmp_path, model_type)
    path = recipe(tmp_path, folder, adapter=EXPERTS)
    assert main.main(["train", str(path)]) == 0, capsys.readouterr().err
    run = RunFolder(tmp_path / "run")
    base = AutoModelForCausalLM.from_pretrained(folder)
    plain = logits(base)
    opened = PeftModel.from_pretrained(base, run.adapter)
    tuned = logits(opened)
    assert (tuned - plain).norm() > 1e-3 * plain.norm()
    assert main.main(["merge", str(run.path), "--dtype", "float32"]) == 0, capsys.readouterr().err
    merged = AutoModelForCausalLM.from_pretrained(run.path / "merged")
    assert (logits(merged) - tuned).norm() < 1e-5 * tuned.norm()
    before = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    changed = {name for name, weight in merged.named_parameters() if not torch.equal(weight, before[name])}
    stacked = {name for name, weight in before.items() if weight.dim() == 3 and ".experts." in name}
    assert stacked <= changed, "the merge has changed each stacked weight"

    # A tensor of an expert's adapter that the file has lost is found
    live = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), run.adapter)
    file = run.adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if ".experts." in name and "lora_B" in name)
    shapes = {name: p.shape for name, p in live.named_parameters() if "lora_" in name}
    rows = [IDS[0].tolist()]
    kept = verify_saved.Live(verify_saved.hashes(live, shapes), shapes, rows, [logits(live)[0]], "", 1e-5)
    save_file({name: torch.zeros_like(t) if name == lost else t for name, t in tensors.items()}, file)
    damaged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), run.adapter)
    with pytest.raises(UserError, match="saved"):
        verify_saved.check_reopened(kept, damaged, run, RunChecks())


def one_module_each(folder: Path, base: Any, names: tuple[str, str, str]) -> dict[str, torch.Tensor]:
    """Save an adapter as PEFT did with transformers 4. Return what it adds to each stacked weight."""
    torch.manual_seed(0)
    tensors, added = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in base.named_parameters():
        if weight.dim() != 3 or ".experts." not in name:
            continue
        holder, _, parameter = name.rpartition(".")
        layers = names[:2] if parameter == "gate_up_proj" else names[2:]
        added[name] = torch.zeros_like(weight)
        for expert in range(len(weight)):
            for layer, part in zip(layers, added[name][expert].chunk(len(layers)), strict=True):
                a, b = 0.1 * torch.randn(4, part.shape[1]), 0.1 * torch.randn(len(part), 4)
                at = f"base_model.model.{holder}.{expert}.{layer}"
                tensors |= {f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}
                part += 2 * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(names), task_type="CAUSAL_LM")
    config.save_pretrained(str(folder))
    return added


# PEFT looks among modules for patterns that it makes for experts' weights (peft 0.21.2, tuners_utils.py)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe"])
def test_adapter_with_one_module_per_expert_continues_or_is_refused(
    model_type: str, tmp_path: Path, capsys: Any
) -> None:
    folder = model_in(tmp_path, model_type)
    base = AutoModelForCausalLM.from_pretrained(folder)
    added = one_module_each(tmp_path / "old", base, ("gate_proj", "up_proj", "down_proj"))
    adapter = {"type": "lora", "init_from": str(tmp_path / "old"), "from_other_base": True}
    still = {"learning_rate": 1e-30, "max_steps": 1, "warmup_steps": 0}
    path = recipe(tmp_path, folder, adapter=adapter, train=still)
    codes, said = [], []
    for command in ("check", "train"):
        codes.append(main.main([command, str(path)]))
        said.append(capsys.readouterr().err)
    if model_type == "qwen2_moe":  # PEFT would ignore its experts with a warning
        assert codes == [2, 2] and said[0] == said[1]
        assert "the adapter has one module per expert, but the experts of qwen2_moe are stacked" in said[0]
        assert "layers.0.mlp.experts.0.down_proj" in said[0]
        return
    assert codes == [0, 0], said
    opened: Any = PeftModel.from_pretrained(base, RunFolder(tmp_path / "run").adapter)
    before = {
        name: weight.clone()
        for name, weight in AutoModelForCausalLM.from_pretrained(folder).named_parameters()
    }
    for name, weight in opened.merge_and_unload().named_parameters():
        if name in added:
            assert torch.allclose(weight - before[name], added[name], atol=1e-6), name
