"""The command line: its flags, and what they ask for."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.merging import parse_override
from lit_memory.report.catalogue import find_experiment
from lit_memory.util.checks import nearest
from lit_memory.util.streams import Lenient


@dataclass(frozen=True)
class Options:
    """The parsed command line; ``parse_options`` makes it, and nothing changes it."""

    experiment: str = ""
    """The file of the experiment; "" where ``list`` and ``gallery`` need none."""
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
    launcher: str = "local"
    """Where runs are started: local, slurm or ray."""
    launch: str | None = None
    """A YAML file with the launcher's settings."""
    detach: bool = False
    """Hand the runs to the cluster and do not wait."""
    cancel: bool = False
    """End the runs that the cluster has."""
    root: str | None = None
    """None is ``$LIT_MEMORY_ROOT`` or the project's folder."""
    bundle: str | None = None
    """A file of finished runs, which are taken first; all are written to it in the end."""
    dry_run: bool = False
    report: bool = False
    """Train nothing; draw the report of what is finished."""
    fresh: bool = False
    """Train again what is finished."""
    list: bool = False
    gallery: bool = False
    """Write reports/README.md and reports/index.html from the reports of the root."""
    new: str = ""
    """Write the template of an experiment with this name."""
    redraw: tuple[Path, ...] | None = None
    """The experiments whose reports are drawn again, () for all; None is not to do that."""

    @cached_property
    def changes(self) -> dict[str, Any]:
        """The overrides as dotted keys and values. Raises ConfigError."""
        found: dict[str, Any] = {}
        for key, value in map(parse_override, self.overrides):
            if key.removesuffix("?") in (other.removesuffix("?") for other in found):
                raise ConfigError("command line", key, "said twice; expected once")
            found[key] = value
        return found

    @property
    def changed(self) -> set[str]:
        """The settings that the overrides change, without the ? of ``model.memory_dim?``. Raises ConfigError."""
        return {key.removesuffix("?") for key in self.changes}

    def check_trains_nothing(self) -> None:
        """Raise ConfigError for what only makes sense where something is trained."""
        training = {"key=value": self.overrides, "--arms": self.arms, "--seeds": self.seeds, "--fresh": self.fresh}
        training |= {"--detach": self.detach, "--cancel": self.cancel, "--bundle": self.bundle}
        training |= {"--jobs": self.jobs, "--launcher": self.launcher, "--launch": self.launch}
        for flag, value in training.items():
            if _is_said(flag, value):
                message = f"{self.experiment} reads the reports of other experiments and trains nothing; leave it out"
                raise ConfigError("command line", flag, message)

    @property
    def again(self) -> str:
        """What goes on with the runs of this command: with ``--fresh``, it would begin anew."""
        return "the same command without --fresh" if self.fresh else "the same command"

    @property
    def tags(self) -> dict[str, str]:
        """Tags of new runs."""
        return {"modified": " ".join(self.overrides)} if self.overrides else {}


FLAGS: dict[str, dict[str, Any]] = {
    "--scale": {"metavar": "NAME", "help": "one of the experiment's scales (default: its first)"},
    "--arms": {"metavar": "A,B", "help": "run these arms only"},
    "--seeds": {"metavar": "0,1", "help": "run these seeds only"},
    "--jobs": {"metavar": "N", "type": int, "help": "runs at a time (default: as many as the cores allow)"},
    "--launcher": {"metavar": "NAME", "default": "local", "help": "where runs are started: local, slurm or ray"},
    "--launch": {"metavar": "FILE.yaml", "help": "the launcher's settings, such as 'slurm: {partition: gpu}'"},
    "--root": {
        "metavar": "DIR",
        "help": "where checkpoints/, reports/ and mlflow.db go (default: $LIT_MEMORY_ROOT or the project's folder)",
    },
    "--bundle": {"metavar": "FILE.zip", "help": "take the finished runs of this file, and write all to it in the end"},
}
SWITCHES = {
    "--detach": "hand the runs to the cluster and return; the same command says where they are, and reports in the end",
    "--cancel": "end the runs that the cluster still has",
    "--dry-run": "print the plan and do nothing",
    "--report": "draw the report of what is finished and train nothing",
    "--fresh": "train again what is finished; the old runs stay in MLflow, retired",
    "--redraw": "draw the reports of experiments (default: the project's) again from their folders, by today's YAMLs",
    "--list": "print the project's experiments with their verdicts and do nothing",
    "--gallery": "write reports/README.md and reports/index.html from all reports and do nothing else",
}


WORDS: dict[str, tuple[str, str]] = {
    "run": ("", "train, test and report an experiment: EXPERIMENT [key=value ...] [flags], see lit-memory run --help"),
    "list": ("--list", "the experiments with their papers and verdicts"),
    "report": ("--report", "draw the report of what is finished of an EXPERIMENT"),
    "gallery": ("--gallery", "write one page of all reports"),
    "redraw": ("--redraw", "draw reports again from their folders, by today's YAMLs"),
    "new": ("--new", "write NAME.yaml, an experiment to start from"),
}
"""First word of ``lit-memory`` -> the flag of the command that it stands for, and what it does."""


class Parser(argparse.ArgumentParser):
    """Errors as ConfigErrors: one line, exit code 2. A help that cannot be written is lost, as all output is."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("command line", "", f"{message}; see --help")

    def print_help(self, file: Any = None) -> None:
        super().print_help(Lenient(file or sys.stdout))  # Python 3.11.2 does not catch the error, 3.11.5 does


def flags_of(argv: Sequence[str]) -> list[str]:
    """The flags of a command line that begins with one of ``WORDS``. Raises ConfigError; SystemExit after the help."""
    word, *rest = argv or ["--help"]
    if word in ("-h", "--help"):
        p = Parser(prog="lit-memory", description="Experiments on long-context memories: one YAML, one verdict.")
        commands = p.add_subparsers(title="commands", metavar="COMMAND")
        for name, (_, text) in WORDS.items():
            commands.add_parser(name, help=text)
        p.print_help()
        raise SystemExit(0)
    if word not in WORDS:
        raise ConfigError("command line", word, f"unknown command; {nearest(word, WORDS)}")
    return [flag for flag in (WORDS[word][0],) if flag] + rest


def parser() -> Parser:
    """The command's flags (frozen by a test)."""
    p = Parser(
        prog="run.py",
        description="Train, evaluate and compare with the paper: one YAML, one table or figure.",
        allow_abbrev=False,
    )
    experiment = "a file, or the name of one of the project's experiments"
    p.add_argument("experiment", metavar="EXPERIMENT.yaml", nargs="?", help=experiment)
    p.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all arms, for example train.lr=1e-3")
    for flag, settings in FLAGS.items():
        p.add_argument(flag, **settings)
    for flag, text in SWITCHES.items():
        p.add_argument(flag, action="store_true", help=text)
    p.add_argument("--new", metavar="NAME", help="write NAME.yaml, an experiment to start from")
    return p


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Options of a command line, ``sys.argv`` by default. Raises ConfigError; SystemExit after ``--help``."""
    given = vars(parser().parse_intermixed_args(argv))
    if given["new"] is not None:
        _check_alone(given, "new", "writes a template")
        if given["new"] == "":
            raise ConfigError("command line", "--new", "'': expected a name")
        return Options(new=given["new"])
    if given["list"]:
        _check_alone(given, "list", "shows all experiments", "experiment")
        return Options(list=True)
    if given["gallery"]:
        _check_alone(given, "gallery", "shows all reports", "root")
        return Options(gallery=True, root=given["root"])
    if given["redraw"]:
        _check_alone(given, "redraw", "draws the reports of all scales again", "experiment", "overrides", "root")
        names = [given["experiment"], *given["overrides"]] if given["experiment"] else []
        return Options(redraw=tuple(map(find_experiment, names)), root=given["root"])
    if given["experiment"] is None:
        raise ConfigError("command line", "EXPERIMENT.yaml", "missing; expected a file, or a name that --list shows")
    for name in ("report", "cancel"):
        if given["fresh"] and given[name]:
            raise ConfigError("command line", "--fresh", f"trains again, and --{name} trains nothing; leave one out")
    if given["detach"] and given["cancel"]:
        raise ConfigError("command line", "--detach", "hands runs over, and --cancel ends them; leave one out")
    if given["bundle"] == "":
        raise ConfigError("command line", "--bundle", "'': expected a file")
    given["experiment"] = short(find_experiment(given["experiment"]))
    given |= {"overrides": tuple(given["overrides"]), "redraw": None, "new": ""}
    for name in ("arms", "seeds"):
        given[name] = None if given[name] is None else tuple(given[name].split(","))
    return Options(**given)


def _is_said(flag: str, value: Any) -> bool:
    """Whether a command line has a flag, 0 and "" included."""
    if flag.endswith("launcher"):
        return value != "local"
    return not (value is None or value is False or value in ((), []))


def _check_alone(given: Mapping[str, Any], flag: str, does: str, *beside: str) -> None:
    """Raise ConfigError for what a command line has beside a flag that stands alone. beside: what it goes with."""
    for name, value in given.items():
        if name not in (flag, *beside) and _is_said(name, value):
            what = str(value) if name == "experiment" else f"--{name.replace('_', '-')}"
            raise ConfigError("command line", f"--{flag}", f"{does}, so leave {what} out")


def short(path: Path) -> str:
    """A path as one would type it: relative if it lies below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # it lies elsewhere, or there is no working directory any more
        return str(path)
