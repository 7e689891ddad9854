"""Find installed packages and their source files without importing them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from finetune.core.errors import Exit, Problem, UserError


def installed(package: str) -> bool:
    """Whether `import package` would find something; nothing is imported, nor what it is a part of."""
    top, *inner = package.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not inner:
        return spec is not None
    places = [Path(place, *inner) for place in spec.submodule_search_locations or ()]
    return any(place.is_dir() or place.with_suffix(".py").exists() for place in places)


def source_of(package: str, file: str) -> Path:
    """The path of a source file of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            Problem(f"{package} is not installed", fix=f"pip install {package}"),
            code=Exit.ENVIRONMENT,
        )
    return Path(next(iter(spec.submodule_search_locations))) / file
