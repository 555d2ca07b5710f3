"""What a segment-recurrent model offers: one base class for all, and a mixin for each ability that only some have.

``SegmentRecurrent`` is the contract of every model. ``LayerRecurrent`` keeps one state per layer, which allows the
diagonal schedule. The mixins are optional:

* ``Grouped``        several segments of one shape can be read in one go.
* ``LayerMajor``     one of them, in ``layer_major.py``: a layer reads all segments before the next layer begins.
* ``GrowingState``   the state has a part per segment or line.
* ``SharedRead``     several samples can read one state without a copy.
* ``SeparateWrite``  a segment can be written without computing its hidden states.
* ``Incremental``    an open segment can be read piece by piece.
* ``Divisible``      a segment can be cut anywhere, or at multiples of some tokens, without changing a result.
* ``Diagnosed``      diagnostics of the memory are logged.
* ``Visible``        what a memory holds, and what is written to it, can be looked at.
* ``SeveralLosses``  training weighs several losses.
* ``NoWeightDecay``  some parameters are excluded from weight decay.
* ``Compiled``       an optional package compiles a part for the CPU.

Shape suffixes: S segments, B batch, T tokens, D width, V vocabulary.
"""

import os
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from lit_memory.recurrence.calls import autocasts, hooked
from lit_memory.recurrence.state import State, map_state, state_tensors
from lit_memory.util.names import load


class SegmentRecurrent(nn.Module):
    """A model that reads one segment at a time and carries a state between segments.

    The state is a pytree of tensors, batch first. It is passed in and returned, never kept on the module: that is what
    makes data parallelism, activation checkpointing, beam search and tests work. A subclass defines ``init_state`` and
    ``step``, and has a ``config`` and a ``decoder`` with a ``head``.
    """

    config: Any
    """The ``Config`` that the model was built from."""
    decoder: Any
    """The backbone: embeddings, layers, norm and ``head``."""
    numbers: ClassVar[int] = 0
    """Part of the key of a run; raise it when a change of the model's code moves the numbers of its runs."""
    looks_at_numbers: bool = False
    """Whether the CPU has to see numbers of a segment to go on, so that a GPU cannot be given several at once."""

    def init_state(self, batch: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> State:
        """The state of ``batch`` samples before their first segment.

        Default device and dtype: those of the parameters, but never below fp32.
        """
        raise NotImplementedError(f"{type(self).__name__} lacks init_state")

    def step(
        self, state: State, ids_BT: Tensor, mask_BT: Tensor | None = None, write: bool = True
    ) -> tuple[Tensor, State]:
        """Read one segment: hidden states (B, T, D) of its tokens, and the next state.

        mask_BT: True at real tokens; default: all are real.
        write: without, the state is returned unchanged.
        """
        raise NotImplementedError(f"{type(self).__name__} lacks step")

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits (B, T, V) of hidden states. Apart from ``step``, as on a long context only the answer needs them."""
        return self.decoder.head(hidden_BTD)

    def state_floats(self, state: State) -> int:
        """Floats that one sample carries from segment to segment."""
        return sum(t[0].numel() for t in state_tensors(state) if t.is_floating_point())

    def reorder(self, state: State, idx: Tensor) -> State:
        """The state of the samples ``idx``, which may repeat, as for beam search."""
        return map_state(lambda t: t.index_select(0, idx), state)

    def generate(self, ids_BT: Tensor, max_new_tokens: int = 20, **options: Any) -> Tensor:
        """Continuations (B, max_new_tokens) of prompts. ``options``: those of ``lit_memory.generate``."""
        return load("lit_memory.recurrence.generate:generate")(self, ids_BT, max_new_tokens, **options)

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *, revision: str | None = None, **flags: Any) -> Self:
        """The model in a folder that ``save_pretrained`` wrote, or a new one around a pretrained decoder.

        Arguments and errors: those of ``lit_memory.hf.pretrained.from_pretrained``.
        """
        return load("lit_memory.hf.pretrained:from_pretrained")(cls, source, revision=revision, **flags)

    def save_pretrained(
        self, folder: str | os.PathLike[str], segment_len: int | None = None, tokenizer: Any = None
    ) -> None:
        """Write config.json, model.safetensors, a tokenizer and a model card to a folder.

        Arguments and errors: those of ``lit_memory.hf.pretrained.save_pretrained``.
        """
        load("lit_memory.hf.pretrained:save_pretrained")(self, folder, segment_len, tokenizer)


class LayerRecurrent(SegmentRecurrent):
    """A model whose recurrence lies inside each layer of its ``decoder``.

    The layers are modules, ``layer(rows, layer_state, mask, write) -> (rows, layer_state')``, of equal structure unless
    ``refuses_diagonal``, and the state is a tuple with one entry per layer.
    """

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    def embed(self, ids_BT: Tensor, write: bool = True) -> Tensor:
        """Rows that enter the first layer. Without ``write``, rows that only write memory are left out."""
        raise NotImplementedError

    def finish(self, rows_BTD: Tensor, write: bool = True) -> Tensor:
        """Hidden states of the tokens, after the final norm, from the rows that leave the last layer."""
        raise NotImplementedError

    def step(self, state, ids_BT, mask_BT=None, write=True):
        rows = self.embed(ids_BT, write)
        states = []
        for layer, layer_state in zip(self.layers, state, strict=True):
            rows, layer_state = layer(rows, layer_state, mask_BT, write)
            states.append(layer_state)
        return self.finish(rows, write), tuple(states)

    def refuses_diagonal(self) -> str | None:
        """Why layers cannot be computed together, by the diagonal schedule; None if they can."""
        if autocasts(self):
            return "vmap has no autocast (mixed precision)"
        return "its layers have rotary_bases of their own" if getattr(self.config, "rotary_bases", None) else None


class Grouped(SegmentRecurrent):
    """A model that can read several segments of one shape in one go."""

    def refuses_groups(self, longest: int = 0) -> str | None:
        """Why this cannot be done now; None if it can. longest: tokens of the longest segment."""
        dropout = getattr(self.config, "dropout", 0.0)
        if dropout and self.training:
            return f"dropout={dropout} would draw other numbers"
        if autocasts(self):
            return "autocast (a mixed precision) has no backward pass by hand"
        if torch._C._are_functorch_transforms_active():
            return "functorch's transforms follow no backward pass by hand"
        return self.refuses_hooks()

    def refuses_hooks(self) -> str | None:
        """``refuses_groups`` where that is all that stands against it: nothing of the model is by hand."""
        return "hooks of its modules would not be called" if any(map(hooked, self.modules())) else None

    def read_group(
        self, ids_SBT: Tensor, state: State, mask_SBT: Tensor | None, cuts: frozenset[int], keep: int
    ) -> tuple[list[Tensor], State]:
        """Hidden states (B, T, D) of the last ``keep`` segments, and the state after the last one.

        mask_SBT: True at real tokens. cuts: segments before which no gradient leaves the state.
        """
        raise NotImplementedError


class GrowingState(SegmentRecurrent):
    """A model whose state grows with what it reads, so that states of different ages have different shapes."""

    state_growth: int = 0
    """Floats that one ``growth_unit`` adds to the state of a sample."""
    growth_unit: ClassVar[str] = "segment"

    def select_state(self, live_B: Tensor, new: State, old: State) -> State:
        """``select_state`` of a state ``new`` that may be larger than the state ``old`` before it."""
        raise NotImplementedError

    def append_samples(self, state: State, others: State) -> State:
        """``append_samples`` of ``others`` that have just begun, and so are smaller."""
        raise NotImplementedError

    def read_once(self, state: State) -> State | None:
        """A state of what every segment reads of ``state`` alike; None where that depends on the segment."""
        return None


class SharedRead(SegmentRecurrent):
    """A model whose ``step`` without ``write`` accepts one state for several samples in a row, uncopied.

    The batch of its ids is then a multiple of that of the state.
    """


class SeparateWrite(SegmentRecurrent):
    """A model that writes a segment at less cost than ``step``, if its hidden states are not needed."""

    def advance(self, state: State, ids_BT: Tensor, mask_BT: Tensor | None = None) -> State:
        """The state after one segment: that of ``step``, up to rounding, with its gradients. With dropout it may draw
        other numbers, as it reads fewer rows."""
        raise NotImplementedError


class Incremental(SegmentRecurrent):
    """A model that keeps what later tokens of a segment need of the earlier ones, such as keys and values.

    What it keeps of the open segment is a pytree of tensors like the state, batch first. A call uses it up: the tensors
    that go in may be written to. ``Rereading`` does the same for every other model, at the cost of reading the open
    segment again with every piece.
    """

    def refuses_incremental(self) -> str | None:
        """Why nothing can be kept with these settings, so that ``Rereading`` does it; None if it can."""
        return None

    def begin(self, state: State, opened: State | None = None, live_B: Tensor | None = None) -> State:
        """Segments of which no token has been read.

        opened, live_B: only the samples where ``live_B`` is True begin; the others go on with ``opened``.
        """
        raise NotImplementedError

    def extend(
        self, state: State, opened: State, ids_BT: Tensor, lengths_B: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Hidden states (B, T, D) of the next tokens, those of ``step``, and what is kept then.

        state: the memory before the segment. lengths_B: tokens of every sample, which come first, 0 included; default:
        all T. Hidden states behind them are arbitrary.
        """
        raise NotImplementedError

    def close(self, state: State, opened: State, live_B: Tensor) -> State:
        """The state after the open segment, that of ``step``, for the samples where ``live_B`` is True; the others keep
        theirs."""
        raise NotImplementedError


class Divisible(SegmentRecurrent):
    """A model that gives the same hidden states and state if a segment is cut at multiples of ``grain`` tokens."""

    grain: int


class Diagnosed(SegmentRecurrent):
    """A model with diagnostics of its memory, which are logged beside the metrics of a task."""

    diagnosed: ClassVar[tuple[str, ...]] = ()
    """Diagnostics logged at every validation; a report may plot them."""
    tested: ClassVar[tuple[str, ...]] = ()
    """Diagnostics also logged for every test condition."""


class Look(NamedTuple):
    """What is seen of a memory that reads one segment. Every tuple has an entry per layer, with the samples first.

    parts: name -> tensors of the memory after the segment. keys: features (B, M, K) of the M keys that it writes; ()
    for a memory that shows none. gates: name -> gates (B, N) of its N writes.
    """

    parts: dict[str, tuple[Tensor, ...]]
    keys: tuple[Tensor, ...]
    gates: dict[str, tuple[Tensor, ...]]


class Visible(SegmentRecurrent):
    """A model whose memory can be looked at while it reads."""

    visible: ClassVar[tuple[str, ...]] = ("norm",)
    """The views (``util.views.VIEWS``) that a report can ask for."""

    def parts(self, state: State) -> dict[str, tuple[Tensor, ...]]:
        """What a state remembers: name -> a tensor (B, ...) per layer."""
        raise NotImplementedError

    def look(self, state: State, ids_BT: Tensor, mask_BT: Tensor | None = None) -> tuple[Look, State]:
        """Read one segment: what is seen, and the next state, that of ``step``."""
        new = self.step(state, ids_BT, mask_BT)[1]
        return Look(self.parts(new), (), {}), new


class SeveralLosses(SegmentRecurrent):
    """A model that is trained on a weighted sum of losses."""

    loss_names: ClassVar[tuple[str, ...]] = ()
    """Losses that ``train.losses`` may weigh; "answer" is that of the task."""


class NoWeightDecay(SegmentRecurrent):
    """A model that excludes some of its parameters from weight decay."""

    @property
    def no_weight_decay(self) -> set[str]:
        """Names of these parameters."""
        raise NotImplementedError


class Compiled(SegmentRecurrent):
    """A model of which a part is compiled for the CPU where an optional package is installed."""

    def uncompiled(self) -> str:
        """Why that part runs as plain tensor operations, as a line for the user; "" where it is compiled."""
        raise NotImplementedError
