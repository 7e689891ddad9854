"""Import only installed packages, never a file of the working directory with the same name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from finetune.core.errors import Exit, Problem, UserError, raise_if_any

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, or site-packages
# Entry of a working directory that libraries would take for another one -> why. Linker scripts of gcc and
# glibc can name these libraries without a folder.
UNSAFE = {
    **dict.fromkeys(
        ("hf:", "http:", "https:"),
        "`datasets` can take addresses that begin with this for files of the folder",
    ),
    **dict.fromkeys(
        (
            "libgcc_s.so.1",
            "libgcc.a",
            "libgcc_eh.a",
            "libc.so.6",
            "libc_nonshared.a",
            "libm.so.6",
            "libmvec.so.1",
        ),
        "the compiler of GPU kernels would use it in place of the system's file",
    ),
}
_OWN = {"benchmarks", "finetune", "scripts", "tests"}  # folders of a checkout that hold Python files


def leave_working_directory() -> None:
    """Remove the working directory from the import path of this process and of its child processes.

    `python -m`, DeepSpeed's launcher and an open end of PYTHONPATH add it. Its files may belong to another
    person: Python would import a `wandb.py` in place of a package that is not installed. A checkout of
    finetune stays, unless somebody added modules to it.

    Raises:
        UserError: the working directory does not exist any more, its name is not UTF-8, its link `src` leads
            to itself, or `check_working_directory` (exit 3).
    """
    try:
        here = os.path.realpath(os.getcwd())
        here.encode()  # a run writes absolute paths into its files
        Path("src").resolve()  # transformers does so when it is imported
    except (OSError, UnicodeEncodeError, RuntimeError) as error:
        found = {UnicodeEncodeError: "its name is not UTF-8", RuntimeError: "its link `src` leads to itself"}
        raise UserError(
            Problem(
                "finetune can't use the working directory",
                found=error.strerror or "" if isinstance(error, OSError) else found[type(error)],
                fix="change to another folder with `cd`, and run the command again",
                code="path",
            ),
            code=Exit.ENVIRONMENT,
        ) from None
    check_working_directory()
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if Path(here) != ROOT or _has_added_modules():
        sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here]
        entries = [place for place in entries if os.path.realpath(place) != here]
    if not any(os.path.realpath(place) == str(ROOT) for place in sys.path):  # a checkout, not installed
        entries.append(str(ROOT))
    os.environ |= {"PYTHONPATH": os.pathsep.join(entries), "PYTHONSAFEPATH": "1"}


def check_working_directory() -> None:
    """Refuse a working directory with entries that libraries would take for others.

    `datasets` takes `hf://...` for a local file if `hf:/` is a mount point. Triton starts gcc in the working
    directory. gcc's own libgcc_s.so is a script, which names libgcc_s.so.1 or libgcc.a without a folder.
    GNU ld looks for such a name in the working directory first.

    Raises:
        UserError: every such entry (exit 3).
    """
    raise_if_any(
        (
            Problem(
                f"the working directory has an entry {name}",
                where=os.path.abspath(name),
                fix="run the command in another folder, or rename the entry",
                why=why,
                code="unsafe-file",
            )
            for name, why in UNSAFE.items()
            if os.path.lexists(name)
        ),
        code=Exit.ENVIRONMENT,
    )


def _has_added_modules() -> bool:
    entries = [entry for entry in ROOT.iterdir() if entry.name not in _OWN and not entry.name.startswith(".")]
    return any(
        entry.suffix in (".py", ".so") or (entry.is_dir() and next(entry.glob("*.py"), None))
        for entry in entries
    )
