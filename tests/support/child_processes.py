"""Processes in place of those of multiprocessing."""

import subprocess


class Child(subprocess.Popen[bytes]):
    """A program whose exit code is read as that of a process of multiprocessing."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()
