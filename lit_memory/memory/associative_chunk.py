"""The associative memory over a chunk of segments, forward and backward by hand.

Within a chunk the matrix A stays as it was, and what the segments have written so far stays a list of factors:

    A_s = A + sum over rows n written before s of phi_n delta_n^T
    phi^T A_s = phi^T A + (phi . phi_n)_n^T (delta_n)_n

So no A of a single segment is ever stored. The queries of all segments are known beforehand: what they find in A is
one product for the whole chunk. The backward pass is the same recurrence from the end. With phi_m the keys of the reads
after s and e_m the gradients of what they found,

    dA_s = dA + sum over m of phi_m e_m^T,   d(delta_n) = dA_s^T phi_n,   d(phi_n) = dA_s delta_n

The equations are those of ``associative.py``, which is the slow twin.

Shape suffixes: B batch, S segments, R rows that read, M rows that are written together, C channels, K features, D value
width, E = C + D + 1, N rows that all segments write (or, of the keys of reads, read).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_memory.memory.associative import dpfp, dpfp_backward, gamma_correction, length, overlap


class Flags(NamedTuple):
    """What ``associative.write`` and ``associative.read`` are told, and the feature map."""

    nu: int
    normalize_phi: bool
    update: str
    gamma: str
    gamma_detach: bool
    beta_on_z: bool
    eps: float
    denom_floor: float
    use_denom: bool
    gamma_eps: float | None = None

    @property
    def square_eps(self) -> float:
        """Added to |phi|^2 in gamma."""
        return self.eps if self.gamma_eps is None else self.gamma_eps


TINY = 1e-30
"""Smallest length that a vector is divided by."""


class Denominator(NamedTuple):
    """z . phi + eps of rows, (B, R, 1), as it is and floored.

    Only with a floor: |phi|, |z|, and where the floor is larger.
    """

    overlap_BR1: Tensor
    value_BR1: Tensor
    phi_norm_BR1: Tensor | None = None
    z_norm_B11: Tensor | None = None
    floored_BR1: Tensor | None = None


class Read(NamedTuple):
    """What one read found."""

    y_BRD: Tensor
    z_BK: Tensor
    den: Denominator | None


class Write(NamedTuple):
    """What one write replaced, and by what."""

    old: Read
    missing_BMD: Tensor
    beta_BM1: Tensor
    raw_gamma_BM1: Tensor | None
    gamma_BM1: Tensor | None
    key_BMC: Tensor
    live_B11: Tensor | None


class Chunk:
    """Memory (A, z) while S segments read and write it. Calls of the backward pass are those of the forward pass from
    the end.

    queries_SBRC: channels of the queries of every segment. written: rows that a segment writes.
    """

    def __init__(self, A_BKD: Tensor, z_BK: Tensor, queries_SBRC: Tensor, written: int, flags: Flags) -> None:
        queries_BSRC = queries_SBRC.transpose(0, 1)
        batch, segments, rows, _ = queries_BSRC.shape
        self.flags, self.A_BKD, self.z_BK = flags, A_BKD, z_BK
        self.queries_BSRC = queries_BSRC
        self.segments, self.rows = segments, rows
        phi_BSRK = dpfp(queries_BSRC, flags.nu, flags.normalize_phi)
        self.phi, self.found = (
            x.unflatten(1, (segments, rows)).unbind(1) for x in (phi_BSRK.flatten(1, 2), phi_BSRK.flatten(1, 2) @ A_BKD)
        )
        total, (keys, width) = segments * written, A_BKD.shape[1:]
        self.group = written if flags.update == "batch" else 1  # rows that are written together
        self.keys_BNK, self.deltas_BND = A_BKD.new_empty(batch, total, keys), A_BKD.new_empty(batch, total, width)
        self.asked_BNK = A_BKD.new_empty(batch, total + segments * rows, keys)  # keys of all reads, in their order
        self.written, self.asked = 0, 0
        self.reads: list[Read] = []
        self.writes: list[Write] = []

    # forward

    def recall(self, s: int, x_BRD: Tensor, rows_BRD: Tensor) -> Tensor:
        """Puts x + y, y what the queries of segment s recall, into ``rows``."""
        self.reads.append(self._read(self.phi[s], self._with_factors(self.found[s], self.phi[s])))
        return torch.add(x_BRD, self.reads[-1].y_BRD, out=rows_BRD)

    def write(self, rows_BME: Tensor, live_B: Tensor | None = None) -> None:
        """Write rows together, or one after another. live_B: 0 for samples that write nothing, 1 for the others.

        rows_BME: key, value, and the logit of beta. They may be overwritten.
        """
        live_B11 = None if live_B is None else live_B[:, None, None]
        channels, width = self.queries_BSRC.shape[-1], self.A_BKD.shape[2]
        for rows in rows_BME.split(self.group, 1):
            key_BMC, value_BMD, logit_BM1 = rows.split([channels, width, 1], dim=-1)
            self._write(key_BMC, value_BMD, logit_BM1.sigmoid(), live_B11)

    def _write(self, key_BMC: Tensor, v_BMD: Tensor, beta_BM1: Tensor, live_B11: Tensor | None) -> None:
        flags, z_BK = self.flags, self.z_BK
        phi_BMK = dpfp(key_BMC, flags.nu, flags.normalize_phi)
        old = self._read(phi_BMK, self._with_factors(torch.bmm(phi_BMK, self.A_BKD), phi_BMK))
        missing_BMD = v_BMD - old.y_BRD
        delta_BMD = beta_BM1 * missing_BMD
        delta_BMD = delta_BMD if live_B11 is None else delta_BMD * live_B11
        self.keys_BNK.narrow(1, self.written, self.group).copy_(phi_BMK)
        self.deltas_BND.narrow(1, self.written, self.group).copy_(delta_BMD)
        self.written += self.group
        raw = gamma = None
        if old.den is not None:
            raw = gamma_correction(z_BK, phi_BMK, old.den.overlap_BR1, flags.gamma, flags.square_eps)
            gamma = raw * beta_BM1 if flags.beta_on_z else raw
            gamma = gamma if live_B11 is None else gamma * live_B11
            self.z_BK = z_BK + (gamma * phi_BMK).sum(1)
        self.writes.append(Write(old, missing_BMD, beta_BM1, raw, gamma, key_BMC, live_B11))

    def state(self) -> tuple[Tensor, Tensor]:
        """(A, z) after the last write."""
        return torch.baddbmm(self.A_BKD, self.keys_BNK.mT, self.deltas_BND), self.z_BK

    def _with_factors(self, found_BRD: Tensor, phi_BRK: Tensor) -> Tensor:
        """phi^T A_s, given phi^T A."""
        count, n = phi_BRK.shape[1], self.written
        self.asked_BNK.narrow(1, self.asked, count).copy_(phi_BRK)
        self.asked += count
        if not n:
            return found_BRD
        weights = torch.bmm(phi_BRK, self.keys_BNK.narrow(1, 0, n).mT)
        return torch.baddbmm(found_BRD, weights, self.deltas_BND.narrow(1, 0, n))

    def _read(self, phi_BRK: Tensor, found_BRD: Tensor) -> Read:
        flags, z_BK = self.flags, self.z_BK
        if not flags.use_denom:
            return Read(found_BRD, z_BK, None)
        overlap_BR1 = overlap(z_BK, phi_BRK, flags.eps)
        den = Denominator(overlap_BR1, overlap_BR1)
        if flags.denom_floor:
            phi_norm_BR1, z_norm_B11 = length(phi_BRK), length(z_BK.unsqueeze(1))
            floor_BR1 = flags.denom_floor * phi_norm_BR1 * z_norm_B11
            value_BR1 = torch.maximum(overlap_BR1, floor_BR1)
            den = Denominator(overlap_BR1, value_BR1, phi_norm_BR1, z_norm_B11, floor_BR1 > overlap_BR1)
        return Read(found_BRD / den.value_BR1, z_BK, den)

    # backward

    def begin_backward(self, dA_BKD: Tensor, dz_BK: Tensor) -> None:
        """dA, dz: gradients of the state after the chunk."""
        self.dA_BKD, self.dz_BK = dA_BKD, dz_BK
        self.dfound_BND = self.asked_BNK.new_empty(*self.asked_BNK.shape[:2], self.A_BKD.shape[2])
        self.ddeltas_BND, self.dkeys_BNK = torch.bmm(self.keys_BNK, dA_BKD), torch.bmm(self.deltas_BND, dA_BKD.mT)
        self.dphi: list[Tensor] = []

    def recall_backward(self, s: int, dy_BRD: Tensor) -> None:
        """dy: gradient of what ``recall`` returned for segment s."""
        phi_BRK = self.phi[s]
        dfound_BRD, dphi_BRK = self._read_backward(self.reads.pop(), phi_BRK, dy_BRD)
        self.dphi.append(self._factors_backward(dfound_BRD, dphi_BRK))

    def write_backward(self) -> Tensor:
        """Gradient (B, M, E) of the rows of the last call of ``write``."""
        count = self.deltas_BND.shape[1] // (self.segments * self.group)
        return torch.cat([self._write_backward() for _ in range(count)][::-1], dim=1)

    def _write_backward(self) -> Tensor:
        saved, flags = self.writes.pop(), self.flags
        live_B11 = saved.live_B11
        self.written -= self.group
        phi_BMK = self.keys_BNK.narrow(1, self.written, self.group)
        ddelta_BMD, dphi_BMK = self._later(phi_BMK)
        if live_B11 is not None:
            ddelta_BMD = ddelta_BMD * live_B11
        dbeta_BM1 = (ddelta_BMD * saved.missing_BMD).sum(-1, keepdim=True)
        dv_BMD = ddelta_BMD * saved.beta_BM1
        doverlap = None
        if saved.gamma_BM1 is not None:
            dphi_BMK = torch.addcmul(dphi_BMK, saved.gamma_BM1, self.dz_BK.unsqueeze(1))
            if flags.beta_on_z or not flags.gamma_detach:
                dgamma_BM1 = (phi_BMK * self.dz_BK.unsqueeze(1)).sum(-1, keepdim=True)
                dgamma_BM1 = dgamma_BM1 if live_B11 is None else dgamma_BM1 * live_B11
                if flags.beta_on_z:
                    assert saved.raw_gamma_BM1 is not None
                    dbeta_BM1 = dbeta_BM1 + dgamma_BM1 * saved.raw_gamma_BM1
                    dgamma_BM1 = dgamma_BM1 * saved.beta_BM1
                if not flags.gamma_detach:
                    doverlap, extra_BMK = self._gamma_backward(saved, phi_BMK, dgamma_BM1)
                    dphi_BMK = dphi_BMK + extra_BMK
        dfound_BMD, dread_BMK = self._read_backward(saved.old, phi_BMK, -dv_BMD, doverlap)
        dphi_BMK = torch.baddbmm(dphi_BMK if dread_BMK is None else dphi_BMK + dread_BMK, dfound_BMD, self.A_BKD.mT)
        dphi_BMK = self._factors_backward(dfound_BMD, dphi_BMK)
        dkey_BMC = dpfp_backward(dphi_BMK, saved.key_BMC, flags.nu, flags.normalize_phi)
        return torch.cat([dkey_BMC, dv_BMD, dbeta_BM1 * saved.beta_BM1 * (1 - saved.beta_BM1)], dim=-1)

    def finish_backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of A, z and the channels of all queries."""
        shape = self.segments, self.rows
        dA_BKD = torch.baddbmm(self.dA_BKD, self.asked_BNK.mT, self.dfound_BND)
        dfound_BSRD = self.dfound_BND.unflatten(1, (self.segments, -1)).narrow(2, 0, self.rows).flatten(1, 2)
        dphi_BSRK = torch.cat(self.dphi[::-1], dim=1).baddbmm_(dfound_BSRD, self.A_BKD.mT).unflatten(1, shape)
        dqueries_BSRC = dpfp_backward(dphi_BSRK, self.queries_BSRC, self.flags.nu, self.flags.normalize_phi)
        return dA_BKD, self.dz_BK, dqueries_BSRC.transpose(0, 1)

    def _later(self, phi_BMK: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the factors of the rows behind ``written``: by the state after the chunk, and by all reads after
        their write."""
        ddelta_BMD, dphi_BMK, delta_BMD = (
            x.narrow(1, self.written, self.group) for x in (self.ddeltas_BND, self.dkeys_BNK, self.deltas_BND)
        )
        later = self.asked_BNK.shape[1] - self.asked
        if not later:
            return ddelta_BMD, dphi_BMK
        asked, found = (x.narrow(1, self.asked, later) for x in (self.asked_BNK, self.dfound_BND))
        ddelta_BMD = torch.baddbmm(ddelta_BMD, torch.bmm(phi_BMK, asked.mT), found)
        return ddelta_BMD, torch.baddbmm(dphi_BMK, torch.bmm(delta_BMD, found.mT), asked)

    def _factors_backward(self, dfound_BRD: Tensor, dphi_BRK: Tensor | None) -> Tensor:
        """Gradient of phi through the factors, added to ``dphi_BRK``. Remembers the read for the writes before it."""
        count, n = dfound_BRD.shape[1], self.written
        self.asked -= count
        self.dfound_BND.narrow(1, self.asked, count).copy_(dfound_BRD)
        if not n:
            keys = self.A_BKD.shape[1]
            return dfound_BRD.new_zeros(*dfound_BRD.shape[:2], keys) if dphi_BRK is None else dphi_BRK
        weights = torch.bmm(dfound_BRD, self.deltas_BND.narrow(1, 0, n).mT)
        keys_BNK = self.keys_BNK.narrow(1, 0, n)
        return torch.bmm(weights, keys_BNK) if dphi_BRK is None else torch.baddbmm(dphi_BRK, weights, keys_BNK)

    def _read_backward(
        self, read: Read, phi_BRK: Tensor, dy_BRD: Tensor, doverlap_BR1: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of phi^T A_s and, through the denominator, of phi. doverlap: one that the overlap has otherwise."""
        if read.den is None:
            return dy_BRD, None
        dfound_BRD = dy_BRD / read.den.value_BR1
        dden_BR1 = -(dfound_BRD * read.y_BRD).sum(-1, keepdim=True)
        if read.den.floored_BR1 is None:
            dden_BR1 = dden_BR1 if doverlap_BR1 is None else dden_BR1 + doverlap_BR1
            self.dz_BK = self.dz_BK + (dden_BR1 * phi_BRK).sum(1)
            return dfound_BRD, dden_BR1 * read.z_BK.unsqueeze(1)
        assert read.den.phi_norm_BR1 is not None and read.den.z_norm_B11 is not None
        dfloor_BR1 = torch.where(read.den.floored_BR1, dden_BR1, 0) * self.flags.denom_floor
        dden_BR1 = torch.where(read.den.floored_BR1, 0, dden_BR1)
        dden_BR1 = dden_BR1 if doverlap_BR1 is None else dden_BR1 + doverlap_BR1
        phi_norm_BR1, z_norm_B11 = read.den.phi_norm_BR1.clamp_min(TINY), read.den.z_norm_B11.clamp_min(TINY)
        dz_norm_B1 = (dfloor_BR1 * phi_norm_BR1).sum(1) / z_norm_B11[:, 0]
        self.dz_BK = torch.addcmul(self.dz_BK, read.z_BK, dz_norm_B1) + (dden_BR1 * phi_BRK).sum(1)
        dphi_BRK = phi_BRK * (dfloor_BR1 * z_norm_B11 / phi_norm_BR1)
        return dfound_BRD, dphi_BRK.addcmul_(dden_BR1, read.z_BK.unsqueeze(1))

    def _gamma_backward(self, saved: Write, phi_BMK: Tensor, dgamma_BM1: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the overlap and of phi through gamma = 1 - overlap / (|phi|^2 + square_eps)."""
        assert saved.old.den is not None
        free_BM1 = ~(saved.old.z_BK == 0).all(-1)[:, None, None].expand_as(dgamma_BM1)
        square_BM1 = phi_BMK.square().sum(-1, keepdim=True) + self.flags.square_eps
        overlap_BM1 = saved.old.den.overlap_BR1
        if self.flags.gamma == "clip":
            share_BM1 = overlap_BM1 / square_BM1
            free_BM1 = free_BM1 & (share_BM1 >= 0) & (share_BM1 <= 1)
        if self.flags.gamma == "off":
            free_BM1 = torch.zeros_like(free_BM1)
        dgamma_BM1 = torch.where(free_BM1, dgamma_BM1, 0)
        return -dgamma_BM1 / square_BM1, phi_BMK * (2 * dgamma_BM1 * overlap_BM1 / square_BM1.square())
