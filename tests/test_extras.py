"""Auxiliary lines and tails that mention phrases: what they say and where they are; samples stay as they are."""

import json
import re

import numpy as np
import pytest
import torch
from numpy.random import PCG64, Generator
from test_episodes import make

from lit_memory.plan.experiment import load
from lit_memory.run.build import build_data
from lit_memory.tasks.babi.reader import event_of
from lit_memory.tasks.babi.world import ACTORS, GIVERS, OBJECTS, PLACES
from lit_memory.tasks.extras import SENTENCES, fact, mention
from lit_memory.tasks.memreasoner import OTHER_PLACES
from lit_memory.text.tokenizers import UNKNOWN
from lit_memory.util.provenance import PROJECT

EXPERIMENTS = PROJECT / "experiments"
PHRASES = [f"the {place}" for place in OTHER_PLACES.values()]
FACT = re.compile(r"The .+ (moved to|went to|journeyed to|travelled to|is in) the (.+)\.")
OF_BABI = re.compile(rf"\b({'|'.join((*ACTORS, *GIVERS, *OBJECTS, *PLACES))})\b")


def drawn(count=400):
    rng = Generator(PCG64(1))
    return [mention(PHRASES[i % len(PHRASES)], rng) for i in range(count)]


def texts_of(task, batch):
    """The auxiliary lines of a batch as text."""
    rows = zip(*(t.flatten(0, 1) for t in batch.auxiliary_lines), strict=True)
    return [task.tokenizer.decode(ids[real].tolist()) for ids, real in rows]


def test_mentions_say_nothing_about_anybody():
    """Each has its phrase, is no fact of bAbI and names nothing of it; all templates and phrases come up."""
    sentences = drawn()
    assert all(sum(phrase in sentence.lower() for phrase in PHRASES) == 1 for sentence in sentences)
    assert not any(OF_BABI.search(sentence) or re.search(r"[A-Z]{2}|\bX\b", sentence) for sentence in sentences)
    for sentence in sentences:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            event_of(sentence)
    assert len(set(sentences)) > 200
    shapes = [re.compile(re.sub(r"X|[A-Z]{2,}(\\\.s)?", ".+", re.escape(shape)), re.IGNORECASE) for shape in SENTENCES]
    assert {i for i, shape in enumerate(shapes) for sentence in sentences if shape.fullmatch(sentence)} == {
        *range(len(SENTENCES))
    }


def test_facts_are_about_other_people_and_places():
    """Of bAbI's form, about nobody and no place of bAbI, nor one that is mentioned."""
    rng = Generator(PCG64(1))
    sentences = [fact(PHRASES, rng) for _ in range(2000)]
    places = {FACT.fullmatch(sentence)[2] for sentence in sentences}
    assert len(places) > 50 and not places & {*OTHER_PLACES, *OTHER_PLACES.values()}
    assert "attic" in {FACT.fullmatch(fact(["the library"], rng))[2] for _ in range(2000)}, "it is a place of the noise"
    assert not any(OF_BABI.search(sentence) for sentence in sentences)


def test_every_word_has_an_id():
    """At the sizes of the scale cpu, whose tokenizer knows the most frequent words alone; and most fit into a line."""
    tokenizer, rng = (
        make("memreasoner", haystack="noise", tokenizer="word", vocab_size=2048, books=None).tokenizer,
        Generator(PCG64(1)),
    )
    rows = [tokenizer.encode(sentence) for sentence in (*drawn(), *(fact(PHRASES, rng) for _ in range(400)))]
    assert not any(UNKNOWN in row for row in rows)
    assert np.mean([len(row) <= 12 for row in rows]) > 0.9


@pytest.mark.parametrize(
    ("name", "config"), [("memreasoner", {}), ("variable_tracking", {}), ("passkey", {"needle": "magic"})]
)
def test_every_other_auxiliary_line_mentions_a_phrase(name, config):
    plain = make(name, **config, apart=3, line_tokens=24)
    task = make(name, **config, apart=3, line_tokens=24, mentioned=["the harbour", "a widow"])
    batch, before = task.batch(3, "train", 5, 4), plain.batch(3, "train", 5, 4)
    texts, others, again, later = (
        texts_of(task, found) for found in (batch, before, task.batch(3, "train", 5, 4), task.batch(3, "train", 6, 4))
    )
    assert texts == again and texts[1::2] == others[1::2] and not {*texts[::2]} & {*others[::2], *later[::2]}
    assert len(texts) == 12 and all("harbour" in text or "widow" in text for text in texts[::4])
    assert not any("harbour" in text or "widow" in text for text in texts[2::4])
    assert name != "memreasoner" or all(FACT.match(text) for text in texts[2::4]), "which knows the words of its facts"
    assert torch.equal(batch.ids_BT, before.ids_BT)
    assert task.batch(3, "valid", 5, 4).auxiliary_lines is None


@pytest.mark.parametrize("supporting", [0.0, 1.0])
def test_a_tail_of_its_own_in_layout_text(supporting):
    """All but its first token is to be written; mentions and facts in turn. The other tails stay as they are, and
    validation and test have no mention."""
    config = {"layout": "text", "segment_len": 64, "margin": 40, "supporting": supporting}
    plain = make("memreasoner", **config)
    task = make("memreasoner", **config, mentioned=PHRASES)
    batch, before = task.batch(3, "train", 5, 4), plain.batch(3, "train", 5, 4)
    assert batch.read_only == before.read_only + 1
    tails = torch.stack((batch.ids_BT, batch.targets_BT)).unflatten(-1, (batch.read_only, -1))
    written = [task.tokenizer.decode(row[row >= 0].tolist()) for row in tails[1, :, -1]]
    assert sum(phrase[4:] in text for phrase in PHRASES for text in written) == 2, "two mentions, two facts"
    lengths = (tails[1, :, -1] >= 0).sum(1)
    assert ((tails[1, :, -1] == task.tokenizer.eos_id).sum(1) == 1).all() and (lengths > 4).all() and lengths.max() < 40
    kept = before.targets_BT[before.targets_BT >= 0]
    assert torch.equal(tails[1, :, :-1][tails[1, :, :-1] >= 0], kept)
    for split in ("valid", "test"):
        assert torch.equal(task.batch(3, split, 5, 4).ids_BT, plain.batch(3, split, 5, 4).ids_BT)


@pytest.mark.parametrize("task", ["qa1", "qa2"])
def test_no_sample_of_the_training_has_the_other_places(task):
    """The places of the test are in the mentions alone."""
    made = make("memreasoner", task=task, eval_places="other", apart=2, mentioned=PHRASES)
    others = {made.tokenizer.encode(f" {place}").tolist()[-1] for place in OTHER_PLACES.values()}
    for split in ("train", "valid", "test"):
        batch = made.batch(0, split, 0, 32)
        seen = {int(i) for part in (*(ids for ids, _ in batch.context), batch.ids_BT) for i in part.unique()}
        assert bool(seen & others) == (split == "test")


MENTIONING = sorted(path.stem for path in EXPERIMENTS.glob("*.yaml") if "task.mentioned" in path.read_text())


def said(task, batch):
    """Everything that a batch has a model read or write, row by row."""
    parts = [part if isinstance(part, tuple) else (part, torch.ones_like(part)) for part in batch.context]
    parts += [(batch.ids_BT, torch.ones_like(batch.ids_BT))]
    rows = [ids[real.bool()].tolist() for part in parts for ids, real in zip(*part, strict=True)]
    return [task.tokenizer.decode(row) for row in rows] + (texts_of(task, batch) if batch.auxiliary_lines else [])


def leaks(training, tested, phrases):
    """Four words in a row of a sentence that training and test share, with a word of a phrase among them."""
    named = {word for phrase in phrases for word in phrase.lower().split()} - {"the", "a", "to"}

    def fours(texts):
        sentences = [sentence for text in texts for sentence in re.split(r"[.?!]|<\w+>", text.lower())]
        rows = [re.findall(r"[\w']+", sentence) for sentence in sentences]
        return {tuple(row[i : i + 4]) for row in rows for i in range(len(row) - 3) if named & {*row[i : i + 4]}}

    return fours(training) & fours(tested)


@pytest.mark.parametrize("name", MENTIONING)
def test_no_sentence_of_a_test_leaks_into_the_training(name):
    """The training has the words of the tests' sentences, and no four of these in a row: neither in its samples, nor in
    what is beside them. A sentence of the test among them is found."""
    specs = load(EXPERIMENTS / f"{name}.yaml").at("cpu").plan()
    specs += [spec.start for spec in specs if spec.start]
    kinds = {json.dumps([spec.task, spec.stages], sort_keys=True): spec for spec in specs}
    training, tested, phrases = [], [], set()
    for spec in kinds.values():
        task = build_data(spec).task
        for stage in spec.stages or [{"task": {}}]:
            told = task.at(**stage["task"])
            if told.config.mentioned:
                phrases |= {*told.config.mentioned}
                training += [text for step in range(4) for text in said(told, told.batch(0, "train", step, 16))]
        asked = task.test_conditions()[0][1]
        tested += said(asked, asked.batch(0, "test", 0, 32))
    assert len(leaks([*training, *tested], tested, phrases)) > 3 and not leaks(training, tested, phrases)
