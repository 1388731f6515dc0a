"""How much memory a test's own process has used."""

import re
from pathlib import Path


def peak():
    """Returns the largest resident memory of this program so far, in bytes.

    Not `ru_maxrss`: that begins with what the process that started this one used.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
