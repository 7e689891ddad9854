"""GPT-2's Conv1D layers train as in PEFT, and are merged, quantized or refused in words."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapters import attach
from finetune.cli import main
from finetune.core.run_checks import RunChecks
from finetune.recipe import loader
from support.architectures import CONFIGS
from support.paths import MODEL, QUICKSTART

ALL: dict[str, Any] = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
PEFT: dict[str, Any] = {
    "lora": LoraConfig(r=4, lora_alpha=8, **ALL),
    "dora": LoraConfig(r=4, lora_alpha=8, use_dora=True, **ALL),
    "adalora": AdaLoraConfig(init_r=6, target_r=4, lora_alpha=8, tinit=2, tfinal=6, total_step=20, **ALL),
    "ia3": IA3Config(
        target_modules=["attn.c_proj", "c_attn", "c_fc", "mlp.c_proj"],
        feedforward_modules=["mlp.c_proj"],
        task_type="CAUSAL_LM",
    ),
}


def base(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **CONFIGS[family])).eval()


def losses(model: Any) -> list[float]:
    """Of five steps, without dropout."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids, found = torch.arange(20)[None], []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", PEFT)
@pytest.mark.parametrize("family", ["gpt2", "openai-gpt"])
def test_losses_on_conv1d_layers_are_those_of_peft(family: str, kind: str) -> None:
    if (family, kind) == ("openai-gpt", "ia3"):
        pytest.skip("PEFT has no feed-forward modules of openai-gpt to compare with")
    given = [f"adapter.type={kind}", "adapter.target_modules=all-linear"]
    given += [] if kind == "ia3" else ["adapter.r=4", "adapter.lora_alpha=8"]
    recipe = loader.load(QUICKSTART, given)
    model = base(family)  # warnings are errors: PEFT's about `fan_in_fan_out` too
    torch.manual_seed(1)
    ours: Any = attach.attach(model, recipe.adapter, 20, RunChecks())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own use warns of `fan_in_fan_out`
        plain = base(family)
        torch.manual_seed(1)
        theirs: Any = get_peft_model(plain, PEFT[kind])
    assert set(ours.targeted_module_names) == set(theirs.targeted_module_names) != set()
    first, second = losses(ours), losses(theirs)
    assert first == second and first[-1] < first[0]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer GPT-2 with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2") / "model"
    vocabulary = AutoConfig.from_pretrained(MODEL).vocab_size
    torch.manual_seed(0)
    config = {**CONFIGS["gpt2"], "n_embd": 64, "vocab_size": vocabulary, "n_positions": 1024}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **config)).save_pretrained(folder)
    for path in MODEL.iterdir():
        if "token" in path.name or path.name == "chat_template.jinja":
            shutil.copy(path, folder / path.name)
    return folder


@pytest.mark.parametrize("changes", [(), ("adapter.type=qlora",), ("adapter.type=ia3",)], ids=str)
def test_gpt2_trains_and_merges(gpt2: Path, changes: tuple[str, ...], small, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    given = [f"model.name={gpt2}", "train.max_steps=4", f"train.output_dir={run}", *small, *changes]
    given += ["eval.forgetting=false", "eval.max_new_tokens=2"]
    assert main.main(["check", str(QUICKSTART), *given]) == 0, capsys.readouterr().err
    assert main.main(["train", str(QUICKSTART), *given]) == 0, capsys.readouterr().err
    merge = ["merge", str(run), "--dtype", "float32"]  # compares its logits with the adapter's
    assert main.main(merge) == 0, capsys.readouterr().err


@pytest.mark.parametrize("storage", ["torchao_int8"])
def test_storage_that_has_no_conv1d_layers_is_refused_alike(
    gpt2: Path, storage: str, small, tmp_path, capsys
) -> None:
    given = [
        f"model.name={gpt2}",
        f"model.quantization={storage}",
        f"train.output_dir={tmp_path / 'r'}",
        *small,
    ]
    said = []
    for command in ("check", "train"):
        assert main.main([command, str(QUICKSTART), *given]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and "layers of gpt2 are Conv1D" in said[0]
