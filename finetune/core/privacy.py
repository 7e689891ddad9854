"""What nobody asked to have shown or sent: secrets in messages and logs, telemetry of the libraries.

Secrets come from the environment alone (recipes with one are refused), so what has to be masked is known:
the values of its variables that are called token, key or password, `hf auth login`'s token, and whatever has
the form of a key. Everything that is printed or logged goes through `masked`.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from types import TracebackType

SECRET = re.compile(  # has the form of one, whatever it is called
    r"(?<![A-Za-z0-9])(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{22,}|A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9]))"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|(?i:wandb_?api_?key\W{1,6})[0-9a-f]{40}|(?i:aws_?secret_?access_?key\W{1,6})[A-Za-z0-9/+=]{40}"
)
_NAMED = re.compile(
    r"(^|_)(TOKENS?|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY"
    r"|CONNECTION_STRING)(_|$)"
)
_A_PLACE = re.compile(r"_(PATH|FILE|DIR|HOME|URI|URL)$")
SHORTEST = 8  # characters; a shorter value is in many a word

# Documented switches: huggingface_hub's (TRL reports each run, libraries say what they are), donottrack.sh's
# (huggingface_hub, MLflow), and transformers' request that the Hub converts a repository without safetensors.
# huggingface_hub reads its own when it is imported.
SWITCHES = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "DISABLE_SAFETENSORS_CONVERSION": "1"}


def switch_off_telemetry() -> None:
    """Before any library is imported; what the user has set stays."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)


def masked(text: str, known: list[str] | None = None) -> str:
    """A text without the secrets of this process (`known`, or asked for here), which become `****`."""
    for value in secrets() if known is None else known:
        text = text.replace(value, "****")
    return SECRET.sub("****", text)


def secrets() -> list[str]:
    """The secrets this process knows, the longest first, as they are and as they stand in an address."""
    held = {value for name, value in os.environ.items() if _NAMED.search(name) and not _A_PLACE.search(name)}
    held |= {logged_in()}
    forms = {form for value in held if len(value) >= SHORTEST for form in (value, quote(value, safe=""))}
    return sorted(forms, key=len, reverse=True)


def logged_in() -> str:
    """The token that `hf auth login` left, by huggingface_hub's own places for it; else the empty string."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    path = Path(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")).expanduser()
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback as Python prints it, masked: libraries put what they were given into their errors."""
    sys.stderr.write(masked("".join(traceback.format_exception(kind, error, trace))))
