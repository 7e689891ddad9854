"""Parameters of tests that only `make soak` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def soak_except(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Mark each parameter `soak`, except the representative parameters, which `make test` runs.

    Args:
        kept: the parameters to leave as they are. A tuple may be named by its first item.
        values: the parameters, as `parametrize` takes them.
    """
    kept, values = list(kept), list(values)
    names = [*values, *(value[0] for value in values if isinstance(value, tuple))]
    assert all(one in names for one in kept), "each of `kept` is a parameter"
    found = []
    for value in values:
        items = value if isinstance(value, tuple) else (value,)
        is_kept = value in kept or (isinstance(value, tuple) and value[0] in kept)
        found.append(pytest.param(*items, marks=() if is_kept else pytest.mark.soak))
    return found
