"""Warnings that are not errors in tests, in addition to the list in pyproject.toml."""

import re
from pathlib import Path

OWN_FOLDERS = ("finetune", "scripts", "tests", "examples", "benchmarks")  # as `make lint` has them


def third_party_filters(root: Path) -> list[str]:
    """Ignore what Python says of the source of other packages when it compiles them.

    A package that is not compiled yet is compiled by the first test that imports it. Python 3.12 raises a
    SyntaxWarning for an invalid escape sequence, 3.11 a DeprecationWarning (torchao 0.18 has some). Python
    passes the path of the file, without `.py`, for the name of the module.

    Args:
        root: the folder of the project. Warnings of its own files stay errors.
    """
    module = rf"(?!{re.escape(str(root))}/({'|'.join(OWN_FOLDERS)})/)/"
    return [f"ignore::SyntaxWarning:{module}", f"ignore:invalid escape sequence:DeprecationWarning:{module}"]
