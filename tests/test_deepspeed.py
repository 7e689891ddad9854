"""DeepSpeed's ZeRO, for real, on two processes of the CPU: what one process trains is what they train.

Run as a script it is these launches, one after the other, forked from one process; see `launches`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import two_ranks
from conftest import QUICKSTART, ROOT, metrics, receipts
from safetensors.torch import load_file

from finetune.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    not find_spec("deepspeed"), reason="no DeepSpeed: pip install 'finetune-toolkit[deepspeed]'"
)
SHORT = ["train.max_steps=3", "train.warmup_steps=0", "train.effective_batch_size=8", "train.logging_steps=1"]
SHORT += ["eval.max_new_tokens=2", "eval.general=false", "data.packing=false"]
FULL = ["adapter.type=full", "train.learning_rate=1e-3"]
TRAINED = {  # name -> config, what the recipe says
    "lora": ("zero2_8", ["train.per_device_train_batch_size=2"]),
    "ia3": ("zero3_8", ["adapter.type=ia3"]),
    "dora": ("zero3_8", ["adapter.type=dora", "speed.recompute=all"]),
    "full": ("zero3_8", FULL),
    "untied": ("zero3_8", ["train.per_device_train_batch_size=2"]),
}
REFUSED = {  # name -> config, what the recipe says, exit code, what is said
    "not finite": ("zero2_8", ["train.learning_rate=1e38"], 5, "gradients of step 2 are not finite"),
    "not finite in parts": ("zero3_8", ["train.learning_rate=1e38"], 5, "gradients of step 2 are not finite"),
    "checkpoints": ("zero2_8", ["train.save_strategy=steps"], 3, "moments that DeepSpeed splits"),
    "LoRA+": ("zero2_8", ["adapter.loraplus_lr_ratio=16"], 2, "which LoRA+ needs"),
}


def one_rank(given: list[str], folder: str) -> None:
    """`finetune train` in this process; its exit code and what it said are kept."""
    from finetune import cli

    out = os.open(f"{folder}.{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    code = cli.main(["train", str(QUICKSTART), *SHORT, *given, f"train.output_dir={folder}", "--quiet"])
    Path(f"{folder}.{os.environ['RANK']}.code").write_text(str(int(code)))


def launches(folder: Path, models: dict[str, str], data: list[str]) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import launch_matrix

    for name, (config, given, *_) in {**TRAINED, **REFUSED}.items():
        text = (ROOT / "accelerate_configs" / f"{config}.yaml").read_text()
        copy = folder / f"{config}.yaml"
        copy.write_text(text.replace("mixed_precision: bf16", 'mixed_precision: "no"'))
        own = [*data, *given, f"model.name={models.get(name, models[''])}"]
        two_ranks.run(one_rank, own, str(folder / name), **launch_matrix.environment(copy))


@pytest.fixture(scope="module")
def made(small, two_layers, untied, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    models = {"": str(two_layers), "untied": str(untied)}
    command = [sys.executable, __file__, str(folder), json.dumps(models), json.dumps(small)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FINETUNE_TIMEOUT_SECONDS": "120"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", TRAINED)
def test_two_processes_train_what_one_does(
    name: str, made: Path, train: Callable[..., RunFolder], two_layers, untied
) -> None:
    config, given = TRAINED[name]
    model = untied if name == "untied" else two_layers
    said = (made / f"{name}.0.log").read_text()
    assert [(made / f"{name}.{rank}.code").read_text() for rank in (0, 1)] == ["0", "0"], said[-3000:]
    one, two = train(*SHORT, *given, f"model.name={model}"), RunFolder(made / name)
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert b["learning_rate"] == a["learning_rate"] and b["tokens"] == a["tokens"]
    found = receipts(two)
    assert all(receipt["ok"] for receipt in found.values())
    assert found["splits what trains"]["got"] == "DeepSpeed"
    share = "50.0% of the model's numbers" if config == "zero3_8" else "ZeRO-2"
    assert share in found["split by DeepSpeed"]["got"]
    if name != "full":  # of the weights themselves, which one process has at another place
        assert (
            found["base weights after training"]["got"] == receipts(one)["base weights after training"]["got"]
        )
    kind = "model" if name == "full" else "adapter_model"
    alone, saved = (load_file(run.weights / f"{kind}.safetensors") for run in (one, two))
    assert {key: t.shape for key, t in alone.items()} == {key: t.shape for key, t in saved.items()}
    assert all(float((alone[key] - t).norm()) <= 0.02 * float(t.norm()) for key, t in saved.items())


@pytest.mark.parametrize("name", REFUSED)
def test_what_zero_can_not_do_is_said(name: str, made: Path) -> None:
    """A norm that is not finite, -1 in DeepSpeed's words, ends the run before anything is saved of it."""
    *_, code, said = REFUSED[name]
    assert (made / f"{name}.0.code").read_text() == str(code)
    assert said in (made / f"{name}.0.log").read_text()
    assert not (made / name / "adapter").exists()


if __name__ == "__main__":
    arguments: list[Any] = [json.loads(given) for given in sys.argv[2:]]
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    from finetune import train  # noqa: F401  # once for all ranks

    launches(Path(sys.argv[1]), *arguments)
