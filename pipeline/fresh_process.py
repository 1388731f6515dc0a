"""Processes of this code that look at artifacts as others will: freshly started, and gone when their parent is."""

import errno
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from pipeline.errors import PipelineError

_OUT_OF_ROOM = 71  # EX_OSERR of sysexits.h
_STOPPED_FROM_OUTSIDE = {
    -9: "killed (out of memory?)",
    -15: "terminated",
    -2: "interrupted",
    _OUT_OF_ROOM: "stopped: no room on the disk or no memory",
}
_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


class FreshProcess:
    """Runs `python -m module arguments...` for the length of a block, at whose end it is killed.

    Args:
        module: a module that does its work through `run_fresh`.
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
                "published. Make room if need be, and run the same command again."
            )
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return f"exit code {code}, {lines[-1] if lines else 'no message'}" if code else ""


def run_fresh(function, *arguments):
    """Runs a function in a process that `FreshProcess` started; ends it as soon as the parent is gone, however it went.

    What the machine lacks is told apart from what is wrong with an artifact.
    """

    def watch():
        os.read(0, 1)  # comes back when nobody holds the other end any more
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        function(*arguments)
    except (OSError, MemoryError) as e:
        if isinstance(e, OSError) and e.errno not in _FAULTS:
            raise
        sys.exit(_OUT_OF_ROOM)
