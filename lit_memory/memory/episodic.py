"""Episodic memory of Larimar as pure functions: slots that hold an episode of latents, addressed by linear keys.

Paper:     Das et al. 2024, Larimar: Large language models with episodic memory control, arXiv 2403.11901, section 3;
           the one-hot keys are those of Nelson et al. 2024, Needle in the haystack for memory based large language
           models, arXiv 2407.01437, eq. 1-4; the unordered readout (``distances``, ``unordered``) is that of Das et al.
           2025, MemReasoner, section 3.4.
Reference: the code of arXiv 2403.11901 as spec 11 describes it.

An episode of N latents Z goes into K slots M, and a query z is answered by a latent, with A^+ the pseudo-inverse of A:

(1) W = Z M_0^+      keys of the lines: their coordinates in a base M_0          ``keys``
(2) M = W^+ Z        write: the least-squares solution of W M = Z (eq. 1)        ``slots``, ``write``
(3) w = z M^+        key of a query                                              ``keys``
(4) z_r = w M        read (eq. 2)                                                ``read``
(5) w_k = 1 where k = argmin_j |z - M~_j|, else 0 (eq. 3-4), and its soft form   ``one_hot_keys``, ``gaussian_keys``

Keys of either kind, (1) and (3) or (5), go with (2) and (4). A line whose row of W is zero is as good as absent, which
is how lines of a ragged batch are left out. An episode may have no line: its memory is zero, and reads are zero. With
more lines than slots, M is the least-squares fit.

With the Gram matrix G = W^T W of all written keys, (2) can be computed in parts: lines (W', Z') are added, or
forgotten, by

(6) G' = G +- W'^T W',  M' = G'^+ (G M +- W'^T Z')                               ``add``, ``forget``

Deviations
1. ``newton`` raises where it diverges; the reference returns the result. ``newton_safe`` and ``svd`` are other ways to
   A^+; the reference's evaluation uses ``svd``.
2. (6) equals the published M' = M +- G'^-1 W'^T (Z' - W' M) where G' has an inverse, and also holds where it has none:
   for fewer lines than slots, and where forgetting lowers the rank. G is kept in fp64, as it has the squares of the
   singular values of W.
3. Gaussian keys sum to 1, so that a bandwidth towards 0 gives one-hot keys.

Computations are in the precision of the arguments, which must be at least fp32: call these functions outside of
autocast.

Shape suffixes: B episodes, N lines, K slots, C width of a latent, Q queries, X any leading dimensions, R rows and D
columns of a matrix.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_memory.memory.newton import diverges, newton
from lit_memory.util.checks import FieldError

NEWTON_SCALE = 5e-4
"""First guess of ``newton`` over A^T (spec 11.2). The iteration diverges for singular values above sqrt(2 / 5e-4) =
63.2."""
RCOND = 1e-4
"""Singular values of less than this share of the largest are not inverted by "svd" (spec 12.5)."""
NOISE = 1000
"""Eigenvalues of a Gram matrix up to this multiple of K eps times its trace count as 0: they are rounding errors."""
BLOCK = 2**22
"""Differences held at a time while distances are computed."""


class EpisodicState(NamedTuple):
    """Slots, and the Gram matrix W^T W of the written keys in fp64. Both are zero for an empty memory."""

    M_BKC: Tensor
    gram_BKK: Tensor


def empty(batch: int, slots: int, width: int, device=None, dtype=torch.float32) -> EpisodicState:
    """An empty memory of ``slots`` latents of ``width`` floats."""
    M_BKC = torch.zeros(batch, slots, width, device=device, dtype=dtype)
    return EpisodicState(M_BKC, torch.zeros(batch, slots, slots, device=device, dtype=torch.float64))


def pinv(A_XRD: Tensor, solver: str = "newton", steps: int = 15, rcond: float = RCOND) -> Tensor:
    """The pseudo-inverse of every matrix, (X, D, R).

    solver: "newton" is X <- 2X - XAX from NEWTON_SCALE A^T (Ben-Israel and Cohen). It damps small singular values s: it
        multiplies 1/s by 1 - (1 - NEWTON_SCALE s^2)^(2^steps). "newton_safe" starts from A^T / (|A|_1 |A|_inf), which
        never diverges. "svd" is exact.
    steps: steps of both Newton solvers. Each doubles the rounding error outside of the range of a matrix without full
        rank: 2^steps eps in all, 0.004 in fp32 for 15. Reads are free of it, as (2) and (4) multiply it by that matrix.
    rcond: for "svd", the smallest singular value over the largest that is inverted. Slots that were computed by a
        pseudo-inverse have noise of some eps times its condition, which must not be inverted in turn.
    Raises ValueError for another solver, and where "newton" diverges.
    """
    if solver not in ("newton", "newton_safe", "svd"):
        raise FieldError("solver", solver, "expected 'newton', 'newton_safe' or 'svd'")
    if not A_XRD.numel():
        return A_XRD.mT
    if solver == "svd":
        try:
            return torch.linalg.pinv(A_XRD, rtol=rcond)
        except torch.linalg.LinAlgError:  # LAPACK gives up on some matrices of low rank in single precision
            return torch.linalg.pinv(A_XRD.double(), rtol=rcond).to(A_XRD.dtype)
    X_XDR = A_XRD.mT * NEWTON_SCALE
    if solver == "newton_safe":
        size = A_XRD.abs()
        bound_X = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)  # at least the square of the largest singular value
        X_XDR = A_XRD.mT / torch.where(bound_X > 0, bound_X, 1)[..., None, None]
    X_XDR, product = newton(A_XRD, X_XDR, steps)
    if solver == "newton" and diverges(product, steps):
        raise ValueError(
            "solver='newton': the iteration diverges, as a singular value is above 63.2; use solver='newton_safe', "
            "or shorter latents"
        )
    return X_XDR


def keys(z_BNC: Tensor, base_BKC: Tensor, solver: str = "newton", steps: int = 15, rcond: float = RCOND) -> Tensor:
    """(1), (3): coordinates of latents in the rows of ``base_BKC`` (M_0 to write, M to read), (B, N, K).

    solver, steps, rcond: see ``pinv``.
    """
    return z_BNC @ pinv(base_BKC, solver, steps, rcond)


def squared_distances(x_BQC: Tensor, y_BNC: Tensor) -> Tensor:
    """|x - y|^2 of every pair, (B, Q, N).

    From differences, as |x|^2 + |y|^2 - 2xy would lose the digits in which near-duplicates differ.
    """
    block = max(1, BLOCK // max(1, x_BQC.numel()))
    return torch.cat(
        [(x_BQC.unsqueeze(2) - y.unsqueeze(1)).square().sum(-1) for y in y_BNC.split(block, dim=1)], dim=-1
    )


def _distances(z_BQC: Tensor, keys_BNC: Tensor, real_BN: Tensor | None) -> Tensor:
    """Squared distances, inf to keys that are not real. Errors: those of ``nearest``."""
    return _checked(squared_distances(z_BQC, keys_BNC), real_BN)


def _checked(distances_BQN: Tensor, real_BN: Tensor | None) -> Tensor:
    if real_BN is not None:
        distances_BQN = distances_BQN.masked_fill(~real_BN.unsqueeze(1), torch.inf)
    lines_B = torch.full((len(distances_BQN),), distances_BQN.shape[2]) if real_BN is None else real_BN.sum(1)
    if not bool(lines_B.all()):
        raise ValueError(
            f"episode {int(lines_B.argmin())}: expected at least one line to be the nearest; write before reading"
        )
    if not bool(distances_BQN.amin(-1).isfinite().all()):
        raise ValueError(
            "distances: expected numbers, but a latent of a query or of a key is NaN or infinite; check the encoder"
        )
    return distances_BQN


def distances(z_BQC: Tensor, lines_BNC: Tensor, real_BN: Tensor | None = None) -> Tensor:
    """|z - line| of every pair, (B, Q, N), inf to lines that are not real. The gradient of a distance of 0 is 0.

    Errors: those of ``nearest``.
    """
    block = max(1, BLOCK // max(1, z_BQC.numel()))
    parts = [
        torch.linalg.vector_norm(z_BQC.unsqueeze(2) - lines.unsqueeze(1), dim=-1)
        for lines in lines_BNC.split(block, dim=1)
    ]
    return _checked(torch.cat(parts, dim=-1), real_BN)


def unordered(distances_BQN: Tensor, Z_BNC: Tensor, readout: str = "st", temperature: float = 1.0) -> Tensor:
    """The latents of the lines nearest to each read, (B, Q, C).

    readout: "hard" is the nearest line, whose choice has no gradient; "soft" is the mean under softmax(-distances /
        temperature); "st" is hard, with the gradient of soft.
    Raises ValueError for another readout, and for a temperature that is not above 0.
    """
    if readout not in ("hard", "st", "soft"):
        raise FieldError("readout", readout, "expected 'hard', 'st' or 'soft'")
    if not temperature > 0:
        raise FieldError(
            "temperature", temperature, "expected more than 0; for the nearest line alone use readout 'hard'"
        )
    hard_BQC = Z_BNC.take_along_dim(distances_BQN.argmin(-1).unsqueeze(-1), dim=1)
    if readout == "hard":
        return hard_BQC
    excess_BQN = distances_BQN - distances_BQN.amin(-1, keepdim=True)
    soft_BQC = (-excess_BQN / temperature).softmax(-1) @ Z_BNC
    return soft_BQC if readout == "soft" else hard_BQC + (soft_BQC - soft_BQC.detach())


def nearest(z_BQC: Tensor, keys_BNC: Tensor, real_BN: Tensor | None = None) -> Tensor:
    """Index of the nearest key of every query, (B, Q); of equally near ones the first.

    real_BN: True at keys that may be chosen; default: all. Raises ValueError for an episode without any key, and for a
    latent that is not finite.
    """
    return _distances(z_BQC, keys_BNC, real_BN).argmin(-1)


def one_hot_keys(z_BQC: Tensor, keys_BKC: Tensor, real_BK: Tensor | None = None) -> Tensor:
    """(5): 1 at the nearest slot, (B, Q, K). Arguments and errors: those of ``nearest``."""
    return torch.nn.functional.one_hot(nearest(z_BQC, keys_BKC, real_BK), keys_BKC.shape[1]).to(z_BQC.dtype)


def gaussian_keys(z_BQC: Tensor, keys_BKC: Tensor, bandwidth: float, real_BK: Tensor | None = None) -> Tensor:
    """Soft (5): w_k ~ exp(-|z - key_k|^2 / (2 bandwidth^2)) with sum 1, (B, Q, K).

    Raises ValueError as ``nearest`` does, and for a bandwidth that is not above 0.
    """
    if not bandwidth > 0:
        raise FieldError("bandwidth", bandwidth, "expected more than 0; for the nearest slot alone use one_hot_keys")
    distances_BQK = _distances(z_BQC, keys_BKC, real_BK)
    excess_BQK = distances_BQK - distances_BQK.amin(-1, keepdim=True)
    return (-excess_BQK / bandwidth / bandwidth / 2).softmax(-1)  # 0 / b / b is 0 for any b, 0 / b^2 is not


def check(W_BNK: Tensor, Z_BNC: Tensor) -> None:
    """Raise ValueError for the first line whose key or latent is not finite."""
    finite_BN = Z_BNC.isfinite().all(-1) & W_BNK.isfinite().all(-1)
    if not bool(finite_BN.all()):
        episode, line = (~finite_BN).nonzero()[0].tolist()
        raise ValueError(
            f"line {line} of episode {episode}: expected a finite latent and key to write; "
            "check the encoder and the noise"
        )


def slots(W_BNK: Tensor, Z_BNC: Tensor, solver: str = "newton", steps: int = 15) -> Tensor:
    """(2): the slots (B, K, C) of an episode, for a memory that is only read. The order of the lines does not matter.

    W_BNK, Z_BNC: keys and latents. Raises ValueError for a line that is not finite, and where ``pinv`` does.
    """
    check(W_BNK, Z_BNC)
    return pinv(W_BNK, solver, steps) @ Z_BNC


def write(W_BNK: Tensor, Z_BNC: Tensor, solver: str = "newton", steps: int = 15) -> EpisodicState:
    """``slots`` and their Gram matrix, for a memory that is revised. Arguments and errors: those of ``slots``."""
    W_64 = W_BNK.double()
    return EpisodicState(slots(W_BNK, Z_BNC, solver, steps), W_64.mT @ W_64)


def read(state: EpisodicState, W_BQK: Tensor) -> Tensor:
    """(4): the latents under the keys, (B, Q, C). Zero from an empty memory, and from slots without a line."""
    return W_BQK @ state.M_BKC


def add(state: EpisodicState, W_BNK: Tensor, Z_BNC: Tensor) -> EpisodicState:
    """(6): the memory of the lines written before and of these, equal to one exact ``write`` of all.

    Errors: those of ``write``.
    """
    return _revise(state, W_BNK, Z_BNC, 1)


def forget(state: EpisodicState, W_BNK: Tensor, Z_BNC: Tensor) -> EpisodicState:
    """(6) with minus signs: the memory as if these lines, which it holds, had never been written.

    Raises ValueError as ``write`` does, and for lines that were not written.
    """
    return _revise(state, W_BNK, Z_BNC, -1)


def _revise(state: EpisodicState, W_BNK: Tensor, Z_BNC: Tensor, sign: int) -> EpisodicState:
    check(W_BNK, Z_BNC)
    M_BKC, W_BNK, Z_BNC, old_BKK = state.M_BKC.double(), W_BNK.double(), Z_BNC.double(), state.gram_BKK
    gram_BKK = old_BKK + sign * W_BNK.mT @ W_BNK
    with torch.no_grad():
        trace_B = torch.maximum(_trace(old_BKK), _trace(gram_BKK))
        noise_B = NOISE * gram_BKK.shape[-1] * torch.finfo(torch.float64).eps * trace_B
        values_BK, vectors_BKK = torch.linalg.eigh(gram_BKK)
        if bool((values_BK < -noise_B[:, None]).any()):
            raise ValueError(
                "forget: these lines were not written with these keys; expected lines that the memory holds"
            )
        null_BKK = vectors_BKK * (values_BK <= noise_B[:, None]).unsqueeze(1)
        null_BKK = null_BKK @ null_BKK.mT
    inverse_BKK = torch.linalg.pinv(gram_BKK, atol=noise_B, rtol=torch.zeros_like(noise_B), hermitian=True)
    M_BKC = inverse_BKK @ (old_BKK @ M_BKC + sign * W_BNK.mT @ Z_BNC)
    clean_BKK = gram_BKK - null_BKK @ gram_BKK @ null_BKK  # noise that stayed would count as keys later
    return EpisodicState(M_BKC.to(state.M_BKC.dtype), clean_BKK)


def _trace(A_BKK: Tensor) -> Tensor:
    return A_BKK.diagonal(dim1=-2, dim2=-1).sum(-1)


def read_nearest(z_BQC: Tensor, keys_BNC: Tensor, Z_BNC: Tensor, real_BN: Tensor | None = None) -> Tensor:
    """(5), (2) and (4) in one, for a memory with a slot per line: the latent nearest to each query, (B, Q, C).

    Lines with equal keys share the slot of the first, which holds their mean: exactly their latent, if it is the same.
    Costs O(N C) per query, where ``write`` inverts an N x N matrix. Arguments and errors: those of ``nearest``.
    """
    first_BQ1 = nearest(z_BQC, keys_BNC, real_BN).unsqueeze(-1)
    out_BQC, key_BQC = (t.take_along_dim(first_BQ1, dim=1) for t in (Z_BNC, keys_BNC))
    if not bool(out_BQC.isfinite().all()):
        raise ValueError(
            "read_nearest: expected a finite latent, but that of the nearest line is NaN or infinite; check the encoder"
        )
    same_BQN = squared_distances(key_BQC, keys_BNC) == 0
    if real_BN is not None:
        same_BQN = same_BQN & real_BN.unsqueeze(1)
    b, q, n = same_BQN.nonzero(as_tuple=True)
    return out_BQC.index_put(
        (b, q), (Z_BNC[b, n] - out_BQC[b, q]) / same_BQN.sum(-1)[b, q].unsqueeze(-1), accumulate=True
    )
