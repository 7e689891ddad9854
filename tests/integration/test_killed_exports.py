"""Merge, quantize and publish, killed at each of their writes: nothing half-written is taken for a result."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.core import safe_files
from finetune.core.errors import Problem, UserError
from finetune.export import merged_files, merging, publishing
from finetune.run_folder.run_folder import RunFolder
from support.paths import MODEL, ROOT

KILLED = ROOT / "tests" / "support" / "killed_commands.py"


def contents(folder: Path) -> dict[str, str]:
    """The hash of each file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(content(path)).hexdigest() for path in files}


def content(path: Path) -> bytes:
    """A file's bytes. torchao writes the metadata of safetensors in another order in each process."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.dumps(json.loads(data[8:end]), sort_keys=True).encode() + data[end:]


def killed(run: Path, place: Path, words: list[str]) -> list[Path]:
    """What a command leaves that is killed before its first, second ... write, and at last not at all."""
    place.mkdir()
    shutil.copytree(run, place / "run")
    done = subprocess.run(
        [sys.executable, str(KILLED), str(place), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    count = int(done.stdout.split()[-1])
    assert count >= 3
    return [place / f"killed-{number}" / "run" for number in range(1, count + 2)]


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("quantized", [None, "int8"])
def test_merge_that_is_killed_leaves_whole_weights_or_none(quantized: str | None, trained, tmp_path) -> None:
    name = f"merged-{quantized}" if quantized else "merged"
    words = ["merge", "RUN", *(["--quantize", quantized] if quantized else [])]
    source = trained().path
    before = contents(source)
    *cut, whole = killed(source, tmp_path / "killed", words)
    expected = contents(whole / name)
    for run in cut:
        assert contents(run).items() >= before.items(), "what the run had is as it was"
        if (run / name).exists():
            assert contents(run / name) == expected and name in RunFolder(run).read("merge.json")
        if run not in (cut[0], cut[len(cut) // 2], cut[-1]):
            continue
        words = ["merge", str(run), "--quiet", *(["--quantize", quantized] if quantized else [])]
        code = 2 if (run / name).exists() else 0  # it never overwrites
        assert main.main(words) == code
        assert contents(run / name) == expected
        if not quantized:
            assert main.main(["publish", str(run), "--merged", "--dry-run", "--quiet"]) == 0


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("options", [["--to", "vllm"], ["--to", "vllm", "--adapter"]], ids=" ".join)
def test_export_that_is_killed_leaves_a_whole_folder_or_none(options: list[str], trained, tmp_path) -> None:
    name = "export-vllm-adapter" if "--adapter" in options else "export-vllm-bf16"
    source = trained().path
    before = contents(source)
    *cut, whole = killed(source, tmp_path / "killed", ["export", "RUN", *options])
    expected = {file: digest for file, digest in contents(whole / name).items() if file != "export.json"}
    for run in cut:
        assert contents(run).items() >= before.items(), "what the run had is as it was"
        if (run / name).exists():
            assert contents(run / name).items() >= expected.items() and name in RunFolder(run).read(
                "export.json"
            )
    for run in (cut[0], cut[len(cut) // 2], cut[-1]):
        code = 2 if (run / name).exists() else 0  # it never overwrites
        assert main.main(["export", str(run), *options, "--quiet"]) == code
        assert contents(run / name).items() >= expected.items()


@pytest.mark.soak
def test_publish_that_is_killed_changes_nothing_in_the_run(trained, tmp_path, capsys) -> None:
    source = trained().path
    before = contents(source)
    *cut, whole = killed(source, tmp_path / "killed", ["publish", "RUN", "--dry-run"])
    assert contents(whole) == before
    for run in cut:
        assert contents(run) == before
        assert main.main(["publish", str(run), "--dry-run"]) == 0


class Killed(BaseException):
    """No handler of errors takes it."""


@pytest.mark.parametrize("number", [1, 2])
def test_merged_weights_that_are_published_have_a_report(number: int, tmp_path, monkeypatch, capsys) -> None:
    """Cut off at each rename of the last stage. `publish --merged` takes weights that merge.json names."""
    folder, target, left = RunFolder(tmp_path / "run"), tmp_path / "run" / "merged", [number]
    folder.path.mkdir()
    folder.write("merge.json", {"merged": {"dtype": "float32"}})  # of weights that somebody deleted
    rename = safe_files.os.rename

    def cut_off(*given: object, **options: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise Killed
        rename(*given, **options)  # pyright: ignore[reportArgumentType]  (as it was called)

    with merging.staging(target) as (whole, _):
        shutil.copytree(MODEL, whole, dirs_exist_ok=True)
        monkeypatch.setattr("finetune.core.safe_files.os.rename", cut_off)
        with pytest.raises(Killed):
            merging.publish(whole, target, folder, {"dtype": "bfloat16"})
        monkeypatch.undo()
    assert not target.exists() or folder.read("merge.json")["merged"]["dtype"] == "bfloat16"
    (tmp_path / "run" / ".merged.0123456789abcdef.tmp").mkdir()  # kill -9 leaves it there
    assert "Delete it if no other merge is running" in merged_files.note_interrupted(target, "merge")[0]
    assert json.loads((folder.path / "merge.json").read_text())["merged"]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, None, "refused"])
def test_publish_that_is_ended_leaves_no_temporary_folder(
    end: Any, trained, tmp_path, monkeypatch, capsys
) -> None:
    """A dry run that succeeds leaves one on purpose."""
    run = shutil.copytree(trained().path, tmp_path / "run")
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))

    def show(*_: object) -> None:
        if isinstance(end, signal.Signals):
            os.kill(os.getpid(), end)
        if end == "refused":
            raise UserError(Problem("refused"))

    monkeypatch.setattr(publishing, "show", show)
    code = main.main(["publish", str(run), "--dry-run", "--quiet"])
    assert code == {signal.SIGTERM: 75, signal.SIGINT: 130, None: 0, "refused": 2}[end]
    assert len(list(made.iterdir())) == (end is None)


def test_temporary_files_of_tests_go_with_the_session() -> None:
    folder = Path(tempfile.gettempdir())
    assert folder == Path(os.environ["TMPDIR"]) and folder.name.startswith("finetune-tests-")
    assert Path(os.environ["FINETUNE_CACHE"]).is_relative_to(folder)
