"""Seeds of random numbers of the data, of training steps and synthetic prose; the split of a text. Standard library."""

import hashlib


def mixed_seed(seed: int, split: str, step: int) -> int:
    """A 63-bit seed that depends on its arguments alone."""
    digest = hashlib.blake2b(f"{seed}/{split}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def split_of(text: str) -> str:
    """Split of a sample by a hash of its text: "train" for 80 %, "valid" for 10 %, "test" for 10 %."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (*["train"] * 8, "valid", "test")[int.from_bytes(digest, "little") % 10]
