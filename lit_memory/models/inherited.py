"""The weights of one model in another: what a run takes over from the run that it starts from.

A model is a set of parts: decoder, memory, encoder and so on, and where the layers of a decoder hold a block beside a
memory of their own, the parts of that memory. A part that both models have is taken over whole; one that only one of
them has stays as it was drawn, or is left behind. So a plain decoder becomes that of ARMT, which gets a fresh memory.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lit_memory.util.checks import preview

SAME = ("family", "layers", "width", "heads", "vocab_size", "norm_eps", "rotary_base")
SAME += ("rotary_bases", "query_scale", "score_cap", "logit_cap")
"""Fields in which a model and its initial weights must agree, although the shapes may fit without."""
SAME_WHERE_BOTH = {"rotary_dims": "rotary_fraction", "encoder_size": "encoder_heads"}
SAME_WHERE_BOTH |= {name: name for name in ("memory_activation", "memory_residual", "output_gate", "fusion")}
"""As ``SAME``, of parts that one of the two may not have; and the field that sets it."""
LAYER = re.compile(r"(decoder\.layers\.\d+\.)(\w+)\.?")


def inherited(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights of a model: those of another one, and its own in parts that the other one does not have.

    own, theirs: the models' ``state_dict``. Raises ValueError where a part that both have differs.
    """
    mine, given = parts_of(own), parts_of(theirs)
    common = {part for part, _ in mine.values()} & {part for part, _ in given.values()}
    needed = {name: own[full] for name, (part, full) in mine.items() if part in common}
    found = {name: theirs[full] for name, (part, full) in given.items() if part in common}
    for problem, wrong in (("lacks", needed.keys() - found.keys()), ("has besides", found.keys() - needed.keys())):
        if wrong:
            raise ValueError(f"it {problem} {preview(wrong)}; expected the same weights in {preview(common)}")
    for name, weight in needed.items():
        if found[name].shape != weight.shape:
            raise ValueError(f"its {name} has shape {(*found[name].shape,)}; expected {(*weight.shape,)}")
    return {full: found.get(name, own[full]) for name, (_, full) in mine.items()}


def parts_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Name of a weight, as in a decoder whose layers are plain blocks -> its part and its own name."""
    matches = {name: LAYER.match(name) for name in names}
    wrapped = {match[1] for match in matches.values() if match and match[2] == "block"}
    found = {}
    for name, match in matches.items():
        part, plain = name.partition(".")[0], name
        if match and match[2] == "block":
            plain = match[1] + name[match.end() :]
        elif match and match[1] in wrapped:
            part = match[2]
        found[plain] = part, name
    return found


def check_same(config: Any, theirs: Any) -> None:
    """Raise ValueError where two configurations differ in a field of ``SAME`` or ``SAME_WHERE_BOTH``."""
    both = [name for name in SAME_WHERE_BOTH if hasattr(theirs, name) and hasattr(config, name)]
    for name in (*SAME, *both):
        found, wanted = getattr(theirs, name, None), getattr(config, name, None)
        if found != wanted:
            problem = f"its {name} is {found!r}, that of the model {wanted!r}"
            raise ValueError(f"{problem}; expected the same, set model.{SAME_WHERE_BOTH.get(name, name)}")


def check_inherited(model: Any, start: Any) -> None:
    """Raise ValueError where a model cannot take over the weights of another one. Both may lie on the device "meta"."""
    check_same(model.config, start.config)
    inherited(model.state_dict(), start.state_dict())
