"""Seeds of random numbers: of the data, of training steps, of synthetic prose. Standard library only."""

import hashlib


def mixed_seed(seed: int, split: str, step: int) -> int:
    """A 63-bit seed that depends on its arguments alone."""
    digest = hashlib.blake2b(f"{seed}/{split}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
