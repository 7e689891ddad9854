"""The commands that install a missing package work where they are shown."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.core import packages
from support.paths import ROOT


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment whose `pip` is the first on PATH."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "pip"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def test_install_extra_in_a_checkout_installs_the_checkout(activated, monkeypatch, tmp_path) -> None:
    assert packages.install_extra("eval") == "pip install -e '.[eval]'"
    monkeypatch.chdir(tmp_path)
    assert packages.install_extra("eval") == f"pip install -e '{ROOT}[eval]'"
    for extra in ("flash", "hybrid"):  # built from source against the installed torch
        assert packages.install_extra(extra).endswith(f"[{extra}]' --no-build-isolation")


def test_install_extra_of_an_installed_package_names_the_package(activated, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(packages, "_ROOT", tmp_path)  # site-packages hold no pyproject.toml
    assert packages.install_extra("bnb") == "pip install 'finetune-toolkit[bnb]'"


def test_install_command_uses_the_environment_of_this_process(activated, monkeypatch) -> None:
    assert packages.install_command("galore-torch") == "pip install galore-torch"
    monkeypatch.setenv("PATH", "/usr/bin")
    assert packages.install_command("a", "b") == f"{activated}/python -m pip install a b"
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv" / "bin" / "python"))
    assert packages.install_command("a") == ".venv/bin/python -m pip install a"


def test_install_command_without_pip_uses_uv(activated, monkeypatch) -> None:
    monkeypatch.setattr(packages, "_has_pip", lambda: False)
    assert packages.install_command("lm-eval[math]") == (
        f"uv pip install 'lm-eval[math]' --python {activated}/python"
    )


def test_require_names_the_command_and_exits_with_3(monkeypatch) -> None:
    packages.require("json", "eval", "needs json")
    with pytest.raises(
        packages.UserError, match=r"needs no_such_module \[package-missing\]\n.*pip install"
    ) as raised:
        packages.require("no_such_module", "eval", "needs no_such_module")
    assert raised.value.code == 3


def test_pip_of_this_environment_takes_the_command(tmp_path) -> None:
    """pip reads `-e PATH[extra]` as it is written; nothing is installed. In a process of its own, since an
    import of pip takes setuptools' distutils away from torch.compile."""
    command = packages.install_extra("eval")
    (path,) = [word.strip("'") for word in command.split() if "[eval]" in word]
    reads = "from pip._internal.req.constructors import install_req_from_editable as read; import sys; "
    reads += "print(*read(sys.argv[1]).extras)"
    done = subprocess.run([sys.executable, "-c", reads, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["eval"]
    assert shutil.which(command.split()[0]) or Path(command.split()[0]).exists()


def test_install_command_leaves_setuptools_distutils_alone() -> None:
    """`find_spec("pip")` makes setuptools stop providing distutils, which torch.compile imports."""
    finder = sys.modules["_distutils_hack"].DISTUTILS_FINDER if "_distutils_hack" in sys.modules else None
    if finder is None:
        pytest.skip("setuptools provides no distutils in this environment")
    before = finder.spec_for_distutils
    packages.install_command("galore-torch")
    assert finder.spec_for_distutils == before
