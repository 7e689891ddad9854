"""Import modules of benchmarks/ and scripts/."""

import functools
import importlib
import sys
from typing import Any

from support.paths import ROOT


@functools.cache
def module_of(folder: str, name: str) -> Any:
    """A module of benchmarks/ or scripts/, which import their neighbours by name alone."""
    sys.path.insert(0, str(ROOT / folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
