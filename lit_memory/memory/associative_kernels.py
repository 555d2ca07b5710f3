"""The associative memory of ``associative.py`` as loops that numba compiles. Needs the extra ``fast``.

Only ``associative_compiled.py`` imports this file. The matrix A is written in place, so that nothing keeps A of a
segment; the backward pass begins with ``replay``, which repeats the additions of a chunk of segments bit by bit. What
is not cheap to compute again is kept by the caller. ``associative_rows.py`` has what happens with a row.

Arrays are contiguous, in fp32 or fp64, all of one kind. What a function returns it writes into its last arguments.

Shape suffixes as in ``associative.py``: B batch, R rows that read, M rows that are written, C channels, K features, D
value width; P places of a row; G groups of rows that are written together; E = C + D + 1 floats of a written row: key,
value, and the logit of beta.
"""

import math

import numpy as np

from lit_memory.memory.associative_rows import (
    combine,
    copy,
    denominator,
    denominator_backward,
    dots,
    features,
    features_backward,
    gamma_backward,
    gamma_of,
    length_of,
    spread,
)
from lit_memory.memory.kernels import compiled


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
                gamma = live * gamma_of(overlap, square + rules.square_eps, z_K, rules)
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
        copy(before_BKD[b], A_BKD[b])
        add_rows(written_BME[b], live_B[b], rules, A_BKD[b])


@compiled
def write_backward(written_ME, live, A_KD, z_GBK, b, rules, dA_KD, dz_K, dwritten_ME):
    """dA and dz after the rows of sample b become those before them. written: what ``write`` left. A: before the rows.
    z: before every group."""
    kind, (keys, width), group = dA_KD.dtype, dA_KD.shape, rules.group
    later_GKD = np.empty((len(z_GBK) - 1, keys, width), kind)  # before every group but the first
    for g in range(len(later_GKD)):
        copy(A_KD if g == 0 else later_GKD[g - 1], later_GKD[g])
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
