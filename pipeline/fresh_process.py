"""Processes of this code that look at artifacts as others will: freshly started, and gone when their parent is."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from pipeline.errors import PipelineError

_STOPPED_FROM_OUTSIDE = {-9: "killed (out of memory?)", -15: "terminated", -2: "interrupted"}


class FreshProcess:
    """Runs `python -m module arguments...` for the length of a block, at whose end it is killed.

    Args:
        module: a module that calls `end_with_parent` first.
        arguments: of the command line.
    """

    def __init__(self, module, *arguments):
        self._module = module
        self._command = [sys.executable, "-m", module, *map(str, arguments)]

    def __enter__(self):
        root = str(Path(__file__).resolve().parents[1])  # the child finds this code wherever it was started from
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._stderr
        )
        return self

    def __exit__(self, *exc_info):
        self._process.kill()
        self._process.stdin.close()
        self._process.wait()
        self._stderr.close()

    def wait(self):
        """Waits for its end.

        Returns:
            "" if it ended with 0, else the last line that it wrote to stderr, with its exit code.

        Raises:
            PipelineError: it was stopped from outside, which says nothing about what it looked at.
        """
        code = self._process.wait()
        if code in _STOPPED_FROM_OUTSIDE:
            raise PipelineError(
                f"a process that checks artifacts ({self._module}) was {_STOPPED_FROM_OUTSIDE[code]}; nothing was "
                "published. Run the same command again, with more memory if need be."
            )
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return f"exit code {code}, {lines[-1] if lines else 'no message'}" if code else ""


def end_with_parent():
    """Ends this process, started by `FreshProcess`, as soon as its parent is gone, however that ended."""

    def watch():
        os.read(0, 1)  # comes back when nobody holds the other end any more
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
