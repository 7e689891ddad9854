"""`finetune explain`: describe the code of an error."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from finetune.core import standard_streams
from finetune.core.command_lines import command
from finetune.core.error_codes import CODES
from finetune.core.errors import Problem, UserError, nearest

WIDTH = 80
EXPLAIN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("code", {"metavar": "CODE", "nargs": "?", "help": "the code in brackets of an error message"}),
)


def explain(options: argparse.Namespace) -> dict[str, Any]:
    """Describe an error code, or list all error codes."""
    if options.code is None:
        standard_streams.say(*sorted(CODES), "", f"next, describe one: {command('explain')} CODE")
        return {"codes": CODES}
    code = options.code.strip("[]")
    if code not in CODES:
        near = nearest(code, CODES)
        raise UserError(
            Problem(
                "no such error code",
                found=options.code,
                fix=command("explain", near) if near else command("explain"),
                code="command-line",
            )
        )
    standard_streams.say(code, *textwrap.wrap(CODES[code], WIDTH, break_on_hyphens=False))
    return {"codes": {code: CODES[code]}}
