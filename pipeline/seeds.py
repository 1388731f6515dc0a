"""One root seed; everything random derives from it by name."""

import hashlib


def derive_seed(seed, name):
    """Returns a 32-bit unsigned seed for `name`: BLAKE2b of "seed/name", the same on every machine.

    None, "choose a random one", stays None.
    """
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")
