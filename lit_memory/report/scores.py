"""scores.npz: the scores of the samples of tests, one array per name; the same scores give the same bytes."""

import io
from collections.abc import Mapping
from typing import Any

NAME = "scores.npz"
TYPES = ("uint8", "float32", "float64")
"""Of arrays, the smallest that has all their values: scores of 0 and 1 take a byte each before compression."""
BITS = 20
"""Binary digits that a report keeps of a score, six decimal ones: half the file, and finer than ``close`` compares."""


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


def kept_scores(cells: Mapping[Any, float], scores: Mapping[Any, Any]) -> dict[Any, Any]:
    """The scores of (arm, metric, x, seed), to ``BITS``.

    Raises ValueError for scores that cannot be those of their cell.
    """
    import numpy as np

    kept = {}
    for (arm, metric, x, seed), given in scores.items():
        cell = (arm, metric, float(x), int(seed))
        if cell not in cells:
            continue
        found, value = np.asarray(given, dtype=np.float64), cells[cell]
        name = f"scores of arm {arm}, seed {seed}, {metric} at x={x:g}"
        if found.ndim != 1 or not found.size:
            raise ValueError(f"{name}: shape {found.shape}; expected one number per sample of the test")
        if not close(found, value):
            average = f"their mean is {found.mean():g}"
            raise ValueError(f"{name}: {average}, but the result is {value:g}; expected the same test")
        kept[cell] = _rounded(found)
    return kept


def _rounded(found: Any) -> Any:
    """To ``BITS``. What has no more of them, such as a count or a score that was kept, stays as it is."""
    import numpy as np

    mantissa, exponent = np.frexp(found)
    return np.ldexp(np.round(mantissa * 2**BITS) / 2**BITS, exponent)


def _small(found: Any) -> Any:
    """In the first of ``TYPES`` that has all its values."""
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        fitting = (found.astype(name) for name in TYPES)
        return next((small for small in fitting if np.array_equal(small, found, equal_nan=True)), found)
