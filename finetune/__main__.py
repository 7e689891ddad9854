"""`finetune` and `python -m finetune`, and so `accelerate launch -m finetune train RECIPE`."""

import os
import sys


def main() -> int:
    """Run one command and return the exit code. Ctrl-C during the first imports prints no traceback."""
    try:
        _leave_working_directory()
        from finetune.cli.main import main as run
    except KeyboardInterrupt:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C during the imports below
        from finetune.cli import interrupt

        return interrupt.before_the_command(sys.argv[1:])
    return run()


def _leave_working_directory() -> None:
    try:
        # `python -m` and an open end of PYTHONPATH put the working directory before the standard library
        here, root = os.path.realpath(os.getcwd()), os.path.realpath(f"{os.path.dirname(__file__)}/..")
    except OSError:  # it was deleted; the command reports that
        return
    if here != root:
        sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here]
    elif not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]
    from finetune.core import errors, import_paths

    try:
        import_paths.leave_working_directory()
    except errors.UserError:  # the command reports it
        return


if __name__ == "__main__":
    code = main()
    from finetune.distributed import launch_environment

    sys.exit(launch_environment.leave(code))
