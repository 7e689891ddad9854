"""accelerate_configs/ as Accelerate reads them, and what it would pass over in any other."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.hardware.detection import Hardware
from finetune.launch import accelerate_config, launcher
from finetune.launch.launcher import LaunchChoice
from finetune.planning import sharding_cost
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
try:
    import launch_matrix
finally:
    sys.path.pop(0)

FSDP, TWO = {"distributed_type": "FSDP"}, {"fsdp_version": 2}
EIGHT = Hardware("cuda", "NVIDIA H100 80GB HBM3", 8, (9, 0), 79.6, 96)
CONFIGS = {path.stem: path for path in sorted((ROOT / "accelerate_configs").glob("*.yaml"))}


def test_there_is_a_config_for_each_kind_of_launch() -> None:
    assert len(CONFIGS) == 17
    assert {"cpu_2", "ddp_4", "8xh100_fp8_te", "fsdp2_8_offload", "zero3_8", "multi_node"} <= CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_reads_it_and_ignores_nothing(name: str, monkeypatch) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    monkeypatch.setattr(accelerate_config, "installed", lambda package: True)
    text = CONFIGS[name].read_text()
    read: Any = load_config_from_file(str(CONFIGS[name]))
    accelerate_config.check(CONFIGS[name])
    assert read.mixed_precision in ("no", "bf16", "fp8")
    assert text.startswith("# ") and text.count("#") > 2, "says when to use it, and why"
    made = launch_matrix.environment(CONFIGS[name])
    for section in ("fp8_config", "fsdp_config", "parallelism_config"):
        for key, value in getattr(read, section).items():
            full = key if key.startswith(section.split("_")[0]) else f"{section.split('_')[0]}_{key}"
            assert str(value).lower() in {
                value.lower() for given, value in made.items() if given.lower().endswith(full)
            }, f"{key} reaches no process"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_reads_it_as_accelerates_launcher_does(name: str, monkeypatch) -> None:
    """plan_launch.variables, made without torch, beside the launcher's own environment."""
    monkeypatch.setattr(accelerate_config, "installed", lambda package: True)
    found = sharding_cost.variables(accelerate_config.read(CONFIGS[name]))
    made = {key: value.lower() for key, value in launch_matrix.environment(CONFIGS[name]).items()}
    for key, value in found.items():
        assert made.get(key, "no") == value.lower(), key
    asks = re.compile("ACCELERATE_USE_(FSDP|DEEPSPEED|PARALLELISM)|ACCELERATE_FP8_BACKEND|FSDP_VERSION")
    assert {key for key in made if asks.match(key)} <= found.keys()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fsdp_config": {"fsdp_verison": 2}}, "fsdp_config.fsdp_verison: fsdp_config has no such key"),
        ({"fp8_config": {"backend": "AO", "enable_float8": False}}, "fp8_config.enable_float8"),
        ({"deepspeed_config": {"zero_stag": 2}}, "zero_stage"),
        ({"parallelism_config": {"cp_size": 4}}, "parallelism_config_cp_size"),
        ({"dynamo_config": {"dynamo_bakend": "INDUCTOR"}}, "dynamo_config.dynamo_bakend"),
        ({"fp8_config": {"backend": "ao"}}, "AO"),
        ({"distributed_type": "MULTI_CPU"}, "Accelerate starts one process and ignores num_processes"),
        ({"distributed_type": "NO"}, "Accelerate starts one process and ignores num_processes"),
        ({"distributed_type": False}, "distributed_type: 'NO' (without quotes"),
        ({"mixed_precison": "bf16"}, "mixed_precision"),
        ({"fp8_config": "AO"}, "fp8_config must be a section"),
        ({"mixed_precision": "bf17"}, "bf16"),
        ({"distributed_type": "MULTIGPU"}, "MULTI_GPU"),
        ({"distributed_type": "MEGATRON_LM"}, "does not support Megatron-LM"),
        ({"dynamo_config": {"dynamo_use_regional_compilation": "abc"}}, "must be true or false"),
        ({"num_machines": {}}, "a text or a number"),
        ({"main_process_port": []}, "a text or a number"),
        ({"parallelism_config": {"parallelism_config_cp_size": []}}, "a text or a number"),
        ({"num_processes": "two"}, "an integer from 1 to 65,536"),
        ({"num_processes": 0}, "an integer from 1 to 65,536"),
        ({"num_processes": "2"}, "num_processes: 2"),
        ({"num_processes": 10**9}, "an integer from 1 to 65,536"),
        ({"num_machines": "1"}, "num_machines: 1"),
        ({"num_machines": True}, "an integer from 1 to 65,536"),
        ({"machine_rank": -2}, "an integer from 0 to 65,535"),
        *(({"main_process_port": port}, "an integer from 0 to 65,535") for port in (-1, 70000, 10**12, "x")),
        ({"fsdp_config": {"fsdp_version": 3}}, "1, 2"),
        ({"fsdp_config": {"fsdp_version": 2}}, "only with distributed_type: FSDP"),
        ({"fp8_config": {"backend": "AO"}}, "only with mixed_precision: fp8"),
        ({"fp8_config": {"backend": "TE", "fp8_format": "HYBIRD"}}, "HYBRID"),
        ({"deepspeed_config": {"zero_stage": "three"}}, "zero_stage must be an integer from 0 to 3"),
        (
            {"deepspeed_config": {"deepspeed_config_file": "ds.json"}},
            "can't compare a separate DeepSpeed config file with the recipe",
        ),
        ({"gpu_ids": 0}, 'a string of numbers such as "0,1"'),
        ({"gpu_ids": [0, 1]}, 'a string of numbers such as "0,1"'),
        ({"gpu_ids": "0"}, "type MULTI_GPU needs several GPUs"),
        (
            {**FSDP, "fsdp_config": {**TWO, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
            "reshard_after_forward",
        ),
        (
            {**FSDP, "fsdp_config": {**TWO, "forward_prefetch": True}},
            "fsdp_config.forward_prefetch: the key belongs to FSDP1",
        ),
        ({**FSDP, "fsdp_config": {**TWO, "fsdp_use_orig_params": False}}, "the original parameters"),
        ({**FSDP, "fsdp_config": {**TWO, "fsdp_sync_module_states": True}}, "cpu_ram_efficient_loading"),
        (
            {**FSDP, "fsdp_config": {**TWO, "fsdp_min_num_params": 5}},
            "only with the wrap policy SIZE_BASED_WRAP",
        ),
        (
            {**FSDP, "fsdp_config": {**TWO, "fsdp_auto_wrap_policy": "TRANSFORMER_WRAP"}},
            "TRANSFORMER_BASED_WRAP",
        ),
        ({"rdzv_backend": "c10d"}, "only from the command line"),
        ({"enable_cpu_affinity": True}, "--enable_cpu_affinity"),
    ],
)
def test_what_accelerate_passes_over_is_an_error(
    changes: dict[str, Any], said: str, tmp_path, capsys
) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    made = {**yaml.safe_load(CONFIGS["ddp_2"].read_text()), **changes}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(made))
    if not changes.keys() & {"mixed_precison", "distributed_type"}:
        load_config_from_file(str(path))  # in silence
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        accelerate_config.check(path)
    assert raised.value.code == 2
    assert main.main(["train", "recipes/quickstart.yaml", "--accelerate", str(path)]) == 2
    assert "mine.yaml" in capsys.readouterr().err
    words = ["--config_file", str(path), "-m", "finetune", "train", "recipes/quickstart.yaml"]
    assert launcher.main(words) == 2 and "mine.yaml" in capsys.readouterr().err


def test_mpirun_that_is_not_installed_is_an_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    made = yaml.safe_load(CONFIGS["ddp_2"].read_text()) | {"mpirun_config": {"mpirun_hostfile": "hosts"}}
    (path := tmp_path / "mine.yaml").write_text(yaml.safe_dump(made))
    with pytest.raises(UserError, match="needs mpirun, which is not installed") as raised:
        accelerate_config.check(path)
    assert raised.value.code == 3


def test_a_key_that_is_given_twice_is_an_error(tmp_path, capsys) -> None:
    """The last one would hold, without a word; in a section too."""
    path = tmp_path / "mine.yaml"
    path.write_text(CONFIGS["fsdp2_8"].read_text() + "\nnum_processes: 2\n")
    for command in (["train", "recipes/quickstart.yaml", "--dry-run"], ["plan", "recipes/quickstart.yaml"]):
        assert main.main([*command, "--accelerate", str(path)]) == 2
        said = capsys.readouterr().err
        assert (
            "error: num_processes: the mapping has the same key twice" in said and f"first at {path}:" in said
        )
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_version: 1\n")
    with pytest.raises(UserError, match=r"fsdp_config\.fsdp_version: the mapping has the same key twice"):
        accelerate_config.read(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1: 2", "1: an accelerate config has no such key"),
        ("null: 2", "None: an accelerate config has no such key"),
        ("mpirun_config: {1: 2}", "mpirun_config has no such key"),
        ("mpirun_config: {true: 2}", "mpirun_config.True: mpirun_config has no such key"),
    ],
)
def test_key_that_is_no_string_is_an_error(line: str, said: str, tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n{line}\n")
    with pytest.raises(UserError) as raised:
        accelerate_config.check(path)
    assert said in str(raised.value)


UNREADABLE = ["num_processes: 2  # café\n".encode("latin-1"), b"a: 2026-02-30\n", b"a: " + b"[" * 3000]


@pytest.mark.parametrize("content", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_config_that_is_no_text_or_has_a_date_that_is_none_is_an_error(content: bytes, tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(
        UserError, match=r"not an accelerate config|not valid YAML|nested too deeply"
    ) as raised:
        accelerate_config.read(path)
    assert raised.value.problems[0].where.startswith(str(path))


@pytest.mark.parametrize(
    "name", ["num_processes", "mixed_precision", "parallelism_config.cp_size", "fp8_config.x"]
)
@pytest.mark.parametrize("value", [[1], {"a": 1}, "9" * 5000], ids=["list", "mapping", "long"])
def test_a_value_of_another_form_is_an_error(name: str, value: Any, tmp_path) -> None:
    path, (section, _, key) = tmp_path / "mine.yaml", name.rpartition(".")
    wrong = {section: {key: value}} if section else {key: value}
    path.write_text(yaml.safe_dump({"distributed_type": "NO", "tpu_env": []} | wrong))
    with pytest.raises(UserError, match="has another form"):
        accelerate_config.read(path)


def test_a_config_of_accelerate_launch_itself_is_looked_at(tmp_path, capsys, monkeypatch) -> None:
    """By the processes that it starts."""
    path = tmp_path / "mine.yaml"
    path.write_text(CONFIGS["cpu_2"].read_text() + "fsdp_config: {fsdp_verison: 2}\n")
    words = ["accelerate", "launch", "--config_file", str(path), "scripts/train.py"]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr("psutil.Process.cmdline", lambda self: words)
    assert main.main(["train", "recipes/quickstart.yaml"]) == 2
    assert "fsdp_config.fsdp_verison: fsdp_config has no such key" in capsys.readouterr().err
    words[2:4] = []  # then it reads what `accelerate config` wrote
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(path))
    assert main.main(["train", "recipes/quickstart.yaml"]) == 2
    assert "fsdp_config.fsdp_verison: fsdp_config has no such key" in capsys.readouterr().err
    words[:2] = ["/usr/bin/python", "/usr/bin/accelerate-launch"]
    assert main.main(["train", "recipes/quickstart.yaml"]) == 2
    words[:2] = ["torchrun", "accelerate-launcher"]
    launcher.check_the_launchers()
    words[:2] = ["/usr/bin/python", "/usr/bin/accelerate-launch"]
    words.insert(2, "--cpu")  # Accelerate then reads none
    launcher.check_the_launchers()


def test_a_launch_that_was_told_to_stop_has_not_failed(monkeypatch, capsys) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    failure = SimpleNamespace(exitcode=75, timestamp=9, message="", error_file="<N/A>", local_rank=0, pid=1)
    monkeypatch.setattr(ChildFailedError, "format_msg", lambda error: "")

    def stopped(asked: Any) -> None:
        raise ChildFailedError("finetune", cast(Any, {0: failure}))

    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    monkeypatch.setattr("accelerate.commands.launch.launch_command", stopped)
    assert launcher.main(["--config_file", str(CONFIGS["cpu_2"]), "scripts/train.py"]) == 75
    assert "failed" not in capsys.readouterr().err


def test_use_cpu_of_several_processes_reaches_them(monkeypatch) -> None:
    """Accelerate hands it on to one alone: by its own launcher they would train on GPUs."""
    started: list[str] = []
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    monkeypatch.setattr(
        "accelerate.commands.launch.launch_command",
        lambda asked: started.append(os.environ["ACCELERATE_USE_CPU"]),
    )
    assert launcher.main(["--config_file", str(CONFIGS["cpu_2"]), "scripts/train.py"]) == 0
    assert started == ["true"]
    monkeypatch.setattr(launcher, "detect", lambda: EIGHT)
    with pytest.raises(UserError, match="launcher ignores use_cpu") as raised:
        launcher.check_cpu(CONFIGS["cpu_2"])
    assert raised.value.code == 2
    launcher.check_cpu(CONFIGS["ddp_2"])


@pytest.mark.parametrize(
    ("variable", "by"),
    [("TORCHELASTIC_RUN_ID", "torchrun"), ("ACCELERATE_MIXED_PRECISION", "accelerate launch")],
)
def test_a_config_named_inside_a_launch_is_refused(variable: str, by: str, monkeypatch, capsys) -> None:
    """`torchrun scripts/train.py RECIPE --accelerate zero3_8` would train by DDP."""
    monkeypatch.setenv(variable, "no")
    assert main.main(["train", "recipes/quickstart.yaml", "--accelerate", "zero3_8"]) == 2
    said = capsys.readouterr().err
    assert f"{by} has started this process" in said and "zero3_8" in said


@pytest.mark.parametrize(
    ("name", "gpus", "said"), [("ddp_8", 4, "--num_processes 4"), ("multi_node", 8, "16")]
)
def test_a_number_of_processes_that_only_the_launcher_can_be_told(name, gpus, said, monkeypatch) -> None:
    machine = Hardware("cuda", "NVIDIA H100 80GB HBM3", gpus, (9, 0), 79.6, 96)
    monkeypatch.setattr(launcher, "detect", lambda: machine)
    with pytest.raises(UserError, match="the command line must give the number") as raised:
        launcher.if_needed(["train", "recipe.yaml"], lambda machine: LaunchChoice("", "", 1), name)
    (problem,) = raised.value.problems
    assert raised.value.code == 2 and said in problem.fix and "-m finetune train recipe.yaml" in problem.fix


def without_a_number(config: str, folder: Path) -> Path:
    made = yaml.safe_load(CONFIGS[config].read_text())
    del made["num_processes"]
    (folder / "mine.yaml").write_text(yaml.safe_dump(made))
    return folder / "mine.yaml"


@pytest.mark.parametrize(
    ("config", "gpus", "said"),
    [
        ("context_parallel_4", 2, "set sizes that multiply to 2"),
        ("context_parallel_4", 8, "--num_processes 4 "),
        ("ddp_4", 8, "--num_processes 8 "),
    ],
)
def test_a_config_without_num_processes(config: str, gpus: int, said: str, monkeypatch, tmp_path) -> None:
    """Accelerate takes none from the machine; nor more or fewer than `parallelism_config` is for."""
    monkeypatch.setattr(launcher, "detect", lambda: replace(EIGHT, count=gpus))
    path = without_a_number(config, tmp_path)
    with pytest.raises(UserError) as raised:
        launcher.check_count(path, [], ["train", "recipe.yaml"])
    assert raised.value.code == 2 and said in raised.value.problems[0].fix


def test_what_accelerate_says_of_its_options_is_an_error(tmp_path, capsys) -> None:
    path = without_a_number("ddp_4", tmp_path)
    assert launcher.main(["--config_file", str(path), "scripts/train.py"]) == 2
    assert "You need to manually pass in `--num_processes`" in capsys.readouterr().err


def test_a_missing_config_of_the_launcher_is_an_error_and_a_shipped_name_is_found(
    capsys, monkeypatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # the launcher sets it for its processes
    assert launcher.main(["--config_file", "cpu_22", "scripts/train.py"]) == 2
    shown = capsys.readouterr().err
    assert "--config_file: finetune can't find this accelerate config" in shown and "cpu_2" in shown
    found = []
    monkeypatch.setattr(
        "accelerate.commands.launch.launch_command", lambda given: found.append(given.config_file)
    )
    assert launcher.main(["--config_file", "cpu_2", "scripts/train.py"]) == 0
    assert found == [str(CONFIGS["cpu_2"])]


def test_processes_of_several_machines_are_not_begun_again(capsys) -> None:
    words = ["--num_machines", "2", "--num_processes", "16", "--machine_rank", "0", "--main_process_ip", "a"]
    config = ["--config_file", str(CONFIGS["multi_node"])]
    assert launcher.main([*config, *words, "--max_restarts", "1", "scripts/train.py"]) == 2
    assert "scripts/slurm/train.sbatch" in capsys.readouterr().err


def test_a_config_may_say_which_of_many_machines_this_is(tmp_path, monkeypatch) -> None:
    machine = Hardware("cuda", "NVIDIA H100 80GB HBM3", 8, (9, 0), 79.6, 96)
    monkeypatch.setattr(launcher, "detect", lambda: machine)
    made = yaml.safe_load(CONFIGS["multi_node"].read_text()) | {"num_processes": 16, "machine_rank": 1}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(made | {"main_process_ip": "10.0.0.1", "main_process_port": 29500}))
    launcher.check_count(path, [], ["train", "recipe.yaml"])
    path.write_text(yaml.safe_dump(made))
    with pytest.raises(UserError, match="the command line must give the number"):
        launcher.check_count(path, [], ["train", "recipe.yaml"])


def test_a_signal_ends_a_launch_for_good(monkeypatch) -> None:
    """Also where nothing was started yet, and where the launcher would begin again what ended."""
    monkeypatch.setenv(launcher.STOPPED, "")
    told: list[int] = []
    children = [SimpleNamespace(send_signal=told.append)]
    process = SimpleNamespace(children=lambda: children)
    monkeypatch.setattr(launcher, "psutil", SimpleNamespace(Process=lambda: process, NoSuchProcess=OSError))
    monkeypatch.setitem(sys.modules, "psutil", None)  # a second signal may come while the first imports it
    launcher.forward(signal.SIGTERM, None)
    assert told == [signal.SIGTERM]
    with pytest.raises(SystemExit) as left:  # what is begun again
        launcher.if_needed(["train", "recipe.yaml"], lambda machine: LaunchChoice("", "", 1))
    assert left.value.code == 75
    children.clear()
    with pytest.raises(SystemExit) as left:
        launcher.forward(signal.SIGTERM, None)
    assert left.value.code == 75


def test_a_place_of_one_s_own_is_not_taken_for_a_shipped_config(tmp_path) -> None:
    assert launcher.find("fsdp2_8").stem == launcher.find("accelerate_configs/fsdp2_8.yaml").stem == "fsdp2_8"
    with pytest.raises(UserError, match="finetune can't find this accelerate config"):
        launcher.find(str(tmp_path / "fsdp2_8.yaml"))


def test_deepspeed_is_asked_for_before_anything_starts(monkeypatch) -> None:
    monkeypatch.setattr(accelerate_config, "installed", lambda package: False)
    with pytest.raises(UserError, match="needs DeepSpeed") as raised:
        accelerate_config.check(CONFIGS["zero3_8"])
    assert raised.value.code == 3


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Any:
    """`cluster(script, *words)`: what a scheduler's script runs on its second machine, as it is parsed."""
    stubs = {
        "python": 'printf "%s\\n" "$@"',
        "srun": 'shift; exec "$@"',
        "scontrol": "echo first; echo second",
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def run(script: str, *words: str) -> Any:
        from accelerate.commands.launch import launch_command_parser

        line = ["bash", "-euo", "pipefail", "-c", script, "script", *words]
        said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        assert said[:2] == ["-m", "finetune.launch"]
        return launch_command_parser().parse_args(said[2:])

    return run


def test_slurm_s_script_starts_what_it_says(cluster, monkeypatch) -> None:
    given = {"JOB_ID": "71", "JOB_NODELIST": "node[1-2]", "NNODES": "2", "NODEID": "1", "GPUS_ON_NODE": "8"}
    given["CPUS_PER_TASK"] = "64"
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    script = (ROOT / "scripts" / "slurm" / "train.sbatch").read_text()
    (told,) = re.findall(r"^#SBATCH --signal B:(\w+)@", script, re.M)
    assert signal.Signals[f"SIG{told}"] in launcher.FORWARDED
    assert told not in ("TERM", "INT", "HUP", "QUIT"), "srun does not hand it on, but kills"
    found = cluster(script, "recipe.yaml", "train.output_dir=a b", "--resume=auto")
    assert (found.num_machines, found.num_processes, found.machine_rank) == (2, 16, 1)
    assert (found.main_process_ip, found.main_process_port) == ("first", 20071)
    assert found.training_script == "scripts/train.py" and (ROOT / found.config_file).is_file()
    assert found.training_script_args == ["recipe.yaml", "train.output_dir=a b", "--resume=auto"]
    accelerate_config.check(ROOT / found.config_file)


def test_slurm_s_script_ends_where_its_machines_are_not_known(cluster, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "64")
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURM_NNODES", "2")
    (tmp_path / "scontrol").write_text("#!/bin/bash\nexit 1\n")
    with pytest.raises(subprocess.CalledProcessError):
        cluster((ROOT / "scripts" / "slurm" / "train.sbatch").read_text(), "recipe.yaml")


def test_skypilot_s_task_starts_what_it_says(cluster, monkeypatch) -> None:
    task = yaml.safe_load((ROOT / "scripts" / "skypilot" / "train.yaml").read_text())
    given = {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "8", "NODE_RANK": "1", "NODE_IPS": "10.0.0.1\n10.0.0.2"}
    for name, value in given.items():
        monkeypatch.setenv(f"SKYPILOT_{name}", value)
    for name, value in {**task["envs"], "RUNS": "/mnt/runs", "SKYPILOT_TASK_ID": "sky-1"}.items():
        monkeypatch.setenv(name, value)
    found = cluster(task["run"].replace("~/finetune-venv/bin/python", "python"))
    assert (found.num_machines, found.num_processes, found.machine_rank) == (2, 16, 1)
    assert found.main_process_ip == "10.0.0.1" and (ROOT / found.config_file).is_file()
    words = [task["envs"]["RECIPE"], "train.output_dir=/mnt/runs/sky-1", "--resume=auto"]
    assert found.training_script_args == words
    assert (ROOT / task["envs"]["RECIPE"]).is_file() and "constraints.txt" in task["setup"]


def test_gpus_may_be_named_by_their_uuids_and_sizes_left_empty() -> None:
    given = {"distributed_type": "MULTI_GPU", "num_processes": 2, "gpu_ids": "GPU-1a-2b, MIG-3c"}
    assert not accelerate_config.check_values(given, "own.yaml")
    assert accelerate_config.sizes({"parallelism_config": {"parallelism_config_cp_size": None}}) == 1


@pytest.mark.parametrize(
    "text",
    [
        "{num_processes: 2, fsdp_config: {\n\ufeff#: 1}, num_machines: 2, deepspeed_config: {\n }}\n",
        "num_machines: 1\nfsdp_config:\n  a: 1\n\ufeff num_machines: 2\n",
        "\ufeffnum_machines: 2\n",
    ],
)
def test_file_is_read_as_accelerate_reads_it(text: str, tmp_path: Path) -> None:
    """libyaml skips a byte order mark within a text, and PyYAML's own parser does not."""
    (path := tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    with path.open(encoding="utf-8") as file:
        try:
            wanted = yaml.safe_load(file)
        except yaml.YAMLError:
            wanted = None
    if wanted is None:
        with pytest.raises(UserError):
            accelerate_config.read(path)
    else:
        assert accelerate_config.read(path) == wanted
    (path := tmp_path / "config.json").write_text('{"num_machines": 2e0}')
    assert accelerate_config.read(path) == json.loads(path.read_text())
