"""Command line: `python -m pipeline run|check|tune|prepare|…|publish|rollback|versions JOB.toml [--set …]`."""

import contextlib
import os
import signal
import sys

from pipeline.errors import Interrupted


def _on_early_signal(number, frame):
    # Importing the commands takes a moment, in which there is nothing to save or clean up.
    name = signal.Signals(number).name
    os.write(2, f"error: stopped by {name} before anything was done. Run the same command again.\n".encode())
    os._exit(Interrupted.exit_code)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _on_early_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))  # see Job._start_again
    try:
        from pipeline.commands import main
    except ModuleNotFoundError as e:
        sys.exit(f"error: {e}. Install what training needs: pip install '.[train]', or `make venv` in a checkout.")
    try:
        main()
        code = 0
    except SystemExit as e:
        code = e.code or 0
    # Not through Python's shutdown: threads of TensorFlow that still run then were seen to crash the process.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
