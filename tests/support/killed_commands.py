"""Kill a command with SIGKILL at each of its writes: `python killed_commands.py FOLDER COMMAND...`.

The command is forked from a process that has imported the libraries. `RUN` in it means a new copy of the
folder `FOLDER/run`. The files of a killed command are in `FOLDER/killed-<n>`. Prints how many there are.
"""

import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate"}
MOST = 400  # writes of a command; more are a mistake of this script


def main(folder: Path, words: list[str]) -> None:
    import finetune.cli.main
    import finetune.export.merging
    import finetune.export.publishing

    for number in range(1, MOST):
        copy = shutil.copytree(folder / "run", folder / f"killed-{number}" / "run")
        child = os.fork()
        if not child:
            os.chdir(copy.parent)
            named = [word.replace("RUN", str(copy)) for word in words]
            die_at(number)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the process is killed; nobody reads its warnings
                os._exit(finetune.cli.main.main([*named, "--quiet"]))
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0, "the whole command works"
            print(number - 1)
            return
    raise AssertionError("it writes without an end")


def die_at(number: int) -> None:
    """End this process, with no chance to clean up, just before its write of this number."""
    left = number

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        flags = arguments[2] if event == "open" else 0
        writes = isinstance(flags, int) and flags & WRITES and not str(arguments[0]).startswith("/dev")
        if event in CHANGES or writes:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
