"""House words that no text for users has; the field's words are in their place."""

from __future__ import annotations

import re

HOUSE_WORDS = (
    r"held[- ]out", r"data sets?\b", r"\breceipts?\b", r"\bledger\b", r"\bladder\b", r"\brungs?\b",
    r"(?<!fine-)\btuned\b", r"\blevers?\b", r"\bunbeaten\b", r"\bgoes on\b", r"\bgoing on from\b",
    r"\bpassed over\b", r"\btowers?\b", r"(?<!_)quantis", r"optimis(?!t)", r"\blicence\b", r"\bbehaviour\b",
    r"\bof ours\b", r"stopped by itself", r"not finite", r"\bgathered whole\b", r"\bsplit base\b",
    r"\bmade again\b", r"\bpasses over memory\b", r"\bfirst weights\b", r"\btokens with loss\b",
    r"\bwhole numbers?\b", r"\btruth values?\b", r"\brows at once\b", r"\bprecision no\b",
    r"\bstorage of the base\b",
)  # fmt: skip


def house_words(text: str) -> list[str]:
    """Return the patterns that match."""
    return [word for word in HOUSE_WORDS if re.search(word, text)]
