"""DeepSpeed's ZeRO, for real, on two processes of the CPU: what one process trains is what they train."""

from __future__ import annotations

import shutil
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from finetune.checkpointing import checkpoints, resume_contract
from finetune.core.errors import UserError
from finetune.distributed import deepspeed_zero, launch_environment
from finetune.run_folder.run_folder import RunFolder
from support import two_ranks
from support.faults import Fault, injected
from support.paths import QUICKSTART, ROOT
from support.runs import digests, metrics, run_checks
from support.tiny_models import save, sizes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not find_spec("deepspeed"), reason="no DeepSpeed: pip install 'finetune-toolkit[deepspeed]'"
)
SHORT = ["train.max_steps=3", "train.warmup_steps=0", "train.effective_batch_size=8", "train.logging_steps=1"]
SHORT += ["eval.max_new_tokens=2", "eval.forgetting=false", "data.packing=false"]
FULL = ["adapter.type=full", "train.learning_rate=1e-3"]
TRAINED = {  # name -> config, what the recipe says
    "lora": ("zero2_8", ["train.per_device_train_batch_size=2"], 0, ""),
    "ia3": ("zero3_8", ["adapter.type=ia3"], 0, ""),
    "dora": ("zero3_8", ["adapter.type=dora", "speed.activation_checkpointing=full"], 0, ""),
    "full": ("zero3_8", FULL, 0, ""),
    "untied": ("zero3_8", ["train.per_device_train_batch_size=2"], 0, ""),
    "dora by ZeRO-2": ("zero2_8", ["adapter.type=dora"], 0, ""),
    "ia3 by ZeRO-2": ("zero2_8", ["adapter.type=ia3"], 0, ""),
    "qlora by ZeRO-2": ("zero2_8", ["adapter.type=qlora"], 0, ""),
    "full by ZeRO-2": ("zero2_8", FULL, 0, ""),
    "experts by ZeRO-2": ("zero2_8", ["adapter.target_modules=all-linear-and-experts"], 0, ""),
    "lora, offloaded": ("zero3_8_offload", [], 0, ""),
    "dora, offloaded": ("zero3_8_offload", ["adapter.type=dora"], 0, ""),
    "ia3, offloaded": ("zero3_8_offload", ["adapter.type=ia3"], 0, ""),
    "full, offloaded": ("zero3_8_offload", FULL, 0, ""),
}
REFUSED = {  # name -> config, what the recipe says, exit code, what is said
    "not finite": ("zero2_8", ["train.learning_rate=1e38"], 5, "gradients of step 2 are NaN or Inf"),
    "not finite in parts": ("zero3_8", ["train.learning_rate=1e38"], 5, "gradients of step 2 are NaN or Inf"),
    "checkpoints": (
        "zero2_8",
        ["train.save_steps=2", "train.optim=adamw_bnb_8bit"],
        3,
        "state that DeepSpeed, under adamw_bnb_8bit, keeps",
    ),
    "LoRA+": ("zero2_8", ["adapter.loraplus_lr_ratio=16"], 2, "LoRA+ needs an optimizer"),
}
# Moments in parts, weights too, both on the CPU
GOES_ON = ["lora", "dora", "full", "full by ZeRO-2", "full, offloaded"]


def one_rank(given: list[str], code: int, *faults: Fault) -> None:
    from finetune.cli import main

    with injected(*faults):
        assert main.main(["train", str(QUICKSTART), *SHORT, *given, "--quiet"]) == code


@pytest.fixture
def models(two_layers: Path, untied: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model of each run of TRAINED and REFUSED."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    config = Qwen3MoeConfig(**sizes(hidden_size=64, num_key_value_heads=2, **experts))
    mixture = save(tmp_path_factory.mktemp("mixture"), AutoModelForCausalLM.from_config(config))
    special = {"untied": untied, "experts by ZeRO-2": mixture}
    return {name: special.get(name, two_layers) for name in (*TRAINED, *REFUSED)}


@pytest.fixture
def launched(small, models, tmp_path) -> Callable[..., tuple[RunFolder, str]]:
    """`launched(name, *words)`: a run without 16 bits, which DeepSpeed has on GPUs alone; what it said."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import launch_matrix
    finally:
        sys.path.pop(0)

    def run(name: str, *words: str, faults: tuple[Fault, ...] = ()) -> tuple[RunFolder, str]:
        config, given, code, _ = {**TRAINED, **REFUSED}[name]
        text = (ROOT / "accelerate_configs" / f"{config}.yaml").read_text()
        copy = tmp_path / f"{config}.yaml"
        copy.write_text(text.replace("mixed_precision: bf16", 'mixed_precision: "no"'))
        own = [*small, *given, f"model.name={models[name]}"]
        own += [f"train.output_dir={tmp_path / 'two'}", *words]
        said = two_ranks.run(one_rank, own, code, *faults, **launch_matrix.environment(copy))
        return RunFolder(tmp_path / "two"), said

    return run


@pytest.mark.usefixtures("the_only_launch")
@pytest.mark.parametrize("name", TRAINED)
def test_two_processes_train_what_one_does(
    name: str, launched, train: Callable[..., RunFolder], models: dict[str, Path]
) -> None:
    config, given, *_ = TRAINED[name]
    if "offload" in config and not shutil.which("c++"):
        pytest.skip("DeepSpeed's Adam of the CPU is compiled here, and there is no c++")
    saving = ["train.save_steps=2", "train.max_steps=4"] if name in GOES_ON else []
    one, (two, _) = train(*SHORT, *given, f"model.name={models[name]}", *saving), launched(name, *saving)
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert b["learning_rate"] == a["learning_rate"] and b["tokens"] == a["tokens"]
    found = run_checks(two)
    assert all(check["passed"] for check in found.values())
    assert found["sharding"]["actual"] == "DeepSpeed"
    share = "50.0% of the model's numbers" if "zero3" in config else "ZeRO-2"
    assert share in found["sharded by DeepSpeed"]["actual"]
    if given != FULL:  # of the weights themselves, which one process has at another place
        assert (
            found["base weights after training"]["actual"]
            == run_checks(one)["base weights after training"]["actual"]
        )
    kind = "model" if given == FULL else "adapter_model"
    alone, saved = (load_file(run.weights / f"{kind}.safetensors") for run in (one, two))
    assert {key: t.shape for key, t in alone.items()} == {key: t.shape for key, t in saved.items()}
    assert all(float((alone[key] - t).norm()) <= 0.02 * float(t.norm()) for key, t in saved.items())
    if saving:
        goes_on(two, lambda: launched(name, *saving, "--resume"))


def goes_on(run: RunFolder, again: Callable[[], Any]) -> None:
    """From step 2, as if it had been killed after it, to the same bits; not as a run that is not split."""
    last, logged = run.checkpoints / "step-4", metrics(run)
    kept, contract = digests(last), checkpoints.read_json(last, checkpoints.CONTRACT)
    for folder in (last, run.weights):
        shutil.rmtree(folder)
    (run.path / "eval.json").unlink()
    again()
    found = digests(last)
    tensors = {name for name in kept if name.endswith(".safetensors")}
    assert {"weights.safetensors", "ranks.safetensors"} <= tensors
    assert {name: kept[name] for name in tensors} == {name: found[name] for name in tensors}
    assert [one["loss"] for one in metrics(run)] == [one["loss"] for one in logged] and run.weights.is_dir()
    facts = {name: value for name, value in contract["facts"].items() if name != "moments split by"}
    for then, now in ((facts, contract["facts"]), (contract["facts"], facts)):
        with pytest.raises(UserError, match="moments split by") as raised:
            resume_contract.compare({**contract, "facts": then}, {**contract, "facts": now}, last)
        assert raised.value.code == 4


@pytest.mark.usefixtures("the_only_launch")
def test_a_rank_that_hangs_is_not_waited_for_by_torch_s_default(launched, monkeypatch) -> None:
    """DeepSpeed's groups are its own, which wait for half an hour."""
    monkeypatch.setenv(launch_environment.TIMEOUT, "15")
    began = time.monotonic()
    with pytest.raises(AssertionError, match=launch_environment.GONE):
        launched("lora", faults=(Fault("hang", step=2, rank=1),))
    assert time.monotonic() - began < 120


@pytest.mark.usefixtures("the_only_launch")
@pytest.mark.parametrize("name", REFUSED)
def test_what_zero_can_not_do_is_said(name: str, launched) -> None:
    """A norm that is not finite, -1 in DeepSpeed's words, ends the run before anything is saved of it."""
    run, said = launched(name)
    assert REFUSED[name][3] in said and not run.adapter.exists()


def frequencies(place: Path) -> None:
    """A base that ZeRO-3 splits while it is loaded, in bf16: the dtype of what it computes of itself."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    deepspeed.init_distributed("gloo")
    split = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "train_batch_size": 2}
    kept = HfDeepSpeedConfig(split)  # transformers holds it weakly
    base = AutoModelForCausalLM.from_pretrained(str(place), dtype=torch.bfloat16)
    assert kept.is_zero3() and all(buffer.dtype == torch.bfloat16 for buffer in base.buffers())
    deepspeed_zero.own_buffers(base)
    assert all(buffer.dtype == torch.float32 for buffer in base.buffers())


def test_zero_3_leaves_rotary_frequencies_in_fp32(two_layers) -> None:
    two_ranks.run(frequencies, two_layers)
