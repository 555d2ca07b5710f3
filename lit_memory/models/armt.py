"""ARMT: associative recurrent memory transformer.

Paper:     Rodkin et al. 2024, arXiv 2407.04841, section 2 and appendix C.1. The equations are in
           ``memory/associative.py``.
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de,
           ``modeling_amt/language_modeling.py``; with ``PRESENT`` ``src/armt.py`` at 3da7f48, as the authors run it
           today, and with ``past_tokens`` and ``sink`` its ``src/armt_sw.py`` (see ``armt_past.py``).

The rows of a segment are ``[tokens; memory tokens]``. Every layer first adds to all its rows what they recall from the
layer's memory of earlier segments, then runs the transformer block, then writes the block's outputs at the memory
tokens. The memory tokens that enter the first layer are the same learned parameter in every segment.

Deviations
1. The state is passed in and returned; the reference keeps it in module attributes.
2. The memory of a segment is written at its end, as in the reference; the paper writes it at the start of the next
   segment. The values are the same.
3. ``value_std`` (reference: 0, so that a fresh ARMT is the backbone) breaks the plateau of small models trained from
   scratch.
4. Flags that are not in the paper: see ``memory/associative.py``, ``beta_init`` and ``memory_layers`` (3da7f48), and
   ``recall_on_mem_rows=False``, which is ours.
5. Against 3da7f48: GPT-2's positions begin anew in every segment, as at aa145de (there they go on, so that a context
   ends with the table), and with ``past_tokens`` so do Gemma's rotations; fresh memory tokens have the scale of the
   embeddings (there: 0.02), and a state is never below fp32.

Shape suffixes: B batch, T rows (tokens, then memory tokens), M memory tokens, D width, K features of a key, C channels
of a key, S segments, R rows that enter a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.memory import associative, compiled
from lit_memory.memory.associative import AssociativeState
from lit_memory.models import armt_past, armt_segments
from lit_memory.models.attention import attention_mask
from lit_memory.models.decoder import BackboneConfig, Block, Decoder
from lit_memory.models.key_values import KeyValueCache, Piece
from lit_memory.models.plain import replaced
from lit_memory.recurrence import Compiled, LayerMajor, Look, SharedRead, Visible, full_precision, state_options
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.fields import added

PRESENT: Mapping[str, Any] = {"normalize_phi": True, "gamma_eps": 0.0, "beta_init": 1.0}
"""Fields of ``ARMT.Config`` that make it the ARMT that its authors run today (3da7f48); ``use_denom`` and ``gamma`` are
options there as here."""


class ARMTLayer(nn.Module):
    """Recall, block, write; with ``remembers`` off the block alone, whose memory has no features."""

    def __init__(self, config: "ARMT.Config", remembers: bool = True) -> None:
        super().__init__()
        self.config, self.remembers = config, remembers
        self.block = Block(config)
        if not remembers:
            return
        self.to_query = nn.Linear(config.width, config.memory_dim, bias=False)
        self.to_key = nn.Linear(config.width, config.memory_dim, bias=False)
        self.to_value = nn.Linear(config.width, config.width, bias=False)
        self.to_beta = nn.Linear(config.width, 1)
        if config.beta_init is not None:
            nn.init.constant_(self.to_beta.bias, config.beta_init)
        if config.value_std:
            nn.init.normal_(self.to_value.weight, std=config.value_std)
        else:
            nn.init.zeros_(self.to_value.weight)

    def forward(self, rows_BTD: Tensor, state: Any, mask_BT: Tensor | None = None, write: bool = True):
        memory_tokens = self.config.memory_tokens if write else 0
        rows_BTD = rows_BTD + self.recall(rows_BTD, state, memory_tokens)
        if self.config.past_tokens:
            rows_BTD, new = armt_past.attend(self.block, rows_BTD, state, mask_BT, int(self.config.sink), memory_tokens)
            state = new if write else state
        else:
            rows_BTD = self.block(rows_BTD, _mask(mask_BT, memory_tokens))
        return rows_BTD, self.memorize(rows_BTD[:, -memory_tokens:], state) if memory_tokens else state

    def precise(self, rows: Tensor) -> Tensor:
        """Rows in the precision of the memory's weights, which may be another than the block's."""
        return rows.to(self.to_query.weight.dtype)

    def features(self, x_BTC: Tensor, state: AssociativeState) -> Tensor:
        """phi(x) in the state's precision."""
        return associative.dpfp(x_BTC.to(state.z_BK.dtype), self.config.nu, self.config.normalize_phi)

    def recall(self, rows_BTD: Tensor, state: AssociativeState, memory_tokens: int) -> Tensor:
        """y_j of every row; zeros without a memory, and at the memory rows without ``recall_on_mem_rows``.

        Where several samples in a row read the memory of one (``SharedRead``), their rows are read together: one
        matrix product, and no copy of the matrix.
        """
        c = self.config
        if not self.remembers:
            return torch.zeros_like(rows_BTD)
        asking = rows_BTD if c.recall_on_mem_rows else rows_BTD[:, : rows_BTD.shape[1] - memory_tokens]
        query_BTC = self.to_query(self.precise(asking))
        with full_precision(rows_BTD.device):
            phi = self.features(query_BTC, state).reshape(len(state.z_BK), -1, state.z_BK.shape[1])
            y = associative.read(state, phi, eps=c.eps, denom_floor=c.denom_floor, use_denom=c.use_denom)
            y_BTD = y.reshape(asking.shape)
        return F.pad(y_BTD, (0, 0, 0, rows_BTD.shape[1] - asking.shape[1])).to(rows_BTD.dtype)

    def keys_and_gates(self, rows_BMD: Tensor, state: AssociativeState) -> tuple[Tensor, dict[str, Tensor]]:
        """phi(k), (B, M, K), and the gates (B, M) with which the memory rows are written to ``state``."""
        c, rows_BMD = self.config, self.precise(rows_BMD)
        with full_precision(rows_BMD.device):
            phi = self.features(self.to_key(rows_BMD), state)
            beta_BM1 = self.to_beta(rows_BMD).sigmoid().to(phi.dtype)
            gates = {"beta": beta_BM1.squeeze(-1)}
            if c.use_denom:
                flags = {"update": c.update, "gamma": c.gamma, "beta_on_z": c.beta_on_z}
                flags |= {"eps": c.eps, "gamma_eps": c.gamma_eps}
                gates["gamma"] = associative.gammas(state.z_BK, phi, beta_BM1, **flags).squeeze(-1)
        return phi, gates

    def memorize(self, rows_BMD: Tensor, state: Any) -> Any:
        """The state after the M memory rows have been written."""
        if not self.remembers:
            return state
        c, rows_BMD = self.config, self.precise(rows_BMD)
        key, value, beta = self.to_key(rows_BMD), self.to_value(rows_BMD), self.to_beta(rows_BMD).sigmoid()
        flags = {"update": c.update, "gamma": c.gamma, "gamma_detach": c.gamma_detach, "beta_on_z": c.beta_on_z}
        flags |= {"eps": c.eps, "gamma_eps": c.gamma_eps, "denom_floor": c.denom_floor, "use_denom": c.use_denom}
        with full_precision(rows_BMD.device):
            phi = self.features(key, state)
            value, beta = value.to(phi.dtype), beta.to(phi.dtype)
            memory = AssociativeState(state.A_BKD, state.z_BK)
            return state._replace(**associative.write(memory, phi, value, beta, **flags)._asdict())


def _mask(mask_BT: Tensor | None, memory_tokens: int) -> Tensor | None:
    """Attention mask of ``[tokens; memory tokens]``: memory rows are always valid."""
    if mask_BT is None:
        return None
    mask_BT = F.pad(mask_BT, (0, memory_tokens), value=True)
    return attention_mask(mask_BT, mask_BT.shape[1])


class ARMT(Visible, SharedRead, KeyValueCache, LayerMajor, Compiled):
    """Transformer with an associative memory in every layer."""

    visible = ("norm", "overlap", "gates", "map")

    @dataclass
    class Config(BackboneConfig):
        memory_tokens: int = 4
        memory_dim: int = 32
        """Channels of keys and queries before the feature map; a key has 2*nu*memory_dim features (the script has
        64)."""
        nu: int = 3
        """Rolls of DPFP."""
        update: Literal["batch", "sequential"] = "batch"
        """Write the memory tokens of a segment together (reference) or one after another (paper)."""
        gamma: Literal["clip", "raw", "off"] = "clip"
        """Correction of the normaliser: clipped to [0, 1] (reference), the paper's formula, or none (the ablation)."""
        gamma_detach: bool = True
        """No gradient through gamma ("converges better", appendix C.1)."""
        beta_on_z: bool = False
        """Apply beta to the normaliser as well."""
        eps: float = 1e-5
        """Added to the denominators."""
        denom_floor: float = 0.0
        """Smallest denominator, as a fraction of |phi|*|z|. Ours."""
        normalize_phi: bool = False
        """Keys and queries of unit length (3da7f48)."""
        use_denom: bool = True
        """Divide by z . phi; without, the memory is a plain delta rule (an option at 3da7f48)."""
        recall_on_mem_rows: bool = True
        """Memory rows recall as well. Without: ours."""
        value_std: float = 0.0
        """Standard deviation of W_v at init; with 0 a fresh ARMT equals its backbone."""
        gamma_eps: float | None = added(None)
        """Added to |phi|^2 in gamma; default: ``eps``, as at aa145de (3da7f48: 0)."""
        beta_init: float | None = added(None)
        """Bias of beta's logit at init; default: random, as at aa145de (3da7f48: 1)."""
        memory_layers: list[int] = added([])
        """Layers that have a memory, counted from 0; default: all (3da7f48: ``wrap_layers``)."""
        past_tokens: int = added(0)
        """Tokens before the segment whose keys and values every layer keeps, see ``armt_past.py``; 0: none."""
        sink: bool = added(False)
        """A learned row in front of the tokens; with ``past_tokens`` only."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, self, "memory_tokens", "memory_dim", "nu")
            if self.nu >= 2 * self.memory_dim:
                raise FieldError("nu", self.nu, f"expected fewer rolls than 2*memory_dim={2 * self.memory_dim}")
            if self.eps <= 0:
                raise FieldError("eps", self.eps, "expected more than 0, which an empty memory would be divided by")
            at_least(0, self, "denom_floor", "value_std", "gamma_eps", "past_tokens")
            if not abs(self.beta_init or 0) <= 1e4:
                raise FieldError("beta_init", self.beta_init, "expected a logit from -1e4 to 1e4")
            if not self.past_tokens and self.sink:
                raise FieldError("sink", self.sink, "expected past_tokens with it")
            if self.gamma_eps == 0 and (self.gamma == "raw" or not self.gamma_detach):
                expected = "expected more than 0 unless gamma is clipped and detached: a key of zeros is divided by it"
                raise FieldError("gamma_eps", self.gamma_eps, expected)
            if sorted({*self.memory_layers} & {*range(self.layers)}) != self.memory_layers:
                expected = f"expected layers from 0 to {self.layers - 1} that rise; leave it out for all"
                raise FieldError("memory_layers", self.memory_layers, expected)

        def rows(self, segment_len: int) -> int:
            return self.sink + segment_len + self.memory_tokens

    def __init__(self, config: "ARMT.Config") -> None:
        super().__init__()
        self.config = config
        chosen = config.memory_layers or range(config.layers)
        remembers = iter([i in chosen for i in range(config.layers)])
        self.decoder = Decoder(config, lambda config: ARMTLayer(config, next(remembers)))
        self.memory = self.decoder.memory_tokens(config.memory_tokens)
        if config.sink:
            self.sink = self.decoder.memory_tokens(1)

    def init_state(self, batch, device=None, dtype=None):
        c, options = self.config, state_options(self, device, dtype)
        layers: Any = self.layers
        features = [2 * c.nu * c.memory_dim if layer.remembers else 0 for layer in layers]
        state = tuple(associative.empty(batch, keys, c.width, **options) for keys in features)
        return tuple(armt_past.empty(memory, c) for memory in state) if c.past_tokens else state

    def embed(self, ids_BT, write=True):
        rows_BTD = self.decoder.tokens(ids_BT)
        c = self.config
        own = ([self.sink] if c.sink else []), ([self.memory] if write else [])
        before, after = ([rows.to(rows_BTD.dtype).expand(len(rows_BTD), -1, -1) for rows in part] for part in own)
        rows_BTD = torch.cat([*before, rows_BTD, *after], dim=1)
        return self.decoder.add_positions(rows_BTD, before=int(c.sink), after=c.memory_tokens if write else 0)

    def finish(self, rows_BTD, write=True):
        end = rows_BTD.shape[1] - (self.config.memory_tokens if write else 0)
        return self.decoder.norm(rows_BTD[:, self.config.sink : end])

    def read_tokens(self, state, piece, rows_BTD):
        layers: Any = self.layers
        for layer, layer_state in zip(layers, state, strict=True):
            rows_BTD = piece.through(layer.block, rows_BTD + layer.recall(rows_BTD, layer_state, 0))
        return rows_BTD

    def write_memory(self, state, opened):
        layers: Any = self.layers
        count, new = self.config.memory_tokens, []
        piece = Piece(opened, count)
        rows_BMD = self.memory.to(self.decoder.norm.weight.dtype).repeat(len(opened.rows_B), 1, 1)
        rows_BMD = piece.add_positions(self.decoder, rows_BMD, wrapped=0)
        for layer, layer_state in zip(layers, state, strict=True):
            rows_BMD = piece.through(layer.block, rows_BMD + layer.recall(rows_BMD, layer_state, count))
            new.append(layer.memorize(rows_BMD, layer_state))
        return tuple(new)

    def refuses_groups(self, longest=0):
        if self.config.past_tokens:
            return "its token rows see those of the segment before"
        precision = self.decoder.norm.weight.dtype
        if precision != torch.promote_types(precision, torch.float32):
            return "its weights are less precise than its state"
        if precision != self.memory.dtype:
            return "its memory has a precision of its own"
        if self.config.special:
            return f"its blocks ({', '.join(self.config.special)}) have no backward pass by hand"
        return replaced(armt_segments.parts(self.layers)) or super().refuses_groups(longest)

    def refuses_incremental(self):
        return "its rows see past_tokens" if self.config.past_tokens else super().refuses_incremental()

    def refuses_diagonal(self):
        return "not all of its layers have a memory" if self.config.memory_layers else super().refuses_diagonal()

    def uncompiled(self):
        return compiled.missing()

    def read_layer(self, layer, rows_SBRD, state, mask_SBT, cuts, keep):
        if layer.remembers:
            return armt_segments.read_layer(layer, rows_SBRD, state, mask_SBT, cuts, keep)
        kept = slice(max(0, len(rows_SBRD) - keep), None)
        mask = None if mask_SBT is None else _mask(mask_SBT[kept].flatten(0, 1), self.config.memory_tokens)
        rows_SBRD = rows_SBRD[kept]
        return layer.block(rows_SBRD.flatten(0, 1), mask).unflatten(0, rows_SBRD.shape[:2]), state

    def parts(self, state):
        state = [layer for layer in state if layer.A_BKD.shape[1]]
        named = {"A": tuple(layer.A_BKD for layer in state)}
        return named | {"z": tuple(layer.z_BK for layer in state)} if self.config.use_denom else named

    def look(self, state, ids_BT, mask_BT=None):
        layers: Any = self.layers
        rows_BTD, states, written = self.embed(ids_BT), [], []
        for layer, old in zip(layers, state, strict=True):
            rows_BTD, new = layer(rows_BTD, old, mask_BT)
            states.append(new)
            if layer.remembers:
                written.append(layer.keys_and_gates(rows_BTD[:, -self.config.memory_tokens :], old))
        keys, gates = zip(*written, strict=True)
        of_layers = {name: tuple(of_layer[name] for of_layer in gates) for name in gates[0]}
        return Look(self.parts(states), keys, of_layers), tuple(states)
