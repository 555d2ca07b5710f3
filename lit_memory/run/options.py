"""What the command line asks for."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lit_memory.plan.merging import parse_override


@dataclass(frozen=True)
class Options:
    """The parsed command line; ``cli.parse_options`` makes it, and nothing changes it."""

    experiment: str = ""
    """The file of the experiment; "" where ``list`` needs none."""
    overrides: tuple[str, ...] = ()
    """Settings of all arms, as ``key=value``."""
    scale: str | None = None
    """None is the experiment's first scale."""
    arms: tuple[str, ...] | None = None
    """None is all arms."""
    seeds: tuple[str, ...] | None = None
    """None is all seeds."""
    jobs: int | None = None
    """Runs at a time. None is as many as the cores allow."""
    root: str | None = None
    """None is ``$LIT_MEMORY_ROOT`` or the project's folder."""
    dry_run: bool = False
    report: bool = False
    """Train nothing; draw the report of what is finished."""
    fresh: bool = False
    """Train again what is finished."""
    list: bool = False

    @cached_property
    def changes(self) -> dict[str, Any]:
        """The overrides as dotted keys and values. Raises ConfigError."""
        return dict(map(parse_override, self.overrides))
