"""Find installed packages and their source files without importing them, and say how to install others."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

from finetune.core.errors import Exit, Problem, UserError

PROJECT = "finetune-toolkit"
_ROOT = Path(__file__).resolve().parents[2]  # of the checkout, or site-packages


def installed(package: str) -> bool:
    """Return whether `import package` would find the package. The function imports no package."""
    top, *inner = package.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not inner:
        return spec is not None
    places = [Path(place, *inner) for place in spec.submodule_search_locations or ()]
    return any(place.is_dir() or place.with_suffix(".py").exists() for place in places)


def install_command(*requirements: str) -> str:
    """The command that installs packages into the environment of this process."""
    python = Path(sys.executable)
    shown = os.path.relpath(python) if python.is_relative_to(Path.cwd()) else str(python)
    if not _has_pip():
        return shlex.join(["uv", "pip", "install", *requirements, "--python", shown])
    on_path = shutil.which("pip")
    pip = ["pip"] if on_path and Path(on_path).parent == python.parent else [shown, "-m", "pip"]
    return shlex.join([*pip, "install", *requirements])


def _has_pip() -> bool:
    """Return whether this environment has pip. Environments of uv have no pip.

    `importlib.util.find_spec("pip")` would make setuptools stop providing distutils in Python 3.11. Without
    distutils, torch.compile fails on the CPU. See `spec_for_pip` in setuptools.
    """
    try:
        importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def install_extra(extra: str) -> str:
    """The command that installs an extra of this project: of the checkout, or of the installed package."""
    more = ["--no-build-isolation"] if extra in ("flash", "hybrid") else []  # built against torch
    if not (_ROOT / "pyproject.toml").is_file():
        return install_command(f"{PROJECT}[{extra}]", *more)
    folder = "." if Path.cwd() == _ROOT else str(_ROOT)
    return install_command("-e", f"{folder}[{extra}]", *more)


def require(package: str, extra: str, what: str) -> None:
    """Raise a UserError (exit 3) if a package of an extra is missing; `what` says who needs it."""
    if not installed(package):
        raise UserError(
            Problem(what, fix=install_extra(extra), code="package-missing"), code=Exit.ENVIRONMENT
        )


def source_of(package: str, file: str) -> Path:
    """The path of a source file of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            Problem(f"{package} is not installed", fix=install_command(package), code="package-missing"),
            code=Exit.ENVIRONMENT,
        )
    return Path(next(iter(spec.submodule_search_locations))) / file
