"""The gallery: cards, leaderboard, README.md, and the one file index.html, also in a browser."""

import csv
import dataclasses
import hashlib
import io
import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from browser import absent, browser
from PIL import Image, ImageDraw
from report_data import XS, make_frame, make_plan

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import load
from lit_memory.plan.sections import ReportConfig
from lit_memory.report.cards import read_cards
from lit_memory.report.charts import POINTS, charts
from lit_memory.report.gallery import ASSETS, LIBRARY, embedded, write_gallery
from lit_memory.report.labels import mean_interval
from lit_memory.report.leaderboard import board, board_charts
from lit_memory.report.markdown import markdown, tables
from lit_memory.report.render import render
from lit_memory.report.results import Results
from lit_memory.report.style import ARCHITECTURES
from lit_memory.util.provenance import PROJECT

ARMS = ["armt", "wide", "rmt"]
MODELS = {"armt": "`model.name: armt`", "wide": "`model.name: armt, model.width: 256`", "rmt": "`model.name: rmt`"}
CONFIG = ReportConfig(chance=0.0625, state_x=500, x_label="pairs", log_x=True, caveats=["`1 < 2` first"])
CLAIM = 'x < 1 & "y" </script><img src=x onerror=alert(1)> {{ 7 * 7 }}'
PAPER = {"title": "A paper", "arxiv": "2407.04841", "item": "Figure 1", "claim": CLAIM}


def png(width=140, height=90):
    image, file = Image.new("RGB", (width, height), "white"), io.BytesIO()
    ImageDraw.Draw(image).line((0, 0, width, height), fill="#0072B2")
    image.save(file, "PNG")
    return file.getvalue()


def write_report(folder, experiment="armt_like", keys=("",) * 9, **changes):
    """The report of three arms of two architectures; the state of the last one grows. keys: of its nine runs."""
    sizes = {arm: {"parameters": 10, "state_floats": floats} for arm, floats in zip(ARMS, (64, 128, 0), strict=True)}
    sizes["rmt"] |= {"state_growth": 2, "growth_unit": "segment", "segments": 500}
    runs = [{"arm": arm, "seed": s, "seconds": 90.0, **sizes[arm]} for arm in ARMS for s in (0, 1, 2)]
    runs = [{**run, "key": key} for run, key in zip(runs, keys, strict=True)]
    fields = {"experiment": experiment, "paper": PAPER, "settings": MODELS, "runs": runs, "command": "python run.py x"}
    fields |= {"models": {"armt": "armt", "wide": "armt", "rmt": "rmt"}}
    fields |= {"title": f"Title of {experiment}", "evidence": "toy", "labels": {"wide": "ARMT, wide"}} | changes
    expect = ["armt[200] - rmt[200] > 0.1"]
    frame = make_frame(arms=ARMS, value=lambda arm, seed, x: 0.9 - 0.01 * seed - ARMS.index(arm) * x / 2000)
    render(make_plan(arms=ARMS, config=CONFIG, expect=expect, **fields), frame, folder)


def write_marks(folder):
    """A summary of marks: no arms, no runs."""
    folder.mkdir(parents=True)
    marks = [["ability", "ARMT"], ["Memory", "++ (+)"]]
    (folder / "table.md").write_text(f"Marks\n\n{markdown(marks[0], marks[1:])}")
    (folder / "table.csv").write_text("ability,model,measured,paper\nMemory,ARMT,++,+\n")
    page = "# marks\n\n**NOT REPRODUCED** at scale cpu\n\n```bash\npython run.py experiments/marks.yaml\n```\n"
    (folder / "README.md").write_text(page)
    verdict = {"experiment": "marks", "scale": "", "paper": PAPER, "verdict": "NOT REPRODUCED", "missing": []}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    (folder / "figure.png").write_bytes(png())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A root with a report, one of another scale, one without words for anything, a summary of marks, and two that are
    left out."""
    root = tmp_path_factory.mktemp("gallery")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_memory.report.render.draw", lambda *args: {"figure.png": png()})
        for name in ("new", "new/gpu", "new/cpu-modified-abcdef", "new/gpu-incomplete"):
            write_report(root / "reports" / name, experiment=name.partition("/")[0], scale=name[4:7] or "cpu")
        write_report(root / "reports" / "plain", experiment="plain", title="", labels={}, evidence="", train_x=None)
    write_marks(root / "reports" / "marks")
    return root


@pytest.fixture(scope="module")
def cards(root):
    return {card.name: card for card in read_cards(root / "reports", pytest.fail)}


@pytest.fixture(scope="module")
def written(root):
    """The gallery's files: name -> text."""
    _, paths = write_gallery(root, pytest.fail)
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}


def test_cards(cards):
    assert list(cards) == ["marks", "new", "new/gpu", "plain"]
    assert [cards[name].title for name in ("new", "new/gpu")] == ["Title of new", "Title of new · scale gpu"]
    new = cards["new"]
    assert (new.title, new.verdict, new.evidence, new.seeds, new.minutes) == (
        "Title of new",
        "REPRODUCED",
        "toy",
        3,
        13.5,
    )
    assert new.command == "python run.py x" and new.lines[0]["line"] == "armt[200] - rmt[200] > 0.1"
    assert new.exploratory and not cards["marks"].exploratory
    assert "exploratory (3 seeds)" in new.judged and (new.figure.width, new.figure.height) == (140, 90)
    assert {"new", "rmt", "toy", "figure"} <= set(re.findall(r"\w+", new.words))
    assert cards["plain"].title == "plain" and cards["plain"].evidence == "not stated"
    marks = cards["marks"]
    assert marks.results is None and marks.seeds is None and marks.minutes is None
    assert marks.tables == [[["ability", "ARMT"], ["Memory", "++ (+)"]]]


def test_points_are_those_of_the_table(root, cards):
    figure, state = charts(cards["new"].results)
    shown = {"armt": "armt", "ARMT, wide": "wide", "rmt": "rmt"}
    for row in csv.DictReader((root / "reports/new/table.csv").read_text().splitlines()):
        series = next(s for s in figure["series"] if shown[s["name"]] == row["arm"])
        i = XS.index(int(row["x"]))
        assert (
            series["points"][i][1:5] == [pytest.approx(float(row[of]), abs=1e-6) for of in ("mean", "std")] + [None] * 2
        )
        assert [own[i] for own in series["seeds"]] == pytest.approx([float(row[f"seed_{s}"]) for s in (0, 1, 2)])
    assert [tick[1] for tick in figure["ticks"]] == ["50", "100", "200", "500"] and figure["share"]
    assert [guide["name"] for guide in figure["guides"]] == ["chance (0.0625)", "trained on up to 50"]
    gaps = [b[0] - a[0] for a, b in zip(figure["ticks"], figure["ticks"][1:], strict=False)]
    assert gaps[0] == pytest.approx(gaps[1]) and gaps[2] > gaps[1]  # a logarithmic axis
    assert [s["points"][0][-1] for s in state["series"]] == ["64 floats", "128 floats", "1,000 floats"]


@pytest.mark.parametrize("changed", [{"config": ReportConfig(x="step", y="loss")}, {"config": ReportConfig(y="loss")}])
def test_other_figures(tmp_path, monkeypatch, changed):
    """A seed or a result that is missing, one x alone, and a metric that is no share."""
    monkeypatch.setattr("lit_memory.report.render.draw", lambda *args: {"figure.png": png()})
    frame = make_frame(xs=[50], metric="loss")
    frame = frame[(frame.arm == "gamma") & (frame.seed > 0)]
    plan = make_plan(xs=[50], expect=[], models={"gamma": "armt", "no_gamma": "armt"}, **changed)
    render(plan, frame, tmp_path / "reports" / "x")
    (card,) = read_cards(tmp_path / "reports", pytest.fail)
    dots = charts(card.results)[0]
    assert [len(s["points"]) for s in dots["series"]] == [1, 0] and not dots["share"]
    assert dots["series"][0]["seeds"] == [[None], [0.991], [0.992]]
    _, (row,) = board([card])
    assert row.metric == "loss (nats per token) (less is better)" and row.value("armt") == "0.992"
    assert board_charts([row])[0]["series"] == []
    write_gallery(tmp_path, pytest.fail)


def results(config=CONFIG, seeds=6, **validations):
    """Of two arms, in memory."""
    models = {"gamma": "armt", "no_gamma": "armt"}
    plan = make_plan(seeds=list(range(seeds)), config=config, expect=[], models=models)
    return dataclasses.replace(Results.from_frame(plan, make_frame(seeds=plan.seeds)), **validations)


def test_every_architecture_has_a_point():
    assert {marker for _, marker, _ in ARCHITECTURES.values()} <= POINTS.keys()


def test_an_interval_where_there_are_enough_seeds():
    figure, state = charts(results())
    middle, low, high = (figure["series"][1]["points"][2][i] for i in (1, 3, 4))
    assert [low, high] == pytest.approx(mean_interval("exact_match", [30 / 200 + 0.01 * seed for seed in range(6)]))
    assert low < middle < high and state["series"][1]["points"][0][3] is not None
    assert charts(results(seeds=4))[0]["series"][1]["points"][2][3:5] == [None, None]


def test_the_figure_is_that_of_the_picture():
    """Relative to an arm where the picture is; the paper's points; times; the training of every run."""
    relative, *_ = charts(results(ReportConfig(relative_to="gamma")))
    assert {point[1] for point in relative["series"][0]["points"]} == {0} and "difference from gamma" in relative["y"]
    assert not relative["share"] and relative["guides"] == [{"name": "trained on up to 50", "x": 50}]
    more = {"floors": {"capacity": "a naive forecast", "loss": "of no run"}, "curves": True}
    kept = ReportConfig(y="capacity", identity=True, paper_values="armt_text_and_figures", time="seconds", **more)
    along = {("gamma", "loss", step, 0): 1 / step for step in (100.0, 200.0)}
    cells = {("gamma", metric, x, 0): x for metric in ("capacity", "seconds") for x in map(float, XS)}
    figure, _, time, training = charts(results(kept, cells=cells, validations=along))
    names = ["trained on up to 50", "a naive forecast", "all kept (y = x)"]
    assert [guide["name"] for guide in figure["guides"]] == names
    assert figure["guides"][1]["points"] == [[x, x] for x in XS] and len(time["guides"]) == 0
    assert time["log"] and time["series"][0]["points"][-1][1] == 500 and time["name"] == "Time"
    (run,) = training["series"]
    assert (run["name"], run["group"], [point[:2] for point in run["points"]]) == (
        "gamma, seed 0",
        "gamma",
        [[100, 0.01], [200, 0.005]],
    )
    assert training["y"] == "loss (nats per token) on validation data"


def test_leaderboard(cards):
    names, rows = board(list(cards.values()))
    assert names == ["armt", "rmt"] and [row.card.name for row in rows] == ["new", "new/gpu", "plain"]
    row = rows[0]
    assert row.arms == {"armt": ["armt", "wide"], "rmt": ["rmt"]}
    assert row.value("rmt") == "0.840 → 0.390" and row.value("armt") == "0.865 to 0.890 → 0.640 to 0.890"
    assert row.state("armt") == "64 to 128" and row.value("mamba") == ""
    state, length = board_charts(rows)
    assert len(state["series"]) == 9 and {s["group"] for s in state["series"]} == {"armt", "rmt"}
    assert {s["card"] for s in length["series"]} == {"new", "new-gpu"}  # the other does not know its training
    assert [point[0] for point in length["series"][0]["points"]] == pytest.approx([0, 0.30103, 0.60206, 1], abs=1e-5)
    assert "toy, 3 seeds" in state["series"][0]["name"]
    assert len({(s["group"], s["look"]["color"]) for s in state["series"]}) == 2


class Links(HTMLParser):
    """What a page could load, and where it leads."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.links, self.tags, self.ids, self.unnamed = [], [], set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.add(tag)
        self.ids += [found["id"]] if "id" in found else []
        loads = [found[name] for name in ("src", "srcset", "data", "poster", "action", "background") if name in found]
        self.loaded += loads + ([found["href"]] if tag in ("link", "use", "base") else [])
        if tag == "a":
            self.links.append(found["href"])
        if tag == "img" and not found.get("alt"):
            self.unnamed.append(found)
        assert not any(name.startswith("on") for name in found), found


def test_the_page_loads_nothing(root, written):
    page = Links(written["index.html"])
    assert page.loaded and all(url.startswith("data:") for url in page.loaded)
    assert "default-src 'none'" in written["index.html"] and "sourceMappingURL" not in written["index.html"]
    assert not re.search(r"url\(|@import", (ASSETS / "gallery.css").read_text())
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|https?:", (ASSETS / "gallery.js").read_text())
    away = [link for link in page.links if re.match(r"\w+:", link)]
    assert {*away} == {"https://arxiv.org/abs/2407.04841"}
    inside = [link for link in page.links if link not in away]
    assert all(link[1:] in page.ids if link[0] == "#" else (root / "reports" / link).is_file() for link in inside)
    assert len(page.ids) == len(set(page.ids)) and not page.unnamed


def test_text_stays_text(written):
    """Words of a claim are shown as they are: they end no element, and are no template."""
    assert "<img src=x" not in written["index.html"] and "&lt;/script&gt;&lt;img src=x" in written["index.html"]
    assert "{{ 7 * 7 }}" in written["index.html"] and "<code>1 &lt; 2</code> first" in written["index.html"]
    assert written["index.html"].count("</script>") == 3
    text = embedded({"name": "</script><!--\u2028"})
    assert json.loads(text) == {"name": "</script><!--\u2028"} and not {"<", "\u2028"} & set(text)


def test_every_value_of_the_leaderboard_has_its_report(written):
    header, *rows = next(table for table in tables(written["README.md"]) if table[0][0] == "report")
    assert header == ["report", "metric", "tested", "armt", "rmt"] and len(rows) == 3
    for row in rows:
        link = re.search(r"\((\S+)\)", row[0])[1]
        assert all(cell.startswith("[0.") and f"]({link})" in cell for cell in row[3:])
        assert re.search("(toy|not stated), seeds: 3", row[0])


def test_the_readme_counts(root, written):
    text = written["README.md"]
    counts = tables(text)[0]
    assert counts[1:] == [["A paper", "3", "1", "0", "0", "4"], ["all", "3", "1", "0", "0", "4"]]
    assert "| [Title of new](new/README.md)" in text and "| REPRODUCED, exploratory " in text and " 14 " in text
    assert all((root / "reports" / link).is_file() for link in re.findall(r"\]\((?!http)(\S+?)\)", text))


def test_the_same_reports_give_the_same_bytes(root, written):
    before = {path: path.read_bytes() for path in (root / "reports").glob("*.*")}
    _, paths = write_gallery(root, pytest.fail)
    assert {path: path.read_bytes() for path in paths.values()} == before


DAMAGES = {
    "no JSON": ("verdict.json", b"{"),
    "another JSON": ("verdict.json", b"[]"),
    "a plan of something else": ("report.json", b'{"values": {}}'),
    "no text": ("README.md", b"\xff\xfe\xff"),
    "no picture": ("figure.png", b"PNG"),
    "half a picture": ("figure.png", png()[:150]),
    "no figure": ("figure.png", None),
    "no table": ("table.md", None),
    "a table of letters": ("table.csv", b"arm,x,metric,seed_0\narmt,a,b,c\n"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("kind", ["new", "plain"])
def test_a_broken_report_is_named_and_the_others_are_shown(tmp_path, root, name, kind):
    file, content = DAMAGES[name]
    for other in ("marks", "plain", "new"):
        (tmp_path / "reports" / other).mkdir(parents=True)
        for path in (root / "reports" / other).glob("*.*"):
            (tmp_path / "reports" / other / path.name).write_bytes(path.read_bytes())
    broken = tmp_path / "reports" / kind / file
    broken.write_bytes(content) if content is not None else broken.unlink()
    said = []
    summary, paths = write_gallery(tmp_path, said.append)
    assert summary.startswith("2 reports: ")
    (line,) = said
    assert "\n" not in line and line.startswith("left out of the gallery: ") and str(broken.parent) in line
    shown = re.findall(r'class="card" id="(\w+)"', paths["index.html"].read_text(encoding="utf-8"))
    assert shown == [other for other in ("marks", "new", "plain") if other != kind]


def test_a_report_of_an_earlier_version_is_marked(tmp_path, monkeypatch):
    """Its runs have keys that today's file does not plan; a report whose file is not known has no mark."""
    shutil.copy(PROJECT / "experiments" / "tarm_quadratic.yaml", tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    keys = [spec.key[:8] for spec in load("mine.yaml").at("cpu").plan()][:9]
    other = [*keys[:-1], "0" * 8]
    write_report(tmp_path / "reports" / "today", "mine", keys, scale="cpu")
    write_report(tmp_path / "reports" / "old", "mine", other, scale="cpu")
    write_report(tmp_path / "reports" / "scale", "mine", keys, scale="gone")
    write_report(tmp_path / "reports" / "unknown", "unknown", other, scale="cpu")
    cards = read_cards(tmp_path / "reports", pytest.fail)
    assert {card.name for card in cards if card.earlier} == {"old", "scale"}
    _, paths = write_gallery(tmp_path, pytest.fail)
    page = paths["README.md"].read_text(encoding="utf-8")
    assert page.count("†") == 3 and re.search(r"\(old/README.md\) +\| [\w, ]+ †", page)
    assert paths["index.html"].read_text(encoding="utf-8").count(">earlier version<") == 2


def test_no_report_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no report that can be shown"):
        write_gallery(tmp_path, pytest.fail)
    assert not list(tmp_path.iterdir())


def test_the_command(root, capsys):
    assert main(["--gallery", "--root", str(root)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.splitlines()[0] == "4 reports: 3 REPRODUCED, 1 NOT REPRODUCED"
    assert str(root / "reports" / "index.html") in out


def test_the_library_is_the_one_of_the_sources():
    """Its bytes, its licence, and that an installed package has them."""
    facts = dict(re.findall(r"^(\w+) +(.+)$", (ASSETS / "SOURCES").read_text(), re.MULTILINE))
    library = (ASSETS / LIBRARY).read_bytes()
    assert facts["file"] == LIBRARY and hashlib.sha256(library).hexdigest() == facts["sha256"]
    assert (
        f"v{facts['version']}".encode() in library[:100]
        and "Permission is hereby" in (ASSETS / "chart.LICENSE").read_text()
    )
    assert '"report/assets/*"' in (PROJECT / "pyproject.toml").read_text()


def test_tables_are_read_as_they_were_written():
    rows = [["a|b", ""], ["`x` | y", "1"]]
    assert tables(f"text\n\n{markdown(['k', 'long name'], rows)}\n| no") == [[["k", "long name"], *rows]]


@pytest.mark.slow
def test_the_projects_own_reports(tmp_path):
    """All are shown, in a file that one can send."""
    (tmp_path / "reports").symlink_to(PROJECT / "reports")
    cards = read_cards(tmp_path / "reports", pytest.fail)
    from lit_memory.report.gallery import html

    assert len(cards) >= 42 and len(html(cards, *board(cards)).encode()) <= 8 * 2**20


# In a browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if absent():
        pytest.skip(f"not installed: {absent()}")
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


NAMES = """return [...document.querySelectorAll("button, input, select, .plot canvas, dialog, [role=region]")].filter(
  (e) => !(e.textContent.trim() || e.ariaLabel || e.getAttribute("aria-labelledby") || e.labels?.length)
).map((e) => e.outerHTML)"""
INK = """const c = document.querySelector(arguments[0] + " .plot canvas"), seen = new Set();
const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", { willReadFrequently: true });
copy.drawImage(c, 0, 0);
const d = new Uint32Array(copy.getImageData(0, 0, c.width, c.height).data.buffer);
for (const pixel of d) seen.add(pixel);
return seen.size"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_in_a_browser(root, written, page, width, dark):
    """It fits, draws, filters, opens and closes, says nothing on the console, and asks no host for anything."""
    url = (root / "reports" / "index.html").as_uri()
    page.complaints(), page.requests()
    page.open(url, width, 900, dark)
    assert page.run("return document.documentElement.scrollWidth") <= width
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == dark
    assert page.run(INK, "#board-state") > 10 and page.run(INK, "#board-length") > 10
    assert page.run(NAMES) == []
    page.run("search.value = 'title GPU'; search.dispatchEvent(new Event('input'))".replace("GPU", "of new"))
    assert page.run("return shown.textContent") == "2 of 4"
    page.run("verdict.value = 'NOT REPRODUCED'; verdict.dispatchEvent(new Event('change'))")
    assert page.run("return [shown.textContent, nothing.hidden]") == ["0 of 4", False]
    page.click(".filters button[type=reset]")
    assert page.run("return shown.textContent") == "4 of 4"
    page.click("[data-card=new]")
    assert page.run("return explorer.open && explorer.contains(document.activeElement)")
    assert page.run(INK, "#explorer-chart") > 10
    assert page.run("const b = explorer.getBoundingClientRect(); return b.left >= 0 && b.right <= innerWidth")
    full = page.run(INK, "#explorer-chart")
    page.run("for (const b of document.querySelectorAll('#explorer-chart .legend button')) b.click()")
    assert page.run(INK, "#explorer-chart") < full
    page.click("#tabs button:last-child")
    assert page.run("return document.querySelector('#tabs [aria-pressed=true]').textContent") == "State"
    page.click("#close")
    assert page.run("return explorer.open || document.activeElement.dataset.card") == "new"
    page.run("task.value = 'new'; task.dispatchEvent(new Event('change'))")
    assert page.run(INK, "#board-length") > 10
    page.click("#theme")
    assert page.run("return getComputedStyle(document.body).backgroundColor") != background
    assert page.complaints() == [] and page.requests() == [url]
