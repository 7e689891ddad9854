"""Mask secrets in messages, files and uploads, and switch off the telemetry of libraries.

A recipe with a secret is an error, so finetune reads secrets only from the environment. Known secrets are the
values of variables with names such as token, key or password, and the token of `hf auth login`. finetune
finds them in plain text, JSON, HTML, URLs and base64. JSON can be inside of JSON. It finds other secrets by
their format. All printed and logged text goes through `masked`.
"""

from __future__ import annotations

import base64
import html
import json
import math
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from finetune.core.visible_text import continued, visible_lines

# A key does not begin in the middle of a word. It may begin after JSON's `\\n` or after `%3D` in a URL.
_BEGIN = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
_KEYS = (  # with the prefix of each service
    r"hf_[A-Za-z0-9]{16,}",
    r"api_org_[A-Za-z0-9]{20,}",
    r"sk-[A-Za-z0-9_-]{16,}",
    r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    r"gh[pousr]_[A-Za-z0-9]{20,}",
    r"github_pat_[A-Za-z0-9_]{22,}",
    r"gl(?:pat|dt|rt|ptt|agent|soat|cbt)-[A-Za-z0-9_.-]{20,}",
    r"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])",
    r"xox[a-z]-[A-Za-z0-9-]{10,}",
    r"xapp-[0-9]-[A-Za-z0-9-]{10,}",
    r"hooks\.slack\.com/services/[A-Za-z0-9/]{20,}",
    r"AIza[A-Za-z0-9_-]{35}",
    r"ya29\.[A-Za-z0-9_-]{20,}",
    # A JSON web token. `(?!eyJ)` keeps the search linear, because each eyJ after `-` or `_` begins a match
    r"eyJ(?:[A-Za-z0-9]|[_-](?!eyJ)){6,}\.eyJ[A-Za-z0-9_-]{6,}(?:\.[A-Za-z0-9_-]*)?",
    r"wandb_v1_[A-Za-z0-9_-]{20,}",
    r"npm_[A-Za-z0-9]{36}",
    r"pypi-[A-Za-z0-9_-]{50,}",
    r"dckr_pat_[A-Za-z0-9_-]{20,}",
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    r"nvapi-[A-Za-z0-9_-]{40,}",
    r"r8_[A-Za-z0-9]{37}",
    r"gsk_[A-Za-z0-9]{40,}",
)
_KEY_LINE = r"[A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
_GAP = r"(?:\\[nr]|\s|[\"',>]|<br)*"  # between the lines of a key, also in JSON and HTML
# Up to the line END. Of a key that is cut off: lines of base64, and headers such as `Proc-Type: 4,ENCRYPTED`
_PEM = (
    rf"-----BEGIN {_KEY_LINE}(?:(?:(?!-----BEGIN )[\s\S]){{0,20000}}?-----END {_KEY_LINE}"
    rf"|(?:{_GAP}(?:[A-Z][A-Za-z-]{{2,20}}: [^\n\\]{{0,100}}|[A-Za-z0-9+/=]{{16,}}))*)"
)
_IN_PLACE = (  # a text before the secret, and the secret. `Path` turns https:// into https:/
    # A password can hold an `@` or a `/`; a number and a `/` are a port
    r"(?P<user>:/{1,2}[^\s/:@\"'<>\\]*:)(?!\d{1,5}/)[^\s\"'<>\\]{1,500}(?=@)",
    r"(?P<header>(?i:authorization)\\?[\"']?\s*[:=]\s*\\?[\"']?(?:[A-Za-z]{3,12}\s+)?)[A-Za-z0-9._~+/=-]{8,}",
    r"(?P<bearer>\b(?i:bearer)\s+)(?=[^\s\"']*\d)[A-Za-z0-9._~+/=-]{16,}",
    r"(?P<query>[?&](?i:[a-z-]*(?:token|signature|secret|password|credential)|sig|api_?key|key)=)[^&\s\"'<>*\\]{6,}",
    r"(?P<wandb>(?i:wandb)\w{0,20}\W{1,6})[0-9a-f]{40}(?![0-9a-f])",
    r"(?P<aws>(?i:secret[-_]?access[-_]?key|account_?key|shared_?access_?key)\W{1,6})[A-Za-z0-9+/=]{40,}",
)
SECRET = re.compile("|".join([f"{_BEGIN}(?:{'|'.join(_KEYS)})", _PEM, *_IN_PLACE]))  # by format, not by name
_GIVEN = re.compile(  # a name such as `password` and its value, in JSON, YAML and shell commands
    r"(?P<name>(?i:api[-_]?key|secret|passw(?:or)?d|credential|token|private[-_]?key|access[-_]?key|[a-z0-9]_key)"
    r"\w{0,20}\W{1,6})(?P<value>[A-Za-z0-9+/=._-]{16,})"
)
_SECRET_KEY = re.compile(
    r"(?i)(?:(?<![a-z_])token|\b\w{0,40}(?:passwd|password|secret|credentials?"
    r"|(?:hub|hf|auth|access|api|wandb|private)_?(?:token|key)))[\"']?\s*:"
)
_WORD = re.compile(r"[a-z_]+")  # the form of the keys of finetune's own JSON
_RUN = re.compile(r"[A-Za-z0-9]{20,}")  # a run of letters and digits
_DIGEST = re.compile(r"[0-9a-f]+|[0-9A-F]+")
_NAMED = re.compile(  # names of variables, also PGPASSWORD, HFTOKEN, MYSQL_PWD and db_password
    r"(?i)(TOKENS?|SECRETS?|CREDENTIALS?|PASSWORDS?|PASSWD|PASSPHRASE|API_?KEYS?|CONNECTION_STRING)(_|$)"
    r"|(^|_)(ACCESS|SECRET|PRIVATE|SIGNING|ENCRYPTION)_KEYS?(_|$)|_(PASS|PWD)$|^SSHPASS$"
)
_MAY_NAME = re.compile(r"(?i)_(KEYS?|PAT|AUTH)$")  # OPENAI_KEY holds a secret, and CACHE_KEY does not
# A name and a secret inside of a value, as in `host=db password=...` and `{"password": "..."}`
_INSIDE = re.compile(
    r"(?i)(?:password|passwd|pwd|secret|token|key|credential)s?[\"']?\s*[=:]\s*(?:\"([^\"]+)\"|'([^']+)'|([^\s\"'&;,}]+))"
)
# The password of an address, as in DATABASE_URL
_LOGIN = re.compile(r"://[^/\s:@]*:(?!\d{1,5}/)(\S{1,500})@")
_A_PLACE = re.compile(r"(?i)_(PATH|FILE|DIR|HOME|URI|URL)$")
SHORTEST = 8  # characters of a known secret; shorter values occur in ordinary words
SHORTEST_PART = 12  # characters of a part of a known secret; the first ones may be `github_pat_`
ENCODED = 3  # times that a known secret can be encoded in JSON, HTML or Python
_ENCODINGS: tuple[Callable[[str], str], ...] = (
    html.escape,
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: repr(text)[1:-1],
)
SHORTEST_CODED = 12  # bytes of a known secret that is also searched in base64
# Thresholds for random runs of 20 and more letters and digits. tests/security/test_secrets.py measures how
# many of 1,000 keys they find, and that run folders have no false hits.
CHANGES, ENTROPY = 0.3, 3.4

# Documented switches:
# - HF_HUB_DISABLE_TELEMETRY for huggingface_hub, through which TRL reports each run. It is read at import.
# - DO_NOT_TRACK (donottrack.sh) for huggingface_hub and MLflow.
# - HF_UPDATE_DOWNLOAD_COUNTS for datasets, which sends the name of each dataset to a counter of downloads.
# - transformers' request that the Hub converts a repository without safetensors.
SWITCHES = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "DISABLE_SAFETENSORS_CONVERSION": "1",
}


def switch_off_telemetry() -> None:
    """Switch off telemetry before a library is imported. Variables that the user has set stay."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)


class Secret(NamedTuple):
    """The position of a secret in a text."""

    start: int
    end: int


def masked(text: str, known: list[str] | None = None) -> str:
    """Replace the secrets of a text by `****`.

    Args:
        known: the result of `secrets()`, if the caller has it already.
    """
    for value in secrets() if known is None else known:
        if value.isdecimal():  # a part of a longer number is no secret
            text = re.sub(rf"(?<!\d)(?<!\d\.){value}(?!\.?\d)", "****", text)
        else:
            text = text.replace(value, "****")
        after = len(text)
        for part in reversed(_parts(text, value)):
            text = f"{text[: part.start]}****{text[min(part.end, after) :]}"
            after = part.start
    return _GIVEN.sub(_masked_value, SECRET.sub(lambda found: f"{_before(found)}****", text))


def masked_json(value: object, indent: int | None = None) -> str:
    """Return a value as JSON text without secrets. Numbers, and keys that are plain words, stay as they are.

    A secret of digits can be a part of a number, and a password such as `examples` can be a key.
    """
    known = secrets()
    of_keys = [secret for secret in known if not _WORD.fullmatch(secret)]

    def hidden(part: Any) -> Any:
        if isinstance(part, str):
            return masked(part, known)
        if isinstance(part, dict):
            named = (
                (masked(key, of_keys) if isinstance(key, str) else key, one) for key, one in part.items()
            )
            return {key: hidden(one) for key, one in named}
        return [hidden(one) for one in part] if isinstance(part, (list, tuple)) else part

    # The second search finds secrets by the keys before them
    return masked(json.dumps(hidden(value), indent=indent, allow_nan=False), [])


def find_parts(text: str, known: list[str]) -> list[Secret]:
    """Return each beginning and each end of `known` secrets in a text, except for addresses."""
    return [part for secret in known if "://" not in secret for part in _all_parts(text, secret)]


def _parts(text: str, secret: str) -> list[Secret]:
    """Return the same of one secret if it is random. The beginning of others can be a common word."""
    return _all_parts(text, secret) if is_random(secret) and "/" not in secret else []


def _all_parts(text: str, secret: str) -> list[Secret]:
    """Return each part with SHORTEST_PART or more characters. Messages and prompts are cut."""
    found = [Secret(start, end) for start, end in _beginnings(text, secret)]
    size = len(text)
    found += [Secret(size - end, size - start) for start, end in _beginnings(text[::-1], secret[::-1])]
    return sorted(found)


def _beginnings(text: str, secret: str) -> Iterator[tuple[int, int]]:
    """Yield the position of each beginning of a secret that has SHORTEST_PART or more characters."""
    for match in re.finditer(re.escape(secret[:SHORTEST_PART]), text):
        start = match.start()
        same = os.path.commonprefix([text[start : start + len(secret)], secret])  # noqa: RUF071 (of texts)
        yield start, start + len(same)


def find_secrets(text: str, known: list[str]) -> list[Secret]:
    """Return each secret in a text in order: `known` secrets, and text with the format of a secret."""
    secrets_found = [
        Secret(match.start() + len(_before(match)), match.end()) for match in SECRET.finditer(text)
    ]
    secrets_found += [
        Secret(*match.span("value")) for match in _GIVEN.finditer(text) if is_random(match["value"])
    ]
    for value in known:
        secrets_found += [Secret(*match.span()) for match in re.finditer(re.escape(value), text)]
        secrets_found += _parts(text, value)  # also the whole secret, once more
    return sorted({*secrets_found})


def names_a_secret(line: str) -> bool:
    """Return whether a line of YAML has a key such as token or password. Its value may have any format."""
    return bool(_SECRET_KEY.search(line))


def masked_setting(value: str) -> str:
    """Return the value of an environment variable for a file, without text in the format of a secret."""
    return "****" if masked(value) != value or is_random(value) else value


@lru_cache(maxsize=256)
def is_random(text: str) -> bool:
    """Return whether a text holds a run of letters and digits that looks random.

    In a random run, the kind of character changes more often than in words, and few characters repeat. A run
    of only hexadecimal digits is a hash and not a secret.
    """
    return any(_is_random(run) for run in _RUN.findall(text) if not _DIGEST.fullmatch(run))


def _is_random(run: str) -> bool:
    kinds = ["d" if sign.isdigit() else "U" if sign.isupper() else "l" for sign in run]
    pairs = list(pairwise(kinds))
    # A capital before a small letter does not count, because words may begin with a capital.
    changes = sum(a != b and (a, b) != ("U", "l") for a, b in pairs)
    counts = Counter(run).values()
    entropy = -sum(count / len(run) * math.log2(count / len(run)) for count in counts)
    return len({*kinds}) > 1 and changes / len(pairs) >= CHANGES and entropy >= ENTROPY


def _before(match: re.Match[str]) -> str:
    """Return the part of a match of SECRET that stays: the name or address before the secret."""
    return next((part for part in match.groups() if part), "")


def _masked_value(match: re.Match[str]) -> str:
    return f"{match['name']}****" if is_random(match["value"]) else match[0]


def secrets() -> list[str]:
    """Return the secrets that this process knows in all their encodings, the longest first."""
    given = [(name, value) for name, value in os.environ.items() if not _A_PLACE.search(name)]
    values = {value for name, value in given if _NAMED.search(name)}
    values |= {value for name, value in given if _MAY_NAME.search(name) and is_random(value)}
    values = {value for value in values if not (os.path.isabs(value) and os.path.exists(value))}
    logins = {login for value in os.environ.values() for login in _LOGIN.findall(value)}
    # A driver reads `%40` as `@`, and takes what is after the first `@` for a host
    logins |= {part for login in logins for part in (unquote(login), *re.split("[@/]", login))}
    addresses = {value for value in os.environ.values() if "://" in value}
    logins |= {part for value in values | addresses for part in _inside(value)}
    logins |= {part for value in values for part in (value.partition(":")[2], *re.split("[,; ]", value))}
    values |= {login for login in logins if not login.isalpha()}  # `postgres` is the password of many tests
    values |= {logged_in()}
    # Files of secrets end in a line break, and `docker run --env-file` keeps quotes
    values |= {value.strip() for value in values}
    values |= {value[1:-1] for value in values if value[:1] in ("'", '"') and value[:1] == value[-1:]}
    forms = {form for value in values if len(value) >= SHORTEST for form in _forms(value)}
    return sorted(forms, key=len, reverse=True)


@lru_cache(maxsize=1024)
def _inside(value: str) -> tuple[str, ...]:
    """Return the secrets inside of the value of a variable, by the name before each."""
    parts = [next(filter(None, found)) for found in _INSIDE.findall(value)]
    return (*parts, *map(unquote, parts))


@lru_cache(maxsize=256)
def _forms(value: str) -> frozenset[str]:
    """Return a secret in plain text, and encoded for URLs, JSON, HTML, Python and base64.

    A text can be encoded again: JSON inside of JSON, in HTML.
    """
    plain = value.encode("utf-8", "surrogateescape")
    forms = {value}
    for _ in range(ENCODED):
        forms |= {encode(form) for form in forms for encode in _ENCODINGS}
    forms |= {quote(plain, safe=""), quote(plain)}
    if len(plain) >= SHORTEST_CODED:
        forms |= {plain.hex(), *_in_base64(plain)}
    return frozenset(forms)


def _in_base64(plain: bytes) -> Iterator[str]:
    """Return the base64 characters that depend only on the secret, for each offset in a longer text."""
    for offset in range(3):
        padded = b"\0" * offset + plain
        whole = base64.b64encode(padded[: len(padded) // 3 * 3]).decode()[(offset * 8 + 5) // 6 :]
        yield whole
        yield whole.replace("+", "-").replace("/", "_")


def logged_in() -> str:
    """Return the token of `hf auth login` from huggingface_hub's paths, or the empty string."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    path = Path(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")).expanduser()
    try:
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""  # a pipe may never end
    except (OSError, ValueError):
        return ""


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback without secrets. Libraries may repeat their arguments in errors."""
    parts = traceback.format_exception(kind, error, trace)
    said = [part if part.startswith((" ", "Traceback", "\n")) else _message(part) for part in parts]
    sys.stderr.write(visible_lines(masked("".join(said))))


def _message(part: str) -> str:
    """Return the text of an exception, in which no line looks like a message of finetune."""
    return continued(part.removesuffix("\n")) + "\n"
