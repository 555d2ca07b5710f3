"""The shell's Tab: what argcomplete would be told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_memory.run.completion import commands, described
from lit_memory.run.options import parser

ROOT = Path(__file__).parents[1]
argcomplete = pytest.importorskip("argcomplete", reason="needs the extra completion")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("lit-memory re", ["report", "redraw"]),
        ("lit-memory run armt_ablation_gamma_", ["armt_ablation_gamma_detach", "armt_ablation_gamma_robust"]),
        ("lit-memory report larimar_co", ["larimar_cost"]),
        ("lit-memory run armt_ablation_gamma --scale p", ["paper"]),
        ("run.py armt_ablation_gamma --sc", ["--scale"]),
        ("run.py armt_ablation_gamma --launcher s", ["slurm"]),
        ("run.py titans_chunk_gates --seeds ", ["0", "1", "2"]),
        ("run.py armt_ablation_gamma train.lr", ["train.lr="]),
        ("run.py no_such_experiment --scale ", []),
    ],
)
def test_what_is_offered(line, found):
    """By the part of argcomplete behind its process: that takes file descriptors 8 and 9, which are pytest's here."""
    *words, begun = line.split(" ")
    p = commands() if words[0] == "lit-memory" else described(parser())
    finder = argcomplete.CompletionFinder(p, always_complete_options="long")
    assert [text.strip() for text in finder._get_completions(words, begun, "", None)] == found


def test_the_shell_asks_a_process(tmp_path):
    """As bash does it, with no word of ours on its terminal."""
    line, answer = "lit-memory run armt_ablation_gamma --arms ", tmp_path / "answer"
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "_ARGCOMPLETE": "1"}
    asked |= {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    done = subprocess.run(
        [sys.executable, "-c", "from lit_memory.__main__ import console; console()"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert {text.strip() for text in answer.read_text().split("\n")} == {"gamma", "no_gamma"}
    assert done.returncode == 0 and not done.stdout and not done.stderr
