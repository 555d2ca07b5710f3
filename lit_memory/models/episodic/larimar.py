"""Larimar: an episodic memory of the latents of lines, from which a decoder is conditioned.

Paper:     Das et al. 2024, Larimar: Large language models with episodic memory control, arXiv 2403.11901, section 3;
           Nelson et al. 2024, Needle in the haystack for memory based large language models, arXiv 2407.01437, section
           2. The memory is in ``memory/episodic.py``.
Reference: the code of arXiv 2403.11901 as spec 11 describes it; none of arXiv 2407.01437 is public.

Encoder, episode and decoder are in ``models/lines.py``. With Z the latents of the lines before the question, z its own,
and memory and keys as in ``memory/episodic.py``,

(1) z_r = read(write(Z), z)                                                                     ``read``

Deviations
1. Lines are stored and (1) writes all of them at once when it reads, which is the published write of an episode; the
   state grows by a latent a line. A memory of constant size (``episodic.add``) has the same M with solver "svd".
2. Encoder and decoder have one tokenizer, the decoder's (published: BERT-large's own for BERT-large), and no [SEP] ends
   a line. A pretrained BERT takes for the embedding of a token the mean of those of the pieces that it cuts the token's
   text into; its sentence type is in its positions, and its norms have the decoder's eps (1e-5; BERT's 1e-12). Without
   ``encoder_width`` the two share width and table.
3. The encoder gives the latent alone; the published one also gives a log-variance, which nothing uses.
4. The variance of keys is a setting (published: learned by one of five kinds of networks, the largest of them 15 % of
   the model).
5. Noise is off by default (published: 1e-6 or 1e-4 in training; 0 in arXiv 2407.01437) and only in training.
6. ``keys`` "one_hot" and "gaussian" take the lines themselves for the key memory: a slot per line, as in arXiv
   2407.01437.
7. ``prefix_tokens`` counts tokens (published: the first words of a sentence).
8. ``distinct`` keeps repeated lines once: what is read from one-hot keys is the same, by other keys a line counts once
   however often it came.

Shape suffixes: B batch, T tokens, N lines, Q questions, X lines of a batch, C width of a latent, E latent and key, K
slots.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.memory import episodic
from lit_memory.models.episodic.lines import Episode, LineRecurrent, LinesConfig, aged, ages, taken, trimmed
from lit_memory.recurrence import full_precision
from lit_memory.util.checks import FieldError, at_least

ROWS = 16
"""Lines that are encoded together where repeated ones are kept once."""


class Larimar(LineRecurrent):
    """Decoder that one latent conditions, read from the latents of earlier lines."""

    loss_names = ("answer", "memory", "autoencoding", "language", "keys")
    diagnosed = tested = ("hop1_support", "lines")

    @dataclass
    class Config(LinesConfig):
        """``slots`` are for linear keys."""

        keys: Literal["linear", "one_hot", "gaussian"] = "linear"
        """How lines and questions are addressed: by coordinates in M_0 and M (arXiv 2403.11901), or by the nearest line
        (arXiv 2407.01437)."""
        bandwidth: float = 1.0
        """Of Gaussian keys."""
        prefix_tokens: int = 0
        """Keys are latents of the first so many tokens of a line; 0: of the whole line. Not with linear keys."""
        distinct: bool = False
        """A line that is there already, token by token, is not encoded again and takes no slot of its own (ours)."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, self, "prefix_tokens")
            if not self.bandwidth > 0:
                raise FieldError(
                    "bandwidth", self.bandwidth, "expected more than 0; for the nearest line alone use keys: one_hot"
                )
            if self.prefix_tokens and self.keys == "linear":
                raise FieldError(
                    "prefix_tokens",
                    self.prefix_tokens,
                    "linear keys are those of the latents themselves; use keys: one_hot or gaussian",
                )
            if self.distinct and not self.line_tokens:
                raise FieldError(
                    "distinct",
                    self.distinct,
                    "expected line_tokens above 0, so that the state can hold lines; set line_tokens",
                )

    def __init__(self, config: "Larimar.Config") -> None:
        super().__init__(config)
        self.M_0 = nn.Parameter(torch.eye(config.slots, config.latent_width)) if config.keys == "linear" else None
        self.state_growth = config.latent_width * (2 if config.prefix_tokens else 1)
        self.kept_tokens = config.line_tokens if config.distinct else 0

    def lines(self, ids_BNT: Tensor, mask_BNT: Tensor) -> Tensor:
        prefix, whole_BNC = self.config.prefix_tokens, super().lines(ids_BNT, mask_BNT)
        return (
            torch.cat([whole_BNC, super().lines(ids_BNT[..., :prefix], mask_BNT[..., :prefix])], dim=-1)
            if prefix
            else whole_BNC
        )

    def encode_rows(self, ids_XT, real_XT):
        """With ``distinct`` always ``ROWS`` at a time: a latent depends, to the last bit, on nothing that is read with
        its line."""
        if not self.config.distinct:
            return super().encode_rows(ids_XT, real_XT)
        parts = ([*F.pad(t, (0, 0, 0, -len(t) % ROWS)).split(ROWS)] for t in (ids_XT, real_XT))
        return torch.cat([super(Larimar, self).encode_rows(*part) for part in zip(*parts, strict=True)])[: len(ids_XT)]

    def advance(self, state, ids_BT, mask_BT=None):
        return (
            self.advance_distinct(state, *self.cut(ids_BT, mask_BT))
            if self.config.distinct
            else super().advance(state, ids_BT, mask_BT)
        )

    def advance_distinct(self, state: Episode, ids_BNT: Tensor, mask_BNT: Tensor) -> Episode:
        """The episode with those of the lines that it does not have, in the order in which they came first, and the
        last line as the question, also where it has that."""
        old, new_real_BN, state = state.real_BN.shape[1], mask_BNT.any(-1), aged(state, mask_BNT.any(-1))
        parts = (
            (state.ids_BNT, ids_BNT.masked_fill(~mask_BNT, -1)),
            (state.real_BN, new_real_BN),
            (state.age_BN, ages(new_real_BN)),
        )
        all_ids_BNT, real_BN, age_BN = (torch.cat(pair, dim=1) for pair in parts)
        columns_N = torch.arange(real_BN.shape[1], device=real_BN.device)
        first_BN = first_equal(all_ids_BNT)
        own_BN = real_BN & (first_BN == columns_N)
        unknown_BN = own_BN & (columns_N >= old)
        lines_BNE = F.pad(state.lines_BNE, (0, 0, 0, ids_BNT.shape[1]))
        if bool(unknown_BN.any()):
            ids_1XT = all_ids_BNT[unknown_BN].unsqueeze(0)
            lines_BNE = lines_BNE.index_put(
                (unknown_BN,), self.lines(ids_1XT.clamp(min=0), ids_1XT >= 0)[0].to(lines_BNE.dtype)
            )
        lines_BNE = lines_BNE.take_along_dim(first_BN.unsqueeze(-1), dim=1)
        asked_BN = real_BN & (columns_N == (columns_N * real_BN).amax(1, keepdim=True))
        kept_BN = own_BN | asked_BN
        found = Episode(
            lines_BNE * kept_BN.unsqueeze(-1),
            kept_BN,
            all_ids_BNT.masked_fill(~kept_BN.unsqueeze(-1), -1),
            age_BN * kept_BN,
        )
        return trimmed(taken(found, kept_BN.byte().argsort(dim=1, stable=True)))

    def read(self, state: Episode) -> Tensor:
        """(1): what the newest line finds among those before it, (B, C); its own latent where there is none."""
        asked_BQE, lines_BNE, real_BN = state.lines_BNE[:, -1:], state.lines_BNE[:, :-1], state.real_BN[:, :-1]
        own_BC = asked_BQE[:, 0, : self.config.latent_width]
        if not lines_BNE.shape[1]:
            return own_BC
        alone_B1 = ~real_BN.any(1, keepdim=True)
        found_BQC = self.recall(asked_BQE, lines_BNE, real_BN | alone_B1)
        return torch.where(alone_B1, own_BC, found_BQC[:, 0])

    def recall(self, asked_BQE: Tensor, lines_BNE: Tensor, real_BN: Tensor) -> Tensor:
        """What questions find among the real ones of some lines, of which every sample has one, (B, Q, C)."""
        return self.address(asked_BQE, lines_BNE, real_BN)[0]

    def address(self, asked_BQE: Tensor, lines_BNE: Tensor, real_BN: Tensor) -> tuple[Tensor, Tensor | None]:
        """``recall``, and the keys of the questions (B, Q, K), which one-hot keys do not need."""
        c, C = self.config, self.config.latent_width
        Z_BNC, keys_BNC, asked_BQC = lines_BNE[..., :C], lines_BNE[..., -C:], asked_BQE[..., -C:]
        with full_precision(lines_BNE.device):
            if c.keys == "one_hot":
                return episodic.read_nearest(asked_BQC, keys_BNC, Z_BNC, real_BN), None
            Z_BNC = self.noisy(Z_BNC, c.write_noise) * real_BN.unsqueeze(-1)
            if c.keys == "gaussian":
                W_BNK = episodic.gaussian_keys(keys_BNC, keys_BNC, c.bandwidth, real_BN) * real_BN.unsqueeze(-1)
                memory = episodic.write(W_BNK, Z_BNC, c.solver, c.solver_steps)
                w_BQK = episodic.gaussian_keys(asked_BQC, keys_BNC, c.bandwidth, real_BN)
            else:
                assert self.M_0 is not None
                W_BNK = episodic.keys(Z_BNC, self.M_0.to(Z_BNC.dtype).unsqueeze(0), c.solver, c.solver_steps)
                memory = episodic.write(W_BNK, Z_BNC, c.solver, c.solver_steps)
                w_BQK = episodic.keys(asked_BQC, memory.M_BKC, c.solver, c.solver_steps)
            w_BQK = self.noisy(w_BQK, c.read_noise)
            return episodic.read(memory, w_BQK), w_BQK

    def losses(
        self, ids_BNT: Tensor, mask_BNT: Tensor | None = None, names: Collection[str] = loss_names[1:]
    ) -> dict[str, Tensor]:
        """Those of the published training losses of lines that are named: cross-entropies of their tokens, each from
        the ones before it in its line.

        memory: every line from what its own latent reads out of the memory of all. autoencoding: from its latent.
            language: from a zero latent.
        keys (not with one-hot keys): the KL term, 1/2 |w|^2 of the questions up to a constant, mean over the lines.
        mask_BNT: True at real tokens (default: all); a line without any is none.
        """
        mask_BNT = torch.ones_like(ids_BNT, dtype=torch.bool) if mask_BNT is None else mask_BNT
        lines, out = (ids_BNT.flatten(0, 1), mask_BNT.flatten(0, 1)), {}
        if {"memory", "keys"} & set(names):
            lines_BNE, real_BN = self.lines(ids_BNT, mask_BNT), mask_BNT.any(-1)
            found_BNC, w_BNK = self.address(lines_BNE, lines_BNE, real_BN)
            if w_BNK is not None:
                out["keys"] = (w_BNK.square().sum(-1) / 2)[real_BN].mean()
            if "memory" in names:
                out["memory"] = self.reconstruction(*lines, found_BNC.flatten(0, 1))
        if "autoencoding" in names:
            out["autoencoding"] = self.autoencoding(*lines)
        if "language" in names:
            out["language"] = self.reconstruction(
                *lines, torch.zeros(len(lines[0]), self.config.latent_width, device=ids_BNT.device)
            )
        return {name: out[name] for name in self.loss_names if name in out and name in names}


MULTIPLIER = 6364136223846793005
"""Odd, so that no token is lost in a product modulo 2^64. Source: Knuth, The art of computer programming, volume 2,
section 3.3.4."""


def first_equal(ids_BNT: Tensor) -> Tensor:
    """The first line with the same tokens as each line, (B, N).

    Lines are put together by a hash of 64 bits, and then compared, token by token, with the first of their hash: lines
    that differ are never taken for the same, and at worst one that is repeated is not found.
    """
    powers_T = torch.full_like(ids_BNT[0, 0], MULTIPLIER).cumprod(0)  # modulo 2^64
    hash_BN, order_BN = ((ids_BNT + 2) * powers_T).sum(-1).sort(dim=1, stable=True)
    own_N = torch.arange(ids_BNT.shape[1], device=ids_BNT.device)
    new_BN = F.pad(hash_BN[:, 1:] != hash_BN[:, :-1], (1, 0), value=True)
    leader_BN = order_BN.gather(1, (own_N * new_BN).cummax(dim=1).values)
    first_BN = torch.empty_like(order_BN).scatter(1, order_BN, leader_BN)
    same_BN = (ids_BNT.take_along_dim(first_BN.unsqueeze(-1), dim=1) == ids_BNT).all(-1)
    return torch.where(same_BN, first_BN, own_N)
