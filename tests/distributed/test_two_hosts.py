"""Two machines, as far as one can be two: network namespaces joined by two interfaces, which takes root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from finetune.run_folder.run_folder import RunFolder
from support import two_ranks
from support.paths import QUICKSTART, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = ("finetune-a", "finetune-b")
ADDRESS = "10.213.7.{}"


def ip(*words: str, check: bool = True) -> int:
    return subprocess.run(["ip", *words], check=check, capture_output=True).returncode


@pytest.fixture
def hosts() -> Iterator[tuple[str, ...]]:
    """Their names; none where one can't be two."""
    if os.getuid() != 0 or not shutil.which("ip") or ip("netns", "add", HOSTS[0], check=False) != 0:
        yield ()
        return
    try:
        ip("netns", "add", HOSTS[1])
        ip("link", "add", "ft0", "netns", HOSTS[0], "type", "veth", "peer", "name", "ft0", "netns", HOSTS[1])
        for number, host in enumerate(HOSTS, 1):
            ip("-n", host, "addr", "add", f"{ADDRESS.format(number)}/24", "dev", "ft0")
            ip("-n", host, "link", "set", "ft0", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield HOSTS
    finally:
        for host in HOSTS:
            ip("netns", "del", host, check=False)


def lines(hosts: tuple[str, ...]) -> list[list[str]]:
    """Each host's launch of scripts/train.py, by Accelerate's launcher and by ours, as in train.sbatch."""
    plain, ours = "accelerate.commands.launch", "finetune.launch"
    if not hosts:
        config = ["accelerate_configs/ddp_8.yaml", "--num_processes", "2", "--mixed_precision", "no"]
        return [[sys.executable, "-m", plain, "--config_file", *config, "scripts/train.py"]]
    given = ["--num_machines", "2", "--num_processes", "2", "--mixed_precision", "no", "--max_restarts", "0"]
    given += ["--main_process_ip", ADDRESS.format(1), "--main_process_port", "29517"]
    config = ["--config_file", "accelerate_configs/multi_node.yaml", *given, "--machine_rank"]
    return [
        ["ip", "netns", "exec", host, sys.executable, "-m", by, *config, str(rank), "scripts/train.py"]
        for rank, (host, by) in enumerate(zip(hosts, (ours, plain), strict=True))
    ]


@pytest.mark.soak
@pytest.mark.usefixtures("the_only_launch")
def test_two_hosts_train_what_one_does(hosts, train, small, two_layers, tmp_path) -> None:
    """By the config of many machines, one process on each; without root by two processes of this one."""
    folder = tmp_path / "two"
    recipe = [str(QUICKSTART), *small, f"model.name={two_layers}", f"train.output_dir={folder}"]
    recipe += ["train.max_steps=4", "train.warmup_steps=0", "train.effective_batch_size=8", "--quiet"]
    recipe += ["train.per_device_train_batch_size=4", "eval.max_new_tokens=8", "eval.forgetting=false"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "FINETUNE_TIMEOUT_SECONDS": "120"}
    environment["ACCELERATE_USE_CPU"] = "true"  # these configs are for GPUs
    environment.pop("GLOO_SOCKET_IFNAME", None)  # the processes find the interface that the other host is on
    started = [
        subprocess.Popen(
            [*line, *recipe], env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for line in lines(hosts)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(said)
    split = "train.effective_batch_size=8", "train.per_device_train_batch_size=4"
    one = train(*split, "train.max_steps=4", name="one")
    two_ranks.compare(one, RunFolder(folder))
