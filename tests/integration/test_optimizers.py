"""Optimizers: in 8 and 4 bits weights move as the plain one's; what can't be had is known at once."""

import pytest
import torch
from safetensors.torch import load_file

from finetune.autoconfig import optimizer_choice
from finetune.cli import main
from finetune.core.run_checks import RunChecks
from finetune.recipe.schema import Speed
from finetune.training import optimizers
from support.offloading import batches, distance, model_of
from support.paths import MODEL, QUICKSTART
from support.runs import metrics, run_checks
from support.soak import soak_except

# ||w - w32|| / ||w32 - w0|| after 20 steps, w32 by the plain optimizer that is named: its limit, and beside
# it what was measured (LoRA r=16 / full fine-tuning of the embedded model's first two layers, random tokens)
BOUNDS = {
    "adamw_torch": ("adamw_torch_fused", 1e-5),  # 2.3e-7 / 5.5e-7: another order of the same operations
    "adamw_8bit": ("adamw_torch_fused", 0.05),  # 0.026 / 0.034
    "adamw_torch_8bit": ("adamw_torch_fused", 0.05),  # 0.020
    "adamw_torch_4bit": ("adamw_torch_fused", 0.7),  # 0.52: its second moments have 16 values
    "lion_8bit": ("lion_32bit", 0.05),  # 0.013 / 0.019
    "rmsprop_bnb_8bit": ("rmsprop_bnb_32bit", 0.06),  # 0.027 / 0.039
}


def moved(kind: str, optim: str, steps: int = 20):
    """Trained tensors before and after, in one row, and the run check."""
    from trl.trainer.sft_config import SFTConfig

    model = model_of(kind)
    rate = 1e-4 if "lion" in optim else 1e-3
    arguments = SFTConfig(optim=optim, learning_rate=rate, use_cpu=True, bf16=False)
    made, options = optimizers.kind_and_options(arguments, model, Speed())
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = torch.cat([p.detach().flatten() for p in parameters])
    optimizer = made(parameters, **options)
    for ids in batches(model, steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    checks = RunChecks()
    optimizers.add_run_check(optimizer, optim, made, checks)
    return before, torch.cat([p.detach().flatten() for p in parameters]), checks.entries[0]


@pytest.mark.parametrize("optim", soak_except(["adamw_torch", "adamw_8bit", "adamw_torch_4bit"], BOUNDS))
def test_weights_move_as_the_plain_optimizer_s_do(optim: str) -> None:
    plain, bound = BOUNDS[optim]
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step: the same, a minute later
        before, weights, check = moved("lora", optim)
    start, wanted, _ = moved("lora", plain)
    assert torch.equal(before, start)
    found = distance(weights, wanted, before)
    assert found < bound, found
    if "bit" in optim:
        assert found > 1e-3, "its state has all 32 bits"
        kind = {"adamw_torch_8bit": "OptimState8bit", "adamw_torch_4bit": "OptimState4bit"}
        assert f"24 tensors in {kind.get(optim, 'uint8')}" in check.actual
        assert "4 tensors in float32" in check.actual  # k_proj and v_proj: A or B has fewer than 4096 numbers
    assert check.passed


def test_an_optimizer_with_all_its_bits_is_not_taken_for_one_in_eight() -> None:
    model, checks = model_of("lora"), RunChecks()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = batches(model, 1)[0]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizers.add_run_check(optimizer, "adamw_8bit", torch.optim.AdamW, checks)
    assert not checks.entries[0].passed and "28 tensors in float32" in checks.entries[0].actual
    optimizers.add_run_check(optimizer, "sgd", torch.optim.SGD, checks)
    assert not checks.entries[1].passed and "torch's AdamW" in checks.entries[1].actual


@pytest.mark.parametrize("kind", soak_except(["lora"], ["full", "lora"]))
def test_a_run_in_eight_bits_saves_what_a_plain_run_does(kind: str, train) -> None:
    """One process: the Trainer has bitsandbytes keep embeddings in 32 bits, by place in the optimizer."""
    options = [f"adapter.type={kind}", "adapter.r=16", "train.max_steps=4", "train.learning_rate=1e-3"]
    options += ["data.validation=null", "train.effective_batch_size=4"]
    runs = [train(*options, f"train.optim={o}", name=o) for o in ("adamw_torch_fused", "adamw_8bit")]
    plain, eight = (load_file(next(run.weights.glob("*model.safetensors"))) for run in runs)
    before = load_file(MODEL / "model.safetensors") if kind == "full" else {}
    names = [name for name in plain if name in before or "lora_B" in name]  # B begins at zero

    def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensors[name].float().flatten() for name in names])

    found = distance(flat(eight), flat(plain), flat(before) if before else 0.0)
    assert 1e-4 < found < 0.05, found
    said = run_checks(runs[1])["train.optim"]["actual"]
    # norms and embeddings; of LoRA, k_proj and v_proj
    assert (
        "bitsandbytes's AdamW" in said
        and (
            "6 tensors in float32, 14 tensors in uint8"
            if kind == "full"
            else "4 tensors in float32, 24 tensors in uint8"
        )
        in said
    ), said
    said = run_checks(runs[0])["train.optim"]["actual"]
    assert "torch's AdamW" in said and "uint8" not in said


def test_adalora_keeps_the_optimizer_asked_for(train) -> None:
    run = train("adapter.type=adalora", "adapter.r=16", "train.optim=lion_8bit", "data.validation=null")
    got = run_checks(run)["train.optim"]["actual"]
    assert "bitsandbytes's Lion" in got and "uint8" in got


def test_torchao_s_optimizer_follows_the_schedule(train) -> None:
    """It keeps its learning rate in a tensor; LoRA+ makes it, and of the kind that was asked for."""
    with torch.compiler.set_stance("force_eager"):
        options = ["train.optim=adamw_torch_8bit", "adapter.loraplus_lr_ratio=4", "data.validation=null"]
        run = train(*options, "adapter.r=16", "train.max_steps=4")
    got = run_checks(run)
    assert "OptimState8bit" in got["train.optim"]["actual"] and got["adapter.loraplus_lr_ratio"]["passed"]
    rates = [line["learning_rate"] for line in metrics(run)]
    assert rates[0] > rates[1] > rates[-1]


@pytest.mark.parametrize(
    ("override", "package"),
    [
        ("train.optim=lion_8bit", "bitsandbytes"),
        ("train.optim=adamw_torch_4bit", "torchao"),
        ("speed.offload=optimizer", "torchao"),
    ],
)
def test_a_package_that_is_missing_is_known_before_anything_loads(
    override: str, package: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(optimizer_choice, "installed", lambda name: name != package)
    assert main.main(["check", str(QUICKSTART), override]) == 3
    said = capsys.readouterr().err
    assert f"needs the package {package}," in said and "pip install -e '.[" in said


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("train.optim=galore_adamw", 2, "train.optim_target_modules: all-linear"),
        ("train.optim=schedule_free_adamw", 2, "does not support schedule-free optimizers"),
        ("train.optim=stable_adamw", 3, "pip install torch-optimi"),
        ("train.optim=adalomo", 3, "pip install lomo-optim"),
        ("train.learning_rate=0", 2, "a learning rate of 0 trains nothing"),
        (
            "train.learning_rate=0",
            2,
            "a value such as 1e-05 to 0.01\n  help:      train.learning_rate: 3e-04",
        ),
    ],
)
def test_what_can_train_nothing_is_known_before_anything_loads(
    override, code, said, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(optimizer_choice, "installed", lambda name: False)
    assert main.main(["check", str(QUICKSTART), override]) == code
    assert said in capsys.readouterr().err
