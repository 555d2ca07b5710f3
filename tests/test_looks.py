"""What is seen of a memory, segment after segment, against a loop by hand; in fp64 on tiny models."""

import math

import pytest
import torch
from torch.nn import functional as F

import lit_memory
from lit_memory.lit.views import PLACES, Along, Gates, Map, Norm, Overlap, measure
from lit_memory.recurrence import Look, Visible, looks, state_tensors, unroll
from lit_memory.registry import MODELS, REGISTRIES, load_class
from lit_memory.util.names import load
from lit_memory.util.views import VIEWED, VIEWS

VISIBLE = [name for name in MODELS if issubclass(load_class("model", name), Visible)]
every_model = pytest.mark.parametrize("name", VISIBLE)


@every_model
def test_a_look_changes_no_state(build, tokens, name):
    model, ids = build(name).eval(), tokens(3, 15)
    state, expected = model.init_state(3), model.init_state(3)
    with torch.no_grad():
        for part in ids.split(5, dim=1):
            look, state = model.look(state, part)
            expected = model.step(expected, part)[1]
            assert all(map(torch.equal, state_tensors(state), state_tensors(expected)))
            parts = model.parts(expected)
            assert list(look.parts) == list(parts) and all(len(of) == 2 for of in parts.values())
            assert all(map(torch.equal, *(sum(map(tuple, of.values()), ()) for of in (look.parts, parts))))
        *_, last = looks(model, ids.split(5, dim=1))
    final = model.parts(unroll(model, ids, 5, keep=0, schedule="sequential").state)
    assert all(torch.equal(a, b) for name in final for a, b in zip(last.parts[name], final[name], strict=True))


@every_model
def test_samples_begin_and_end(build, tokens, name):
    """A look has the samples that have begun, and NaN for one without a real token."""
    model, ids = build(name).eval(), tokens(3, 15)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    first, second, third = ids.split(5, dim=1)
    with torch.no_grad():
        found = list(looks(model, iter([first[:2], (second, mask), third])))
        *_, alone = looks(model, [second[2:], third[2:]])
    for look, size in zip(found, (2, 3, 3), strict=True):
        tensors = [t for of in (*look.parts.values(), look.keys, *look.gates.values()) for t in of]
        assert {len(t) for t in tensors} == {size}
        ended = [t.flatten(1).isnan().any(1).tolist() for t in tensors]
        assert all(row == [False, look is found[1], False][:size] for row in ended)
    for of, other in zip(found[-1].parts.values(), alone.parts.values(), strict=True):
        assert all(torch.allclose(a[2:], b, atol=1e-12) for a, b in zip(of, other, strict=True))


def test_every_view_is_whole():
    """Each can be measured and drawn, and some model or task allows it."""
    for name, view in VIEWS.items():
        assert callable(load(view.measured)) and callable(load(view.drawn)) and view.words[0].isupper()
        allowing = [n for kind in REGISTRIES for n in REGISTRIES[kind] if name in visible(kind, n)]
        assert allowing, name
    named = {view for kind in REGISTRIES for n in REGISTRIES[kind] for view in visible(kind, n)}
    assert named == set(VIEWS)
    assert all("norm" in visible("model", name) for name in VISIBLE)


def visible(kind, name):
    return getattr(load_class(kind, name), "visible", ())


@pytest.mark.parametrize("flags", [{}, {"update": "sequential"}, {"gamma": "raw"}, {"gamma": "off", "beta_on_z": True}])
def test_keys_and_gates_of_armt_are_those_that_it_writes(build, tokens, flags):
    """z grows by gamma times every key; beta is what ``memorize`` has computed."""
    model, ids, betas = build("armt", **flags), tokens(3, 20), []
    for layer in model.layers:
        layer.to_beta.register_forward_hook(lambda _, args, output: betas.append(output.sigmoid().squeeze(-1)))
    before = model.parts(model.init_state(3))
    with torch.no_grad():
        for look in looks(model, ids.split(5, dim=1)):
            written, betas[:] = betas[::2], []  # every second one is of the look
            for layer in range(2):
                phi, gamma = look.keys[layer], look.gates["gamma"][layer]
                grown = before["z"][layer] + (gamma.unsqueeze(2) * phi).sum(1)
                assert torch.allclose(look.parts["z"][layer], grown, atol=1e-12)
                assert phi.shape == (3, 2, 24) and (phi >= 0).all()
                assert torch.equal(look.gates["beta"][layer], written[layer])
            before = look.parts


def test_a_plain_delta_rule_has_neither_normaliser_nor_gamma(build, tokens):
    (look,) = looks(build("armt", use_denom=False), [tokens(2, 5)])
    assert list(look.parts) == ["A"] and list(look.gates) == ["beta"]


@pytest.mark.parametrize("name", ["lmm", "mac", "mag", "mal"])
def test_gates_of_titans_are_those_of_its_diagnostics(build, tokens, name):
    model, ids = build(name, memory_heads=2, **{"write_prefix": True} if name == "mac" else {}), tokens(3, 7)
    mask = torch.arange(7) < torch.tensor([[7], [4], [6]])
    with torch.no_grad():
        (look,) = looks(model, [(ids, mask)])
    expected = model.diagnostics(((ids, mask),))
    for gate, of_layers in look.gates.items():
        for layer, values in enumerate(of_layers):
            assert torch.allclose(values.nanmean(), expected[f"{gate}.{layer}"], atol=1e-12)
    norms = [of.norm(dim=1).mean() for of in look.parts["M"]]
    assert torch.allclose(torch.stack(norms), torch.stack([expected[f"M_norm.{layer}"] for layer in range(2)]))
    (look,) = looks(build(name, momentum=False, forget=False), [ids])
    assert look.gates.keys() == {"theta"}


def test_the_overlap_of_keys_is_a_mean_over_all_pairs():
    """Of the second sample, which ends early, only what it wrote."""
    keys = [torch.randn(2, 3, 5, dtype=torch.float64) for _ in range(4)]
    keys[2][1] = math.nan
    view = Overlap()
    for of_segment in keys:
        view.update(Look({}, (of_segment,), {}))
    found = view.arrays()
    assert found["segment"].tolist() == [1, 2, 3, 4] and found["overlap"].shape == (4, 1)
    assert found["overlap"][0].isnan()
    for s in (1, 2, 3):
        means = []
        for b in (0, 1):
            cosines = [
                F.cosine_similarity(new, old, dim=0)
                for new in keys[s][b]
                for before in keys[:s]
                for old in before[b]
                if not (new.isnan().any() or old.isnan().any())
            ]
            means += [sum(cosines) / len(cosines)] if cosines else []
        assert found["overlap"][s, 0] == pytest.approx(float(sum(means) / len(means)), abs=1e-6)


def test_norms_and_gates_are_means_over_samples(build, tokens):
    model, ids = build("armt"), tokens(4, 10)
    norm, gates, last = Norm(), Gates(), Map()
    with torch.no_grad():
        for look in looks(model, ids.split(5, dim=1)):
            for view in (norm, gates, last):
                view.update(look)
        state = unroll(model, ids, 5, keep=0).state
    found, written = norm.arrays(), gates.arrays()
    for layer in range(2):
        by_hand = sum(state[layer].A_BKD[b].square().sum().sqrt() for b in range(4)) / 4
        assert found["A"][1, layer] == pytest.approx(float(by_hand), rel=1e-6)
        assert written["beta"][1, layer] == pytest.approx(float(look.gates["beta"][layer].mean()), rel=1e-6)
    assert torch.equal(last.arrays()["A"], state[1].A_BKD[0].float())


def test_a_long_context_is_thinned():
    class Count(Along):
        def measured(self, look):
            return {"A": torch.tensor([float(len(self.means) + 1)])}

    for length in (1, 2, PLACES, PLACES + 1, 5000):
        view = Count()
        for _ in range(length):
            view.update(Look({}, (), {}))
        found = view.arrays()
        places = found["segment"].tolist()
        assert places == found["A"][:, 0].tolist() == sorted(set(places))  # a value lies at its own place
        assert len(places) <= PLACES and (places[0], places[-1]) == (1, length)
        assert length > PLACES or len(places) == length
    assert Count().arrays() == {}


def module_and_data(**task):
    data = lit_memory.AssociativeRetrievalData(pairs=2, test_pairs=[3, 12, 6], test_size=20, eval_batch_size=4, **task)
    torch.manual_seed(0)
    sizes = {"width": 16, "layers": 2, "heads": 2, "memory_tokens": 2, "memory_dim": 4}
    return lit_memory.LitARMT(vocab_size=data.task.vocab_size, **sizes), data


def test_what_is_measured_is_the_longest_test_and_nothing_else_changes():
    module, data = module_and_data()
    random, weights = torch.get_rng_state(), [p.clone() for p in module.parameters()]
    found = measure(module, data, ["norm", "overlap", "gates", "map"])
    again = measure(module, data, ["map", "norm"])
    assert torch.equal(torch.get_rng_state(), random) and module.training and module.diagnostics is None
    assert all(map(torch.equal, module.parameters(), weights))
    assert {view for view, _ in found} == {"norm", "overlap", "gates", "map"}
    assert found["norm", "A"].shape == (12, 2) and found["map", "A"].shape == (24, 16)
    assert all(torch.equal(of, found[name]) for name, of in again.items())
    assert {of.dtype for of in found.values()} == {torch.float32}
    batch = data.test_samples(VIEWED)
    assert batch.ids_BT.shape[0] == VIEWED and torch.equal(batch.ids_BT, data.test_samples(VIEWED).ids_BT)
    with torch.no_grad():
        *_, last = looks(module.model, batch.written())
    expected = torch.stack([of.flatten(1).norm(dim=1).mean() for of in last.parts["A"]])
    assert torch.equal(found["norm", "A"][-1], expected)


def test_a_test_of_few_samples_has_no_more():
    data = lit_memory.AssociativeRetrievalData(pairs=2, test_size=3)
    assert len(data.test_samples(VIEWED).ids_BT) == 3
