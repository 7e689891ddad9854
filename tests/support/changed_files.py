"""Change files while a command runs: `python changed_files.py FOLDER FIRST COUNT COMMAND...`.

Each command is forked from a process that has imported the libraries. It runs on new copies of the folders
`FOLDER/run` and `FOLDER/base`. `RUN` in the command means the copy of the run, whose base model is the other
copy. While the command opens a file, another file is deleted, cut, emptied or replaced. Prints a line of JSON
for each command: the change, the exit code and the output.
"""

import json
import os
import random
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

LAST_OPEN = 90  # a command opens about so many files
ACTIONS = ("delete", "delete", "cut", "empty", "replace", "folder")
WEIGHTS = (".safetensors", ".json", ".jsonl", ".yaml", ".jinja")


def change(path: Path, action: str) -> None:
    size = path.stat().st_size
    if action in ("delete", "folder"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if action == "folder":
        path.mkdir()
    elif action in ("cut", "empty") and path.is_file():
        os.truncate(path, size // 2 if action == "cut" else 0)
    elif action == "replace" and path.is_file():
        other = path.with_name("other")
        other.write_bytes(b"\x9b no content " * 50)
        os.replace(other, path)


def main(folder: Path, first: int, count: int, words: list[str]) -> None:
    import finetune.cli.main
    import finetune.export.exporting
    import finetune.export.merging
    import finetune.export.publishing  # noqa: F401 (the forked commands need it)

    for seed in range(first, first + count):
        chance = random.Random(seed)
        own = folder / f"changed-{seed}"
        for name in ("run", "base"):
            shutil.copytree(folder / name, own / name, ignore=shutil.ignore_patterns("checkpoints"))
        files = sorted(path for name in ("run", "base") for path in (own / name).rglob("*"))
        path = chance.choice([path for path in files if path.suffix in WEIGHTS or path.is_dir()])
        action, at = chance.choice(ACTIONS), chance.randrange(1, LAST_OPEN)
        child = os.fork()
        if not child:
            run_command(own, [path, action, at], words)
        _, status = os.waitpid(child, 0)
        said = (own / "output").read_text(errors="replace")
        shown = f"{action} {path.relative_to(own)} at {at}"
        print(json.dumps([shown, os.waitstatus_to_exitcode(status), said.replace(str(own), "")]), flush=True)
        shutil.rmtree(own)


def run_command(own: Path, changed: list[Any], words: list[str]) -> None:
    """Run the command in a child, which ends here."""
    import finetune.cli.main

    path, action, left = changed

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "open" and str(arguments[0]).startswith(str(own)):
            left -= 1
            if left == 0:
                change(path, action)

    output = os.open(own / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.addaudithook(count)
    warnings.simplefilter("ignore")  # the test reads the errors
    code = 1
    try:
        named = [word.replace("RUN", str(own / "run")) for word in words]
        code = finetune.cli.main.main([*named, "--quiet", f"model.name={own / 'base'}"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
