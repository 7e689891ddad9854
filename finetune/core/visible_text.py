"""Show text of others with escapes for invisible characters and terminal controls.

Names, samples, settings and messages of libraries may hold characters that control a terminal, change the
order of a line or are invisible. finetune replaces each by an escape such as `\\u001b`, which JSON and YAML
can read.
"""

from __future__ import annotations

import re
import unicodedata

_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories: control, format, surrogate, line separators
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")  # letters and marks without a shape
_NO_CHARACTER = 0xFFFE  # the last two codes of each plane; YAML refuses U+FFFE and U+FFFF
_NO_LETTERS = 0xE0000  # tags, variation selectors and private use start here
# The two joiners are useful in emoji and between letters of scripts that join, but not in Latin text.
_JOINING = r"[\u0590-\u1fff\u2100-\U0010ffff]"
_JOINERS = rf"(?<={_JOINING})([\u200c\u200d])(?={_JOINING})"  # not compiled here, because that takes 10 ms
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
CONTINUED = "  | "  # starts each further line of a text that finetune did not write


def visible(text: object) -> str:
    """Return a text on one line, with an escape for each invisible or control character."""
    line = str(text)
    if line.isascii() and line.isprintable():  # most lines
        return line
    parts = re.split(_JOINERS, line)  # every second one is a joiner
    parts[::2] = ["".join(map(_shown, part)) for part in parts[::2]]
    return "".join(parts)


def visible_lines(text: object) -> str:
    """Do the same as `visible`, but keep line breaks and tabs, for pages and for text that finetune built."""
    return "\n".join("\t".join(map(visible, line.split("\t"))) for line in str(text).split("\n"))


def continued(text: object) -> str:
    """Return a text of several lines, in which no later line looks like a message of finetune."""
    return visible_lines(text).replace("\n", f"\n{CONTINUED}")


def _shown(sign: str) -> str:
    code = ord(sign)
    if sign in _SHORT:
        return _SHORT[sign]
    is_seen = unicodedata.category(sign) not in _UNSEEN and sign not in _BLANK
    if is_seen and code & _NO_CHARACTER != _NO_CHARACTER and code < _NO_LETTERS:
        return sign
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
