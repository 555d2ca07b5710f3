"""Larimar: encoder and decoder against twins, the named facts of spec 11.4 that need a model, its losses, bad input.

All comparisons are in fp64 on tiny models. The contract of all models is in ``test_recurrence.py``, flags
are in ``test_models.py``.
"""

import pytest
import torch
from torch.nn import functional as F

from lit_memory.memory import episodic
from lit_memory.models.attention import attention_mask
from lit_memory.models.decoder import Decoder
from lit_memory.models.episodic import larimar
from lit_memory.models.episodic.encoder import group_by_width
from lit_memory.models.episodic.larimar import Larimar
from lit_memory.recurrence import state_tensors, unroll

N = 5  # tokens per line
V = 19
TINY = {
    "vocab_size": V,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "latent_width": 8,
    "slots": 6,
    "init_std": 0.3,
    "embedding_std": 1.0,
    "positions": 32,
}


def make(**config):
    torch.manual_seed(0)
    return Larimar(Larimar.Config(**{**TINY, **config})).double()


def ids_of(batch, length, seed=7):
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(a, b, tol=1e-10):
    return torch.allclose(a, b, rtol=tol, atol=tol)


# --- encoder and decoder


def test_encoder_is_torchs():
    """The layers equal those of torch's own post-norm encoder with the same weights; the rest is written out."""
    model, ids = make(), ids_of(3, N)
    encoder, rows = model.encoder, torch.cat([model.encoder.cls.expand(3, 1, -1), model.decoder.tokens(ids)], dim=1)
    rows = F.layer_norm(rows + encoder.positions.weight[: N + 1], (16,), encoder.norm.weight, encoder.norm.bias)
    for layer in encoder.layers:
        twin = torch.nn.TransformerEncoderLayer(16, 2, 64, 0.0, F.gelu, batch_first=True, dtype=torch.float64)
        names = {
            "self_attn.in_proj_": "attention.qkv.",
            "self_attn.out_proj.": "attention.out.",
            "linear1.": "up.",
            "linear2.": "down.",
        }
        names |= {"norm1.": "norm1.", "norm2.": "norm2."}
        twin.load_state_dict(
            {f"{a}{kind}": layer.state_dict()[f"{b}{kind}"] for a, b in names.items() for kind in ("weight", "bias")}
        )
        rows = twin(rows)
    expected = encoder.to_latent(torch.tanh(encoder.pooler(rows[:, 0])))
    assert close(model.encode(ids), expected)


def test_encoder_skips_padding():
    """Padding, by mask or by id, changes no latent; the order of tokens does; a line without a token has a latent."""
    model, ids = make(pad_id=0), ids_of(2, N).clamp(min=1)
    padded = F.pad(ids, (0, 3))
    assert close(model.encode(padded), model.encode(ids)) and close(
        model.encode(F.pad(ids, (0, 3), value=4), F.pad(ids > 0, (0, 3))), model.encode(ids)
    )
    assert not close(model.encode(ids.flip(1)), model.encode(ids), 1e-3)
    blank = model.encode(torch.zeros(1, N, dtype=torch.int64))
    assert blank.isfinite().all() and close(blank, model.encode(torch.zeros(1, 2, dtype=torch.int64)))


def test_lines_that_repeat_are_encoded_and_decoded_once(monkeypatch):
    """With the same latents, loss and gradients as one by one; with dropout, every one by itself."""
    model = make(pad_id=0)
    ids_XT = ids_of(5, N)[[0, 1, 0, 2, 1, 0, 3, 4]]
    mask_XT = torch.arange(N) < torch.tensor([5, 3, 5, 2, 3, 4, 0, 0])[:, None]
    seen, decode, encoder = [], model.decode_with_bos, model.encoder.forward
    monkeypatch.setattr(model.encoder, "forward", lambda tokens, mask: seen.append(len(mask)) or encoder(tokens, mask))
    monkeypatch.setattr(model, "decode_with_bos", lambda ids, *rest: seen.append(len(ids)) or decode(ids, *rest))
    found = model.autoencoding(ids_XT, mask_XT)
    found.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert seen == [5, 5]  # lines without a token are alike
    model.zero_grad()
    own = torch.cat([model.encode(ids[None], mask[None]) for ids, mask in zip(ids_XT, mask_XT, strict=True)])
    assert close(model.encode(ids_XT, mask_XT), own)
    expected = model.reconstruction(ids_XT, mask_XT, own)
    expected.backward()
    assert close(found, expected) and all(
        close(a, p.grad) for a, p in zip(grads, (p for p in model.parameters() if p.grad is not None), strict=True)
    )
    seen.clear()
    model = make(pad_id=0, dropout=0.5).train()
    encoder = model.encoder.forward
    monkeypatch.setattr(model.encoder, "forward", lambda tokens, mask: seen.append(len(mask)) or encoder(tokens, mask))
    model.autoencoding(ids_XT, mask_XT)
    assert seen == [8] and model.eval().autoencoding(ids_XT, mask_XT) > 0 and seen == [8, 5]


def test_a_line_is_written_from_its_first_token_on():
    """With ``bos_id`` the first token of a line, too, is written from the latent, which has to hold it; the twin has
    none, and decodes line by line what begins with that token. What is said after a question begins with it, too: a
    line that is learnt and one that is asked for have the same positions."""
    ids_XT, lengths = ids_of(4, N).clamp(min=1), [N, 3, 1, 0]
    mask_XT = torch.arange(N) < torch.tensor(lengths)[:, None]
    for begin, scored in ((V - 1, sum(lengths)), (-1, N - 1 + 2)):
        model, plain = make(pad_id=0, bos_id=begin), make(pad_id=0)
        plain.load_state_dict(model.state_dict())
        latents_XC = torch.randn(
            4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True
        )
        losses = []
        for ids_T, latent_C, length in zip(ids_XT, latents_XC, lengths, strict=True):
            line = torch.cat([torch.tensor([begin] * (begin >= 0), dtype=torch.int64), ids_T[:length]])
            if len(line) > 1:
                hidden_TD = plain.decode(line[None], latent_C[None])[0]
                assert close(model.decode(ids_T[None, :length], latent_C[None])[0], hidden_TD[len(line) - length :])
                logits = plain.logits(hidden_TD[:-1])
                losses.append(F.cross_entropy(logits, line[1:], reduction="none"))
        found = model.reconstruction(ids_XT, mask_XT, latents_XC)
        assert len(torch.cat(losses)) == scored and close(found, torch.cat(losses).mean())
        used_X = torch.autograd.grad(found, latents_XC)[0].any(1).tolist()
        assert used_X == [length >= (1 if begin >= 0 else 2) for length in lengths]


def test_lines_are_as_wide_as_they_need(monkeypatch):
    """Lines are read and written in columns of their own width, with the latents, loss and gradients of all columns."""
    model, T = make(pad_id=0), 20
    ids_XT, lengths = ids_of(6, T).clamp(min=1), [20, 3, 8, 9, 0, 16]
    mask_XT = torch.arange(T) < torch.tensor(lengths)[:, None]
    assert [(numbers.tolist(), width) for numbers, width in group_by_width(mask_XT)] == [
        ([1, 2, 4], 8),
        ([3, 5], 16),
        ([0], 20),
    ]

    def measured():
        model.zero_grad()
        loss = model.reconstruction(ids_XT, mask_XT, model.encode(ids_XT, mask_XT), torch.arange(6) + 1)
        loss.backward()
        return [
            loss,
            model.encode(ids_XT, mask_XT),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]

    found = measured()
    monkeypatch.setattr(
        "lit_memory.models.episodic.line_recurrent.group_by_width",
        lambda mask: [(torch.arange(len(mask)), mask.shape[1])],
    )
    assert all(close(a, b) for a, b in zip(found, measured(), strict=True))


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_lar_past(family):
    """T-LAR-past: for a zero latent the decoder is the plain one with one slot whose key and value are zero, which is
    not the plain one."""
    model, ids = make(family=family, embedding=False), ids_of(2, N)
    plain = Decoder(model.config).double()
    plain.load_state_dict({name.replace(".block.", "."): weight for name, weight in model.decoder.state_dict().items()})
    rows = F.pad(plain.tokens(ids), (0, 0, 1, 0))
    rows, mask = plain.add_positions(rows)[:, 1:], attention_mask(torch.ones(2, N + 1, dtype=torch.bool), N)
    for block in plain.layers:
        rows = block.attend(rows, mask, (torch.zeros(2, 2, 1, 8).double(),) * 2)[0]
    with_slot, hidden = plain.norm(rows), model.decode(ids, torch.zeros(2, 8).double())
    assert close(hidden, with_slot) and not close(hidden, plain.run(plain.add_positions(plain.tokens(ids))), 1e-3)
    model.to_past.weight.data.zero_()
    assert close(model.decode(ids, torch.randn(2, 8).double()), with_slot)


def test_conditioning_without_a_slot():
    """Embeddings alone: a zero latent gives exactly the plain decoder; another one is added to every token."""
    model, ids, latent = make(past=False), ids_of(2, N), torch.randn(2, 8).double()
    d = model.decoder
    assert torch.equal(
        model.decode(ids, torch.zeros_like(latent)),
        d.norm(d.layers[1](d.layers[0](d.add_positions(d.tokens(ids)), None, None), None, None)),
    )
    rows = d.add_positions(d.tokens(ids) + model.to_rows(latent)[:, None])
    assert close(model.decode(ids, latent), d.norm(d.layers[1].block(d.layers[0].block(rows))))
    mask = torch.tensor([[True] * 3 + [False] * 2] * 2)
    assert close(model.decode(ids, latent, mask)[:, :3], model.decode(ids[:, :3], latent))


# --- the episode


@pytest.mark.parametrize("keys", ["linear", "one_hot", "gaussian"])
def test_step_slow_twin(keys):
    """Line by line and sample by sample: what is read, and what is decoded with it."""
    model, ids = make(keys=keys, solver="svd", prefix_tokens=0 if keys == "linear" else 2), ids_of(2, 6 * N)
    hidden = unroll(model, ids, N).hidden_BTD
    for sample, out in zip(ids, hidden, strict=True):
        Z, prefixes = [], []
        for line, h in zip(sample.split(N), out.split(N), strict=True):
            if len(Z) < 2:
                read = Z[0] if Z else torch.zeros(8).double()
            elif keys == "linear":
                past = torch.stack(Z[:-1])
                M = torch.linalg.pinv(past @ torch.linalg.pinv(model.M_0)) @ past
                read = Z[-1] @ torch.linalg.pinv(M) @ M
            else:
                past, slots = torch.stack(Z[:-1]), torch.stack(prefixes[:-1])
                read = past[(slots - prefixes[-1]).norm(dim=-1).argmin()]
                if keys == "gaussian":
                    distance = (torch.stack(prefixes)[:, None] - slots[None]).square().sum(-1)
                    W = (-distance / 2).softmax(-1)
                    read = W[-1] @ torch.linalg.pinv(W[:-1]) @ past
            assert close(h, model.decode(line[None], read[None])[0], 1e-7)
            Z.append(model.encode(line[None])[0])
            prefixes.append(model.encode(line[None, :2])[0])


def test_lines_of_a_segment():
    """A segment of several lines leaves the state that its lines leave one by one; ragged samples and a short last line
    included."""
    many, one, ids = make(line_tokens=N), make(), ids_of(2, 4 * N)
    assert all(close(a, b) for a, b in zip(unroll(many, ids, 2 * N).state, unroll(one, ids, N).state, strict=True))
    mask = torch.arange(4 * N) < torch.tensor([[4 * N], [2 * N + 3]])
    state = unroll(many, ids, mask_BT=mask).state
    alone = unroll(many, ids[1:, : 2 * N + 3], 2 * N + 3).state
    assert all(close(a, b) for a, b in zip(many.reorder(state, torch.tensor([1])), alone, strict=True))
    assert close(many.read(state)[1:], many.read(alone))


def test_samples_that_begin_late():
    """A sample with fewer lines is padded in front; what it reads is what it reads alone."""
    model, ids = make(), ids_of(3, 4 * N)
    state = unroll(model, iter([ids[:1, :N], ids[:2, N : 2 * N], ids[:, 2 * N : 3 * N], ids[:, 3 * N :]]), keep=0).state
    for i in range(3):
        alone = unroll(model, ids[i : i + 1, i * N :], N).state
        assert close(model.read(state)[i : i + 1], model.read(alone))


def test_question_alone():
    """Nothing before the question: its own latent; nothing at all: zero. Also beside a sample that has lines."""
    model, ids = make(), ids_of(2, 3 * N)
    assert not model.read(model.init_state(2)).any()
    one = unroll(model, ids[:, :N]).state
    assert torch.equal(model.read(one), model.encode(ids[:, :N]))
    ragged = model.read(unroll(model, iter([ids[:1, :N], ids[:1, N : 2 * N], ids[:, 2 * N :]]), keep=0).state)
    assert close(ragged[1], model.encode(ids[1:, 2 * N :])[0]) and not close(
        ragged[0], model.encode(ids[:1, 2 * N :])[0]
    )


def test_constant_memory_is_the_same():
    """Deviation 1: M from a memory of constant size, to which lines are added one by one, reads the same."""
    model, ids = make(solver="svd"), ids_of(2, 10 * N)
    state = unroll(model, ids, N).state
    memory = episodic.empty(2, 6, 8, dtype=torch.float64)
    for z in state.lines_BNE[:, 1:-1].split(1, dim=1):
        memory = episodic.add(memory, episodic.keys(z, model.M_0[None], "svd"), z)
    read = episodic.read(memory, episodic.keys(state.lines_BNE[:, -1:], memory.M_BKC, "svd"))
    assert close(read[:, 0], model.read(state), 1e-7)


def test_lar_length_of_a_passkey():
    """T-LAR-length, T-LAR-perm: a prompt of the needle's first tokens reads the needle's latent bit for bit, at any
    length and place of it."""
    model, needle = make(keys="one_hot", prefix_tokens=3), ids_of(1, N, seed=1)
    filler, prompt = ids_of(5, N, seed=2), needle[:, :3]
    reads = []
    for repeats, place in ((1, 0), (3, 7), (9, 33)):
        lines = [*(filler.split(1) * repeats)]
        lines.insert(place, needle)
        state = unroll(model, iter([*lines, prompt]), keep=0).state
        reads.append(model.read(state))
    assert all(torch.equal(read, model.encode(needle)) for read in reads)


# --- distinct lines


def filled(tokens, place):
    """A needle among five lines that repeat, in segments of 40 lines, and a question that begins as the needle does."""
    needle, filler, lines = ids_of(1, N, seed=1), ids_of(5, N, seed=2), tokens // N // 40 * 40
    text = filler[torch.arange(lines - 2) % 5]
    at = round(place * (lines - 2))
    return torch.cat([text[:at], needle, text[at:], F.pad(needle[:, :3], (0, 2))]).view(1, -1).split(40 * N, dim=1)


def test_lar_length_of_distinct_lines():
    """T-LAR-length, in fp32: what is read after 64,000 tokens is, bit for bit, what is read after 1,000, wherever the
    needle is, and so is the size of the state; no line is encoded twice."""
    model = make(keys="one_hot", prefix_tokens=3, distinct=True, line_tokens=N).float()
    encoded, reads, sizes = [], [], []
    model.encoder.register_forward_pre_hook(lambda _, args: encoded.append(int(args[1].any(1).sum())))
    for tokens, place in ((1000, 0.5), (1000, 0.0), (1000, 1.0), (64_000, 0.5), (64_000, 0.0), (64_000, 0.99)):
        encoded.clear()
        with torch.no_grad():
            state = unroll(model, iter(filled(tokens, place)), keep=0).state
            assert sum(encoded) <= 2 * 7  # five lines, the needle, the question: the whole line and its first tokens
            reads.append(model.read(state))
            sizes.append((model.state_floats(state), state.real_BN.shape, state.ids_BNT.shape))
            lines = torch.cat(filled(tokens, place)).view(-1, N)
            at = (lines == ids_of(1, N, seed=1)).all(1).nonzero().item()
            assert model.readouts(state).nearest_BH.tolist() == [
                [len(lines) - 1 - at]
            ]  # where it was, not in which slot it is
    assert all(torch.equal(read, reads[0]) for read in reads) and set(sizes) == {(2 * 8 * 8, (1, 8), (1, 8, N))}
    assert torch.equal(reads[0], model.encode(ids_of(1, N, seed=1)))
    everything = unroll(
        make(keys="one_hot", prefix_tokens=3, line_tokens=N).float(), iter(filled(1000, 0.5)), keep=0
    ).state
    assert close(model.read(everything), reads[0], 1e-5)


def test_latents_do_not_depend_on_what_is_read_with_them():
    """With ``distinct``, to the last bit in fp32: lines of all lengths alone, and among others in any order."""
    model, generator = (
        make(keys="one_hot", distinct=True, line_tokens=24, positions=24).float(),
        torch.Generator().manual_seed(0),
    )
    ids, mask = ids_of(60, 24), torch.arange(24) < torch.randint(1, 25, (60, 1), generator=generator)
    alone = torch.cat([model.encode(*line) for line in zip(ids.split(1), mask.split(1), strict=True)])
    for size in (2, 15, 16, 17, 31, 60):
        chosen = torch.randperm(60, generator=generator)[:size]
        assert torch.equal(model.encode(ids[chosen], mask[chosen]), alone[chosen])


@pytest.mark.parametrize("segment", [1, 3])
def test_distinct_slow_twin(segment):
    """Sample by sample: lines in the order in which they came first, then the question, which may have been there;
    ragged samples included."""
    model, generator = make(keys="one_hot", distinct=True, line_tokens=N), torch.Generator().manual_seed(0)
    kinds, picks = ids_of(4, N).clamp(max=2), torch.randint(4, (3, 12), generator=generator)
    lengths = torch.randint(1, N + 1, (4,), generator=generator)
    ids, mask = (
        kinds[picks],
        (torch.arange(N) < lengths[picks].unsqueeze(-1))
        & (torch.arange(12) >= torch.tensor([0, 4, 9])[:, None]).unsqueeze(-1),
    )
    mask[0, 5:8] = mask[1, 11] = False
    state = unroll(model, ids.flatten(1), segment * N, mask_BT=mask.flatten(1)).state
    for b in range(3):
        lines = [tuple(line[real].tolist()) for line, real in zip(ids[b], mask[b], strict=True) if real.any()]
        expected = [*dict.fromkeys(lines[:-1]), lines[-1]]
        kept = [
            tuple(line[line >= 0].tolist())
            for line, real in zip(state.ids_BNT[b], state.real_BN[b], strict=True)
            if real
        ]
        assert kept == (expected if lines[-1] in lines[:-1] else [*dict.fromkeys(lines)])
        assert state.age_BN[b][state.real_BN[b]].tolist() == [
            *(len(lines) - 1 - lines.index(line) for line in kept[:-1]),
            0,
        ]
        latents = torch.cat([model.encode(torch.tensor([line])) for line in kept])
        assert close(state.lines_BNE[b][state.real_BN[b]], latents) and not state.lines_BNE[b][~state.real_BN[b]].any()
        alone = unroll(model, ids[b : b + 1].flatten(1), segment * N, mask_BT=mask[b : b + 1].flatten(1)).state
        assert close(model.read(alone), model.read(state)[b : b + 1])
    model.read(state).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.encoder.parameters())


def test_equal_hashes(monkeypatch):
    """Lines of one hash are still told apart: all that a collision costs is a slot for a line that is repeated."""
    ids = torch.tensor([[[1, 2], [2, 1], [1, 2], [1, 2], [2, 1]]])
    assert larimar.first_equal(ids).tolist() == [[0, 1, 0, 0, 1]]
    monkeypatch.setattr(larimar, "MULTIPLIER", 0)
    assert larimar.first_equal(ids).tolist() == [[0, 1, 0, 0, 4]]


# --- losses and noise


def test_losses_that_are_not_named_are_not_computed(monkeypatch):
    model, ids = make(), torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(0))
    lines = model.cut(ids)
    whole = model.losses(*lines)
    for names in (["memory"], ["keys", "language"]):
        found = model.losses(*lines, names=names)
        assert found.keys() == set(names) and all(torch.equal(found[name], whole[name]) for name in names)
    encoded, rows = [], model.encode_rows
    monkeypatch.setattr(model, "encode_rows", lambda ids, real: (encoded.append(ids), rows(ids, real))[1])
    assert close(model.losses(*lines)["autoencoding"], whole["autoencoding"])
    assert sum(map(len, encoded)) == len(lines[0].flatten(0, 1).unique(dim=0))  # once for all losses
    monkeypatch.setattr(model, "address", lambda *_: pytest.fail("the memory was read"))
    assert torch.equal(model.losses(*lines, names=["autoencoding"])["autoencoding"], whole["autoencoding"])


def test_losses_slow_twin():
    """Each published loss is what ``unroll`` gives for a context: no line, the line itself, and all lines with the line
    as the question."""
    model, ids = make(line_tokens=N, pad_id=0), ids_of(2, 3 * N).clamp(min=1)
    ids[0, N - 2 : N] = 0
    lines, found = ids.split(N, dim=1), model.losses(*model.cut(ids))
    for name, context in (("language", []), ("autoencoding", [None]), ("memory", [*lines, None])):
        terms = []
        for line in lines:
            state = (
                unroll(model, tuple(line if c is None else c for c in context), keep=0).state
                if context
                else model.init_state(2)
            )
            logits = model.logits(unroll(model, line, state=state, read_only=1).hidden_BTD)[:, :-1]
            scored = line[:, 1:] != 0
            terms.append(F.cross_entropy(logits[scored], line[:, 1:][scored], reduction="none"))
        assert close(found[name], torch.cat(terms).mean())
    Z = torch.stack([model.encode(line) for line in lines], dim=1)
    memory = episodic.write(episodic.keys(Z, model.M_0[None]), Z)
    assert close(found["keys"], episodic.keys(Z, memory.M_BKC).square().sum(-1).mean() / 2)
    assert "keys" not in make(keys="one_hot").losses(ids[:, None])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, N:] = False
    alone = model.losses(*model.cut(ids[1:, :N]))
    both, first = model.losses(*model.cut(ids, mask)), model.losses(*model.cut(ids[:1]))
    assert close(both["keys"] * 4, first["keys"] * 3 + alone["keys"])


@pytest.mark.parametrize("keys", ["linear", "one_hot", "gaussian"])
def test_losses_of_an_episode_without_lines(keys):
    """It adds nothing to the losses of the others, and alone they are 0."""
    model, ids = make(keys=keys), ids_of(2, 3 * N)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1] = False
    both, first = model.losses(*model.cut(ids, mask)), model.losses(*model.cut(ids[:1]))
    assert both.keys() == first.keys() and all(close(both[name], first[name]) for name in first)
    none = model.losses(*model.cut(ids[:1], mask[1:]))
    assert not any(loss.any() for loss in none.values())
    sum(both.values()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_losses_train_all():
    """Every parameter gets a gradient, and a few steps lower all three cross-entropies."""
    model, ids = make(line_tokens=N), ids_of(4, 3 * N)
    optimizer, sums = torch.optim.Adam(model.parameters(), 3e-3), []
    for _ in range(12):
        losses = model.losses(*model.cut(ids))
        sums.append([losses[name].item() for name in ("memory", "autoencoding", "language")])
        optimizer.zero_grad()
        (sum(losses.values())).backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        optimizer.step()
    assert all(last < 0.8 * first for first, last in zip(sums[0], sums[-1], strict=True))


def test_lar_noise0():
    """T-LAR-noise0: without noise training is deterministic and equals evaluation; with noise only training is not."""
    ids = ids_of(2, 4 * N)
    state = unroll(make(), ids, N).state
    for noise in ({}, {"write_noise": 0.1}, {"read_noise": 0.1}):
        model = make(**noise)
        training = [model.read(state) for _ in range(2)]
        evaluation = [model.eval().read(state) for _ in range(2)]
        assert torch.equal(*evaluation) and torch.equal(evaluation[0], make().read(state))
        assert torch.equal(*training) == torch.equal(training[0], evaluation[0]) == (not noise)


# --- bad input


def test_invalid_combinations():
    with pytest.raises(ValueError, match=r"prefix_tokens=2: linear keys"):
        make(prefix_tokens=2)
    with pytest.raises(ValueError, match=r"distinct=True: expected line_tokens above 0"):
        make(keys="one_hot", distinct=True)
    with pytest.raises(ValueError, match=r"wrap_pos=True: a segment has no memory rows"):
        make(family="gpt2", wrap_pos=True)
    with pytest.raises(ValueError, match=r"past=False: expected True where embedding is False"):
        make(past=False, embedding=False)
    model = make(family="gpt2", positions=8)
    model.config.check_segment(7)
    with pytest.raises(ValueError, match=r"positions=8"):
        model.config.check_segment(8)
    with pytest.raises(ValueError, match=r"9 tokens in one line, but the encoder has 8 positions: use line_tokens"):
        model.encode(ids_of(1, 9))


@pytest.mark.parametrize("keys", ["linear", "one_hot", "gaussian"])
def test_latent_that_is_no_number(keys):
    """A NaN in the encoder is an error in one line as soon as it is read."""
    model, ids = make(keys=keys), ids_of(2, 3 * N)
    state = unroll(model, ids, N).state
    state.lines_BNE[1, 1, 0] = float("nan")
    with pytest.raises(ValueError, match=r"check the encoder"):
        model.read(state)


def test_more_lines_than_slots():
    """Twelve lines in six slots: finite, of rank six at most, and the best fit (``test_episodic.py``)."""
    model = make(solver="svd")
    state = unroll(model, ids_of(2, 12 * N), N).state
    found = model.recall(torch.randn(2, 20, 8).double(), state.lines_BNE, state.real_BN)
    assert found.isfinite().all() and (torch.linalg.matrix_rank(found, rtol=1e-9) <= 6).all()


def test_state_precision():
    """Latents are kept in fp32 at least; memory operations stay there under bf16 autocast."""
    model, ids = make().float(), ids_of(2, 3 * N)
    with torch.autocast("cpu", torch.bfloat16):
        state = unroll(model, ids, N).state
        assert model.read(state).dtype == torch.float32
    low = make().bfloat16()
    assert {t.dtype for t in state_tensors(unroll(low, ids, N).state) if t.is_floating_point()} == {torch.float32}
    assert low.losses(ids[:, None])["memory"].isfinite()
