"""``Chunk`` of ``associative_chunk.py`` through the loops of ``associative_kernels.py``.

Shape suffixes: as in ``associative_chunk.py``; G groups of rows that are written together, of all segments.
"""

from typing import Any

import torch
from torch import Tensor

from lit_memory.memory.associative_chunk import Flags
from lit_memory.memory.compiled import arrays


class CompiledChunk:
    """Has the methods of ``Chunk``, on a CPU in fp32 or fp64.

    It keeps no factors: A and its gradient change in place, segment by segment. The backward pass computes A of all
    segments again.
    """

    def __init__(self, A_BKD: Tensor, z_BK: Tensor, queries_SBRC: Tensor, written: int, flags: Flags) -> None:
        self.rules, group = rules_of(flags, written, A_BKD.dtype)
        self.groups = written // group
        self.first_BKD, self.A_BKD = A_BKD, A_BKD.clone(memory_format=torch.contiguous_format)
        self.z_GBK = z_BK.new_empty(len(queries_SBRC) * self.groups + 1, *z_BK.shape)
        self.z_GBK[0] = z_BK
        self.queries_SBRC = queries_SBRC.contiguous()
        self.written: list[tuple[Tensor, Tensor]] = []
        self.waiting = False  # the last rows of ``written`` are not written yet
        self.everyone_B, self.none = z_BK.new_ones(len(z_BK)), z_BK.new_empty(0, 0, 0)

    def of_segment(self, x_GB: Tensor, s: int, after: int = 0) -> Tensor:
        """What belongs to the groups of segment s, and to ``after`` more."""
        return x_GB[s * self.groups : (s + 1) * self.groups + after]

    def recall(self, s: int, x_BRD: Tensor, rows_BRD: Tensor) -> Tensor:
        self._forward(x_BRD, self.queries_SBRC[s], rows_BRD)
        return rows_BRD

    def write(self, rows_BME: Tensor, live_B: Tensor | None = None) -> None:
        self.written.append((rows_BME, self.everyone_B if live_B is None else live_B))
        self.waiting = True

    def _forward(self, *asking: Tensor) -> None:
        """Write what is waiting, and read. asking: x, queries and the place of x + y."""
        rows_BME, live_B = self.written[-1] if self.waiting else (self.none, self.everyone_B)
        z_GBK = self.of_segment(self.z_GBK, len(self.written) - 1, after=1) if self.written else self.z_GBK[:1]
        inputs = self.waiting, *arrays(live_B, z_GBK), self.rules, *arrays(self.A_BKD, rows_BME)
        _kernels().forward(*inputs, bool(asking), *arrays(*(asking or 3 * [self.none])))
        self.waiting = False

    def state(self) -> tuple[Tensor, Tensor]:
        self._forward()
        A_BKD, self.A_BKD = self.A_BKD, self.first_BKD
        return A_BKD, self.z_GBK[-1].clone()

    def begin_backward(self, dA_BKD: Tensor, dz_BK: Tensor) -> None:
        self.before = [self.first_BKD.contiguous()]  # A before every segment, not one large tensor: always new pages
        for rows in self.written[:-1]:
            self.before.append(torch.empty_like(self.before[0]))
            _kernels().replay(*arrays(*rows, self.before[-2]), self.rules, *arrays(self.before[-1]))
        self.dA_BKD, self.dz_BK = (x.clone(memory_format=torch.contiguous_format) for x in (dA_BKD, dz_BK))
        self.dqueries_SBRC = torch.empty_like(self.queries_SBRC)
        self.dwritten_BME = self._backward(len(self.written))

    def recall_backward(self, s: int, drows_BRD: Tensor) -> None:
        self.dwritten_BME = self._backward(s, drows_BRD)

    def write_backward(self) -> Tensor:
        return self.dwritten_BME

    def _backward(self, s: int, *asking: Tensor) -> Tensor:
        """Through the read of segment s, if ``asking`` has its gradient, and the write of the segment before it."""
        reads, dqueries = (*(3 * [self.none]), self.none.new_empty(0, 0)), self.none
        if asking:
            reads = *asking, self.queries_SBRC[s], self.before.pop(), self.z_GBK[s * self.groups]
            dqueries = self.dqueries_SBRC[s]
        writes = self.none, self.everyone_B, self.none, self.z_GBK[:0]
        if s:
            writes = *self.written.pop(), self.before[-1], self.of_segment(self.z_GBK, s - 1)
        drows_BME = torch.empty_like(writes[0])
        inputs = bool(asking), *arrays(*reads), self.rules, *arrays(self.dA_BKD, self.dz_BK, dqueries)
        _kernels().backward(*inputs, s > 0, *arrays(*writes, drows_BME))
        return drows_BME

    def finish_backward(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.dA_BKD, self.dz_BK, self.dqueries_SBRC


def _kernels() -> Any:
    from lit_memory.memory import associative_kernels

    return associative_kernels


def rules_of(flags: Flags, written: int, dtype: torch.dtype) -> tuple[Any, int]:
    """The ``Rules`` of a memory to which a segment writes so many rows, and how many rows are written together."""
    from lit_memory.memory import associative_rows as rows

    kind = torch.empty(0, dtype=dtype).numpy().dtype.type
    gamma = {"off": rows.OFF, "raw": rows.RAW, "clip": rows.CLIP}[flags.gamma]
    group = written if flags.update == "batch" else 1
    switches = flags.gamma_detach, flags.beta_on_z, flags.use_denom
    numbers = kind(flags.eps), kind(flags.square_eps), kind(flags.denom_floor)
    return rows.Rules(flags.nu, flags.normalize_phi, gamma, *switches, group, *numbers), group
