"""What papers print: the files, and how a report shows them."""

import csv
import itertools
import re
from pathlib import Path

import pytest

from lit_memory.plan.paper import PAPER_VALUES, paper_rows
from lit_memory.report.paper import IMAGE, section

SHARED = Path(__file__).parents[2] / "shared" / "spec" / "paper_values"


def test_paper_values_are_those_of_the_specification():
    """All but the notes, which say here what a number is, and not where somebody found it."""
    if not SHARED.is_dir():
        pytest.skip("../shared is absent")
    for path in PAPER_VALUES.glob("*.csv"):
        ours, theirs = (
            list(csv.DictReader(file.read_text(encoding="utf-8").splitlines())) for file in (path, SHARED / path.name)
        )
        assert ours and [row | {"note": ""} for row in ours] == [row | {"note": ""} for row in theirs]


@pytest.mark.parametrize("path", sorted(PAPER_VALUES.glob("*.csv")), ids=lambda path: path.stem)
def test_notes_say_what_a_number_is(path):
    """Not in whose files it was found; and what is printed as an image has none."""
    rows = paper_rows(path.stem)
    assert not [
        row["note"]
        for row in rows
        if re.search(r"\bseed \d|read_file|GitHub|text copy|this machine|dash in", row["note"])
    ]
    assert not [row for row in rows if row["value"] and row["note"].startswith(IMAGE)]


def paper_page(monkeypatch, tmp_path, rows):
    """What a report shows of these rows: table, arm, condition, metric, value, std, note."""
    with (tmp_path / "made.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["table", "arm", "condition", "metric", "value", "std", "note"], *rows])
    monkeypatch.setattr("lit_memory.plan.paper.PAPER_VALUES", tmp_path)
    lines = section(paper_rows("made")).splitlines()
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] if line.startswith("|") else line
        for line in lines
        if line and "---" not in line
    ]


def test_the_papers_tables_have_the_layout_of_ours(monkeypatch, tmp_path):
    rows = [
        ["Table 1", "a", "QA1; 1k", "accuracy %", "99", "", ""],
        ["Table 1", "a", "QA1; 2k", "accuracy %", "98", "0.5", ""],
        ["Table 1", "b", "QA1; 1k", "accuracy %", "", "", ""],
        ["Table 1", "b", "QA1; 2k", "accuracy %", "7", "", "the best of three"],
        ["text", "a", "QA1; 9k", "accuracy %", "50", "", "roughly"],
    ]
    grid = ["Table 1, accuracy %; columns: QA1", ["model", "1k", "2k"], ["a", "99", "98 ± 0.5"], ["b", "–", "7"]]
    rest = [["where", "model", "condition", "metric", "value"], ["text", "a", "QA1; 9k", "accuracy %", "50"]]
    assert paper_page(monkeypatch, tmp_path, rows) == [
        *grid,
        *rest,
        "- b QA1; 2k: the best of three.",
        "- text: roughly.",
    ]
    rows = [
        ["Table 5", arm, "400M", metric, value, "", "all alike"]
        for arm, metric, value in zip("aabb", ["ppl", "acc"] * 2, "3456", strict=True)
    ]
    assert paper_page(monkeypatch, tmp_path, rows) == [
        "Table 5; columns: 400M",
        ["model", "ppl", "acc"],
        ["a", "3", "4"],
        ["b", "5", "6"],
        "- all alike.",
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [("a", "x"), ("b", "y")],
        [("a", "x"), ("a", "y")],
        [("a", "x"), ("b", "x")],
        [*itertools.product("ab", "xy"), ("a", "x")],
    ],
)
def test_what_is_no_grid_stays_a_list(monkeypatch, tmp_path, rows):
    found = paper_page(
        monkeypatch, tmp_path, [["Table 1", arm, condition, "acc", "1", "", ""] for arm, condition in rows]
    )
    assert found == [
        ["where", "model", "condition", "metric", "value"],
        *(["Table 1", arm, condition, "acc", "1"] for arm, condition in rows),
    ]


def test_an_image_is_told_once(monkeypatch, tmp_path):
    assert paper_page(monkeypatch, tmp_path, [["Table 3", arm, "all", "", "", "", IMAGE] for arm in "abc"]) == [
        "- Table 3: printed only as an image."
    ]
