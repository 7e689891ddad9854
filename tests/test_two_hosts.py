"""Two machines, as far as one can be two: network namespaces joined by a pair of interfaces. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import QUICKSTART, ROOT, metrics, receipts

from finetune.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = ("finetune-a", "finetune-b")
ADDRESS = "10.213.7.{}"


def ip(*words: str, check: bool = True) -> int:
    return subprocess.run(["ip", *words], check=check, capture_output=True).returncode


@pytest.fixture
def hosts() -> Iterator[tuple[str, ...]]:
    if os.getuid() != 0 or not shutil.which("ip") or ip("netns", "add", HOSTS[0], check=False) != 0:
        pytest.skip("making network namespaces needs root")
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


@pytest.mark.usefixtures("the_only_launch")
def test_two_hosts_train_what_one_does(hosts, train, small, two_layers, tmp_path) -> None:
    """By the config of many machines and the line of scripts/slurm/train.sbatch, one process on each."""
    one = train("train.per_device_train_batch_size=4", "train.max_steps=1", name="one")
    folder = tmp_path / "two"
    recipe = [str(QUICKSTART), *small, f"model.name={two_layers}", f"train.output_dir={folder}"]
    recipe += ["train.max_steps=1", "train.warmup_steps=0", "train.effective_batch_size=8", "--quiet"]
    recipe += ["train.per_device_train_batch_size=4", "eval.max_new_tokens=2", "eval.general=false"]
    line = [sys.executable, "-m", "finetune.launch", "--config_file", "accelerate_configs/multi_node.yaml"]
    line += ["--num_machines", "2", "--num_processes", "2", "--mixed_precision", "no"]
    line += ["--main_process_ip", ADDRESS.format(1), "--main_process_port", "29517", "--max_restarts", "0"]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "ft0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"PYTHONPATH": str(ROOT), "FINETUNE_TIMEOUT_SECONDS": "120"}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *line, "--machine_rank", str(rank), "scripts/train.py", *recipe],
            env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    run = RunFolder(folder)
    assert receipts(run)["processes"]["got"] == "2"
    for a, b in zip(metrics(one), metrics(run), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-6)
