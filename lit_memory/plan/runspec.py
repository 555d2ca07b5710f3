"""One run as plain data, and the key that identifies it."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_memory.plan.sections import TrainConfig
from lit_memory.plan.trainer import devices_of
from lit_memory.registry import Source, load_class, provide
from lit_memory.util.fields import added_fields

KEY_VERSION = 2
"""Part of every key; raise it when a change of the code moves the numbers of all models. A model has ``numbers``."""
SECTIONS = ("model", "task", "train")


def key_folder(root: Path, key: str) -> Path:
    """The folder of everything that the runs of a key leave on disk."""
    return root / "checkpoints" / key[:16]


@dataclass(frozen=True)
class RunSpec:
    """One run, fully resolved: plain data, picklable, enough for ``engine.run_one``."""

    experiment: str
    scale: str
    arm: str
    point: str
    """The grid point, "" without a grid."""
    seed: int
    model: dict[str, Any]
    task: dict[str, Any]
    train: dict[str, Any]
    start: "RunSpec | None" = None
    """The trained run whose weights this one starts from (``train.init``)."""
    code: dict[str, dict[str, str]] = field(default_factory=dict)
    """Section -> ``file`` and ``digest`` of the user's code that defines its class; ours is not here."""
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    """Setting -> ``file`` and ``digest`` of the user's file or folder that it names."""

    @cached_property
    def key(self) -> str:
        """Hash of everything that changes the numbers: sections and seed, without names and reports.

        A field declared with ``added`` is left out at the value for what was done before it existed.
        """
        sections = {section: self._keyed(section) for section in SECTIONS}
        if self.start is not None:
            sections["train"]["init"] = {"run": self.start.key}
        content = {"version": KEY_VERSION, **sections, "seed": self.seed}
        if numbers := load_class("model", self.model["name"]).numbers:
            content["numbers"] = numbers
        if self.train["trainer"].get("accumulate_grad_batches", 1) > 1:
            content["batch_size"] = "of an optimizer step"  # it was that of each of the accumulated batches before
        if self.code:
            content["code"] = {section: source["digest"] for section, source in self.code.items()}
        if self.files:
            content["files"] = {setting: source["digest"] for setting, source in self.files.items()}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def provide_code(self) -> None:
        """Register the classes of a user that this run and the one it starts from need, in a process that another one
        started. Raises RegistrationError."""
        for section, source in self.code.items():
            provide(section, getattr(self, section)["name"], Source(Path(source["file"]), source["digest"]))
        if self.start is not None:
            self.start.provide_code()

    def _keyed(self, section: str) -> dict[str, Any]:
        """The settings of a section that belong to the key."""
        values = getattr(self, section)
        cls = TrainConfig if section == "train" else load_class(section, values["name"]).Config
        before = added_fields(cls)
        return {name: value for name, value in values.items() if name not in before or before[name] != value}

    @property
    def devices(self) -> int:
        """Devices that the run takes."""
        return devices_of(self.train["trainer"])

    @property
    def threads(self) -> int:
        """CPU threads that the run takes: ``train.threads`` for every device."""
        return self.train["threads"] * self.devices

    @property
    def name(self) -> str:
        """The name of the run in MLflow and on the terminal."""
        return f"{self.arm}{'-' + self.point if self.point else ''}-s{self.seed}-{self.key[:8]}"

    def folder(self, root: Path) -> Path:
        """The folder of checkpoints, lock and log: one per key, as several experiments may share a run."""
        return key_folder(root, self.key)

    @property
    def stages(self) -> list[dict[str, Any]]:
        """Every stage with its steps, batch size, ``until``, whether it is ``needed`` and the task's fields that it
        changes; [] without training."""
        stages = self.train["stages"] or [{}] * (self.train["steps"] > 0)
        return [
            {
                "steps": s.get("steps", self.train["steps"]),
                "until": s.get("until", {}),
                "needed": s.get("needed", False),
                "batch_size": s.get("batch_size", self.train["batch_size"]),
                "task": {k.removeprefix("task."): v for k, v in s.items() if k.startswith("task.")},
            }
            for s in stages
        ]

    @property
    def validations(self) -> list[int]:
        """Steps after which the run validates, if no stage ends early."""
        found, first = [], 0
        for stage in self.stages:
            end = first + stage["steps"]
            found += [*range(first + self.train["valid_every"], end, self.train["valid_every"]), end]
            first = end
        return found

    @property
    def trained(self) -> "RunSpec":
        """The run that trains the weights: this one, or the one it starts from where this one trains nothing."""
        return self if self.stages or self.start is None else self.start

    def config(self) -> dict[str, Any]:
        """Everything as nested plain data."""
        return asdict(self)
