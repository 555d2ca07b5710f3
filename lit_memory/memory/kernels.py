"""The scans of ``scan.py`` as loops that numba compiles for this processor. Needs the extra ``fast``.

Only ``compiled.py`` imports this file, when the first scan runs. A loop goes through memory once, where the plain tensor
operations write and read every intermediate result. The innermost loop runs along contiguous numbers, so that LLVM
vectorises it; all of it runs on the thread of the caller and starts no other.

Arrays are contiguous, in fp32 or fp64, all of one kind. What a function returns it writes into its last arguments. The
backward passes keep one state per ``CHUNK`` tokens and compute the others again.

Shape suffixes as in ``scan.py``: B batch, T tokens, E channels, N states per channel, K key width, V value width; here
B holds samples times heads in the attention. S is the number of chunks.
"""

import math

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

CHUNK = 16
"""Tokens whose states are held at a time on the way back."""
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
LOWEST, HIGHEST = np.float32(-88.0), np.float32(89.0)
"""Exponents below and above give 0 and infinity in fp32."""
C0, C1, C2, C3, C4, C5, C6 = (np.float32(1 / math.factorial(k)) for k in range(1, 8))
ONE, HALF = np.float32(1), np.float32(0.5)

compiled = njit(cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
"""Sums may be taken in any order; NaN and infinity stay what they are."""


@intrinsic
def power_of_two(typingctx, k):
    """2^k as fp32 of an int32 from -127, which gives 0, to 128, which gives infinity."""

    def codegen(context, builder, signature, args):
        biased = builder.add(args[0], context.get_constant(types.int32, 127))
        return builder.bitcast(builder.shl(biased, context.get_constant(types.int32, 23)), builder_type(context))

    def builder_type(context):
        return context.get_value_type(types.float32)

    return types.float32(types.int32), codegen


def exponential(x):
    """e^x; the compiled code has ``math.exp`` for fp64."""
    return math.exp(x)


def _exponential_fp32(x):
    """Range reduction, polynomial and exponent bits, to 1e-7: a call of ``exp`` would keep the loop from vectorising."""
    v = min(max(x, LOWEST), HIGHEST)
    k = np.floor(v * LOG2_E + HALF)
    f = v - k * LN2_HIGH - k * LN2_LOW
    p = C6
    p = p * f + C5
    p = p * f + C4
    p = p * f + C3
    p = p * f + C2
    p = p * f + C1
    p = p * f + C0
    p = p * f + ONE
    y = p * power_of_two(np.int32(k))
    return y if x == x else x


@overload(exponential, jit_options={"error_model": "numpy"})
def _exponential(x):
    return _exponential_fp32 if x == types.float32 else lambda x: math.exp(x)


@compiled
def selective_forward(x_BTE, delta_BTE, A_NE, B_BTN, C_BTN, state_BNE, y_BTE, starts_BSNE, last_BNE):
    """Outputs, the state before every chunk, and the final state."""
    batch, tokens, channels = x_BTE.shape
    into_E = np.empty(channels, x_BTE.dtype)
    h_NE = np.empty(A_NE.shape, x_BTE.dtype)
    for b in range(batch):
        h_NE[:] = state_BNE[b]
        for t in range(tokens):
            if t % CHUNK == 0:
                starts_BSNE[b, t // CHUNK] = h_NE
            x_E, delta_E, y_E = x_BTE[b, t], delta_BTE[b, t], y_BTE[b, t]
            for e in range(channels):
                into_E[e] = delta_E[e] * x_E[e]
                y_E[e] = 0
            for n in range(len(A_NE)):
                A_E, h_E, B, C = A_NE[n], h_NE[n], B_BTN[b, t, n], C_BTN[b, t, n]
                for e in range(channels):
                    h = exponential(delta_E[e] * A_E[e]) * h_E[e] + into_E[e] * B  # eq. 2a, 4
                    h_E[e] = h
                    y_E[e] += h * C  # eq. 2b
        last_BNE[b] = h_NE


@compiled
def selective_chunk(x_TE, delta_TE, A_NE, B_TN, decay_TNE, h_TNE):
    """Decays of a chunk, and its states h after h[0]."""
    into_E = np.empty(x_TE.shape[1], x_TE.dtype)
    for t in range(len(x_TE)):
        delta_E = delta_TE[t]
        for e in range(len(into_E)):
            into_E[e] = delta_E[e] * x_TE[t, e]
        for n in range(len(A_NE)):
            A_E, decay_E, before_E, h_E, B = A_NE[n], decay_TNE[t, n], h_TNE[t, n], h_TNE[t + 1, n], B_TN[t, n]
            for e in range(len(into_E)):
                decay = exponential(delta_E[e] * A_E[e])
                decay_E[e] = decay
                h_E[e] = decay * before_E[e] + into_E[e] * B


@compiled
def selective_backward(
    x_BTE, delta_BTE, A_NE, B_BTN, C_BTN, starts_BSNE, gy_BTE, glast_BNE, gx_BTE, gdelta_BTE, gA_NE, gB_BTN, gC_BTN, g_BNE
):
    """Gradients of x, Delta, A, B, C and the first state, from those of the outputs and the final state."""
    batch, tokens, channels = x_BTE.shape
    states, zero = len(A_NE), x_BTE.dtype.type(0)
    decay_TNE = np.empty((CHUNK, states, channels), x_BTE.dtype)
    h_TNE = np.empty((CHUNK + 1, states, channels), x_BTE.dtype)
    into_E, ginto_E, gexp_E = np.empty((3, channels), x_BTE.dtype)
    gA_NE[:] = 0
    for b in range(batch):
        g_NE = g_BNE[b]
        g_NE[:] = glast_BNE[b]
        for s in range(starts_BSNE.shape[1] - 1, -1, -1):
            first, end = s * CHUNK, min(tokens, (s + 1) * CHUNK)
            h_TNE[0] = starts_BSNE[b, s]
            selective_chunk(
                x_BTE[b, first:end], delta_BTE[b, first:end], A_NE, B_BTN[b, first:end], decay_TNE, h_TNE
            )
            for t in range(end - 1, first - 1, -1):
                x_E, delta_E, gy_E = x_BTE[b, t], delta_BTE[b, t], gy_BTE[b, t]
                for e in range(channels):
                    into_E[e] = delta_E[e] * x_E[e]
                    ginto_E[e] = 0
                    gexp_E[e] = 0
                for n in range(states):
                    A_E, gA_E, g_E, decay_E = A_NE[n], gA_NE[n], g_NE[n], decay_TNE[t - first, n]
                    before_E, h_E = h_TNE[t - first, n], h_TNE[t - first + 1, n]
                    B, C, gB, gC = B_BTN[b, t, n], C_BTN[b, t, n], zero, zero
                    for e in range(channels):
                        g = g_E[e] + gy_E[e] * C  # of h_t
                        gC += gy_E[e] * h_E[e]
                        gB += g * into_E[e]
                        ginto_E[e] += g * B
                        g *= decay_E[e]  # of h_{t-1}
                        g_E[e] = g
                        gexponent = g * before_E[e]
                        gA_E[e] += gexponent * delta_E[e]
                        gexp_E[e] += gexponent * A_E[e]
                    gB_BTN[b, t, n] = gB
                    gC_BTN[b, t, n] = gC
                for e in range(channels):
                    gx_BTE[b, t, e] = ginto_E[e] * delta_E[e]
                    gdelta_BTE[b, t, e] = gexp_E[e] + ginto_E[e] * x_E[e]


@compiled
def attention_forward(r_BTK, k_BTK, v_BTV, decay_BTK, state_BKV, o_BTV, starts_BSKV, last_BKV):
    """Outputs r_t S_{t-1} without the bonus, the state before every chunk, and the final state."""
    S_KV = np.empty(state_BKV.shape[1:], r_BTK.dtype)
    for b in range(len(r_BTK)):
        S_KV[:] = state_BKV[b]
        for t in range(r_BTK.shape[1]):
            if t % CHUNK == 0:
                starts_BSKV[b, t // CHUNK] = S_KV
            v_V, o_V = v_BTV[b, t], o_BTV[b, t]
            o_V[:] = 0
            for i in range(len(S_KV)):
                S_V, r, k, decay = S_KV[i], r_BTK[b, t, i], k_BTK[b, t, i], decay_BTK[b, t, i]
                for j in range(len(v_V)):
                    S = S_V[j]
                    o_V[j] += r * S
                    S_V[j] = decay * S + k * v_V[j]
        last_BKV[b] = S_KV


@compiled
def attention_backward(
    r_BTK, k_BTK, v_BTV, decay_BTK, starts_BSKV, go_BTV, glast_BKV, gr_BTK, gk_BTK, gv_BTV, gdecay_BTK, g_BKV
):
    """Gradients of r, k, v, the decay and the first state, from those of the outputs and the final state."""
    zero, (keys, values) = r_BTK.dtype.type(0), g_BKV.shape[1:]
    S_TKV = np.empty((CHUNK + 1, keys, values), r_BTK.dtype)
    for b in range(len(r_BTK)):
        g_KV = g_BKV[b]
        g_KV[:] = glast_BKV[b]
        for s in range(starts_BSKV.shape[1] - 1, -1, -1):
            first, end = s * CHUNK, min(r_BTK.shape[1], (s + 1) * CHUNK)
            S_TKV[0] = starts_BSKV[b, s]
            for t in range(first, end - 1):
                v_V = v_BTV[b, t]
                for i in range(keys):
                    S_V, next_V, k, decay = S_TKV[t - first, i], S_TKV[t - first + 1, i], k_BTK[b, t, i], decay_BTK[b, t, i]
                    for j in range(values):
                        next_V[j] = decay * S_V[j] + k * v_V[j]
            for t in range(end - 1, first - 1, -1):
                v_V, go_V, gv_V = v_BTV[b, t], go_BTV[b, t], gv_BTV[b, t]
                gv_V[:] = 0
                for i in range(keys):
                    S_V, g_V, r, k, decay = S_TKV[t - first, i], g_KV[i], r_BTK[b, t, i], k_BTK[b, t, i], decay_BTK[b, t, i]
                    gr, gk, gdecay = zero, zero, zero
                    for j in range(values):
                        g = g_V[j]  # of S_t
                        gr += go_V[j] * S_V[j]
                        gk += g * v_V[j]
                        gdecay += g * S_V[j]
                        gv_V[j] += g * k
                        g_V[j] = decay * g + r * go_V[j]
                    gr_BTK[b, t, i] = gr
                    gk_BTK[b, t, i] = gk
                    gdecay_BTK[b, t, i] = gdecay
