"""The scans of ``scan.py`` as loops that numba compiles for this processor. Needs the extra ``fast``.

Only ``compiled.py`` imports this file, when the first scan runs. A loop goes through memory once, where the plain
tensor operations write and read every intermediate result. The innermost loop runs along contiguous numbers, so that
LLVM vectorises it. It all runs on the caller's thread and starts no other, so that a process may be forked.

Arrays are contiguous, in fp32 or fp64, all of one kind. What a function returns it writes into its last arguments. The
backward passes keep one state per ``CHUNK`` tokens and compute the others again.

Shape suffixes as in ``scan.py``: B batch, T tokens, E channels, N states per channel, K key width, V value width; here
B holds samples times heads in the attention. S is the number of chunks.
"""

import math
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

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

FILES = ("associative_kernels.py", "associative_rows.py", "kernels.py")
"""The files that have compiled functions; these call no others."""
SOURCES = sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in FILES)).hexdigest()[:12]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: compile, or take what was compiled before. Sums may be taken in any order; NaN and infinity stay.

    numba looks at the file of a function alone, and would go on with a loop whose callees have changed in another one.
    So the name of what it keeps has the digest of all these files.
    """
    function.__qualname__ += f"_{SOURCES}"
    return njit(cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})(function)


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
    """Range reduction, polynomial, exponent bits; to 1e-7. A call of ``exp`` would keep the loop from vectorising."""
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
    y = p * power_of_two(np.int32(k))  # pyright: ignore[reportCallIssue]  numba adds the first argument
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
def selective_states(x_TE, delta_TE, A_NE, B_TN, decay_TNE, h_TNE):
    """Decays of a chunk, and its states h after h[0]."""
    for t in range(len(x_TE)):
        x_E, delta_E = x_TE[t], delta_TE[t]
        for n in range(len(A_NE)):
            A_E, decay_E, before_E, h_E, B = A_NE[n], decay_TNE[t, n], h_TNE[t, n], h_TNE[t + 1, n], B_TN[t, n]
            for e in range(len(x_E)):
                decay = exponential(delta_E[e] * A_E[e])
                decay_E[e] = decay
                h_E[e] = decay * before_E[e] + delta_E[e] * x_E[e] * B


@compiled
def selective_step_back(
    x_E, delta_E, A_NE, B_N, C_N, decay_NE, before_NE, h_NE, gy_E, gx_E, gdelta_E, gA_NE, gB_N, gC_N, g_NE
):
    """One token of ``selective_backward``. g_NE: of h_t, and afterwards of h_{t-1}. gA_NE: is added to."""
    gx_E[:] = 0
    gdelta_E[:] = 0
    for n in range(len(A_NE)):
        A_E, gA_E, g_E, decay_E, before_E, h_E = A_NE[n], gA_NE[n], g_NE[n], decay_NE[n], before_NE[n], h_NE[n]
        B, C = B_N[n], C_N[n]
        gB = gC = x_E.dtype.type(0)
        for e in range(len(x_E)):
            g = g_E[e] + gy_E[e] * C
            gC += gy_E[e] * h_E[e]
            gB += g * delta_E[e] * x_E[e]
            gx_E[e] += g * B  # of Delta x
            g *= decay_E[e]
            g_E[e] = g
            gexponent = g * before_E[e]  # of Delta A
            gA_E[e] += gexponent * delta_E[e]
            gdelta_E[e] += gexponent * A_E[e]
        gB_N[n] = gB
        gC_N[n] = gC
    for e in range(len(x_E)):
        gdelta_E[e] += gx_E[e] * x_E[e]
        gx_E[e] *= delta_E[e]


@compiled
def selective_backward(x, delta, A_NE, B, C, starts_BSNE, gy, glast_BNE, gx, gdelta, gA_NE, gB, gC, g_BNE):
    """Gradients of x, Delta, A, B, C and the first state (g), from those of the outputs and the final state.

    x, delta, gy, gx, gdelta: (B, T, E). B, C, gB, gC: (B, T, N).
    """
    h_TNE = np.empty((CHUNK + 1, *A_NE.shape), A_NE.dtype)
    decay_TNE = np.empty_like(h_TNE)
    gA_NE[:] = 0
    g_BNE[:] = glast_BNE
    for b in range(len(x)):
        for s in range(starts_BSNE.shape[1] - 1, -1, -1):
            first, end = s * CHUNK, min(x.shape[1], (s + 1) * CHUNK)
            h_TNE[0] = starts_BSNE[b, s]
            selective_states(x[b, first:end], delta[b, first:end], A_NE, B[b, first:end], decay_TNE, h_TNE)
            for t in range(end - 1, first - 1, -1):
                i, at = t - first, (b, t)
                inputs = x[at], delta[at], A_NE, B[at], C[at], decay_TNE[i], h_TNE[i], h_TNE[i + 1], gy[at]
                selective_step_back(*inputs, gx[at], gdelta[at], gA_NE, gB[at], gC[at], g_BNE[b])


@compiled
def attention_step(k_K, v_V, decay_K, S_KV, next_KV):
    """S_t of S_{t-1}; they may be one array."""
    for i in range(len(k_K)):
        S_V, next_V, k, decay = S_KV[i], next_KV[i], k_K[i], decay_K[i]
        for j in range(len(v_V)):
            next_V[j] = decay * S_V[j] + k * v_V[j]


@compiled
def attention_forward(r_BTK, k_BTK, v_BTV, decay_BTK, state_BKV, o_BTV, starts_BSKV, last_BKV):
    """Outputs r_t S_{t-1}, without the bonus, the state before every chunk, and the final state."""
    last_BKV[:] = state_BKV
    o_BTV[:] = 0
    for b in range(len(r_BTK)):
        S_KV = last_BKV[b]
        for t in range(r_BTK.shape[1]):
            if t % CHUNK == 0:
                starts_BSKV[b, t // CHUNK] = S_KV
            r_K, o_V = r_BTK[b, t], o_BTV[b, t]
            for i in range(len(r_K)):
                S_V, r = S_KV[i], r_K[i]
                for j in range(len(o_V)):
                    o_V[j] += r * S_V[j]
            attention_step(k_BTK[b, t], v_BTV[b, t], decay_BTK[b, t], S_KV, S_KV)


@compiled
def attention_step_back(r_K, k_K, v_V, decay_K, S_KV, go_V, gr_K, gk_K, gv_V, gdecay_K, g_KV):
    """One token of ``attention_backward``. g_KV: of S_t, and afterwards of S_{t-1}."""
    gv_V[:] = 0
    for i in range(len(r_K)):
        S_V, g_V, r, k, decay = S_KV[i], g_KV[i], r_K[i], k_K[i], decay_K[i]
        gr = gk = gdecay = r_K.dtype.type(0)
        for j in range(len(v_V)):
            g = g_V[j]
            gr += go_V[j] * S_V[j]
            gk += g * v_V[j]
            gdecay += g * S_V[j]
            gv_V[j] += g * k
            g_V[j] = decay * g + r * go_V[j]
        gr_K[i] = gr
        gk_K[i] = gk
        gdecay_K[i] = gdecay


@compiled
def attention_backward(r, k, v, decay, starts_BSKV, go, glast_BKV, gr, gk, gv, gdecay, g_BKV):
    """Gradients of r, k, v, the decay and the first state (g), from those of the outputs and the final state.

    r, k, decay, gr, gk, gdecay: (B, T, K). v, go, gv: (B, T, V).
    """
    S_TKV = np.empty((CHUNK, *g_BKV.shape[1:]), r.dtype)
    g_BKV[:] = glast_BKV
    for b in range(len(r)):
        for s in range(starts_BSKV.shape[1] - 1, -1, -1):
            first, end = s * CHUNK, min(r.shape[1], (s + 1) * CHUNK)
            S_TKV[0] = starts_BSKV[b, s]
            for t in range(first, end - 1):
                attention_step(k[b, t], v[b, t], decay[b, t], S_TKV[t - first], S_TKV[t - first + 1])
            for t in range(end - 1, first - 1, -1):
                at = b, t
                inputs = r[at], k[at], v[at], decay[at], S_TKV[t - first], go[at]
                attention_step_back(*inputs, gr[at], gk[at], gv[at], gdecay[at], g_BKV[b])
