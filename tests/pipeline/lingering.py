"""A process as `FreshProcess` starts one: it would wait for ten minutes, or (with an argument) finds the disk full."""

import errno
import os
import sys
import time

from pipeline.fresh_process import run_fresh


def fail(seconds):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if __name__ == "__main__":
    run_fresh(fail if sys.argv[1:] else time.sleep, 600)
