"""The associative memory of ``associative.py`` as loops that numba compiles. Needs the extra ``fast``.

Only ``associative_compiled.py`` imports this file. phi has a feature r_i * r_(i-j) for every pair of channels, of which
both are positive in one case of four. So a row is kept as the places and values of the features that are not zero, and
a read, a write, and their gradients touch these rows of the matrix alone, at a quarter of the arithmetic of the
matrix product. The gradient of a feature that is zero reaches no channel.

The matrix A is written in place, so that nothing keeps A of a segment; the backward pass begins with ``replay``, which
repeats the additions of a chunk of segments bit by bit. What is not cheap to compute again is kept by the caller.

Arrays are contiguous, in fp32 or fp64, all of one kind. What a function returns it writes into its last arguments.

Shape suffixes as in ``associative.py``: B batch, R rows that read, M rows that are written, C channels, K features, D
value width; P places of a row, of which the first ``count`` are used; G groups of rows that are written together, E =
C + D + 1 floats of a written row: key, value, and the logit of beta.
"""

import math
from typing import NamedTuple

import numpy as np

from lit_memory.memory.kernels import compiled

OFF, RAW, CLIP = 0, 1, 2


class Rules(NamedTuple):
    """``Flags`` for the loops. gamma: one of OFF, RAW, CLIP. group: rows that are written together. eps, floor: numbers
    of the arrays' kind."""

    nu: int
    normalize: bool
    gamma: int
    detach: bool
    beta_on_z: bool
    use_denom: bool
    group: int
    eps: np.floating
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
    """gamma of a row. square: |phi|^2 + eps."""
    zero, one = z_K.dtype.type(0), z_K.dtype.type(1)
    if rules.gamma == OFF or is_empty(z_K):
        return one
    gamma = one - overlap / square
    if rules.gamma == CLIP:
        gamma = zero if gamma < zero else (one if gamma > one else gamma)
    return gamma


@compiled
def read(x_RD, queries_RC, A_KD, z_K, rules, rows_RD):
    """x + y of one sample."""
    place_P, value_P = np.empty(len(A_KD), np.int64), np.empty(len(A_KD), A_KD.dtype)
    y_D, z_norm, den = np.empty(A_KD.shape[1], A_KD.dtype), length_of(z_K), A_KD.dtype.type(1)
    for r in range(len(x_RD)):
        count, _ = features(queries_RC[r], rules, place_P, value_P)
        combine(A_KD, place_P, value_P, count, y_D)
        if rules.use_denom:
            den = denominator(z_K, z_norm, place_P, value_P, count, rules)[1]
        x_D, rows_D = x_RD[r], rows_RD[r]
        for d in range(len(y_D)):
            rows_D[d] = x_D[d] + y_D[d] / den


@compiled
def read_backward(drows_RD, queries_RC, A_KD, z_K, rules, dA_KD, dz_K, dqueries_RC):
    """dA and dz of one sample are added to."""
    kind, keys = A_KD.dtype, len(A_KD)
    place_P, value_P, dphi_P = np.empty(keys, np.int64), np.empty(keys, kind), np.empty(keys, kind)
    e_D, z_norm = np.empty(A_KD.shape[1], kind), length_of(z_K)
    for r in range(len(drows_RD)):
        x_C, dy_D = queries_RC[r], drows_RD[r]
        count, length = features(x_C, rules, place_P, value_P)
        found = denominator(z_K, z_norm, place_P, value_P, count, rules)
        den = found[1] if rules.use_denom else kind.type(1)
        for d in range(len(e_D)):
            e_D[d] = dy_D[d] / den
        dots(A_KD, place_P, count, e_D, dphi_P)
        spread(dA_KD, place_P, value_P, count, kind.type(1), e_D)
        if rules.use_denom:
            denominator_backward(found, kind.type(0), z_K, z_norm, place_P, value_P, count, rules, dphi_P, dz_K)
        features_backward(dphi_P, value_P, count, length, x_C, rules, dqueries_RC[r])


@compiled
def write(live, z_GBK, b, rules, A_KD, written_ME):
    """A after the rows of sample b, and z after every group. written: key, value and logit; afterwards key, what is
    missing, and beta. z_GBK: G + 1 entries, of which the first is given."""
    kind, (keys, width), group = A_KD.dtype, A_KD.shape, rules.group
    place_MP, value_MP = np.empty((group, keys), np.int64), np.empty((group, keys), kind)
    counts, y_D, one = np.empty(group, np.int64), np.empty(width, kind), kind.type(1)
    channels = written_ME.shape[1] - width - 1
    for g in range(len(z_GBK) - 1):
        z_K, after_K = z_GBK[g, b], z_GBK[g + 1, b]
        z_norm, den = length_of(z_K), one
        after_K[:] = z_K
        for m in range(group):
            row_E, place_P, value_P = written_ME[g * group + m], place_MP[m], value_MP[m]
            missing_D = row_E[channels : channels + width]
            count, _ = features(row_E[:channels], rules, place_P, value_P)
            beta = one / (one + math.exp(-row_E[-1]))
            counts[m], row_E[-1] = count, beta
            combine(A_KD, place_P, value_P, count, y_D)
            if rules.use_denom:
                overlap, den, square = denominator(z_K, z_norm, place_P, value_P, count, rules)
                gamma = live * gamma_of(overlap, square + rules.eps, z_K, rules)
                gamma = gamma * beta if rules.beta_on_z else gamma
                for p in range(count):
                    after_K[place_P[p]] += gamma * value_P[p]
            for d in range(width):
                missing_D[d] -= y_D[d] / den
        for m in range(group):
            row_E = written_ME[g * group + m]
            missing_D = row_E[channels : channels + width]
            spread(A_KD, place_MP[m], value_MP[m], counts[m], live * row_E[-1], missing_D)


@compiled
def add_rows(written_ME, live, rules, A_KD):
    """What ``write`` added to A of one sample, in the same order. written: what it left."""
    place_P, value_P = np.empty(len(A_KD), np.int64), np.empty(len(A_KD), A_KD.dtype)
    width = A_KD.shape[1]
    channels = written_ME.shape[1] - width - 1
    for m in range(len(written_ME)):
        row_E = written_ME[m]
        count, _ = features(row_E[:channels], rules, place_P, value_P)
        spread(A_KD, place_P, value_P, count, live * row_E[-1], row_E[channels : channels + width])


@compiled
def replay(written_BME, live_B, before_BKD, rules, A_BKD):
    """A after the rows of a segment."""
    for b in range(len(A_BKD)):
        A_BKD[b] = before_BKD[b]
        add_rows(written_BME[b], live_B[b], rules, A_BKD[b])


@compiled
def gamma_backward(found, beta, live, z_K, later_K, place_P, value_P, count, rules, dphi_P):
    """Add the gradient of phi through z after the write. Returns those of beta and of the overlap."""
    dgamma = dbeta = doverlap = z_K.dtype.type(0)
    overlap, _, square = found
    square += rules.eps
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


@compiled
def write_backward(written_ME, live, A_KD, z_GBK, b, rules, dA_KD, dz_K, dwritten_ME):
    """dA and dz after the rows of sample b become those before them. written: what ``write`` left. A: before the rows.
    z: before every group."""
    kind, (keys, width), group = dA_KD.dtype, dA_KD.shape, rules.group
    later_GKD = np.empty((len(z_GBK) - 1, keys, width), kind)  # before every group but the first
    for g in range(len(later_GKD)):
        later_GKD[g] = A_KD if g == 0 else later_GKD[g - 1]
        add_rows(written_ME[g * group : (g + 1) * group], live, rules, later_GKD[g])
    place_MP, value_MP = np.empty((group, keys), np.int64), np.empty((group, keys), kind)
    counts, e_MD, later_K = np.empty(group, np.int64), np.empty((group, width), kind), np.empty(keys, kind)
    for g in range(len(z_GBK) - 1, -1, -1):
        z_K = z_GBK[g, b]
        z_norm = length_of(z_K)
        later_K[:] = dz_K
        for m in range(group):
            row_E, drow_E, e_D = written_ME[g * group + m], dwritten_ME[g * group + m], e_MD[m]
            place_P, value_P = place_MP[m], value_MP[m]
            inputs = row_E, live, A_KD if g == 0 else later_GKD[g - 1], z_K, z_norm, later_K, rules, dA_KD
            counts[m] = write_row_backward(*inputs, place_P, value_P, dz_K, e_D, drow_E)
        for m in range(group):
            spread(dA_KD, place_MP[m], value_MP[m], counts[m], kind.type(1), e_MD[m])


@compiled
def write_row_backward(row_E, live, A_KD, z_K, z_norm, later_K, rules, dA_KD, place_P, value_P, dz_K, e_D, drow_E):
    """Gradients of one written row, and e, that of what it read of A. dz is added to; later: dz after the write.
    Returns the count of places."""
    kind, (keys, width) = A_KD.dtype, A_KD.shape
    dphi_P, dread_P = np.empty(keys, kind), np.empty(keys, kind)
    channels, beta, dbeta = len(row_E) - width - 1, row_E[-1], kind.type(0)
    missing_D, dvalue_D = row_E[channels : channels + width], drow_E[channels : channels + width]
    count, length = features(row_E[:channels], rules, place_P, value_P)
    combine(dA_KD, place_P, value_P, count, dvalue_D)
    dots(dA_KD, place_P, count, missing_D, dphi_P)
    found = denominator(z_K, z_norm, place_P, value_P, count, rules)
    den = found[1] if rules.use_denom else kind.type(1)
    for d in range(width):
        dbeta += live * dvalue_D[d] * missing_D[d]
        dvalue_D[d] *= live * beta
        e_D[d] = -dvalue_D[d] / den
    for p in range(count):
        dphi_P[p] *= live * beta
    dots(A_KD, place_P, count, e_D, dread_P)
    if rules.use_denom:
        more, extra = gamma_backward(found, beta, live, z_K, later_K, place_P, value_P, count, rules, dphi_P)
        dbeta += more
        denominator_backward(found, extra, z_K, z_norm, place_P, value_P, count, rules, dread_P, dz_K)
    for p in range(count):
        dphi_P[p] += dread_P[p]
    features_backward(dphi_P, value_P, count, length, row_E[:channels], rules, drow_E[:channels])
    drow_E[-1] = dbeta * beta * (kind.type(1) - beta)
    return count


@compiled
def forward(written, live_B, z_GBK, rules, A_BKD, written_BME, asks, x_BRD, queries_BRC, rows_BRD):
    """If ``written``, write the rows of a segment; then, if ``asks``, read those of the next one, x + y.

    Both in one loop, in which a sample's matrix stays in the cache.
    """
    for b in range(len(A_BKD)):
        if written:
            write(live_B[b], z_GBK, b, rules, A_BKD[b], written_BME[b])
        if asks:
            read(x_BRD[b], queries_BRC[b], A_BKD[b], z_GBK[-1, b], rules, rows_BRD[b])


@compiled
def backward(
    asks, drows_BRD, queries_BRC, after_BKD, z_BK, rules, dA_BKD, dz_BK, dqueries_BRC, written, written_BME, live_B,
    before_BKD, z_GBK, dwritten_BME,
):  # fmt: skip
    """``forward`` from the end. before, after: A before and after the write. z_GBK: before every group of rows; z_BK:
    after them."""
    for b in range(len(dA_BKD)):
        if asks:
            inputs = drows_BRD[b], queries_BRC[b], after_BKD[b], z_BK[b], rules
            read_backward(*inputs, dA_BKD[b], dz_BK[b], dqueries_BRC[b])
        if written:
            inputs = written_BME[b], live_B[b], before_BKD[b], z_GBK, b, rules
            write_backward(*inputs, dA_BKD[b], dz_BK[b], dwritten_BME[b])
