"""What one row reads from the associative memory, or writes to it, compiled by numba. Needs the extra ``fast``.

phi has a feature r_i * r_(i-j) for every pair of channels, of which both are positive in one case of four. So a row is
kept as the places and values of the features that are not zero, and a read, a write, and their gradients touch these
rows of the matrix alone, at a quarter of the arithmetic of the matrix product. The gradient of a feature that is zero
reaches no channel.

Arrays are contiguous, in fp32 or fp64, all of one kind. What a function returns it writes into its last arguments.

Shape suffixes as in ``associative.py``: C channels, K features, D value width; P places of a row, of which the first
``count`` are used.
"""

from typing import NamedTuple

import numpy as np

from lit_memory.memory.kernels import compiled

OFF, RAW, CLIP = 0, 1, 2


class Rules(NamedTuple):
    """``Flags`` for the loops. gamma: one of OFF, RAW, CLIP. group: rows that are written together. eps,
    square_eps, floor: numbers of the arrays' kind."""

    nu: int
    normalize: bool
    gamma: int
    detach: bool
    beta_on_z: bool
    use_denom: bool
    group: int
    eps: np.floating
    square_eps: np.floating
    floor: np.floating


@compiled
def ring(x_C, i):
    """Channel i of [x; -x]."""
    return x_C[i] if i < len(x_C) else -x_C[i - len(x_C)]


@compiled
def features(x_C, rules, place_P, value_P):
    """phi(x). Returns the count of its places, and its length before it was normalised."""
    size, count, square = 2 * len(x_C), 0, x_C.dtype.type(0)
    for i in range(size):
        r = ring(x_C, i)
        if not r <= 0:  # NaN is a place, too
            for j in range(1, rules.nu + 1):
                other = ring(x_C, i - j if i >= j else i - j + size)
                if not other <= 0:
                    place_P[count] = (j - 1) * size + i
                    value_P[count] = r * other
                    square += value_P[count] * value_P[count]
                    count += 1
    length = np.sqrt(square)
    if rules.normalize:
        for p in range(count):
            value_P[p] /= max(length, x_C.dtype.type(1e-12))
    return count, length


@compiled
def features_backward(dvalue_P, value_P, count, length, x_C, rules, dx_C):
    """Gradient of x, given that of the places of phi(x), which is changed."""
    size, tiny = 2 * len(x_C), x_C.dtype.type(1e-12)
    if rules.normalize:
        along = x_C.dtype.type(0)
        if length > tiny:
            for p in range(count):
                along += dvalue_P[p] * value_P[p]
        for p in range(count):
            dvalue_P[p] = (dvalue_P[p] - along * value_P[p]) / max(length, tiny)
    dx_C[:] = 0
    p = 0
    for i in range(size):
        r = ring(x_C, i)
        if not r <= 0:
            for j in range(1, rules.nu + 1):
                at = i - j if i >= j else i - j + size
                other = ring(x_C, at)
                if not other <= 0:
                    add_ring(dx_C, i, dvalue_P[p] * other)
                    add_ring(dx_C, at, dvalue_P[p] * r)
                    p += 1


@compiled
def add_ring(dx_C, i, d):
    """Add the gradient d of channel i of [x; -x]."""
    if i < len(dx_C):
        dx_C[i] += d
    else:
        dx_C[i - len(dx_C)] -= d


@compiled
def combine(A_KD, place_P, value_P, count, y_D):
    """y = A^T phi."""
    y_D[:] = 0
    whole = count - count % 4
    for p in range(0, whole, 4):
        v0, v1, v2, v3 = value_P[p], value_P[p + 1], value_P[p + 2], value_P[p + 3]
        a0, a1, a2, a3 = A_KD[place_P[p]], A_KD[place_P[p + 1]], A_KD[place_P[p + 2]], A_KD[place_P[p + 3]]
        for d in range(len(y_D)):
            y_D[d] += v0 * a0[d] + v1 * a1[d] + v2 * a2[d] + v3 * a3[d]
    for p in range(whole, count):
        v, a = value_P[p], A_KD[place_P[p]]
        for d in range(len(y_D)):
            y_D[d] += v * a[d]


@compiled
def dots(A_KD, place_P, count, e_D, out_P):
    """A e at the places of phi."""
    whole = count - count % 4
    for p in range(0, whole, 4):
        a0, a1, a2, a3 = A_KD[place_P[p]], A_KD[place_P[p + 1]], A_KD[place_P[p + 2]], A_KD[place_P[p + 3]]
        s0 = s1 = s2 = s3 = e_D.dtype.type(0)
        for d in range(len(e_D)):
            s0 += a0[d] * e_D[d]
            s1 += a1[d] * e_D[d]
            s2 += a2[d] * e_D[d]
            s3 += a3[d] * e_D[d]
        out_P[p], out_P[p + 1], out_P[p + 2], out_P[p + 3] = s0, s1, s2, s3
    for p in range(whole, count):
        a, s = A_KD[place_P[p]], e_D.dtype.type(0)
        for d in range(len(e_D)):
            s += a[d] * e_D[d]
        out_P[p] = s


@compiled
def spread(A_KD, place_P, value_P, count, scale, e_D):
    """Add scale * phi e^T to A."""
    for p in range(count):
        v, a = scale * value_P[p], A_KD[place_P[p]]
        for d in range(len(e_D)):
            a[d] += v * e_D[d]


@compiled
def copy(from_KD, to_KD):
    """Rows by rows: an assignment of the whole would not be vectorised."""
    for k in range(len(from_KD)):
        from_D, to_D = from_KD[k], to_KD[k]
        for d in range(len(from_D)):
            to_D[d] = from_D[d]


@compiled
def length_of(z_K):
    """|z|."""
    square = z_K.dtype.type(0)
    for k in range(len(z_K)):
        square += z_K[k] * z_K[k]
    return np.sqrt(square)


@compiled
def is_empty(z_K):
    """Whether a memory was never written."""
    return not np.any(z_K)


@compiled
def denominator(z_K, z_norm, place_P, value_P, count, rules):
    """z . phi + eps as it is and floored, and |phi|^2."""
    overlap, square = rules.eps, z_K.dtype.type(0)
    for p in range(count):
        overlap += value_P[p] * z_K[place_P[p]]
        square += value_P[p] * value_P[p]
    least = rules.floor * np.sqrt(square) * z_norm
    return overlap, (least if rules.floor > 0 and least > overlap else overlap), square


@compiled
def denominator_backward(found, extra, z_K, z_norm, place_P, value_P, count, rules, dphi_P, dz_K):
    """Add the gradients through the denominator to those of phi and z. extra: another gradient of the overlap.

    found: what ``denominator`` returned. dphi: at first the gradient through A^T phi alone, from which that of the
    denominator follows.
    """
    overlap, den, square = found
    dden, doverlap = z_K.dtype.type(0), extra
    for p in range(count):
        dden -= value_P[p] * dphi_P[p]
    dden /= den
    if den > overlap:
        tiny = z_K.dtype.type(1e-30)
        norm, z_norm, dfloor = max(np.sqrt(square), tiny), max(z_norm, tiny), dden * rules.floor
        for p in range(count):
            dphi_P[p] += value_P[p] * (dfloor * z_norm / norm)
        for k in range(len(z_K)):
            dz_K[k] += z_K[k] * (dfloor * norm / z_norm)
    else:
        doverlap += dden
    for p in range(count):
        dz_K[place_P[p]] += doverlap * value_P[p]
        dphi_P[p] += doverlap * z_K[place_P[p]]


@compiled
def gamma_of(overlap, square, z_K, rules):
    """gamma of a row. square: |phi|^2 + square_eps."""
    zero, one = z_K.dtype.type(0), z_K.dtype.type(1)
    if rules.gamma == OFF or is_empty(z_K):
        return one
    gamma = one - overlap / square
    if rules.gamma == CLIP:
        gamma = zero if gamma < zero else (one if gamma > one else gamma)
    return gamma


@compiled
def gamma_backward(found, beta, live, z_K, later_K, place_P, value_P, count, rules, dphi_P):
    """Add the gradient of phi through z after the write. Returns those of beta and of the overlap."""
    dgamma = dbeta = doverlap = z_K.dtype.type(0)
    overlap, _, square = found
    square += rules.square_eps
    raw = gamma_of(overlap, square, z_K, rules)
    gamma = live * raw * beta if rules.beta_on_z else live * raw
    for p in range(count):
        dphi_P[p] += gamma * later_K[place_P[p]]
        dgamma += live * value_P[p] * later_K[place_P[p]]
    if rules.beta_on_z:
        dbeta = dgamma * raw
        dgamma *= beta
    share = overlap / square
    clipped = rules.gamma == CLIP and not (share >= 0 and share <= 1)
    if not (rules.detach or rules.gamma == OFF or clipped or is_empty(z_K)):
        doverlap = -dgamma / square
        for p in range(count):
            dphi_P[p] -= value_P[p] * (doverlap + doverlap) * share
    return dbeta, doverlap
