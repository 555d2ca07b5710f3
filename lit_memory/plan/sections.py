"""Typed sections of an experiment file: ``paper``, ``train`` and ``report``. Imports nothing heavy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lit_memory.plan.paper import paper_rows
from lit_memory.util.checks import FieldError, at_least, check_cuts, nearest
from lit_memory.util.fields import added
from lit_memory.util.views import VIEWS

STEP = "step"
"""The x axis of a report along the training: the steps after which a run validates."""
STEPS_TO, TRAIN_SPEED = "steps_to", "train_tokens_per_s"
OF_A_RUN = (STEPS_TO, "roughness")
"""Metrics that a whole validation curve has, the same at every step."""
TIMES = {
    "seconds": "Seconds of wall clock that the test takes per context, reading and answering",
    TRAIN_SPEED: (
        "Tokens a second of training, forward and backward, on `train.timed_contexts` contexts of the tested length, "
        "or, where that is 0, on as many as have the tokens of a training batch"
    ),
}
"""Metrics measured by the clock at every x of the test -> their description. The second needs ``train.timed_steps``."""


@dataclass
class PaperConfig:
    """Which claim of which paper the experiment tests."""

    title: str
    item: str
    claim: str
    arxiv: str = ""


@dataclass
class TrainConfig:
    """How one run is trained and evaluated. Counts are optimizer steps and contexts."""

    steps: int = 10_000
    """Most steps of a stage; a stage may have its own. 0 tests the weights of the run, folder or name that ``init``
    names as they are."""
    batch_size: int = 64
    init: Any = added("")
    """Source of the initial weights. A folder, or a name on the Hugging Face hub, best with its commit
    (owner/name@commit): a pretrained decoder, which gets a fresh memory, a model of ours, or weights alone, with the
    names of the papers' authors. {decoder: A, encoder: B}: such a decoder and, for a model that reads lines, a BERT.
    {run: arm}, or {run: experiment/arm} for an experiment of the same folder: the run of that arm with the same scale
    and seed, which is trained first, once for all that start from it. Default: all weights are drawn from the seed."""
    lr: float = 3e-4
    weight_decay: float = 1e-3
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate of every stage, from lr to final_lr * lr: along a line (the reference's, over twice the steps, is
    final_lr 0.5 but that it falls from the end of the warm-up on, and so is up to a twentieth higher), or along half a
    cosine."""
    final_lr: float = 0.5
    warmup: float = 0
    """Warm-up of the learning rate. From 1 on: steps at the start of the run. Below 1: the share of every stage's
    steps, at the start of each."""
    clip_norm: float = 0.0
    """Largest gradient norm; 0: no limit."""
    clip_value: float = 0.0
    """Largest gradient entry; 0: no limit."""
    losses: dict[str, Any] = added({})
    """Weights of the losses of a model that has several (its ``loss_names``); default: those of its LightningModule."""
    frozen: list[str] = added([])
    """Parts of the model that are not trained, by the names of their weights: [encoder, decoder.tokens]."""
    bptt: int | None = None
    """Segments of truncated backpropagation through time; default: all."""
    unroll_schedule: Literal["auto", "sequential", "diagonal", "layer"] = "auto"
    """The order in which segments and layers are computed. All give the same values; "auto" is the fastest that the
    model allows."""
    checkpoint_segments: int | None = added(None)
    """Keep the states between groups of so many segments, and compute a group again on the way back: less memory, a
    third more time."""
    replay: bool = added(False)
    """On a GPU: record the kernels of a training step as a CUDA graph, once for every shape of a batch, and launch them
    together. For small models, whose kernels take longer to launch than to run."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """Curriculum: each stage is {task.<field>: value, steps: N, batch_size: B, until: {metric: value}, needed: true}.
    It ends after N steps, or earlier, at the first validation that reaches every metric of ``until``. If its steps do
    not reach them and it is ``needed``, the training ends: harder stages would be lost on it. Default: one stage on the
    task as it is."""
    breakdown: Literal["fail", "test"] = added("fail")
    """What a loss or gradient that is not finite does: it fails the run, or it ends the training, and the run is tested
    with the weights before it, which its report says."""
    valid_every: int = 100
    """Steps between two validations, and between two checkpoints: a killed run loses no more."""
    valid_size: int = 256
    test_size: int | list[int] = 1000
    """Contexts of the test: one number for all values of x, or a list with one for each."""
    eval_batch_size: int = 250
    """Contexts of a batch of a validation and a test. Samples that are drawn are others for batches of another size, so
    that arms with the same number are compared on the same questions. Those that are read in order are in batches of
    the largest divisor of their number up to it: of one, where that is a larger prime."""
    cuts: list[int] = added([])
    """Segment lengths in tokens; default: those of the task. The last one repeats, and 0 is all that is left: [0] reads
    a context in one pass, [200, 1] token by token after the first 200."""
    test_cuts: list[int] = added([])
    """Segment lengths of the test alone; default: ``cuts``."""
    timed_steps: int = added(0)
    """Steps that are timed after the training at every value of the test, for ``report.time: train_tokens_per_s``."""
    timed_contexts: int = added(0)
    """Contexts of a timed step, the same number at every value of the test; 0: as many as have the tokens of a training
    batch."""
    workers: int = 0
    """Processes that draw training batches; 0: the run's own. With ``trainer.accumulate_grad_batches`` only more than
    that many are faster than one, as each draws the whole batch for the parts that it gets."""
    threads: int = 1
    """CPU threads of a run. Part of the key, as the last bits of a sum depend on them."""
    precision: Literal["32-true", "64-true", "bf16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "cuda"] = "cpu"
    trainer: dict[str, Any] = field(default_factory=dict)
    """More arguments of lightning.Trainer: those of ``plan.trainer.FREE`` (accumulate_grad_batches, ...)."""

    def __post_init__(self) -> None:
        named = self.init if isinstance(self.init, dict) else {}
        known = isinstance(self.init, str) or {*named} in ({"decoder", "encoder"}, {"run"})
        if not known or not all(isinstance(name, str) for name in named.values()):
            raise FieldError(
                "init",
                self.init,
                "expected a folder, a name on the hub, {decoder: name, encoder: name}, {run: arm} or "
                "{run: experiment/arm}",
            )
        whole = "run" in named or (isinstance(self.init, str) and self.init)
        if self.steps or not whole:
            at_least(1, self, "steps")
        at_least(1, self, "batch_size", "bptt", "checkpoint_segments", "valid_every", "valid_size", "test_size")
        at_least(1, self, "eval_batch_size", "threads")
        for name in ("lr", "weight_decay", "warmup", "clip_norm", "clip_value", "final_lr", "workers"):
            if not 0 <= getattr(self, name) < math.inf:
                raise FieldError(name, getattr(self, name), "expected a finite number, 0 or more")
        at_least(0, self, "timed_steps", "timed_contexts")
        for name in ("cuts", "test_cuts"):
            check_cuts(name, getattr(self, name))
        if self.timed_contexts and not self.timed_steps:
            raise FieldError("timed_contexts", self.timed_contexts, "expected 0 where timed_steps is 0")
        if self.clip_norm and self.clip_value:
            raise FieldError("clip_value", self.clip_value, "expected 0 where clip_norm is set; choose one")


@dataclass
class ReportConfig:
    """The ``report:`` section of an experiment."""

    x: str = "test_pairs"
    """The x axis: test_<field>, the values that the test varies; the axis of one of the task's curves; or step, the
    validations along the training."""
    y: str = "exact_match"
    """Metric of the figure, and of ``arm[x]`` in ``expect``."""
    x_label: str = ""
    """Words and units of the axis; "" takes them from report.labels.LABELS, or else the name of the field."""
    y_label: str = ""
    log_x: bool = False
    """A logarithmic axis, which begins with a linear part where 0 is on it."""
    log_y: bool = False
    chance: float | None = None
    """y of blind guessing, a horizontal line."""
    floors: dict[str, str] = field(default_factory=dict)
    """Metric of the first arm that the data alone decide, such as a naive forecast's -> words; a grey line each."""
    identity: bool = False
    """Draw the line y = x, on which everything written is kept."""
    state_x: int | str | None = None
    """Draw a second figure, y at this tested value against the floats of state: a tested number, first or last."""
    time: Literal["", "seconds", "train_tokens_per_s"] = ""
    """Add a table and a figure of one of ``TIMES``. Of a claim about times alone, it is the figure of the report."""
    paper_values: str = ""
    """Name of a file of lit_memory/paper_values, without .csv; "" for none."""
    paper_rows: list[str] = field(default_factory=list)
    """Prefixes of "table: condition, metric" ("Fig 2b", "Table 1: QA1") that select rows of that file; default: all."""
    columns: int | None = None
    """Columns of the table: so many values of x at equal distances, with the first and the last; default: all.
    table.csv has all."""
    paper_curves: dict[str, str] = field(default_factory=dict)
    """Arm -> the beginning of "arm: condition" ("MemReasoner:", "RMT (137M): QA1") of the rows that are drawn beside
    it: at the length with which their condition ends ("64k"), or all where the test has a single x."""
    paper_unit: float = 1.0
    """Of the lengths in the paper's conditions, in one unit of x: 512 where x counts segments of 512 tokens, or what
    puts them at the same multiple of the training length."""
    paper_label: str = "the paper's values"
    """The paper's values in the legend."""
    relative_to: str = ""
    """The figure shows by how many per cent y differs from that of this arm, with the same seed; tables have y."""
    curves: bool = False
    """Add a figure of the validations along the training, and a table of the steps to ``threshold``."""
    threshold: float | None = None
    """Value of y for the metric steps_to, the first step that reaches it. Needs x: step or curves."""
    memory: Any = field(default_factory=list)
    """Figures of what the memories do while they read the longest test, a name or a list of ``util.views.VIEWS``; []
    for none. They are measured with the trained weights."""
    caveats: list[str] = field(default_factory=list)
    """What a reader has to know before the verdict, one sentence of Markdown each, shown in the first lines."""
    notes: str = ""
    """Markdown of the section Notes."""

    def __post_init__(self) -> None:
        if isinstance(self.state_x, str) and self.state_x not in ("first", "last"):
            shown = f"{self.state_x!r:.80}"
            raise FieldError("state_x", self.state_x, "expected a tested number without quotes, first or last", shown)
        self.memory = [self.memory] if isinstance(self.memory, str) else self.memory
        if not isinstance(self.memory, list) or len({*map(repr, self.memory)}) < len(self.memory):
            raise FieldError("memory", self.memory, f"expected one of {', '.join(VIEWS)}, or a list of different ones")
        for view in self.memory:
            if not isinstance(view, str) or view not in VIEWS:
                raise FieldError("memory", self.memory, f"no view {view!r:.80}; {nearest(str(view), VIEWS)}")
        if self.columns is not None and self.columns < 2:
            raise FieldError("columns", self.columns, "expected at least 2, or none for all")
        rows = paper_rows(self.paper_values, self.paper_rows)
        for arm, start in self.paper_curves.items():
            if not any(f"{row['arm']}: {row['condition']}".startswith(start) for row in rows):
                known = "; ".join(dict.fromkeys(row["arm"] for row in rows)) or "(no paper_values)"
                expected = f"expected the beginning of 'arm: condition' of a row; arms: {known}"
                raise FieldError(f"paper_curves.{arm}", start, expected)
        if not 0 < self.paper_unit < math.inf:
            raise FieldError("paper_unit", self.paper_unit, "expected a finite number above 0")

    def state_value(self, x_values: Sequence[float]) -> float | None:
        """The tested value that ``state_x`` names. Raises ValueError for one that is not tested."""
        x = self.state_x
        if isinstance(x, str):
            x = x_values[0 if x == "first" else -1]
        if x is not None and x not in x_values:
            tested = ", ".join(map(str, x_values))
            raise FieldError("state_x", x, f"expected one of the tested values {tested}, first or last")
        return x
