"""Larimar: an episodic memory of the latents of lines, which condition a decoder.

Paper:     Das et al. 2024, Larimar: Large language models with episodic memory control, arXiv 2403.11901, section 3;
           Nelson et al. 2024, Needle in the haystack for memory based large language models, arXiv 2407.01437, section
           2. The memory is in ``memory/episodic.py``.
Reference: the code of arXiv 2403.11901 as spec 11 describes it; none of arXiv 2407.01437 is public.

Encoding, episode and decoding are in ``line_recurrent.py``. With Z the latents of the lines before the question, z its
own latent, and memory and keys as in ``memory/episodic.py``,

(1) z_r = read(write(Z), z)                                                                     ``read``

Deviations
1. Lines are stored, and (1) writes all of them at once when it reads, which is the published write of an episode. The
   state grows by one latent per line. A memory of constant size (``episodic.add``) has the same M with solver "svd".
2. Encoder and decoder share one tokenizer, the decoder's (published: BERT-large's own for BERT-large), and no [SEP]
   ends a line. In a pretrained BERT, the embedding of a token is the mean over the word pieces of its text, the
   sentence type is added to the positions, and norms have the decoder's eps (1e-5; BERT's 1e-12). Without
   ``encoder_width`` encoder and decoder also share width and token embeddings.
3. The encoder returns the latent alone; the published one also returns a log-variance, which nothing uses.
4. The variance of keys is a setting (published: learned by one of five kinds of networks, the largest of them 15 % of
   the model).
5. Noise is off by default (published: 1e-6 or 1e-4 in training; 0 in arXiv 2407.01437) and only in training.
6. ``keys`` "one_hot" and "gaussian" use the lines themselves as the key memory: a slot per line, as in arXiv
   2407.01437.
7. ``prefix_tokens`` counts tokens (published: the first words of a sentence).
8. ``distinct`` keeps repeated lines once. What one-hot keys read is the same, unless lines that begin with the same
   ``prefix_tokens`` end differently; then, and with other keys, a line counts once, however often it was read.

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
from lit_memory.models.episodic.encoder import LinesConfig
from lit_memory.models.episodic.episode import Episode, ages, drop_leading_padding, gather_lines, shift_ages
from lit_memory.models.episodic.line_recurrent import LineRecurrent
from lit_memory.recurrence import full_precision
from lit_memory.util.checks import FieldError, at_least

ROWS = 16
"""Lines that are encoded together with ``distinct``."""


class Larimar(LineRecurrent):
    """Decoder conditioned on one latent, which is read from an episodic memory of earlier lines."""

    loss_names = ("answer", "memory", "autoencoding", "language", "keys")
    diagnosed = tested = ("hop1_support", "lines")

    @dataclass
    class Config(LinesConfig):
        """Sizes, and how lines are addressed. ``slots`` are for linear keys."""

        keys: Literal["linear", "one_hot", "gaussian"] = "linear"
        """Address lines and questions by coordinates in M_0 and M (arXiv 2403.11901), or by the nearest line (arXiv
        2407.01437)."""
        bandwidth: float = 1.0
        """Bandwidth of Gaussian keys."""
        prefix_tokens: int = 0
        """First tokens of a line whose latent is its key; 0: the whole line. Not with linear keys."""
        distinct: bool = False
        """Deduplicate lines: one with the tokens of an earlier one is not encoded again and takes no slot (ours)."""

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
        prefix, latents_BNC = self.config.prefix_tokens, super().lines(ids_BNT, mask_BNT)
        if not prefix:
            return latents_BNC
        keys_BNC = super().lines(ids_BNT[..., :prefix], mask_BNT[..., :prefix])
        return torch.cat([latents_BNC, keys_BNC], dim=-1)

    def encode_rows(self, ids_XT, real_XT):
        """With ``distinct`` always ``ROWS`` lines at a time, so that no bit of a latent depends on the other lines."""
        if not self.config.distinct:
            return super().encode_rows(ids_XT, real_XT)
        ids, masks = (F.pad(t, (0, 0, 0, -len(t) % ROWS)).split(ROWS) for t in (ids_XT, real_XT))
        latents = [super(Larimar, self).encode_rows(*part) for part in zip(ids, masks, strict=True)]
        return torch.cat(latents)[: len(ids_XT)]

    def advance(self, state, ids_BT, mask_BT=None):
        if self.config.distinct:
            return self.advance_distinct(state, *self.cut(ids_BT, mask_BT))
        return super().advance(state, ids_BT, mask_BT)

    def advance_distinct(self, state: Episode, ids_BNT: Tensor, mask_BNT: Tensor) -> Episode:
        """The episode with the new lines that it does not have yet, in the order of their first occurrence.

        The last line is the question, also where the episode has it already.
        """
        all_lines = self.with_new_lines(state, ids_BNT, mask_BNT)
        real_BN = all_lines.real_BN
        columns_N = torch.arange(real_BN.shape[1], device=real_BN.device)
        first_BN = first_equal(all_lines.ids_BNT)
        own_BN = real_BN & (first_BN == columns_N)
        lines_BNE = self.encode_unknown(all_lines, own_BN & (columns_N >= state.real_BN.shape[1]))
        lines_BNE = lines_BNE.take_along_dim(first_BN.unsqueeze(-1), dim=1)
        question_BN = real_BN & (columns_N == (columns_N * real_BN).amax(1, keepdim=True))
        kept_BN = own_BN | question_BN
        kept_lines = Episode(
            lines_BNE * kept_BN.unsqueeze(-1),
            kept_BN,
            all_lines.ids_BNT.masked_fill(~kept_BN.unsqueeze(-1), -1),
            all_lines.age_BN * kept_BN,
        )
        return drop_leading_padding(gather_lines(kept_lines, kept_BN.byte().argsort(dim=1, stable=True)))

    @staticmethod
    def with_new_lines(state: Episode, ids_BNT: Tensor, mask_BNT: Tensor) -> Episode:
        """The episode with all new lines behind the old ones. Their entries are zero so far."""
        new_real_BN = mask_BNT.any(-1)
        state = shift_ages(state, new_real_BN)
        return Episode(
            F.pad(state.lines_BNE, (0, 0, 0, ids_BNT.shape[1])),
            torch.cat([state.real_BN, new_real_BN], dim=1),
            torch.cat([state.ids_BNT, ids_BNT.masked_fill(~mask_BNT, -1)], dim=1),
            torch.cat([state.age_BN, ages(new_real_BN)], dim=1),
        )

    def encode_unknown(self, episode: Episode, unknown_BN: Tensor) -> Tensor:
        """The entries (B, N, E) of an episode, in which those of the unknown lines are computed."""
        if not bool(unknown_BN.any()):
            return episode.lines_BNE
        ids_1XT = episode.ids_BNT[unknown_BN].unsqueeze(0)
        new_XE = self.lines(ids_1XT.clamp(min=0), ids_1XT >= 0)[0]
        return episode.lines_BNE.index_put((unknown_BN,), new_XE.to(episode.lines_BNE.dtype))

    def read(self, state: Episode) -> Tensor:
        """(1): what the newest line reads from those before it, (B, C); its own latent if there is none."""
        query_BQE, lines_BNE, real_BN = state.lines_BNE[:, -1:], state.lines_BNE[:, :-1], state.real_BN[:, :-1]
        own_BC = query_BQE[:, 0, : self.config.latent_width]
        if not lines_BNE.shape[1]:
            return own_BC
        empty_B1 = ~real_BN.any(1, keepdim=True)
        read_BQC = self.recall(query_BQE, lines_BNE, real_BN | empty_B1)
        return torch.where(empty_B1, own_BC, read_BQC[:, 0])

    def recall(self, query_BQE: Tensor, lines_BNE: Tensor, real_BN: Tensor) -> Tensor:
        """What questions read from the real lines of a batch, (B, Q, C). Every sample has a real line."""
        return self.address(query_BQE, lines_BNE, real_BN)[0]

    def address(self, query_BQE: Tensor, lines_BNE: Tensor, real_BN: Tensor) -> tuple[Tensor, Tensor | None]:
        """``recall``, and the keys of the questions (B, Q, K), which one-hot keys do not need."""
        c, C = self.config, self.config.latent_width
        Z_BNC, keys_BNC, query_BQC = lines_BNE[..., :C], lines_BNE[..., -C:], query_BQE[..., -C:]
        with full_precision(lines_BNE.device):
            if c.keys == "one_hot":
                return episodic.read_nearest(query_BQC, keys_BNC, Z_BNC, real_BN), None
            Z_BNC = self.add_noise(Z_BNC, c.write_noise) * real_BN.unsqueeze(-1)
            if c.keys == "gaussian":
                W_BNK = episodic.gaussian_keys(keys_BNC, keys_BNC, c.bandwidth, real_BN) * real_BN.unsqueeze(-1)
                M_BKC = episodic.slots(W_BNK, Z_BNC, c.solver, c.solver_steps)
                w_BQK = episodic.gaussian_keys(query_BQC, keys_BNC, c.bandwidth, real_BN)
            else:
                assert self.M_0 is not None
                W_BNK = episodic.keys(Z_BNC, self.M_0.to(Z_BNC.dtype).unsqueeze(0), c.solver, c.solver_steps)
                M_BKC = episodic.slots(W_BNK, Z_BNC, c.solver, c.solver_steps)
                w_BQK = episodic.keys(query_BQC, M_BKC, c.solver, c.solver_steps)
            w_BQK = self.add_noise(w_BQK, c.read_noise)
            return w_BQK @ M_BKC, w_BQK  # (4)

    def losses(
        self, ids_BNT: Tensor, mask_BNT: Tensor | None = None, names: Collection[str] = loss_names[1:]
    ) -> dict[str, Tensor]:
        """The published training losses of lines, as far as they are in ``names``.

        memory, autoencoding, language: cross-entropies of the tokens of every line, given those before them and what
            its latent reads from the memory of all lines; its latent; or a zero latent.
        keys: the KL term, 1/2 |w|^2 of the keys w up to a constant, mean over the lines. Not with one-hot keys.
        mask_BNT: True at real tokens (default: all). A line without any is no line.
        """
        mask_BNT = torch.ones_like(ids_BNT, dtype=torch.bool) if mask_BNT is None else mask_BNT
        lines, out, known = (ids_BNT.flatten(0, 1), mask_BNT.flatten(0, 1)), {}, None
        if {"memory", "keys"} & set(names):
            lines_BNE, real_BN = self.lines(ids_BNT, mask_BNT), mask_BNT.any(-1)
            latents_XC = lines_BNE[..., : self.config.latent_width].flatten(0, 1)
            known = torch.arange(len(latents_XC), device=latents_XC.device), latents_XC
            empty_B1 = ~real_BN.any(1, keepdim=True)  # episodes without a line, whose reads are not scored
            read_BNC, w_BNK = self.address(lines_BNE, lines_BNE, real_BN | empty_B1)
            if w_BNK is not None:
                out["keys"] = (w_BNK.square().sum(-1) / 2)[real_BN].sum() / real_BN.sum().clamp(min=1)
            if "memory" in names:
                out["memory"] = self.reconstruction(*lines, read_BNC.flatten(0, 1))
        if "autoencoding" in names:
            out["autoencoding"] = self.autoencoding(*lines, known)
        if "language" in names:
            zeros_XC = torch.zeros(len(lines[0]), self.config.latent_width, device=ids_BNT.device)
            out["language"] = self.reconstruction(*lines, zeros_XC)
        return {name: out[name] for name in self.loss_names if name in out and name in names}


MULTIPLIER = 6364136223846793005
"""Odd, so that no token is lost in a product modulo 2^64. Source: Knuth, The art of computer programming, volume 2,
section 3.3.4."""


def first_equal(ids_BNT: Tensor) -> Tensor:
    """The first line with the same tokens as each line, (B, N).

    Lines are grouped by a hash of 64 bits, and then compared, token by token, with the first line of their hash: lines
    that differ never count as equal; at worst, a repeated line is missed.
    """
    powers_T = torch.full_like(ids_BNT[0, 0], MULTIPLIER).cumprod(0)  # modulo 2^64
    hash_BN, order_BN = ((ids_BNT + 2) * powers_T).sum(-1).sort(dim=1, stable=True)
    own_N = torch.arange(ids_BNT.shape[1], device=ids_BNT.device)
    new_BN = F.pad(hash_BN[:, 1:] != hash_BN[:, :-1], (1, 0), value=True)
    leader_BN = order_BN.gather(1, (own_N * new_BN).cummax(dim=1).values)
    first_BN = torch.empty_like(order_BN).scatter(1, order_BN, leader_BN)
    same_BN = (ids_BNT.take_along_dim(first_BN.unsqueeze(-1), dim=1) == ids_BNT).all(-1)
    return torch.where(same_BN, first_BN, own_N)
