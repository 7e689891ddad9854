"""Import a package's public names on first use, so that importing the package stays fast."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_imports(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module-level `__getattr__` (PEP 562) for `package`.

    Args:
        package: the package's `__name__`.
        names: public name -> "module.name" inside the package.
    """

    def getattr_lazily(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = names[name].rpartition(".")
        return getattr(importlib.import_module(f"{package}.{module}"), attribute)

    return getattr_lazily
