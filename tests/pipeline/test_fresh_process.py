"""Fresh processes: what they end with is told, and none outlives its parent."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pipeline.errors import PipelineError
from pipeline.fresh_process import FreshProcess
from tests.jobs import ROOT, environment

_PARENT = """
import time
from pipeline.fresh_process import FreshProcess
with FreshProcess("tests.pipeline.lingering") as child:
    print(child._process.pid, flush=True)
    time.sleep(600)
"""


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_end_and_last_line():
    with FreshProcess("platform") as process:
        assert process.wait() == ""
    with FreshProcess("no_such_module") as process:
        assert process.wait().startswith("exit code 1, ") and "no_such_module" in process.wait()


def test_stopped_from_outside_is_no_judgement():
    with FreshProcess("tests.pipeline.lingering") as process:
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(PipelineError, match=r"tests.pipeline.lingering\) was killed \(out of memory\?\); nothing"):
            process.wait()


def test_a_full_disk_is_no_judgement():
    with FreshProcess("tests.pipeline.lingering", "full") as process, pytest.raises(PipelineError, match="no room"):
        process.wait()


def test_none_is_left_at_the_end_of_the_block():
    with FreshProcess("tests.pipeline.lingering") as process:
        pid = process._process.pid
        assert _is_alive(pid)
    assert not _is_alive(pid)


def test_none_outlives_a_killed_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 60
    while _is_alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _is_alive(pid)
