"""What a shell offers after Tab, by argcomplete: experiments by name or file, and the scales, arms, seeds and settings
of the one that was typed. Files are read as YAML alone: no code of a user runs."""

import argparse
from collections.abc import Mapping
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.reading import extended
from lit_memory.report.catalogue import experiment_names, find_experiment
from lit_memory.run.options import WORDS, Parser, parser


def complete(words: bool) -> None:
    """Answer the shell and end the process. words: the command is ``lit-memory``, which begins with one of ``WORDS``.
    Raises ImportError without argcomplete."""
    import argcomplete

    argcomplete.autocomplete(commands() if words else described(parser()), always_complete_options="long")


def commands() -> Parser:
    """The parser of ``lit-memory``, for the shell alone: a word, and the flags that go with it."""
    p = Parser(prog="lit-memory")
    words = p.add_subparsers()
    for word, (_, text) in WORDS.items():
        takes = [described(parser())] if word in ("run", "report") else []
        words.add_parser(word, help=text, parents=takes, add_help=not takes)
    return p


def described(p: Parser) -> Parser:
    """The parser with what each of its arguments may be."""
    completers = {
        "experiment": lambda **_: experiment_names(),
        "overrides": lambda parsed_args, **_: [f"{key}=" for key in settings(tree_of(parsed_args))],
        "scale": lambda parsed_args, **_: list(tree_of(parsed_args).get("scales", {})),
        "arms": lambda parsed_args, **_: list(tree_of(parsed_args).get("arms", {})),
        "seeds": lambda parsed_args, **_: [str(seed) for seed in tree_of(parsed_args).get("seeds", [0])],
        "launcher": lambda **_: ["local", "slurm", "ray"],
    }
    for action in p._actions:
        if action.dest in completers:
            action.completer = completers[action.dest]  # pyright: ignore[reportAttributeAccessIssue] argcomplete's name
    return p


def tree_of(given: argparse.Namespace) -> Mapping[str, Any]:
    """The content of the experiment that was typed; {} where there is none that can be read."""
    try:
        return extended(find_experiment(given.experiment or ""))
    except (ConfigError, OSError):
        return {}


def settings(tree: Mapping[str, Any]) -> list[str]:
    """Dotted keys that the file sets in any of its sections."""
    found = {f"{section}.{key}" for section, values in tree.get("base", {}).items() for key in values}
    for layer in [*tree.get("scales", {}).values(), *tree.get("arms", {}).values()]:
        found |= {key for key in layer or {} if "." in key}
    return sorted(found)
