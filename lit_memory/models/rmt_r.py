"""RMT-R: recurrent memory transformer with retrieval over its past memory states.

Paper:     Kuratov et al. 2024, In Search of Needles in a 11M Haystack, arXiv 2402.10790, section on self-retrieval;
    spec 4.
Reference: github.com/booydar/recurrent-memory-transformer, branch babilong_retr.

The rows of a segment are ``[M; R; tokens; M]``: M is the memory of the previous segment, R what M retrieves from the
memories of all earlier segments. With X = [M_1; ...; M_{s-1}] and M = M_{s-1}, the numbered steps of spec 4 are

(1) scores = LN_q(M) W_Q (LN_kv(X) W_K)^T / sqrt(D), p = softmax(scores), or softmax(1e5 scores) for ``top_1``
(2) r = p LN_kv(X) W_V W_O + M, and R = r + W_2 act(W_1 LN_mlp(r))
(3) rows [M; R; tokens; M]; in the first segment, which retrieves nothing, [M; R] is a parameter of 2m rows
(4) M_s is the output of the decoder at the last m rows, and joins X

``formula="paper"`` is the formula of the paper: R = softmax(M W_Q (X W_K)^T / sqrt(D)) X W_V W_O with the initial
memory M_0 in X.

The state grows by 2 m D floats per segment (``state_growth``), so that a stream is not read in constant memory: 50
million tokens in segments of 512, with m = 16 and D = 768, end at 2.4 billion floats.

Deviations
1. The state holds the keys and values of the past memories, 2 m D floats each, where the reference holds the memories,
   m D, and projects all of them again in every segment. They do not change, so that the values are the same. Keys and
   values belong to the segment that wrote them: under ``bptt`` they get gradients from the segments within its reach.
2. Dropout, 0.1 in the reference, is the backbone's ``dropout``, as in its blocks.
3. The projections start like the backbone's, N(0, init_std) with biases 0; the sources do not say.
4. A sample that has ended adds rows that are never read, as a batch has one shape. ``reorder`` drops rows that no
   sample reads.

Shape suffixes: B batch, T tokens, M memory tokens, P rows of past memories, D width, E = 2D (key, then value).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.decoder import ACTIVATIONS
from lit_memory.models.rmt import RMT
from lit_memory.recurrence import GrowingState, full_precision, state_options
from lit_memory.util.checks import at_least


class RetrievalState(NamedTuple):
    """The last memory, keys and values of all written memories, and which of these rows a sample has written."""

    memory_BMD: Tensor
    past_BPE: Tensor
    valid_BP: Tensor


class Retrieval(nn.Module):
    """One head of attention from the last memory to past ones and, in the reference, a feed-forward; both residual."""

    def __init__(self, config: "RMTR.Config") -> None:
        super().__init__()
        width, code = config.width, config.formula == "code"
        self.top_1, self.code = config.retrieval == "top_1", code
        self.norm_query, self.norm_past = (
            nn.LayerNorm(width, config.norm_eps) if code else nn.Identity() for _ in range(2)
        )
        self.to_query = nn.Linear(width, width, bias=code)
        self.to_past = nn.Linear(width, 2 * width, bias=code)
        self.out = nn.Linear(width, width, bias=code)
        self.dropout = nn.Dropout(config.dropout)
        if code:
            activation = ACTIVATIONS[config.family]()
            layers = (
                nn.LayerNorm(width, config.norm_eps),
                nn.Linear(width, 4 * width),
                activation,
                nn.Linear(4 * width, width),
            )
            self.feed_forward = nn.Sequential(*layers, nn.Dropout(config.dropout))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def keys_values(self, memory_BMD: Tensor) -> Tensor:
        """Keys and values of a memory for the state, (B, M, E)."""
        return self.to_past(self.norm_past(memory_BMD.to(self.to_past.weight.dtype)))

    def forward(self, memory_BMD: Tensor, past_BPE: Tensor, valid_BP: Tensor) -> Tensor:
        """R (B, M, D); finite but arbitrary for a sample without a valid row."""
        memory_BMD = memory_BMD.to(self.to_query.weight.dtype)
        query_BMD = self.to_query(self.norm_query(memory_BMD))
        readable_BP = valid_BP | ~valid_BP.any(1, keepdim=True)
        with full_precision(past_BPE.device):  # in the state's precision: bf16 cannot resolve 1e5 * scores
            key_BPD, value_BPD = past_BPE.chunk(2, dim=-1)
            scores_BMP = (
                query_BMD.to(key_BPD.dtype) @ key_BPD.mT / key_BPD.shape[-1] ** 0.5 * (1e5 if self.top_1 else 1)
            )  # (1)
            p_BMP = scores_BMP.masked_fill(~readable_BP[:, None], -torch.inf).softmax(-1)
            found_BMD = (p_BMP if self.top_1 else self.dropout(p_BMP)) @ value_BPD
        found_BMD = self.out(found_BMD.to(memory_BMD.dtype))
        if not self.code:
            return found_BMD
        r_BMD = self.dropout(found_BMD) + memory_BMD  # (2)
        return r_BMD + self.feed_forward(r_BMD)


class RMTR(GrowingState, RMT):
    """RMT that also reads what its last memory retrieves from all earlier ones."""

    @dataclass
    class Config(RMT.Config):
        memory_tokens: int = 16
        retrieval: Literal["full", "top_1"] = "full"
        """Attend to all past rows, or (nearly) only to the best match."""
        formula: Literal["code", "paper"] = "code"
        """The reference's residual block over [M_1; ...], or the paper's bare attention over [M_0; M_1; ...]."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, self, "memory_tokens")

        def rows(self, segment_len: int) -> int:
            return segment_len + 3 * self.memory_tokens

    def __init__(self, config: "RMTR.Config") -> None:
        super().__init__(config)
        if config.formula == "code":
            self.memory = self.decoder.memory_tokens(2 * config.memory_tokens)  # M_0, and R of the first segment
        self.retrieval = Retrieval(config)
        self.state_growth = 2 * config.memory_tokens * config.width

    def init_state(self, batch, device=None, dtype=None):
        options = state_options(self, device, dtype)
        memory_BMD = self.memory[: self.config.memory_tokens].expand(batch, -1, -1)
        past_BPE = self.retrieval.keys_values(memory_BMD if self.config.formula == "paper" else memory_BMD[:, :0])
        return RetrievalState(
            memory_BMD.to(**options),
            past_BPE.to(**options),
            torch.ones(past_BPE.shape[:2], dtype=torch.bool, device=options["device"]),
        )

    def read_rows(self, state):
        return torch.cat([state.memory_BMD, self.retrieve(state)], dim=1)  # (3)

    def write_rows(self, state):
        return state.memory_BMD

    def written(self, state, new_BMD):
        memory_BMD, past_BPE, valid_BP = state
        past_BPE = torch.cat([past_BPE, self.retrieval.keys_values(new_BMD).to(past_BPE.dtype)], dim=1)  # (4)
        return RetrievalState(
            new_BMD.to(memory_BMD.dtype), past_BPE, F.pad(valid_BP, (0, new_BMD.shape[1]), value=True)
        )

    def retrieve(self, state: RetrievalState) -> Tensor:
        """R (B, M, D) of the next segment; learned rows for a sample that has written nothing yet."""
        if self.config.formula == "paper":
            return self.retrieval(*state)
        first_BMD = self.memory[self.config.memory_tokens :].expand_as(state.memory_BMD)
        if not state.past_BPE.shape[1]:
            return first_BMD
        return torch.where(state.valid_BP.any(1)[:, None, None], self.retrieval(*state), first_BMD)

    def select_state(self, live_B, new, old):
        memory_BMD = torch.where(live_B[:, None, None], new.memory_BMD, old.memory_BMD)
        added_BP = live_B[:, None].expand(-1, new.valid_BP.shape[1] - old.valid_BP.shape[1])
        return RetrievalState(memory_BMD, new.past_BPE, torch.cat([old.valid_BP, added_BP], dim=1))

    def append_samples(self, state, others):
        missing = state.valid_BP.shape[1] - others.valid_BP.shape[1]  # rows that the samples of ``state`` have written
        past_BPE = torch.cat([state.past_BPE, F.pad(others.past_BPE, (0, 0, 0, missing)).to(state.past_BPE.dtype)])
        memory_BMD = torch.cat([state.memory_BMD, others.memory_BMD.to(state.memory_BMD.dtype)])
        return RetrievalState(
            memory_BMD, past_BPE, torch.cat([state.valid_BP, F.pad(others.valid_BP, (0, missing), value=False)])
        )

    def reorder(self, state, idx):
        memory_BMD, past_BPE, valid_BP = super().reorder(state, idx)
        used_P = valid_BP.any(0)
        return RetrievalState(memory_BMD, past_BPE[:, used_P], valid_BP[:, used_P])
