"""A neural memory of one layer, every token with a surprise at the weights right before it, one chunk at a time.

Paper:     Behrouz et al. 2025, Titans, arXiv 2501.00663, eq. 8 to 15, without the chunks of section 3.2. Equations (1)
           to (4) are in ``neural.py``, (8) and (9) in ``neural_node.py``. A triangular system for the errors of a chunk
           is the idea of Yang et al. 2024, arXiv 2406.06484, for the delta rule (``delta.py``); here there is momentum
           besides, and the decay has another place.

A memory of one layer is a matrix, and g_t = k_t M_{t-1} - v_t is linear in the errors before it. With (8) for M_{t-1},
where primes are the coefficients of the token before, and of the start of the chunk for the first one, the errors of a
chunk solve

(10) (I - A) g = sum_i read'_i * (K V_i) - v        with A_tj = inside'_tj (k_t . k_j) for j < t, else 0
(11) g = sum_i W_i V_i - U      with U = (I - A)^-1 v and W_i = (I - A)^-1 (read'_i * K): of every chunk at once

so that only (11) and (9) go from chunk to chunk, and the length of a chunk is speed alone.

Shape suffixes: X samples times heads, N chunks, T tokens of a chunk, J parts of the state (M, and S with momentum), K
width of keys and queries, V width of values, E width of what a system solves for.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.memory.neural import NeuralState
from lit_memory.memory.neural_by_hand import Coefficients, joined
from lit_memory.memory.neural_node import Form, Passed


def exact_chunks(
    form: Form, state: NeuralState, q_XNTK: Tensor, k_XNTK: Tensor, target_XNTV: Tensor, table: Coefficients
) -> Passed:
    """``neural_node.chunks`` where each token has its own surprise. The state has one layer, without an activation."""
    read_XNTJ, inside_XNTT, write_XNTJ, carry_XNJJ = table
    parts, values = read_XNTJ.shape[-1], target_XNTV.shape[-1]
    system_XNTT = F.pad(inside_XNTT[..., :-1, :], (0, 0, 1, 0)).neg() * (k_XNTK @ k_XNTK.mT)
    start_XN1J = F.pad(torch.ones_like(read_XNTJ[..., :1, :1]), (0, parts - 1))  # M and nothing of S
    before_XNTJ = torch.cat([start_XN1J, read_XNTJ[..., :-1, :]], dim=-2)
    given_XNTE = torch.cat([target_XNTV, joined(k_XNTK, before_XNTJ.unsqueeze(-1))], dim=-1)
    solved_XNTE = torch.linalg.solve_triangular(system_XNTT, given_XNTE, upper=False, unitriangular=True)
    U, W = solved_XNTE.split([values, given_XNTE.shape[-1] - values], dim=-1)
    to_end = joined(k_XNTK, write_XNTJ.unsqueeze(-1)).mT
    (M,) = state.M  # one layer alone
    V_XEV, starts, errors = torch.cat([M, *state.S], dim=1), [], []
    for u, w, written, carry_XJJ in zip(*(t.unbind(1) for t in (U, W, to_end, carry_XNJJ)), strict=True):
        starts.append(V_XEV)
        errors.append(torch.baddbmm(u, w, V_XEV, beta=-1))  # (11)
        carried_XEV = torch.bmm(carry_XJJ, V_XEV.unflatten(1, (parts, -1)).flatten(2)).view_as(V_XEV)
        V_XEV = torch.baddbmm(carried_XEV, written, errors[-1])  # (9)
    inside = (q_XNTK @ k_XNTK.mT) * inside_XNTT
    o_XNTV = joined(q_XNTK, read_XNTJ.unsqueeze(-1)) @ torch.stack(starts, 1) + inside @ torch.stack(errors, 1)  # (8)
    M, *S = V_XEV.chunk(parts, dim=1)
    return Passed(o_XNTV, NeuralState((M,), tuple(S)) if form.write else None, None)
