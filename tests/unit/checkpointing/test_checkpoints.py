"""Checkpoints on disk: what is published verifies, whatever happens; what can't be kept is said."""

import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from finetune.checkpointing import checkpoints, serialization, training_state
from finetune.core import verified_files
from finetune.core.errors import UserError
from finetune.hub import client
from finetune.run_folder import run_folder
from support.soak import soak_except

TREE: dict[str, Any] = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)}, 1: {"empty": torch.zeros(0)}},
    "groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1], "nothing": None}],
    "random": (3, tuple(range(5)), None),
    "numpy": ("MT19937", np.arange(4, dtype=np.uint32), np.int64(7)),
    "odd": [float("inf"), 0.1 + 0.2, True, torch.bfloat16],
}


def content(step: int = 1, size: int = 8) -> dict[str, Any]:
    values = {"weights.safetensors": {"a": torch.full((size,), float(step))}, "state.json": {"step": step}}
    return {**values, checkpoints.CONTRACT: {"recipe": {}}}


def test_all_that_a_training_holds_comes_back_as_it_was() -> None:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(serialization.flatten(TREE, tensors, "all", torch.clone))
    back = serialization.restore(json.loads(text), tensors)
    assert back["state"].keys() == {0, 1} and back["groups"] == TREE["groups"]
    assert torch.equal(back["state"][0]["exp_avg"], TREE["state"][0]["exp_avg"])
    assert back["random"] == TREE["random"] and back["odd"] == TREE["odd"]
    assert back["numpy"][1].dtype == np.uint32 and (back["numpy"][1] == TREE["numpy"][1]).all()
    with pytest.raises(UserError, match=r"all\.x: set"):
        serialization.flatten({"x": {1}}, {}, "all", torch.clone)
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(UserError, match=r"all\.x: NestedTensor") as raised:  # nor made again
        serialization.flatten({"x": jagged}, {}, "all", torch.clone)
    assert raised.value.code == 3


@pytest.mark.parametrize("kind", serialization.LOW_BITS)
def test_moments_of_few_bits_come_back(kind: str) -> None:
    import importlib

    made = getattr(importlib.import_module(serialization.LOW_BITS[kind]), kind)
    moment = made.zeros((64, 128), *([] if kind == "OptimStateFp8" else [True]))
    moment.copy_(torch.randn(64, 128))
    tensors: dict[str, torch.Tensor] = {}
    kept = json.dumps(serialization.flatten({"exp_avg": moment}, tensors, "optimizer", torch.clone))
    assert not any(hasattr(tensor, "__tensor_flatten__") for tensor in tensors.values())
    back = serialization.restore(json.loads(kept), tensors)["exp_avg"]
    assert type(back) is made and torch.equal(back.codes, moment.codes)
    assert torch.equal(back.dequantize(), moment.dequantize())


def test_only_the_newest_stay(tmp_path) -> None:
    writer = checkpoints.Writer(tmp_path, 2)
    for step in (1, 2, 3, 4):
        writer.start(step, content(step))
        writer.wait()
        checkpoints.verify(tmp_path / f"step-{step}")
    assert [path.name for path in checkpoints.published(tmp_path)] == ["step-4", "step-3"]
    assert not any((tmp_path / ".staging").iterdir())
    for name in (
        "step-9",
        ".step-9.0123456789abcdef.tmp",
        "old-step-1",
        "old-aside-step-7",
    ):  # of killed processes
        (tmp_path / ".staging" / name).mkdir()
    assert checkpoints.begin(tmp_path, 3) == [
        "finetune renamed the later checkpoint step-4 to aside-step-4"
    ]  # its name is free, it is not gone
    assert not any((tmp_path / ".staging").iterdir())
    assert (tmp_path / "aside-step-4").is_dir()
    found = checkpoints.newest(tmp_path)
    assert found and found.step == 3 and "aside-step-4" in found.notes[0]
    writer.start(4, content(4))
    writer.wait()
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step-3", "step-4"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow past 64 KiB, as on a disk that is full."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_last_one_as_it_was(tmp_path, small_files) -> None:
    writer = checkpoints.Writer(tmp_path, 1)
    writer.start(1, content(1))
    writer.start(2, content(2, size=1 << 16))
    with pytest.raises(UserError, match="can't write the checkpoint of step 2") as raised:
        writer.wait()
    assert raised.value.code == 3 and "262,144 bytes needed" in str(raised.value)
    assert not any((tmp_path / ".staging").iterdir())
    checkpoints.verify(tmp_path / "step-1")
    writer.start(3, content(3))
    writer.wait()
    checkpoints.verify(tmp_path / "step-3")


def test_only_a_full_disk_is_called_one(tmp_path, monkeypatch) -> None:
    def refuses(path: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as changed:
        changed.setattr(checkpoints, "flush", refuses)
        with pytest.raises(UserError, match="Permission denied") as raised:
            checkpoints.write(tmp_path, 1, content(1), 1)
    assert "room on the disk" not in str(raised.value) and "are needed" not in str(raised.value)
    checkpoints.write(tmp_path, 1, content(1), 1)
    monkeypatch.setattr(checkpoints, "rotate", lambda *given: refuses(None))
    with pytest.raises(UserError, match="step 2 is saved, but finetune can't delete older"):
        checkpoints.write(tmp_path, 2, content(2), 1)
    checkpoints.verify(tmp_path / "step-2")


def test_what_does_not_verify_is_never_deleted(tmp_path) -> None:
    """Passed over and out of the way, but there; again where one of that name is."""
    for _ in range(2):
        for step in (1, 2):
            checkpoints.write(tmp_path, step, content(step), None)
        (tmp_path / "step-2" / "state.json").write_bytes(b"")
        assert "unverified-step-2" in checkpoints.begin(tmp_path, 1)[0]
        checkpoints.write(tmp_path, 2, content(2), 1)
        checkpoints.verify(tmp_path / "step-2")
    kept = {"unverified-step-2", "unverified-step-2-again"}
    assert {path.name for path in tmp_path.glob("unverified*")} == kept
    (tmp_path / "aside-step-backup").mkdir()
    checkpoints.rotate(tmp_path, 1)
    assert (tmp_path / "aside-step-backup").is_dir()


def test_a_newer_format_is_refused_not_passed_over(tmp_path) -> None:
    for step in (1, 2):
        checkpoints.write(tmp_path, step, content(step), None)
    manifest = checkpoints.read_json(tmp_path / "step-2", checkpoints.MANIFEST)
    newer = verified_files.signed({"format": 99, "step": 2, "files": manifest["files"]})
    (tmp_path / "step-2" / checkpoints.MANIFEST).write_text(newer)
    for ask in (lambda: checkpoints.newest(tmp_path), lambda: checkpoints.named(tmp_path, "step-2")):
        with pytest.raises(UserError, match="a newer version of finetune wrote the checkpoint") as raised:
            ask()
        assert raised.value.code == 4
    assert checkpoints.begin(tmp_path, 1) == [
        "finetune renamed the later checkpoint step-2 to unverified-step-2"
    ]


def test_moments_that_share_memory_are_written_from_where_they_are(tmp_path) -> None:
    """bitsandbytes' of 8 bits have one map for all parameters."""
    import bitsandbytes as bnb

    weights = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(2)]
    optimizer, tensors = bnb.optim.AdamW8bit(weights), dict[str, torch.Tensor]()
    for parameter in weights:
        parameter.grad = torch.randn(64, 64)
    optimizer.step()
    serialization.flatten(
        optimizer.state_dict(), tensors, "optimizer", partial(training_state._as_it_is, set())
    )
    assert any("qmap" in name for name in tensors)
    checkpoints.write(tmp_path, 1, {"optimizer.safetensors": tensors}, None)
    checkpoints.verify(tmp_path / "step-1")


def test_a_file_that_can_t_be_read_is_damage(tmp_path, monkeypatch) -> None:
    for step in (1, 2):
        checkpoints.write(tmp_path, step, content(step), None)
    original = client.sha256

    def sha256(path: Any) -> str:
        if path.parent.name == "step-2":
            raise OSError(5, "Input/output error")
        return original(path)

    monkeypatch.setattr(client, "sha256", sha256)
    found = checkpoints.newest(tmp_path)
    assert (
        found
        and found.step == 1
        and "finetune can't read " in found.notes[0]
        and "(Input/output error)" in found.notes[0]
    )


def test_all_is_on_the_disk_before_it_is_published(tmp_path, monkeypatch) -> None:
    """Files, manifest, folder; then the name; then the folder of names."""
    done: list[str] = []
    flush, rename = os.fsync, os.rename

    def fsync(handle: int) -> None:
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path)
        done.append(re.sub(r"\.[0-9a-f]{16}\.tmp", ".tmp", path))  # a name that nobody can predict
        flush(handle)

    def renamed(source: Any, target: Any, **folders: Any) -> None:
        done.append("rename")
        rename(source, target, **folders)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    checkpoints.write(tmp_path, 1, content(), None)
    staged, files = ".staging/.step-1.tmp", ("weights.safetensors", "state.json", checkpoints.CONTRACT)
    assert done == [*(f"{staged}/{f}" for f in (*files, checkpoints.MANIFEST)), staged, "rename", "."]
    done.clear()
    run_folder.RunFolder(tmp_path).write("a.json", {})
    assert done == [".a.json.tmp", "rename"]


def test_a_writer_that_is_closed_writes_no_more(tmp_path, monkeypatch, capsys) -> None:
    original = checkpoints.write

    def slow(*given: Any) -> Any:
        time.sleep(0.2)
        if given[1] == 2:
            raise UserError("the disk is gone")
        return original(*given)

    monkeypatch.setattr(checkpoints, "write", slow)
    for step in (1, 2):
        writer = checkpoints.Writer(tmp_path, 1)
        writer.start(step, content(step))
        writer.close()
        assert not writer.thread._threads or not any(t.is_alive() for t in writer.thread._threads)
    checkpoints.verify(tmp_path / "step-1")
    assert "the disk is gone" in capsys.readouterr().err


def test_names_stay_inside_their_folder(tmp_path) -> None:
    """A manifest that was made to point elsewhere, its digest right."""
    (tmp_path / "elsewhere.json").write_text("{}")
    path = checkpoints.write(tmp_path, 1, content(), None)
    manifest = checkpoints.read_json(path, checkpoints.MANIFEST)
    entry = {"bytes": 2, "sha256": client.sha256(tmp_path / "elsewhere.json")}
    for name in ("../elsewhere.json", "/etc/hostname", "..", "state.json/../../elsewhere.json", "a.bin"):
        changed = {"format": 1, "step": 1, "files": {**manifest["files"], name: entry}}
        (path / checkpoints.MANIFEST).write_text(verified_files.signed(changed))
        with pytest.raises(checkpoints.Damaged, match="not a file of a checkpoint"):
            checkpoints.verify(path)
    linked = {"format": 1, "step": 1, "files": {**manifest["files"], "linked.json": entry}}
    (path / "linked.json").symlink_to(tmp_path / "elsewhere.json")
    (path / checkpoints.MANIFEST).write_text(verified_files.signed(linked))
    with pytest.raises(checkpoints.Damaged, match="linked"):
        checkpoints.verify(path)


def test_what_is_not_ours_is_not_touched(tmp_path) -> None:
    (tmp_path / "step-9x").mkdir()
    (tmp_path / "mine").mkdir()
    writer = checkpoints.Writer(tmp_path, 1)
    for step in (1, 2):
        writer.start(step, content(step))
    writer.wait()
    assert (tmp_path / "step-9x").is_dir() and (tmp_path / "mine").is_dir()


OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")


def crashed(at: int, work: Callable[[], Any]) -> bool:
    """Whether a process of its own got as far as operation `at` on files, before which it ended; where that
    is to bring a file to the disk, half of the file is there."""
    child = os.fork()
    if not child:
        count = 0

        def end(event: str, given: Any) -> None:
            nonlocal count
            count += event in OPERATIONS
            if count == at:
                os._exit(9)

        def torn(handle: int) -> None:
            nonlocal count
            count += 1
            if count == at:
                if stat.S_ISREG(os.fstat(handle).st_mode):
                    os.truncate(f"/proc/self/fd/{handle}", os.fstat(handle).st_size // 2)
                os._exit(9)

        sys.addaudithook(end)
        os.fsync = torn
        work()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.parametrize(
    ("case", "every"), soak_except([("next", 3)], [("next", 3), ("first", 1), ("next", 1), ("again", 1)])
)
def test_wherever_a_save_is_cut_off_one_verifies(case: str, every: int, tmp_path) -> None:
    """Before each operation on a file, or every third: the first save, one that rotates, one in place of a
    damaged one."""
    checkpoints.write(tmp_path / "warm", 1, content(), None)  # what is imported now is not opened then
    (before := tmp_path / "before").mkdir()
    for step in (1, 2) if case != "first" else ():
        checkpoints.write(before, step, content(step), None)
    if case == "again":
        (before / "step-2" / "weights.safetensors").write_bytes(b"")
    for at in range(1, 1000, every):
        folder = shutil.copytree(before, tmp_path / f"{at}")
        step = 3 if case == "next" else 2
        unfinished = crashed(
            at, lambda folder=folder, step=step: checkpoints.write(folder, step, content(9), 1)
        )
        found = checkpoints.newest(folder)
        assert found or case == "first", at
        for path in checkpoints.published(folder) if case != "again" else ():
            checkpoints.verify(path)
        checkpoints.begin(folder, found.step if found else 0)
        checkpoints.write(folder, 4, content(4), 1)
        assert [path.name for path in checkpoints.published(folder)] == ["step-4"]
        if not unfinished:
            break
    assert 15 < at < 999
    print(f"\ncrash points of the {case} save: {at - 1}")  # benchmarks/reliability.py --saves
