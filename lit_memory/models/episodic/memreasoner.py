"""MemReasoner: Larimar with a temporal encoding of its lines, and a question that is read, updated and read again.

Paper:     Das et al. 2025, Can memory-augmented language models generalize on reasoning-in-a-haystack tasks?, ICML
           2025, section 3 and algorithm 1.
Reference: none is public.

Encoding, episode and decoding are in ``line_recurrent.py``, the memory is in ``memory/episodic.py``. With Z the latents
of the lines before the question and z_q its own latent,

(1) Z~ = P(Z)                                  temporal encoding                                ``encode_order``
(2) M = (Z~ M_0^+)^+ Z~                        write
(3) z_r = (W_q z_q M^+) M                      read
(4) z_q <- z_q + alpha z_r                     query update, and (3) again: a hop               ``read_hops``
(5) z_i, i = argmin_j |z_r - z~_j|             unordered readout, for the decoder               ``episodic.unordered``
(6) (1) to (5) once more, with only the lines nearest to the last z_r ("IU")                    ``readouts``

Lines that are not real change nothing, wherever they are: positions count real lines, and a GRU in either direction
skips the others. So padding in front does not change the answer; in the paper, where it is encoded, it does.

Deviations
1. Algorithm 1 calls alpha gamma in its loop, and returns the older of its last two readouts: here the newest is
   decoded.
2. A sample that stops at ``tolerance`` repeats its readout for the remaining hops, so that all samples of a batch have
   equally many.
3. The choice in (5) has no gradient, which would leave P and W_q without any where no supporting facts are given.
   ``readout`` "st", the default of training, chooses as the paper does, with the gradient of a softmax over
   -|z_r - z~_j|; "hard" has none, and "soft" does not choose.
4. Left open by the paper: the directions of a GRU share the channels of a latent, W_q starts as the identity, and the
   pseudo-inverses are "newton_safe", which converges for any number of lines.
5. Deviations 1 to 5 of ``larimar.py``.
6. The auto-encoding loss is also taken on the lines of contexts, not only on Wikipedia, and SF* has no prompt P_s but
   ``bos_id``.
7. Without ``memory`` (appendix D.5.2) the state holds the tokens of the context, which the decoder reads in front of
   its own. The paper's prompt has headings between the parts; here that is up to the task.

Shape suffixes: B batch, T tokens, N lines, H hops, I lines that are kept, C width of a latent, K slots, D width, E = C.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lit_memory.memory import episodic
from lit_memory.models.episodic.encoder import LinesConfig
from lit_memory.models.episodic.episode import Episode, Readouts, before_question, readouts_of
from lit_memory.models.episodic.line_recurrent import LineRecurrent
from lit_memory.recurrence import full_precision
from lit_memory.util.checks import FieldError, at_least, check_layers
from lit_memory.util.fields import added


class MemReasoner(LineRecurrent):
    """Decoder conditioned on one latent, which several reads of a memory of ordered lines find."""

    loss_names = ("answer", "order", "autoencoding", "support", "support_autoencoding")
    diagnosed = tested = ("hop1_support", "hop2_support", "lines")

    @dataclass
    class Config(LinesConfig):
        solver: Literal["newton", "newton_safe", "svd"] = "newton_safe"
        temporal: Literal["none", "gru", "sinusoidal", "sinusoidal_from_end"] = "gru"
        """P: a GRU over the lines, or sines added to them, of positions counted from the first line or from the
        last."""
        gru_layers: int = 1
        bidirectional: bool = True
        """Run the GRU in both directions, with half of the channels each."""
        hops: int = 1
        """Largest number of reads of a question; each but the first follows a query update."""
        tolerance: float = 0.0
        """tau: hops stop when the readout moves by less; 0: all ``hops`` are done."""
        alpha: float = 1.0
        """Weight of the readout in the query update."""
        test_alpha: float | None = None
        """``alpha`` outside of training (published: 8); default: the same."""
        readout: Literal["hard", "st", "soft"] = "st"
        """What the decoder gets in training: the nearest line, that with the gradient of "soft", or a mean of all."""
        test_readout: Literal["hard", "soft"] = added("hard")
        """What the decoder gets outside of training (published: hard)."""
        temperature: float = 1.0
        """Temperature of the softmax in "st" and "soft"."""
        update_lines: int = 0
        """eta: outside of training, an episode of more lines is read again with only its nearest ``update_lines`` lines
        (published: 125); 0: never."""
        memory: bool = True
        """Without: the decoder reads the context itself, and the latent of the question."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, self, "gru_layers", "hops")
            check_layers(self, "gru_layers")
            at_least(0, self, "tolerance", "alpha", "test_alpha", "update_lines")
            if not self.temperature > 0:
                raise FieldError(
                    "temperature",
                    self.temperature,
                    "expected more than 0; for the nearest line alone use readout: hard",
                )
            if self.temporal == "gru" and self.bidirectional and self.latent_width % 2:
                raise FieldError(
                    "latent_width",
                    self.latent_width,
                    "expected an even number, half for each direction; or set bidirectional: false",
                )
            if not (self.memory or self.line_tokens):
                raise FieldError(
                    "memory",
                    self.memory,
                    "expected line_tokens above 0, so that the state can hold lines; set line_tokens",
                )

    def __init__(self, config: "MemReasoner.Config") -> None:
        super().__init__(config)
        c, width = config, config.latent_width
        if not c.memory:
            self.kept_tokens, self.state_growth = c.line_tokens, 0
            return
        self.M_0 = nn.Parameter(torch.eye(c.slots, width))
        self.W_q = nn.Parameter(torch.eye(width))
        directions = 1 + c.bidirectional
        self.gru = (
            nn.GRU(width, width // directions, c.gru_layers, batch_first=True, bidirectional=c.bidirectional)
            if c.temporal == "gru"
            else None
        )

    def read_once(self, state):
        return super().read_once(state) if self.config.memory else None

    def read(self, state):
        if self.config.memory:  # an episode of one line is what is decoded after a read: nothing has to be read
            return self.readouts(state).latents_BHC[:, -1] if state.real_BN.shape[1] > 1 else state.lines_BNE[:, -1]
        ids_BT = state.ids_BNT[:, -1]
        return self.encode(ids_BT.clamp(min=0), ids_BT >= 0) * state.real_BN[:, -1:]

    def readouts(self, state: Episode) -> Readouts:
        """The reads of a question: latents for the decoder (5), and the nearest lines in the order of (1).

        If no line is before the question, every hop reads the question's own latent. With (6), lines that were not
        kept are at distance inf. Raises ValueError for a latent that is not finite, and for a model without memory.
        """
        c = self.config
        if not c.memory:
            raise FieldError(
                "memory", c.memory, "expected True, as nothing is read where the decoder sees all; use step"
            )
        query_BC = state.lines_BNE[:, -1]
        Z_BNC, real_BN, _, age_BN = before_question(state)
        empty_B1 = ~real_BN.any(1, keepdim=True)
        with full_precision(Z_BNC.device):
            latents_BHC, distances_BHN = self.hop(query_BC, Z_BNC, real_BN | empty_B1)
            if c.update_lines and not self.training and int(real_BN.sum(1).max()) > c.update_lines:
                latents_BHC, distances_BHN = self.hop_among_nearest(query_BC, Z_BNC, real_BN, distances_BHN)
        latents_BHC = torch.where(empty_B1.unsqueeze(-1), query_BC.unsqueeze(1), latents_BHC)
        return readouts_of(latents_BHC, distances_BHN, real_BN, age_BN)

    def hop(self, query_BC: Tensor, Z_BNC: Tensor, real_BN: Tensor) -> tuple[Tensor, Tensor]:
        """(1) to (5): latents (B, H, C), and distances (B, H, N) of the reads to the ordered lines.

        Only the real lines are read, of which every sample has one.
        """
        reads_BHC, ordered_BNC = self.read_hops(query_BC, Z_BNC, real_BN)
        distances_BHN = episodic.distances(reads_BHC, ordered_BNC, real_BN)
        readout = self.config.readout if self.training else self.config.test_readout
        return episodic.unordered(distances_BHN, Z_BNC, readout, self.config.temperature), distances_BHN

    def hop_among_nearest(
        self, query_BC: Tensor, Z_BNC: Tensor, real_BN: Tensor, distances_BHN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(6): ``hop`` with only the ``update_lines`` lines that the last read is nearest to."""
        order_BN = distances_BHN[:, -1].argsort(dim=1, stable=True)
        kept_BI = order_BN[:, : self.config.update_lines].sort(dim=1).values
        kept_real_BI = real_BN.gather(1, kept_BI) | ~real_BN.any(1, keepdim=True)
        kept_Z_BIC = Z_BNC.take_along_dim(kept_BI.unsqueeze(-1), dim=1)
        latents_BHC, kept_BHI = self.hop(query_BC, kept_Z_BIC, kept_real_BI)
        all_BHN = torch.full_like(distances_BHN, torch.inf)
        return latents_BHC, all_BHN.scatter(2, kept_BI.unsqueeze(1).expand_as(kept_BHI), kept_BHI)

    def read_hops(self, query_BC: Tensor, Z_BNC: Tensor, real_BN: Tensor) -> tuple[Tensor, Tensor]:
        """(1) to (4): what every hop reads, (B, H, C), and the ordered lines, (B, N, C)."""
        c = self.config
        episodic.check(Z_BNC, Z_BNC)  # a GRU would spread what is not finite over all lines
        ordered_BNC = self.encode_order(Z_BNC, real_BN) * real_BN.unsqueeze(-1)
        written_BNC = self.add_noise(ordered_BNC, c.write_noise) * real_BN.unsqueeze(-1)
        W_BNK = episodic.keys(written_BNC, self.M_0.to(Z_BNC.dtype).unsqueeze(0), c.solver, c.solver_steps)
        M_BKC = episodic.slots(W_BNK, written_BNC, c.solver, c.solver_steps)
        to_key_BCK = self.W_q.to(Z_BNC.dtype).mT @ episodic.pinv(M_BKC, c.solver, c.solver_steps)
        alpha = c.alpha if self.training or c.test_alpha is None else c.test_alpha
        moving_B11 = torch.ones_like(query_BC[:, :1, None], dtype=torch.bool)
        query_B1C, reads = query_BC.unsqueeze(1), []
        for _ in range(c.hops):
            read_B1C = self.add_noise(query_B1C @ to_key_BCK, c.read_noise) @ M_BKC
            if reads:
                read_B1C = torch.where(moving_B11, read_B1C, reads[-1])
                moving_B11 = moving_B11 & ((read_B1C - reads[-1]).norm(dim=-1, keepdim=True) >= c.tolerance)
            reads.append(read_B1C)
            query_B1C = query_B1C + alpha * read_B1C
        return torch.cat(reads, dim=1), ordered_BNC

    def encode_order(self, Z_BNC: Tensor, real_BN: Tensor) -> Tensor:
        """(1): latents with the position among the real lines of their episode, (B, N, C); arbitrary at other lines."""
        if self.config.temporal == "none":
            return Z_BNC
        if self.gru is not None:
            return run_gru(self.gru, Z_BNC, real_BN)
        from_end = self.config.temporal == "sinusoidal_from_end"
        position_BN = (real_BN.flip(1).cumsum(1).flip(1) if from_end else real_BN.cumsum(1)) - 1
        return Z_BNC + sinusoids(position_BN, Z_BNC.shape[-1], Z_BNC.dtype)

    def order_loss(self, readouts: Readouts, support_BH: Tensor) -> Tensor:
        """-log softmax_j(-|z_r - z~_j|) of the supporting line of every hop: sum over hops, mean over samples.

        support_BH: age of each supporting line (1: the line before the question); 0 where none is given. Samples
            without any do not count. The loss is 0 if no sample has one.
        Raises ValueError for a line that is not there, and for more supporting lines than the model has hops.
        """
        age_BN, hops = readouts.age_BN, support_BH.shape[1]
        if hops > readouts.nearest_BH.shape[1]:
            raise FieldError(
                "hops",
                readouts.nearest_BH.shape[1],
                f"{hops} supporting lines are told; expected at least as many hops",
            )
        given_BH = support_BH > 0
        column_BH = (age_BN.unsqueeze(1) == support_BH.unsqueeze(2)).byte().argmax(2)
        missing_BH = given_BH & (age_BN.gather(1, column_BH) != support_BH)
        if bool(missing_BH.any()):
            b, h = missing_BH.nonzero()[0].tolist()
            raise ValueError(
                f"support={int(support_BH[b, h])} of sample {b}: expected one of the {int(age_BN[b].max())} lines "
                "before its question"
            )
        logits_BHN = (-readouts.distances_BHN[:, :hops]).masked_fill(~given_BH.unsqueeze(2), 0)
        loss_BH = -logits_BHN.log_softmax(-1).gather(2, column_BH.unsqueeze(2)).squeeze(2) * given_BH
        return loss_BH.sum() / given_BH.any(1).sum().clamp(min=1)

    def lines(self, ids_BNT: Tensor, mask_BNT: Tensor) -> Tensor:
        if self.config.memory:
            return super().lines(ids_BNT, mask_BNT)
        return ids_BNT.new_zeros((*ids_BNT.shape[:2], 0), dtype=torch.float32)

    def decode_state(self, state: Episode, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        if self.config.memory:
            return super().decode_state(state, ids_BT, mask_BT)
        context_BT = state.ids_BNT.flatten(1)
        own_mask_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT
        mask_BT = torch.cat([(context_BT >= 0) & (context_BT != self.config.pad_id), own_mask_BT], dim=1)
        order_BT, longest = (~mask_BT).byte().argsort(dim=1, stable=True), int(mask_BT.sum(1).max())
        real_BT = order_BT[:, :longest]  # real tokens go to the front, so that padding takes no position
        ids_BT = torch.cat([context_BT.clamp(min=0), ids_BT], dim=1).gather(1, real_BT)
        hidden_BTD = self.decode(ids_BT, self.read(state), mask_BT.gather(1, real_BT))
        column_BT = order_BT.argsort(dim=1)[:, context_BT.shape[1] :]
        column_BT = column_BT.clamp(max=longest - 1)  # hidden states of padding are arbitrary
        return hidden_BTD.take_along_dim(column_BT.unsqueeze(-1), dim=1)


def run_gru(gru: nn.GRU, Z_BNC: Tensor, real_BN: Tensor) -> Tensor:
    """Outputs (B, N, C) of a GRU over the real lines, in order, as if there were no others; 0 at the others."""
    x_BNC = Z_BNC.to(next(gru.parameters()).dtype)
    if bool(real_BN.all()):
        return gru(x_BNC)[0].to(Z_BNC.dtype)
    order_BN1 = (~real_BN).byte().argsort(dim=1, stable=True).unsqueeze(-1)
    packed = pack_padded_sequence(
        x_BNC.take_along_dim(order_BN1, dim=1), real_BN.sum(1).cpu(), batch_first=True, enforce_sorted=False
    )
    out_BNC = pad_packed_sequence(gru(packed)[0], batch_first=True, total_length=Z_BNC.shape[1])[0]
    return out_BNC.take_along_dim(order_BN1.argsort(dim=1), dim=1).to(Z_BNC.dtype)


def sinusoids(position_BN: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of positions, (B, N, width), at the frequencies 10000^(-2i/width).

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.5.
    """
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, device=position_BN.device, dtype=torch.float64) / width)
    angle = position_BN.unsqueeze(-1) * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., :width].to(dtype)
