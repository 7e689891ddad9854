"""Format numbers and sizes for people."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any


def precision(launched: str) -> str:
    """Return the dtype of a launch's `mixed_precision`, whose value for fp32 is `no`."""
    return "fp32" if launched == "no" else launched


def size(count: float) -> str:
    """Format a number of bytes, such as `1.50 GiB` or `12.00 MiB`."""
    return f"{amount(count / 2**30)} GiB" if count >= 2**30 else f"{amount(count / 2**20)} MiB"


def file_size(count: float) -> str:
    """Format the size of a file as a file manager does, such as `1.80 MB` or `5.12 kB`."""
    return f"{amount(count / 1e6)} MB" if count >= 1e5 else f"{amount(count / 1e3)} kB"


def amount(value: float) -> str:
    """Format an amount with at most four digits and two decimals, such as `1.50`, `101.6` or `2,048`."""
    return f"{value:,.{2 if abs(value) < 99.995 else 1 if abs(value) < 999.95 else 0}f}"


def duration(seconds: float) -> str:
    """Format a duration, such as `45 s`, `3 min 5 s`, `41 min` or `2 h 10 min`."""
    if not math.isfinite(seconds):
        return "an unknown time"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 3600:
        return f"{whole // 60} min"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def figure(value: object, digits: int = 4) -> str:
    """Format a number with at most `digits` digits, and a large one without decimals; `-` for no number."""
    if not isinstance(value, int | float):
        return "-"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    return f"{value:.{digits}g}"


def percent(value: float) -> str:
    """Format a share, such as `12.5%`."""
    return f"{value:.1%}"


def points(value: float) -> str:
    """Format a difference of two shares in percentage points, without its unit."""
    return f"{100 * value:.1f}"


def signed(value: float, text: Callable[[float], str]) -> str:
    """Format a change with its sign, by a function that formats its amount."""
    return ("+" if value >= 0 else "-") + text(abs(value)) if math.isfinite(value) else "?"


def as_yaml(value: object) -> str:
    """Return a value as a recipe writes it: `true`, `null`, `[q_proj, v_proj]`. Strings have no quotes."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("inf", ".inf").replace("nan", ".nan")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {as_yaml(one)}' for key, one in value.items())}}}"
    return str(value)


def listed(names: Sequence[str], most: int = 5) -> str:
    """List the first names, and count the others: `a, b and 3 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def shortened(text: str, length: int) -> str:
    """Shorten a text to at most `length` characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


# Scores that are shown in percent if no value is above 1
SHARES = {"exact_match", "ended", "acc", "acc_norm", "f1", "em"}


def is_share(key: str, *scores: dict[str, Any]) -> bool:
    """Return whether a score is a share of 1. Ignore the filter in names like `exact_match,strict-match`.

    Some tasks report f1 from 0 to 100, so all values must be at most 1.
    """
    values = [one[key] for one in scores if one.get(key) is not None]
    return key.partition(",")[0] in SHARES and all(value <= 1 for value in values)


def number(value: float, *, share: bool) -> str:
    """Format a score: a share in percent, other scores such as losses and BLEU with four digits."""
    return percent(value) if share else figure(value)


WARNING = "warning: "


def labelled(notice: str) -> str:
    """Return a notice for printing. It starts with `note:`, unless it is a warning."""
    return notice if notice.startswith(WARNING) else f"note: {notice}"
