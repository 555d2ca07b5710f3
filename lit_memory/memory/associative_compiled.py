"""``Chunk`` of ``associative_chunk.py`` through the loops of ``associative_kernels.py``.

Shape suffixes: as in ``associative_chunk.py``; E = C + D + 1.
"""

from typing import Any

import torch
from torch import Tensor

from lit_memory.memory.associative_chunk import Flags


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
        self.everyone_B = z_BK.new_ones(len(z_BK))

    def of_segment(self, x_GB: Tensor, s: int, after: int = 0) -> Tensor:
        """What belongs to the groups of segment s, and to ``after`` more."""
        return x_GB[s * self.groups : (s + 1) * self.groups + after]

    def recall(self, s: int, x_BRD: Tensor) -> Tensor:
        rows_BRD = torch.empty_like(x_BRD, memory_format=torch.contiguous_format)
        inputs = _arrays(x_BRD, self.queries_SBRC[s], self.A_BKD, self.of_segment(self.z_GBK, s)[0])
        _kernels().recall(*inputs, self.rules, *_arrays(rows_BRD))
        return rows_BRD

    def write(self, rows_BME: Tensor, live_B: Tensor | None = None) -> None:
        live_B = self.everyone_B if live_B is None else live_B
        inputs = _arrays(live_B, self.of_segment(self.z_GBK, len(self.written), after=1))
        _kernels().write(*inputs, self.rules, *_arrays(self.A_BKD, rows_BME))
        self.written.append((rows_BME, live_B))

    def state(self) -> tuple[Tensor, Tensor]:
        A_BKD, self.A_BKD = self.A_BKD, self.first_BKD
        return A_BKD, self.z_GBK[-1].clone()

    def begin_backward(self, dA_BKD: Tensor, dz_BK: Tensor) -> None:
        self.A_GBKD = self.first_BKD.new_empty(len(self.z_GBK) - 1, *self.first_BKD.shape)
        self.A_GBKD[0] = self.first_BKD
        for s, rows in enumerate(self.written):
            _kernels().replay(*_arrays(*rows), self.rules, *_arrays(self.of_segment(self.A_GBKD, s, after=1)))
        self.dA_BKD, self.dz_BK = (x.clone(memory_format=torch.contiguous_format) for x in (dA_BKD, dz_BK))
        self.dqueries_SBRC = torch.empty_like(self.queries_SBRC)

    def recall_backward(self, s: int, drows_BRD: Tensor) -> None:
        before = (self.of_segment(x_GB, s)[0] for x_GB in (self.A_GBKD, self.z_GBK))
        inputs = _arrays(drows_BRD, self.queries_SBRC[s], *before)
        _kernels().recall_backward(*inputs, self.rules, *_arrays(self.dA_BKD, self.dz_BK, self.dqueries_SBRC[s]))

    def write_backward(self) -> Tensor:
        rows_BME, live_B = self.written.pop()
        drows_BME, s = torch.empty_like(rows_BME), len(self.written)
        inputs = _arrays(rows_BME, live_B, *(self.of_segment(x_GB, s) for x_GB in (self.A_GBKD, self.z_GBK)))
        _kernels().write_backward(*inputs, self.rules, *_arrays(self.dA_BKD, self.dz_BK, drows_BME))
        return drows_BME

    def finish_backward(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.dA_BKD, self.dz_BK, self.dqueries_SBRC


def _kernels() -> Any:
    from lit_memory.memory import associative_kernels

    return associative_kernels


def _arrays(*tensors: Tensor) -> list[Any]:
    return [t.detach().contiguous().numpy() for t in tensors]


def rules_of(flags: Flags, written: int, dtype: torch.dtype) -> tuple[Any, int]:
    """The ``Rules`` of a memory to which a segment writes so many rows, and how many rows are written together."""
    kernels, kind = _kernels(), torch.empty(0, dtype=dtype).numpy().dtype.type
    gamma = {"off": kernels.OFF, "raw": kernels.RAW, "clip": kernels.CLIP}[flags.gamma]
    group = written if flags.update == "batch" else 1
    switches = flags.gamma_detach, flags.beta_on_z, flags.use_denom
    numbers = kind(flags.eps), kind(flags.denom_floor)
    return kernels.Rules(flags.nu, flags.normalize_phi, gamma, *switches, group, *numbers), group
