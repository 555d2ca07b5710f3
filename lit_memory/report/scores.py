"""scores.npz: the scores of the samples of tests, one array per name; the same scores give the same bytes."""

import io
from collections.abc import Mapping
from typing import Any

NAME = "scores.npz"
TYPES = ("uint8", "float32", "float64")
"""Of arrays, the smallest that has all their values: scores of 0 and 1 take a byte each before compression."""


def pack(scores: Mapping[str, Any]) -> bytes:
    """The file, from one array per name."""
    import numpy as np

    file = io.BytesIO()
    np.savez_compressed(file, **{name: _small(np.asarray(found)) for name, found in sorted(scores.items())})
    return file.getvalue()


def unpack(content: bytes) -> dict[str, Any]:
    """The arrays of a file. Raises ValueError and the like for one that is not as it was written."""
    import numpy as np

    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def close(scores: Any, value: float) -> bool:
    """Whether the mean of the scores is the result of their test, which was averaged in other steps."""
    import numpy as np

    return bool(np.isclose(float(np.mean(scores)), value, rtol=1e-5, atol=1e-5, equal_nan=True))


def _small(found: Any) -> Any:
    """In the first of ``TYPES`` that has all its values."""
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        fitting = (found.astype(name) for name in TYPES)
        return next((small for small in fitting if np.array_equal(small, found, equal_nan=True)), found)
