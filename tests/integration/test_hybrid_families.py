"""Families with Mamba, convolutions, linear attention or RWKV: check, train, packing, merge and losses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.adapters import expert_targets
from finetune.cli import main
from finetune.models import architecture, module_lists
from finetune.planning import adapter_size
from finetune.recipe import loader
from finetune.run_folder.run_folder import RunFolder
from support.hybrid_families import FAMILIES, SAMPLE, config_of
from support.paths import MODEL
from support.soak import soak_except
from support.tiny_models import recipe, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from finetune.models.module_names import Names

TEXTS = (
    "Once upon a time there was a little girl.",
    "The color of the sky",
    "Two.",
    "One plus one is two, I think.",
)
RATE, STEPS = 0.01, 3


def names_of(model: Path) -> Names:
    path = model / "config.json"
    return module_lists.read(path, architecture.config_in(path)).names


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_of(family, **sizes)`: the folder of a tiny model, which the session makes once."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    folder = tmp_path_factory.mktemp("hybrid")

    def make(family: str, **sizes: int) -> Path:
        place = folder / "-".join((family, *map(str, sizes.values())))
        if not place.exists():
            torch.manual_seed(0)
            config = config_of(family, vocab_size=len(tokenizer), **ids, **sizes)
            save(place, AutoModelForCausalLM.from_config(config))
        return place

    return make


@pytest.mark.parametrize("family", soak_except(("jamba", "zamba2", "qwen3_next"), FAMILIES))
def test_all_linear_trains_the_layers_that_check_names(
    family: str, model_of: Any, tmp_path: Path, capsys: Any
) -> None:
    """`check` and `train` print the same note, and every adapter changes in training."""
    path, names = recipe(tmp_path, model_of(family)), names_of(model_of(family))
    resolved = expert_targets.resolve({"target_modules": "all-linear"}, names, "lora")
    said = []
    for command in ("check", "train"):
        assert main.main([command, str(path)]) == 0, capsys.readouterr().err
        said.append("".join(capsys.readouterr()))
    for label in FAMILIES[family].skipped:
        assert any(f".{label}" in one for one in resolved.untrained), resolved.untrained
    assert bool(resolved.untrained) == bool(FAMILIES[family].skipped)
    notes = [[line for line in text.splitlines() if "all-linear skips" in line] for text in said]
    assert notes[0] == notes[1] and len(notes[0]) == bool(resolved.untrained)
    if resolved.untrained:
        assert f"skips {len(resolved.untrained)} linear layer" in notes[0][0]
    adapter = load_file(RunFolder(tmp_path / "run").adapter / "adapter_model.safetensors")
    trained = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in adapter}
    assert trained == set(resolved.modules)
    assert {*resolved.modules, *resolved.untrained, *resolved.skipped} == set(names.linear)
    assert all(tensor.any() for name, tensor in adapter.items() if ".lora_B" in name)
    if not family.startswith(("mamba", "falcon_mamba", "rwkv")):  # `plan` estimates models with attention
        section = loader.load(path)
        found = architecture.read(section.model)
        planned = adapter_size.adapted(section.adapter, section.model, found, 2)
        assert planned.trained == sum(tensor.numel() for tensor in adapter.values())


@pytest.mark.parametrize("key", ["packing", "padding_free"])
@pytest.mark.parametrize("family", soak_except(SAMPLE, FAMILIES))
def test_packing_is_refused_alike_with_the_way_out(
    family: str, key: str, model_of: Any, tmp_path: Path, capsys: Any
) -> None:
    path = recipe(tmp_path, model_of(family), data={key: True})
    capsys.readouterr()  # the progress of saving the model
    said = []
    for command in ("check", "train"):
        assert main.main([command, str(path)]) == 3
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert "can't separate the examples of a packed sequence" in said[0] and f"data.{key}: false" in said[0]
    kernels = FAMILIES[family].kernels
    assert all(package in said[0] for package in kernels or ())
    assert ("pip install" in said[0]) == (kernels is not None)


@pytest.mark.parametrize(
    ("family", "target", "fix"),
    [
        ("jamba", "dt_proj", "remove dt_proj from target_modules"),
        ("mamba", "out_proj", "target_modules: [in_proj, x_proj]"),
    ],
)
def test_layer_that_is_never_called_is_refused_by_name(
    family: str, target: str, fix: str, model_of: Any, tmp_path: Path, capsys: Any
) -> None:
    adapter = {"type": "lora", "r": 4, "target_modules": ["in_proj", target]}
    path = recipe(tmp_path, model_of(family), adapter=adapter)
    capsys.readouterr()  # the progress of saving the model
    said = []
    for command in ("check", "train"):
        assert main.main([command, str(path)]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and target in said[0] and f"help:      {fix}" in said[0]


@pytest.mark.parametrize("family", ["zamba2", pytest.param("zamba", marks=pytest.mark.soak)])
def test_merge_onto_shared_weights_is_refused(
    family: str, model_of: Any, tmp_path: Path, capsys: Any
) -> None:
    """One weight can't hold the adapters of several layers. Adapters on other layers merge."""
    assert names_of(model_of(family)).shared
    path = recipe(tmp_path, model_of(family))
    assert main.main(["train", str(path), "--quiet"]) == 0
    for command in (["merge"], ["export", "--to", "vllm"]):
        assert main.main([command[0], str(tmp_path / "run"), *command[1:]]) == 2
        assert "layers that share their weights, so it can't be merged" in capsys.readouterr().err
    assert not (tmp_path / "run" / "merged").exists()


@pytest.mark.soak
def test_merge_of_layers_with_their_own_weights_works_beside_shared_ones(
    model_of: Any, tmp_path: Path
) -> None:
    path = recipe(tmp_path, model_of("zamba2"))
    own = f"adapter.target_modules={['in_proj', 'linear']}".replace("'", "")
    assert main.main(["train", str(path), own, f"train.output_dir={tmp_path / 'own'}", "--quiet"]) == 0
    assert main.main(["merge", str(tmp_path / "own"), "--dtype", "float32", "--quiet"]) == 0


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("family", ["mamba", pytest.param("jamba", marks=pytest.mark.soak)])
def test_layers_that_are_read_directly_are_not_quantized(
    family: str, quantization: str, model_of: Any, tmp_path: Path, capsys: Any
) -> None:
    """Mamba multiplies by the weight of `dt_proj` itself, which fails if it holds codes."""
    base = model_of(family, hidden_size=64)  # rows of whole blocks, which the CPU reads correctly
    path, stored = recipe(tmp_path, base), f"model.quantization={quantization}"
    assert main.main(["train", str(path), stored, "--quiet"]) == 0, capsys.readouterr().err
    names = names_of(base)
    direct = [name for name in names.uncalled if name in names.linear]
    assert direct
    checks = {one["option"]: one["actual"] for one in RunFolder(tmp_path / "run").read("checks.json")}
    assert f"; {len(direct)} are not quantized" in checks["model.quantization"]


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[place < len(row) for place in range(longest)] for row in rows])


# A reopened RecurrentGemma differs by 1.8e-7, so its run stops at a check. The cause is not known
STATELESS = [family for family in FAMILIES if family != "recurrent_gemma"]


@pytest.mark.parametrize("family", soak_except(("qwen3_next", "lfm2"), STATELESS))
def test_run_has_the_losses_of_a_loop_by_hand(
    family: str, model_of: Any, tmp_path: Path, capsys: Any
) -> None:
    base, names = model_of(family), names_of(model_of(family))
    options = expert_targets.resolve({"target_modules": "all-linear"}, names, "lora").options
    torch.manual_seed(1)
    made = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, init_lora_weights=False, **options)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), made).save_pretrained(tmp_path / "start")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps({'text': text})}\n" for text in TEXTS))
    adapter = {"type": "lora", "init_from": str(tmp_path / "start"), "from_other_base": True}
    train = {
        "per_device_train_batch_size": 4, "effective_batch_size": 4, "max_steps": STEPS, "warmup_steps": 0,
        "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0,
        "router_aux_loss_coef": 0.0, "logging_steps": 1,
    }  # fmt: skip
    if not any("experts" in name for name in names.kinds):
        del train["router_aux_loss_coef"]
    path = recipe(tmp_path, base, adapter=adapter, train=train)
    assert main.main(["train", str(path), "speed.compile=false"]) == 0, capsys.readouterr().err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids, real = padded([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS])
    model: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "start", is_trainable=True
    ).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, expected = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0), list[float]()
    labels = ids[:, 1:].masked_fill(~real[:, 1:], -100).flatten()
    for _ in range(STEPS):
        logits = model(input_ids=ids, attention_mask=real.long(), use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_model_without_attention_trains_with_the_loss_of_trl(
    model_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Its layers run no attention, so the profile of a step shows none."""
    raw = yaml.safe_load(recipe(tmp_path, model_of("mamba"), train={"max_steps": 1}).read_text())
    path = tmp_path / "trl.yaml"
    path.write_text(yaml.safe_dump({**raw, "speed": {"loss": "trl"}}))
    assert main.main(["train", str(path), "--quiet"]) == 0
