"""How many GPUs a command starts on, and the launches that are refused where there is none."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import yaml

from finetune.autoconfig import launch_settings, machine_setup
from finetune.autoconfig.batch_size import most_processes, split_batch
from finetune.cli import doctor_report, main
from finetune.core import run_checks
from finetune.core.errors import UserError
from finetune.distributed.launch_environment import ACCELERATE
from finetune.experiments.runner import verify_resume
from finetune.hardware import detection
from finetune.hardware.detection import Hardware
from finetune.launch import accelerate_config, launcher
from finetune.recipe import loader
from finetune.recipe.schema import Train
from finetune.training import training_arguments
from support.paths import QUICKSTART, ROOT
from support.plans import planned

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = Hardware("cpu", "CPU", 1, (0, 0), 16.0, 8)
CONFIGS = ROOT / "accelerate_configs"


def gpus(count: int) -> Hardware:
    return Hardware("cuda", "NVIDIA H100 80GB HBM3", count, (9, 0), 79.6, 96)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hardware], list[list[str]]]:
    """`on(machine)`: as if on that machine; the launches that are started there."""

    def make(machine: Hardware) -> list[list[str]]:
        started: list[list[str]] = []
        for module in (launcher, detection):
            monkeypatch.setattr(module, "detect", lambda: machine)
        monkeypatch.setattr("os.execv", lambda path, command: started.append(command) or sys.exit(0))
        return started

    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setenv(ACCELERATE, "")  # which a launch sets
    return make


@pytest.mark.parametrize(
    ("devices", "train", "taken", "by"),
    [
        (3, {}, 2, "3"),
        (5, {}, 4, "5"),
        (6, {}, 4, "6"),
        (7, {}, 4, "7"),
        (8, {}, 8, ""),
        (6, {"effective_batch_size": 48}, 6, ""),
        (4, {"effective_batch_size": 7}, 1, "4"),
        (8, {"per_device_train_batch_size": 8}, 4, "8 x 8"),
        (8, {"per_device_train_batch_size": "auto"}, 8, ""),
    ],
)
def test_the_most_gpus_that_divide_the_batch(devices: int, train: dict, taken: int, by: str) -> None:
    found, reason = most_processes(Train.model_validate(train), devices)
    size = train.get("effective_batch_size", 32)
    said = f"auto: {taken} of {devices} GPUs, because {by} does not divide effective_batch_size {size}"
    assert (found, reason) == (taken, said if by else "")


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(("count", "taken"), [(3, 2), (6, 4), (8, 8)])
def test_a_command_starts_on_the_gpus_that_its_batch_divides_by(
    command: str, count: int, taken: int, on, capsys
) -> None:
    started = on(gpus(count))
    more = ["--adapters", "lora,ia3"] if command == "compare" else []
    with pytest.raises(SystemExit):
        main.main([command, str(QUICKSTART), "train.effective_batch_size=32", *more])
    words, said = started[0], capsys.readouterr().out
    assert words[words.index("--num_processes") + 1] == str(taken)
    assert said.count(f"auto: {taken} of {count} GPUs") == (taken < count)


def test_plan_doctor_and_proofs_take_as_many(large, on, capsys) -> None:
    given = ["train.effective_batch_size=32"]
    made = planned(large, *given, gpu="h100-80gb", count=6)
    assert made.processes == 4 and made.batch.effective == 32
    assert made.choices["launch"].reason.startswith("auto: 4 of 6 GPUs")
    assert "; 4 GPUs: training needs" in made.choices["launch"].reason
    alone = planned(large, "train.effective_batch_size=7", gpu="h100-80gb", count=6)
    assert (alone.processes, alone.choices["launch"].value) == (1, "single_gpu")
    on(gpus(6))
    loaded = loader.load(QUICKSTART, given)
    rows = {row[0]: row[2] for row in doctor_report._choices(loaded, gpus(6))}
    assert rows["launcher"] == "auto: 4 of 6 GPUs, because 6 does not divide effective_batch_size 32"
    assert "train.effective_batch_size=" not in "".join(
        verify_resume.shortened(loaded)
    )  # two passes as it is


def test_a_number_of_processes_that_was_asked_for_stays(large, capsys) -> None:
    asked = ["plan", str(large), "--gpu", "h100-80gb", "--gpus", "3"]
    assert main.main([*asked, "--accelerate", "ddp_4"]) == 2
    assert "is no multiple of 3 processes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["single_gpu", "ddp_2", "8xh100_fp8", "fsdp2_8", "multi_node"])
def test_a_config_for_gpus_is_refused_where_there_is_none(name: str, on, capsys, monkeypatch) -> None:
    """Accelerate takes the CPU for them, without a word."""
    monkeypatch.setattr(accelerate_config, "installed", lambda package: True)
    started, asked = on(CPU), ["train", str(QUICKSTART), "--accelerate", name]
    for command in (asked, [*asked, "--dry-run"]):
        if name != "multi_node" or "--dry-run" not in command:  # which is not planned
            assert main.main(command) == 3 and not started
            said = capsys.readouterr().err
            assert "is for GPUs, and no GPU is visible" in said and "cpu_2.yaml" in said
    words = ["accelerate", "launch", "--config_file", str(CONFIGS / f"{name}.yaml"), "scripts/train.py"]
    monkeypatch.setattr("psutil.Process.cmdline", lambda self: words)
    with monkeypatch.context() as process:  # of plain `accelerate launch`
        process.setenv("ACCELERATE_MIXED_PRECISION", "no")
        assert main.main(["train", str(QUICKSTART)]) == 3
        assert f"{name}.yaml" in capsys.readouterr().err
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # it is meant
    if name == "multi_node":  # how many is for the launcher's own command line
        assert main.main(asked) == 2 and not started
        assert "--num_machines N" in capsys.readouterr().err
        return
    with pytest.raises(SystemExit):
        main.main(asked)
    assert len(started) == 1


@pytest.mark.parametrize("flag", ["--multi_gpu", "--multi-gpu", f"--config-file={CONFIGS / 'ddp_2.yaml'}"])
def test_a_launcher_s_flag_for_gpus_is_refused_where_there_is_none(flag, on, capsys, monkeypatch) -> None:
    words = ["accelerate", "launch", flag, "--num_processes", "2", "scripts/train.py"]
    monkeypatch.setattr("psutil.Process.cmdline", lambda self: words)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    on(CPU)
    assert main.main(["train", str(QUICKSTART)]) == 3
    said = capsys.readouterr().err
    assert "this launch is for GPUs, and no GPU is visible" in said
    assert ("--multi_gpu" if "multi" in flag else "ddp_2.yaml") in said


@pytest.mark.parametrize(
    ("name", "machine"), [("cpu", CPU), ("cpu_2", CPU), ("zero2_8", CPU), ("ddp_2", gpus(2))]
)
def test_other_configs_are_started(name: str, machine: Hardware, on, monkeypatch) -> None:
    """DeepSpeed trains on CPUs without `use_cpu`, under which it becomes DDP."""
    monkeypatch.setattr(accelerate_config, "installed", lambda package: True)
    started = on(machine)
    with pytest.raises(SystemExit):
        main.main(["train", str(QUICKSTART), "--accelerate", name])
    assert len(started) == 1


def test_a_dry_run_refuses_what_the_launch_would(small, on, monkeypatch, capsys) -> None:
    on(CPU)
    monkeypatch.setattr(accelerate_config, "installed", lambda package: package != "deepspeed")
    said = []
    for dry in ([], ["--dry-run"]):
        command = ["train", str(QUICKSTART), *small, "--accelerate", "zero2_8", *dry]
        assert main.main(command) == 3
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and "needs DeepSpeed" in said[0]


def test_fp16_is_not_trained_in_on_the_cpu(train, tmp_path: Path, on, monkeypatch, capsys) -> None:
    """Accelerate makes no scaler and no autocast there: what trained was fp16, its run checks of a scaler."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    config = tmp_path / "cpu_fp16.yaml"
    given = yaml.safe_load((CONFIGS / "cpu.yaml").read_text())
    config.write_text(yaml.safe_dump({**given, "mixed_precision": "fp16"}))
    on(CPU)
    assert main.main(["plan", str(QUICKSTART), "--accelerate", str(config)]) == 3
    assert "no fp16 autocast or loss scaler" in capsys.readouterr().err
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    train(code=3)
    with pytest.raises(UserError, match="the CPU can't train in fp16") as raised:
        launch_settings.read(CPU)
    assert raised.value.code == 3 and 'mixed_precision: "no"` or bf16' in raised.value.problems[0].fix
    AcceleratorState._reset_state(reset_partial_state=True)  # another test of this process may have left one
    made = Accelerator(cpu=True, mixed_precision="fp16")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert made.scaler is None and not made.native_amp, "it has both now"


def test_a_batch_that_can_t_be_split_starts_on_one_gpu(on, capsys) -> None:
    started = on(gpus(3))
    with pytest.raises(SystemExit):
        main.main(["train", str(QUICKSTART), "train.effective_batch_size=7"])
    words = started[0]
    assert words[words.index("--config_file") + 1].endswith("single_gpu.yaml")
    assert words[words.index("--num_processes") + 1] == "1"
    assert "auto: 1 of 3 GPUs, because 3 does not divide effective_batch_size 7" in capsys.readouterr().out


def test_one_process_computes_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched for one GPU where three are visible, it would be spread over them (DataParallel)."""
    loaded, none = loader.load(str(QUICKSTART), []), run_checks.Choice("", "")
    launched = launch_settings.read(CPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    setup, batch = machine_setup.Setup(gpus(3), launched, none, none), split_batch(loaded.train, 1)
    assert training_arguments.training_arguments(loaded.train, loaded.data, setup, batch).n_gpu == 1


def test_a_gpu_without_workers_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decided of workers would be refused, and the recipe has not asked for it."""
    loaded, none = loader.load(str(QUICKSTART), ["train.dataloader_num_workers=0"]), run_checks.Choice("", "")
    setup = machine_setup.Setup(gpus(1), launch_settings.read(CPU), none, none)
    made = training_arguments.training_arguments(
        loaded.train, loaded.data, setup, split_batch(loaded.train, 1)
    )
    assert (made.dataloader_num_workers, made.dataloader_persistent_workers) == (0, False)


SCRIPT = """
import sys
from finetune.cli import arguments, main
from finetune.launch import launcher
words = sys.argv[1:] if sys.argv[1] == "train" else ["train", *sys.argv[1:]]
print(launcher.command_line(arguments.go_on(main.parse(words), "runs/a")))
"""
LAUNCHER = """import subprocess, sys
sys.exit(subprocess.run([sys.executable, "SCRIPT", *sys.argv[sys.argv.index("SCRIPT") + 1 :]]).returncode)
"""


@pytest.mark.parametrize(
    ("own", "variables", "expected"),
    [
        (["a.yaml", "train.seed=1"], {}, ["a.yaml", "train.seed=1"]),
        (["train", "a.yaml"], {}, ["train", "a.yaml"]),
        (["a.yaml"], {ACCELERATE: "cpu_2"}, None),
    ],
)
def test_line_that_resumes_begins_with_the_launcher(
    own: list[str], variables: dict[str, str], expected: list[str] | None, tmp_path
) -> None:
    script, launch = tmp_path / "train.py", tmp_path / "accelerate"
    script.write_text(SCRIPT)
    launch.write_text(f"#!{sys.executable}\n" + LAUNCHER.replace("SCRIPT", str(script)))
    launch.chmod(0o755)
    folder = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "ACCELERATE_MIXED_PRECISION": "no", **variables}
    command = [str(launch), "launch", "--num_processes", "2", str(script), *own]
    done = subprocess.run(command, env=folder, capture_output=True, text=True, check=True)
    after = ["train.output_dir=runs/a", "--resume=auto"]
    if expected is None:  # `finetune train --accelerate cpu_2` launched itself
        assert ast.literal_eval(done.stdout) == [
            str(Path(sys.executable).with_name("finetune")),  # it is not on the PATH of this process
            "train",
            *own,
            after[0],
            "--accelerate",
            "cpu_2",
            after[1],
        ]
    else:
        start = ["accelerate", "launch", "--num_processes", "2", str(script)]
        assert ast.literal_eval(done.stdout) == [*start, *expected, *after]
