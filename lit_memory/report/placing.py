"""Where to write names next to points so that no name covers another one, a point, or leaves the frame. Geometry alone:
no matplotlib, no random numbers, so the same boxes always give the same places. Standard library only."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

ROUNDS = 4
"""How often every name may move, once all the others have a place."""
OVERLAP = 1000.0
"""Cost of covering something; a name that stands a unit further from its point costs 1."""


class Box(NamedTuple):
    """A rectangle."""

    x0: float
    y0: float
    x1: float
    y1: float

    def hits(self, other: "Box") -> bool:
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def inside(self, frame: "Box") -> bool:
        return frame.x0 <= self.x0 and self.x1 <= frame.x1 and frame.y0 <= self.y0 and self.y1 <= frame.y1

    def grown(self, by: float) -> "Box":
        """Wider by ``by`` on each side."""
        return Box(self.x0 - by, self.y0 - by, self.x1 + by, self.y1 + by)

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The point of the box that is nearest to (x, y)."""
        return min(max(x, self.x0), self.x1), min(max(y, self.y0), self.y1)

    def crossed(self, start: tuple[float, float], end: tuple[float, float]) -> bool:
        """Does the line from ``start`` to ``end`` run through the box? Looked at in steps of a fiftieth."""
        (x0, y0), (x1, y1) = start, end
        line = ((x0 + (x1 - x0) * i / 50, y0 + (y1 - y0) * i / 50) for i in range(51))
        return any(self.x0 < x < self.x1 and self.y0 < y < self.y1 for x, y in line)

    def share(self, x: float, y: float) -> tuple[float, float]:
        """(x, y) in widths and heights of the box, from its lower left corner."""
        return (x - self.x0) / (self.x1 - self.x0), (y - self.y0) / (self.y1 - self.y0)


def place(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    taken: Sequence[Box],
    frame: Box,
    gap: float,
) -> list[Box]:
    """A box for the name of every point, of the given (width, height), at least ``gap`` away from the point.

    ``taken`` is what no name may cover. Every name takes the cheapest place that the others leave, several times over;
    where a crowd leaves none, it covers as little as it can.
    """
    boxes: list[Box | None] = [None] * len(points)
    for _ in range(ROUNDS):
        for i, (point, size) in enumerate(zip(points, sizes, strict=True)):
            others = [*taken, *(box for j, box in enumerate(boxes) if box is not None and j != i)]
            boxes[i] = min(
                _candidates(point, size, frame, gap),
                key=lambda box, point=point, others=others: _cost(box, point, others, frame),
            )
    return [box for box in boxes if box is not None]


def _candidates(point: tuple[float, float], size: tuple[float, float], frame: Box, gap: float) -> Iterator[Box]:
    """Right of the point, left of it, over or under it, at every height of the frame; of equal costs, the first
    wins."""
    (x, y), (width, height) = point, size
    step = height / 4
    for i in range(int((frame.y1 - frame.y0) / step) + 1):
        for middle in dict.fromkeys((y + i * step, y - i * step)):
            low = min(max(middle - height / 2, frame.y0), frame.y1 - height)
            lefts = [x + gap, x - gap - width]
            if abs(low + height / 2 - y) >= gap + height / 2:
                lefts.append(min(max(x - width / 2, frame.x0), frame.x1 - width))
            yield from (Box(left, low, left + width, low + height) for left in lefts)


def _cost(box: Box, point: tuple[float, float], others: Sequence[Box], frame: Box) -> float:
    (x, y), (near_x, near_y) = point, box.nearest(*point)
    away = ((near_x - x) ** 2 + (near_y - y) ** 2) ** 0.5 + abs((box.y0 + box.y1) / 2 - y) / 2
    return away + OVERLAP * (sum(map(box.hits, others)) + 10 * (not box.inside(frame)))
