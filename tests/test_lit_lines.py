"""LitLarimar and LitMemReasoner on batches of lines: every loss against a twin, an answer from every hop, which lines
were found, bad input.

All comparisons are in fp64 on tiny models, with batches as a task in layout "lines" makes them.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import lit_memory
from lit_memory.recurrence import generate
from lit_memory.tasks.batch import Batch
from lit_memory.tasks.mixins import Prompted

L, T, V, B = 5, 6, 19, 3  # tokens of a line and of a tail, vocabulary, samples
SIZES = {
    "vocab_size": V,
    "width": 16,
    "layers": 1,
    "encoder_layers": 1,
    "heads": 2,
    "latent_width": 8,
    "slots": 9,
    "line_tokens": L,
    "pad_id": 0,
}
SIZES |= {"init_std": 0.3, "embedding_std": 1.0, "positions": 64}
LINES = (7, 4, 5)  # of the samples, with the question
SUPPORT = torch.tensor([[2, 5], [0, 0], [4, 1]])


def make(cls=lit_memory.LitMemReasoner, **options):
    torch.manual_seed(0)
    module = cls(
        **{**SIZES, **({"hops": 2, "solver": "svd"} if cls is lit_memory.LitMemReasoner else {}), **options}
    ).double()
    module.log = lambda *args, **kwargs: None
    return module


def make_batch(tails=2, test=False, support=SUPPORT, seed=5):
    """Two segments of four lines; shorter samples have padding in front; one line is empty. Tails: two tokens of
    prompt, two of answer, EOS."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, V, (B, 8, L), generator=g)
    lengths = torch.randint(2, L + 1, (B, 8), generator=g)
    ids[0, 3], lengths[0, 3] = 0, 1
    mask = (torch.arange(L) < lengths.unsqueeze(-1)) & (torch.arange(8) >= 8 - torch.tensor(LINES)[:, None]).unsqueeze(
        -1
    )
    context = tuple(zip(ids.flatten(1).split(4 * L, dim=1), mask.flatten(1).split(4 * L, dim=1), strict=True))
    tail = torch.randint(1, V, (B, tails, T), generator=g)
    targets = tail.masked_fill((torch.arange(T) < 2) | (torch.arange(T) > 4), -100)
    meta = {"support": support} if support is not None else {}
    prompt = torch.full((B,), 2) if test else None
    return Batch(tail.flatten(1), targets.flatten(1), T, tails, meta, iter(context) if test else context, prompt)


def sample_lines(batch, b):
    """The real lines of one sample, each without its padding."""
    ids, masks = (torch.cat([part[i] for part in batch.context], dim=1)[b].view(-1, L) for i in (0, 1))
    return [line[mask] for line, mask in zip(ids, masks, strict=True) if mask.any()]


def readouts(module, batch, b):
    """Latents, nearest lines and distances of one sample read by itself, line by line."""
    model = module.model
    state = model.init_state(1)
    for line in sample_lines(batch, b):
        padded = F.pad(line, (0, L - len(line)))[None]
        _, state = model.step(state, padded, (torch.arange(L) < len(line))[None])
    return model.readouts(state), [model.encode(line[None])[0] for line in sample_lines(batch, b)]


def terms(model, ids, latent, first=1):
    """Losses of the tokens of a line from position ``first`` on."""
    log_p = model.logits(model.decode(ids[None], latent[None]))[0].log_softmax(-1)
    return [-log_p[p - 1, ids[p]] for p in range(first, len(ids))]


def close(a, b):
    return torch.allclose(
        torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(("tails", "hops"), [(1, 2), (2, 2), (2, 1), (1, 1), (3, 3)])
def test_answers_slow_twin(tails, hops):
    """One tail is decoded from the last hop, as many as hops from one each; one hop serves all."""
    module, batch = make(hops=hops, order_loss=0.0), make_batch(tails)
    expected = []
    for b in range(B):
        found, _ = readouts(module, batch, b)
        for h, ids in enumerate(batch.ids_BT[b].view(tails, T)):
            latent = found.latents_BHC[0, h if tails == hops else -1]
            expected += terms(module.model, ids, latent)[1:4]
    assert close(module.loss(batch), torch.stack(expected).mean()) and torch.equal(
        module.loss(batch), module.training_step(batch, 0)
    )


def test_losses_slow_twin():
    """Order, auto-encoding and SF*, sample by sample and line by line; their weights; what the samples that tell
    nothing contribute."""
    names = ("answer", "order", "autoencoding", "support", "support_autoencoding")
    weights = dict(zip(names, (1.0, 2.0, 0.5, 3.0, 0.25), strict=True))
    module, batch = make(**{f"{name}_loss": weight for name, weight in weights.items()}), make_batch()
    model, order, own, found_lines, told_lines = module.model, [], [], [], []
    for b in range(B):
        found, latents = readouts(module, batch, b)
        lines = sample_lines(batch, b)
        own += [term for line, latent in zip(lines, latents, strict=True) for term in terms(model, line, latent)]
        for h, back in enumerate(SUPPORT[b].tolist()):
            if back:
                order.append(
                    -(-found.distances_BHN[0, h]).log_softmax(-1)[len(lines) - back]
                )  # behind the column of no line
                found_lines += terms(model, lines[-1 - back], found.latents_BHC[0, h])
                told_lines += terms(model, lines[-1 - back], latents[-1 - back])
    losses = module.losses(batch)
    assert list(losses) == list(names)
    assert close(losses["order"], sum(order) / 2)
    for name, expected in zip(names[2:], (own, found_lines, told_lines), strict=True):
        assert close(losses[name], torch.stack(expected).mean()), name
    assert close(module.loss(batch), sum(weights[name] * loss for name, loss in losses.items()))
    for support in (None, torch.zeros(B, 2, dtype=torch.int64)):
        assert list(module.losses(make_batch(support=support))) == ["answer", "autoencoding"]
    assert list(make().losses(batch)) == ["answer", "order"]
    assert make(answer_loss=0.0).loss(make_batch(support=None)) == 0  # nothing is told, and nothing else has a weight


@pytest.mark.parametrize("cls", [lit_memory.LitMemReasoner, lit_memory.LitLarimar])
def test_auxiliary_lines_are_auto_encoded(cls):
    """With those of the context, and they change nothing else; shorter ones, too."""
    batch = make_batch(1)
    module, extra_BNL = (
        make(cls, autoencoding_loss=1.0),
        torch.randint(1, V, (B, 2, L - 1), generator=torch.Generator().manual_seed(3)),
    )
    mask_BNL = torch.arange(L - 1) < torch.tensor([[2, 4], [3, 3], [4, 1]])[..., None]
    both = replace(batch, auxiliary_lines=(extra_BNL, mask_BNL))
    lines = [line for b in range(B) for line in sample_lines(batch, b)]
    lines += [line[real] for line, real in zip(extra_BNL.flatten(0, 1), mask_BNL.flatten(0, 1), strict=True)]
    expected = [term for line in lines for term in terms(module.model, line, module.model.encode(line[None])[0])]
    losses, without = module.losses(both), module.losses(batch)
    assert close(losses.pop("autoencoding"), torch.stack(expected).mean())
    without.pop("autoencoding")
    assert losses.keys() == without.keys() and all(torch.equal(loss, without[name]) for name, loss in losses.items())


@pytest.mark.parametrize(("bptt", "again"), [(None, False), (2, True)])
def test_lines_that_were_read_are_not_encoded_again(bptt, again, monkeypatch):
    """The same loss and gradients as with every line encoded for the auto-encoding; where gradients are cut between
    segments, the latents of the memory would not carry them."""
    batch, found, weights = make_batch(), [], {"autoencoding_loss": 0.5, "support_loss": 1.0}

    def encoded_by(model):
        sizes, rows = [], model.encode_rows
        monkeypatch.setattr(model, "encode_rows", lambda ids, real: (sizes.append(len(ids)), rows(ids, real))[1])
        return sizes

    extra_BNL = torch.randint(1, V, (B, 2, L), generator=torch.Generator().manual_seed(3))
    batch = replace(batch, auxiliary_lines=(extra_BNL, torch.ones_like(extra_BNL, dtype=torch.bool)))
    for reuse in (True, False):
        module = make(**weights, bptt=bptt)
        sizes = encoded_by(module.model)
        if not reuse:
            monkeypatch.setattr(module, "known_latents", lambda *_: None)
        loss = module.loss(batch)
        loss.backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        found.append((sum(sizes), loss, grads))
    (few, loss, grads), (many, slow_loss, slow_grads) = found
    assert (few == many) is again and close(loss, slow_loss) and len(grads) == len(slow_grads)
    assert all(close(a, b) for a, b in zip(grads, slow_grads, strict=True))


def test_auto_encoding_alone_reads_nothing():
    module, batch = make(answer_loss=0.0, order_loss=0.0, autoencoding_loss=2.0), make_batch()
    expected = make(autoencoding_loss=2.0).losses(batch)["autoencoding"]
    module.read_context = None
    assert list(module.losses(batch)) == ["autoencoding"] and close(module.loss(batch), 2 * expected)


def test_every_loss_trains():
    """Each loss alone reaches every parameter but those that it has nothing to do with; M_0 does not matter while lines
    are fewer than slots."""
    unread = ("decoder.layers", "decoder.norm", "decoder.head", "to_past", "to_rows")
    for name, spared in (("answer", ()), ("order", unread), ("support", ()), ("autoencoding", ("W_q", "gru"))):
        module = make(
            **{f"{other}_loss": float(other == name) for other in ("answer", "order", "support", "autoencoding")}
        )
        module.loss(make_batch()).backward()
        reached = {n for n, p in module.model.named_parameters() if p.grad is not None and p.grad.any()}
        assert reached | {"M_0"} == {
            n for n, _ in module.model.named_parameters() if not n.startswith(spared or "-")
        }, name


class Said(Prompted):
    """A task of which a test looks at what was said."""

    new_tokens, stop_id = 3, 18

    def score(self, predicted_BT, batch):
        assert predicted_BT.shape == batch.ids_BT.shape
        return {}

    def score_text(self, said_BN, batch):
        self.said_BN = said_BN
        return {"exact_match": torch.zeros(len(said_BN), dtype=torch.float64)}


@pytest.mark.parametrize("tails", [1, 2])
def test_evaluation(tails):
    """What is said after the prompt of every tail comes from its hop; ``hop<i>_support`` is measured where the line is
    told."""
    module, task = make().eval(), Said(None)
    batch = make_batch(tails)
    with torch.no_grad():
        found = [readouts(module, batch, b)[0] for b in range(B)]
        nearest = torch.cat([f.nearest_BH for f in found])
        told = torch.stack([nearest[:, 0], nearest[:, 1] % 3 + 1], dim=1) * torch.tensor([[1, 1], [0, 1], [1, 0]])
        metrics = module.evaluate(make_batch(tails, test=True, support=told), task)
    assert task.said_BN.shape == (B, tails * 3)
    for b in range(B):
        for h, ids in enumerate(batch.ids_BT[b].view(tails, T)):
            latent = found[b].latents_BHC[:, h if tails == 2 else -1]
            alone = generate(module.model, ids[None, :2], 3, state=module.model.state_from_latents(latent), stop=18)
            assert torch.equal(task.said_BN[b, 3 * h : 3 * h + 3], alone[0])
    assert metrics["hop1_support"][:2] == (1.0, 2) and metrics["hop2_support"][:2] == (0.0, 2)
    assert close(metrics["loss"][0], make(order_loss=0.0).loss(batch)) and metrics["loss"][1] == batch.scored_BT.sum()
    silent = module.evaluate(make_batch(tails, test=True, support=None), task)
    assert set(silent) == {"loss", "exact_match", "lines"} and silent["lines"][:2] == (sum(LINES) / B - 1, B)


def test_without_memory():
    """The context is read by the decoder: no hops, no diagnosis; lines can be auto-encoded all the same."""
    module, task = make(memory=False, autoencoding_loss=1.0).eval(), Said(None)
    assert list(module.losses(make_batch(1))) == ["answer", "autoencoding"]
    module.loss(make_batch(1)).backward()
    assert set(module.evaluate(make_batch(1, test=True), task)) == {"loss", "exact_match"} and task.said_BN.shape == (
        B,
        3,
    )


def test_larimar():
    """The published losses with their weights, on contexts and on text that is written; answers need none of them, and
    they need no answers."""
    cls, batch = lit_memory.LitLarimar, make_batch(1)
    weights = {"memory_loss": 1.0, "autoencoding_loss": 2.0, "language_loss": 3.0, "keys_loss": 0.5}
    module = make(cls, answer_loss=0.0, **weights)
    module.read_context = None  # nothing is read where no answer counts
    ids, mask = module.written_lines(batch)
    assert ids.shape == mask.shape == (B, 8, L)
    found = module.model.losses(ids, mask)
    assert close(module.loss(batch), sum(weights[f"{name}_loss"] * loss for name, loss in found.items()))
    text = torch.randint(1, V, (2, 3 * L))
    written = Batch(text, text, L)
    assert torch.equal(module.written_lines(written)[0], text.view(2, 3, L)) and module.written_lines(written)[1].all()
    ragged = Batch(
        text[:, :L], text[:, :L], L, 1, context=(text[:1, :L], (text[:, L:], torch.ones(2, 2 * L, dtype=torch.bool)))
    )
    assert module.written_lines(ragged)[1].any(-1).tolist() == [[True] * 3, [False, True, True]]
    loose = make(cls, line_tokens=0)
    assert (
        loose.written_lines(Batch(text, text, 6))[0].shape == (2, 3, 6)
        and loose.written_lines(Batch(text, text, 6))[1].sum() == 6 * L
    )
    both = make(cls, autoencoding_loss=2.0)
    assert close(both.loss(batch), make(cls).loss(batch) + 2 * found["autoencoding"])
    metrics = make(cls).evaluate(make_batch(1, test=True), Said(None))
    assert metrics["hop1_support"][1] == 2 and dict(both.hparams)["autoencoding_loss"] == 2.0


def test_losses_are_logged():
    module, seen = make(), {}
    module.log = lambda name, value, **_: seen.setdefault(name, value)
    total = module.training_step(make_batch(), 0)
    assert list(seen) == ["train/loss", "train/answer_loss", "train/order_loss"] and torch.equal(
        total, seen["train/loss"]
    )


def test_bad_input():
    with pytest.raises(ValueError, match=r"order_loss=-1.0: expected a finite number, 0 or more"):
        make(order_loss=-1.0)
    with pytest.raises(
        ValueError, match=r"answer_loss=0: expected more than 0 for it or for another one of answer_loss, memory_loss"
    ):
        make(lit_memory.LitLarimar, answer_loss=0)
    with pytest.raises(ValueError, match=r"keys_loss=0.5: one-hot keys"):
        make(lit_memory.LitLarimar, keys="one_hot", keys_loss=0.5)
    with pytest.raises(TypeError, match=r"unknown argument 'oder_loss'"):
        make(oder_loss=1.0)
    with pytest.raises(
        ValueError, match=r"read_only=3: expected 1 tail, which the last hop answers, or 2, one for each hop"
    ):
        make().loss(make_batch(3))
    with pytest.raises(ValueError, match=r"support=6 of sample 2: expected one of the 4 lines before its question"):
        make().loss(make_batch(support=SUPPORT.clone().index_put((torch.tensor(2), torch.tensor(0)), torch.tensor(6))))
    ids = torch.ones(1, T, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"lines: expected a batch that has the model write some"):
        make().written_lines(Batch(ids, ids, T, read_only=1))
