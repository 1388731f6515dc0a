"""Who is at work, as manifests record it."""

import getpass
import os
import socket


def actor():
    """Returns "user@host"; in a container the user may have no name, but always has a number."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
