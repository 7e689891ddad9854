"""Format numbers and sizes for people."""

from __future__ import annotations

from typing import Any


def size(count: float) -> str:
    """A number of bytes, to be read."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


SHARES = {"exact_match", "ended", "acc", "acc_norm", "f1", "em"}  # shown in percent, where they are 1 at most


def is_share(key: str, *scores: dict[str, Any]) -> bool:
    """Of `exact_match,strict-match` the filter does not matter; some tasks give f1 from 0 to 100."""
    values = [one[key] for one in scores if one.get(key) is not None]
    return key.partition(",")[0] in SHARES and all(value <= 1 for value in values)


def number(value: float, *, share: bool) -> str:
    """A score as it is said: a share in per cent, all else (losses, perplexities, BLEU) as it is."""
    return f"{value:.1%}" if share else f"{value:.4f}"


WARNING = "warning: "


def labelled(notice: str) -> str:
    """A notice as it is printed: a warning as it is, all else as a note."""
    return notice if notice.startswith(WARNING) else f"note: {notice}"
