"""Figures of the memory in a report: measured from the last weights, kept beside it, drawn again; and nothing of a run
changes for them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from report_data import make_plan

import lit_memory
from lit_memory.cli import main
from lit_memory.lit.views import measure
from lit_memory.plan.experiment import load
from lit_memory.plan.sections import ReportConfig
from lit_memory.report.figures import saved
from lit_memory.report.render import write as write_report
from lit_memory.report.results import Results
from lit_memory.report.saved import load as load_report
from lit_memory.report.saved import memory_npz
from lit_memory.report.scores import unpack
from lit_memory.report.views import by_depth, known_views, layers_shown, memory_figures, unknown_runs
from lit_memory.run.starts import weights_of
from lit_memory.run.tracking import Run, Tracker
from lit_memory.util.views import VIEWED

pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
    pytest.mark.usefixtures("unsaved_figures"),
]
VIEWS = ["norm", "overlap", "gates", "map"]
GONE = "as the weights are gone"


def call(*argv) -> int:
    return main([str(arg) for arg in argv])


def seen_files(folder):
    return sorted(path.name for path in folder.glob("memory*"))


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_a_report_shows_the_memory_and_keeps_what_it_has_measured(write, make_root, inline, capsys):
    root, folder = make_root(), None
    plain = write()
    assert call(plain, "--root", root) == 0
    folder = root / "reports" / "tiny"
    before, runs = contents(folder), Tracker(root)
    keys = [spec.key for spec in load(plain).at().plan()]
    ids = [runs.find(key).run_id for key in keys]
    assert seen_files(folder) == [] and "## Memory" not in before["README.md"].decode()
    asking = write(report={"x": "test_pairs", "memory": VIEWS})
    assert [spec.key for spec in load(asking).at().plan()] == keys
    assert call(asking, "--root", root) == 0  # trains nothing
    after = contents(folder)
    pictures = [f"memory_{view}.{suffix}" for view in sorted(VIEWS) for suffix in ("pdf", "png")]
    assert seen_files(folder) == ["memory.npz", *pictures]
    assert [runs.find(key).run_id for key in keys] == ids
    for name in ("table.csv", "scores.npz", "verdict.json", "table.md"):
        assert after[name] == before[name], name
    page = after["README.md"].decode()
    assert page.count("](memory_") == 4 and "[memory.npz](memory.npz)" in page and GONE not in page
    stored = runs.client.list_artifacts(runs.parent("tiny", "default", {}), "report")
    assert "report/memory.npz" in [file.path for file in stored]

    # Drawn again from the folder alone: the same bytes.
    assert call("--redraw", asking, "--root", root) == 0
    assert {name: of for name, of in contents(folder).items() if "memory" in name} == {
        name: of for name, of in after.items() if "memory" in name
    }
    assert contents(folder)["README.md"] == after["README.md"]

    # Without weights, what is there is kept; without both, the page says so.
    for path in (root / "checkpoints").glob("*/step-*"):
        path.unlink()
    assert call(asking, "--root", root, "--report") == 0
    assert contents(folder)["memory.npz"] == after["memory.npz"]
    (folder / "memory.npz").write_bytes(b"PK damaged")
    capsys.readouterr()
    assert call(asking, "--root", root, "--report") == 0
    err = capsys.readouterr().err
    assert "memory.npz: damaged" in err.replace("\n", " ") and err.count("warning:") == 1
    assert seen_files(folder) == [] and [runs.find(key).run_id for key in keys] == ids
    page = (folder / "README.md").read_text()
    assert f"No `overlap` of these runs, {GONE}: a, seed 0; b, seed 0." in page
    assert contents(folder)["table.csv"] == before["table.csv"]


def test_weights_below_another_root_serve_and_damaged_ones_do_not(make_spec, tmp_path):
    from lit_memory.run import checkpoint

    spec, here, there = make_spec(), tmp_path / "here", tmp_path / "there"
    run = Run("id", "FINISHED", {}, {"steps": 6}, {"lit.where": f"machine:{there}"})
    assert weights_of(spec, run, here) is None
    path = checkpoint.path_of(spec.folder(there), 6)
    checkpoint.save(path, lambda file: file.write(b"weights"))
    assert weights_of(spec, run, here) == path
    assert weights_of(spec, replace(run, tags={}), here) is None
    path.write_bytes(b"damaged")
    assert weights_of(spec, run, here) is None


def test_weights_of_today_are_measured_and_those_of_other_code_are_a_warning(write, root, inline, capsys, monkeypatch):
    asking, folder = write(report={"x": "test_pairs", "memory": "norm"}), root / "reports" / "tiny"
    assert call(asking, "--root", root, "--arms", "a") == 0
    assert seen_files(folder) == ["memory.npz", "memory_norm.pdf", "memory_norm.png"]
    assert {(view, arm, seed) for view, _, arm, seed in load_report(folder).memory} == {("norm", "a", 0)}
    assert GONE not in (folder / "README.md").read_text()  # b has not run
    monkeypatch.setattr(
        "lit_memory.run.looking.build_module", lambda spec: lit_memory.LitRMT(vocab_size=9, width=16, heads=2)
    )
    capsys.readouterr()
    assert call(asking, "--root", root, "--report") == 0
    err = capsys.readouterr().err.replace("\n", " ")
    assert "memory of a seed 0: " in err and "does not fit the model" in err


ARMS, PLACES = ["gamma", "no_gamma"], [1.0, 2.0, 3.0, 5.0]


def plan_of(*views, seeds=(0, 1), **changes):
    config = ReportConfig(memory=list(views), log_x=changes.pop("log_x", False))
    visible = dict.fromkeys(views, ARMS)
    plan = make_plan(
        seeds=seeds, config=config, expect=[], visible=visible, models={"gamma": "armt", "no_gamma": "mamba"}, **changes
    )
    return replace(plan, runs=[run | {"status": "finished", "trained_segments": 2} for run in plan.runs])


def along(view, layers, **names):
    """Numbers of every arm and seed, rising along the context and with the layer."""
    found = {}
    for a, arm in enumerate(ARMS):
        for seed in (0, 1):
            found[view, "segment", arm, seed] = np.array(PLACES, np.float32)
            for name, scale in names.items():
                rows = np.array(PLACES)[:, None] * (1 + np.arange(layers[a])) * scale * (1 + seed)
                found[view, name, arm, seed] = rows.astype(np.float32)
    return found


def panels(results):
    (figure,) = memory_figures(results).values()
    assert isinstance(figure, Figure)
    return figure, [axes for axes in figure.axes if axes.get_lines()]


def test_a_panel_for_every_name_and_layer():
    results = Results(plan_of("norm"), {}, memory=along("norm", (2, 2), z=0.5, A=10.0))
    figure, found = panels(results)
    assert [axes.get_title() for axes in found] == ["layer 1 of 2", "layer 2 of 2", "", ""]
    assert [" ".join(axes.get_ylabel().split()) for axes in found] == [
        "norm of the associative matrix A",
        "",
        "norm of the normaliser z",
        "",
    ]
    line = next(line for line in found[1].get_lines() if line.get_label() == "gamma")
    assert list(line.get_ydata()) == [2 * 15 * x for x in PLACES]  # layer 2, the mean of 10 and 20
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ARMS
    dashed = [line for line in found[3].get_lines() if list(line.get_xdata()) == [2, 2]]
    assert len(dashed) == 1 and found[0].get_ylim() == found[1].get_ylim()
    shuffled = dict(sorted(results.memory.items(), key=lambda item: repr(item[0])[::-1]))
    again, _ = panels(replace(results, memory=shuffled))
    assert [axes.get_ylabel() for axes in again.axes] == [axes.get_ylabel() for axes in figure.axes]


def test_numbers_that_were_kept_give_the_same_figure_and_file():
    results = Results(plan_of("norm"), {}, memory=along("norm", (2, 2), z=0.5, A=10.0))
    kept = memory_npz(results.memory)
    again = {tuple(name.split("/")): of for name, of in unpack(kept).items()}
    again = {(view, name, arm, int(seed)): of for (view, name, arm, seed), of in again.items()}
    assert memory_npz(again) == kept
    first, second = (saved(memory_figures(replace(results, memory=of)), ["png"]) for of in (results.memory, again))
    assert first == second and len(first["memory_norm.png"]) > 10_000


@pytest.mark.parametrize(
    ("depths", "titles", "picked"),
    [
        ((1, 1), ["layer 1 of 1"], [(0, 0)]),
        ((3, 3), ["layer 1 of 3", "layer 2 of 3", "layer 3 of 3"], [(0, 0), (1, 1), (2, 2)]),
        ((2, 4), ["first layer", "middle layer", "last layer"], [(0, 0), (1, 2), (1, 3)]),
        ((12, 12), ["first layer", "middle layer", "last layer"], [(0, 0), (6, 6), (11, 11)]),
    ],
)
def test_the_layers_that_are_shown(depths, titles, picked):
    columns = layers_shown(depths)
    assert list(columns) == titles
    assert [tuple(layer_of(count) for count in depths) for layer_of in columns.values()] == picked


def test_what_is_nan_is_left_out_and_missing_seeds_are_named():
    memory = along("overlap", (1, 1), overlap=0.1)
    for array in (of for (_, name, *_), of in memory.items() if name == "overlap"):
        array[0] = np.nan
    del memory["overlap", "overlap", "no_gamma", 1]
    results = Results(plan_of("overlap"), {}, memory=memory)
    figure, (axes,) = panels(results)
    line = next(line for line in axes.get_lines() if line.get_label() == "gamma")
    assert list(line.get_xdata()) == PLACES[1:]
    assert figure.legends[0].get_texts()[1].get_text() == "no_gamma (1 of 2 seeds)"
    assert unknown_runs(results, "overlap") == {"no_gamma": [1]}


def test_five_seeds_have_a_band():
    memory = along("norm", (1, 1), A=1.0)
    memory |= {("norm", name, arm, seed + 2 * i): of for (_, name, arm, seed), of in memory.items() for i in (0, 1, 2)}
    _, (axes,) = panels(Results(plan_of("norm", seeds=range(5)), {}, memory=memory))
    assert len(axes.collections) == 2
    for seen in memory:
        memory[seen] = np.full_like(memory[seen], np.nan) if seen[1:3] == ("A", "gamma") else memory[seen]
    _, (axes,) = panels(Results(plan_of("norm", seeds=range(5)), {}, memory=memory))
    assert len(axes.collections) == 1  # of what is nowhere a number there is nothing to show


def depth_results(**changes):
    """Samples at 5, 15, ... percent; of the first half of the context every second one is right, then all."""
    places = np.arange(5, 100, 10, dtype=np.float32)
    memory = {("depth", "depth", arm, seed): places for arm in ARMS for seed in (0, 1)}
    memory |= {("depth", "x", arm, seed): np.array([500.0]) for arm in ARMS for seed in (0, 1)}
    right = np.array([0, 1, 0, 1, 0, 1, 1, 1, 1, 1], float)
    scores = {("gamma", "exact_match", 500.0, seed): right for seed in (0, 1)}
    return Results(plan_of("depth", **changes), {}, scores, memory=memory)


def test_answers_by_the_depth_of_the_fact():
    results = depth_results()
    assert by_depth(results, "gamma", 0) == [0.5, 0.5, 0.5, 1, 1] and by_depth(results, "no_gamma", 0) == []
    figure, (axes,) = panels(results)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gamma"]
    assert list(axes.get_lines()[-1].get_ydata()) == [0.5, 0.5, 0.5, 1, 1]
    assert unknown_runs(results, "depth") == {"no_gamma": [0, 1]}
    assert known_views(replace(results, scores={})) == [] and memory_figures(replace(results, scores={})) == {}


def test_only_the_first_seed_of_a_map_is_expected():
    matrix = np.array([[0.0, -2.0], [1.0, 0.0]], np.float32)
    results = Results(plan_of("map"), {}, memory={("map", "A", "gamma", 0): matrix})
    assert unknown_runs(results, "map") == {"no_gamma": [0]}
    (figure,) = memory_figures(results).values()
    (image,) = figure.axes[0].get_images()
    assert np.array_equal(image.get_array(), matrix / 2) and "largest entry 2" in figure.axes[0].get_title()


def test_the_lines_of_hops(tmp_path):
    memory = {
        ("hops", "retrieved", "gamma", 0): np.array([[2, 3], [1, 0]], np.float32),
        ("hops", "support", "gamma", 0): np.array([[2, 4], [0, 0]], np.float32),
        ("hops", "lines", "gamma", 0): np.array([4, 1], np.float32),
    }
    results = Results(plan_of("hops"), {}, memory=memory)
    figure, (axes,) = panels(results)
    points = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}
    assert points == {"supports the answer": [(2, 1), (4, 1)], "hop 1": [(2, 1), (1, 2)], "hop 2": [(3, 1)]}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(points)
    folder = write_report(results, tmp_path).paths["README.md"].parent
    back = load_report(folder)
    assert back.memory.keys() == memory.keys() and all(np.array_equal(back.memory[k], memory[k]) for k in memory)


def test_depths_are_those_of_the_samples_in_their_order():
    data = lit_memory.NeedleData(
        segments=1, segment_len=256, test_segments=[1, 2], variant="pk", test_size=6, eval_batch_size=4
    )
    found = measure(None, data, ["depth"])
    _, loaders = data.test_conditions, data.test_dataloader()
    expected = torch.cat([batch.meta["depth"] for batch in loaders[1]])
    assert torch.equal(found["depth", "depth"], expected) and found["depth", "x"].tolist() == [2]
    assert len(expected.unique()) > 1 and not measure(None, lit_memory.AssociativeRetrievalData(), ["depth"])


def test_the_depth_of_a_fact_of_babilong():
    """The earliest supporting fact lies at its depth."""
    data = lit_memory.BABILongData(task="qa2", segments=4, segment_len=64, margin=16, books=1, vocab_size=512)
    task = data.task
    for split in ("train", "test"):
        samples = sorted(task.samples(0, split, 0, 8), key=lambda sample: -sample.segments)
        depths = task.batch(0, split, 0, 8).meta["depth"]
        for sample, depth in zip(samples, depths.tolist(), strict=True):
            first = min(sample.support)
            start = round(depth / 100 * sample.context_len)
            assert len(sample.support) == 2 and np.array_equal(
                sample.read(start, len(sample.facts[first])), sample.facts[first]
            )


def test_hops_are_lines_of_the_context():
    """Counted from the first; the last line of a context is the one before the question."""
    data = lit_memory.PasskeyData(layout="lines", tokens=64, segment_len=64, test_size=VIEWED, depth=50)
    sizes = {"width": 16, "layers": 1, "encoder_layers": 1, "heads": 2, "latent_width": 8, "slots": 9, "hops": 2}
    module = lit_memory.LitMemReasoner(
        vocab_size=data.task.vocab_size, line_tokens=data.task.segment_len, **sizes
    ).eval()
    found = {name: of for (_, name), of in measure(module, data, ["hops"]).items()}
    with torch.no_grad():
        readouts = module.read_context(data.test_samples(VIEWED)).readouts
    lines = readouts.age_BN.amax(1)
    assert torch.equal(found["lines"], lines.float())
    assert torch.equal(lines[:, None] + 1 - found["retrieved"], readouts.nearest_BH.float())
    assert (found["retrieved"] >= 1).all() and (found["retrieved"] <= lines[:, None]).all()
