"""Another program deletes or replaces files while finetune merges, exports or publishes: an error says so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from finetune.core import errors
from support.paths import MODEL, ROOT
from support.soak import soak_except

CHANGES = ROOT / "tests" / "support" / "changed_files.py"
COMMANDS = {
    "publish": ["publish", "RUN", "--dry-run"],
    "merge": ["merge", "RUN"],
    "export": ["export", "RUN", "--to", "vllm"],
    "export of the adapter": ["export", "RUN", "--to", "vllm", "--adapter"],
}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("name", "count"), soak_except([("publish", 3)], [("publish", 3), *((name, 100) for name in COMMANDS)])
)
def test_file_that_changes_while_a_command_runs_is_an_error_of_its_path(
    name: str, count: int, trained, tmp_path
) -> None:
    shutil.copytree(trained().path, tmp_path / "run")
    shutil.copytree(MODEL, tmp_path / "base")
    words = [sys.executable, str(CHANGES), str(tmp_path), "0", str(count), *COMMANDS[name]]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == count
    for change, code, said in lines:
        assert code >= 0 and "Traceback" not in said, (change, said)
        assert "internal-error" not in said and "library-error" not in said, (change, said)
        assert not code or "error:" in said, (change, said)


def open_safetensors(path: Path) -> None:
    with safe_open(path, "pt"):
        pass


@pytest.mark.parametrize("read", [Path.read_bytes, Path.iterdir, open_safetensors])
@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_error_of_a_changed_file_is_no_bug_of_finetune(read, change: str, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    if change == "replaced":
        path.mkdir() if read == Path.read_bytes else path.write_bytes(b"no weights" * 50)
    with pytest.raises(errors.UserError) as raised, errors.only_user_errors("merged the adapter"):
        list(read(path) or ())
    (problem,) = raised.value.problems
    assert problem.code == "path" and problem.fix
    if read != open_safetensors or change == "deleted":  # safetensors names no path of a replaced file
        assert str(path) in problem.where + problem.found
