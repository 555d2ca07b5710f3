"""DNA: the stand-in's oracle and blind solvers, published layouts on disk, and their errors. Common tests are in
    test_tasks.py.

The oracle reads a sequence as text, letter by letter, and knows the rule of the task's docstring alone.
"""

import datasets
import numpy as np
import pytest
import torch

from lit_memory.tasks import dna
from lit_memory.tasks.dna import DNA
from lit_memory.tasks.dna_motifs import MOTIFS, background, draw_background, reverse_complement
from lit_memory.tasks.dna_sets import BASES, load_sequences

A, B = ("".join(BASES[i] for i in motif) for motif in MOTIFS)


def make(**config):
    return DNA(DNA.Config(**config))


def texts(batch):
    """Sequences as text, without padding."""
    return ["".join(BASES[i] for i in row if i < 5) for row in batch.ids_BT[:, :-2].tolist()]


def places(text, motif):
    return [i for i in range(len(text) - 7) if sum(a != b for a, b in zip(text[i : i + 8], motif, strict=True)) <= 1]


def oracle(text):
    other = text[::-1].translate(str.maketrans("ACGT", "TGCA"))
    return int(
        any(20 <= b - a - 8 <= 120 for strand in (text, other) for a in places(strand, A) for b in places(strand, B))
    )


def accuracy(batch, answers):
    """Score of classes as answers."""
    predicted = torch.zeros_like(batch.ids_BT)
    predicted[:, -1] = dna.FIRST_CLASS + torch.as_tensor(answers)
    return DNA(DNA.Config()).score(predicted, batch)["accuracy"].mean().item()


@pytest.mark.parametrize(("split", "length"), [("train", 500), ("valid", 150), ("test", 1000), ("test", 36)])
def test_oracle(split, length):
    """A before B at 20 to 120 bases, with a substitution in each at most, on either strand, is class 1, and nothing
    else is."""
    batch = make(length=length).batch(0, split, 0, 60)
    assert accuracy(batch, [oracle(text) for text in texts(batch)]) == 1.0
    assert 10 < batch.meta["class"].sum() < 50


def test_blind_solvers():
    """One class, the share of any base, and how many motifs there are say nothing or little."""
    batch = make(length=160).batch(0, "test", 0, 1500)
    three_sigma = 3 * 0.5 / 1500**0.5
    assert abs(accuracy(batch, torch.ones(1500, dtype=torch.long)) - 0.5) < three_sigma
    bases, classes = batch.ids_BT[:, :-2], batch.meta["class"]
    for base in range(4):
        share = (bases == base).double().mean(1)
        assert abs(accuracy(batch, (share > share.median()).long()) - 0.5) < three_sigma
        assert abs(share[classes == 0].mean() - share[classes == 1].mean()) < 3 * share.std() * 2 / 1500**0.5
    both = torch.tensor(
        [
            all(any(places(text, m) for m in strands) for strands in ((A, "CGATGACT"), (B, "GATCCTGA")))
            for text in texts(batch)[:300]
        ]
    )
    assert (
        both[classes[:300] == 1].all() and 0.3 < both[classes[:300] == 0].double().mean() < 0.8
    )  # both motifs, in the wrong order


def test_places_of_motifs_tell_much():
    """In sequences that are short beside the distance of the motifs, A alone does by lying early or late, and more do
    both together, whatever their distance (the notes of titans_dna)."""
    for length, alone, both in ((200, 0.84, 0.93), (500, 0.64, 0.77), (1000, 0.58, 0.63)):
        batch = make(length=length).batch(0, "test", 0, 2000)
        bases_BL = (batch.ids_BT[:, :-2] - batch.ids_BT[:, :-2].min()).numpy()
        middle, found = (length - 8) / 2, []
        for motif, sign in zip(MOTIFS, (-1, 1), strict=True):
            for strand, way in ((motif, sign), (reverse_complement(motif), -sign)):
                windows = np.lib.stride_tricks.sliding_window_view(bases_BL, 8, axis=1)
                near = (windows == strand).sum(-1) >= 7
                found.append(way * (near * (np.arange(near.shape[1]) - middle)).sum(1))
        shares = [accuracy(batch, places > 0) for places in (sum(found[:2]), sum(found))]
        assert shares == pytest.approx([alone, both], abs=0.025)


def test_background_is_an_order_3_chain():
    """Frequencies of a base after three others are those of the table; G is rare after C."""
    table = np.diff(background(), axis=1, prepend=0)
    text = draw_background(np.random.default_rng(0), 200, 1500)
    context = text[:, 2:-1] * 16 + text[:, 1:-2] * 4 + text[:, :-3]
    counts = np.zeros((64, 4))
    np.add.at(counts, (context.ravel(), text[:, 3:].ravel()), 1)
    total = counts.sum(1, keepdims=True)
    assert (np.abs(counts - total * table) < 4.5 * np.sqrt(total * table * (1 - table))).all()
    after_c, after_others = table[16:32, 2].mean(), table[np.r_[:16, 32:64], 2].mean()
    assert after_c < 0.5 * after_others


def test_golden_sample():
    """The sampler never changes silently: old results would no longer be comparable."""
    batch = make(length=40).batch(0, "train", 0, 2)
    assert texts(batch) == GOLDEN and batch.meta["class"].tolist() == [0, 1]


GOLDEN = ["ATCAGGATCTATAGTAGGCATAGGTGGGCGGGCAACGTTG", "AGATCCAGACCATATCAGGAACTAATAAGTTCGATGACTT"]


def test_segments_are_padded_in_front():
    """Ids of an uncut sample stand at the end of the segments, behind padding; the last segment asks."""
    whole, cut = (make(length=40, segment_len=n).batch(0, "train", 0, 3) for n in (0, 12))
    assert (
        whole.ids_BT.shape == (3, 42)
        and whole.segment_len == 42
        and cut.ids_BT.shape == (3, 48)
        and cut.segment_len == 12
    )
    assert (
        torch.equal(cut.ids_BT[:, 6:], whole.ids_BT)
        and (cut.ids_BT[:, :6] == dna.PAD).all()
        and cut.read_only == whole.read_only == 1
    )
    assert (make(length=40, segment_len=12).written, make(length=40).written) == (3, 0)


def test_next_base():
    """In training every base is a target, but no padding and no question; validation asks for the class alone."""
    plain, task = make(length=40, segment_len=12), make(length=40, segment_len=12, next_base=True)
    train, valid = task.batch(0, "train", 0, 3), task.batch(0, "valid", 0, 3)
    assert torch.equal(train.ids_BT, plain.batch(0, "train", 0, 3).ids_BT) and train.read_only == 0
    assert (train.targets_BT[:, :6] == -100).all() and (train.targets_BT[:, -2] == -100).all()
    assert torch.equal(train.targets_BT[:, 6:-2], train.ids_BT[:, 6:-2]) and torch.equal(
        train.targets_BT[:, -1], train.ids_BT[:, -1]
    )
    assert torch.equal(valid.targets_BT, plain.batch(0, "valid", 0, 3).targets_BT) and valid.read_only == 1
    assert (
        make(length=40, next_base=True).batch(0, "train", 0, 3).targets_BT[:, 0] == -100
    ).all()  # nothing comes before


# --- sequences on disk

READS = {"neg": ["ACGTACGTAC", "NNNNA"], "pos": ["TTTTTTTT", "CCCCC", "GATTACA"]}


@pytest.fixture
def folder(tmp_path):
    """Layouts: .txt in folders of classes for training, FASTA for validation, a table for the test."""
    for label, sequences in READS.items():
        (tmp_path / "train" / label).mkdir(parents=True)
        for i, sequence in enumerate(sequences):
            (tmp_path / "train" / label / f"{i}.txt").write_text(sequence.lower() if i else sequence + "\n")
    (tmp_path / "valid").mkdir()
    (tmp_path / "valid" / "neg.fa").write_text(">one\nAC\nGT\n\n>two\nA\n")
    (tmp_path / "valid" / "pos.fasta").write_text(">three\nTTT\n")
    (tmp_path / "test.csv").write_text("id,seq,label\n1,ACGTA,pos\n2,GGG,neg\n")
    return tmp_path


def told(task, split):
    batch = task.take(split, range(task.count(split)))
    return list(zip(texts(batch), batch.meta["class"].tolist(), strict=True))


def test_folders(folder):
    """Every sequence has the class of its folder, file or row, and is cut to ``length``; training draws from them."""
    task = make(source=str(folder), length=8)
    expected = [(sequence[:8], label) for label, name in enumerate(READS) for sequence in READS[name]]
    assert sorted(told(task, "train")) == sorted(expected)
    assert sorted(told(task, "valid")) == [("A", 0), ("ACGT", 0), ("TTT", 1)] and sorted(told(task, "test")) == [
        ("ACGTA", 1),
        ("GGG", 0),
    ]
    first = task.batch(0, "train", 0, 40)
    assert (
        torch.equal(first.ids_BT, make(source=str(folder), length=8).batch(0, "train", 0, 40).ids_BT)
        and task.vocab_size == 9
    )
    rows = dict(zip(texts(first), first.ids_BT.tolist(), strict=True))
    assert set(rows) == {text for text, _ in expected} and make().count("test") is None
    assert all(
        row[:-2] == [dna.PAD] * (8 - len(text)) + [BASES.index(c) for c in text] and row[-2] == dna.ASK
        for text, row in rows.items()
    )


def test_a_tenth_is_held_out(tmp_path):
    """Without a part for validation the training sequences are spread by their bases: no sequence is in both, wherever
    it stands."""
    letters = np.random.default_rng(0).choice(list("ACGT"), (400, 20))
    for label, part in (("a", letters[:220]), ("b", letters[180:])):  # forty stand in both
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / f"{label}.txt").write_text("\n".join(map("".join, part)))
    parts = {split: load_sequences(str(tmp_path), split, 2) for split in ("train", "valid")}
    found = {
        split: {s.bases[i:j].tobytes() for i, j in zip(s.starts[:-1], s.starts[1:], strict=True)}
        for split, s in parts.items()
    }
    assert not found["train"] & found["valid"] and len(found["train"] | found["valid"]) == 400
    assert 20 < len(parts["valid"].classes) < 70 and len(parts["valid"].classes) + len(parts["train"].classes) == 440


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


@pytest.mark.parametrize(
    ("name", "text", "split", "message"),
    [
        ("train/pos/2.txt", b"ACG\nACXT\n", "train", r"train/pos/2\.txt:2: 'X' at column 3; expected A, C, G, T or N"),
        ("valid/neg.fa", b">x\nAC\nA-\n", "valid", r"valid/neg\.fa:3: '-' at column 2; expected A, C, G, T or N"),
        (
            "test.csv",
            b"seq,label\nACGT,pos\nAC GT,neg\n",
            "test",
            r"test\.csv:3: ' ' at column 3; expected A, C, G, T or N",
        ),
        ("test.csv", b"seq,label\nACGT\n", "test", r"test\.csv:2: expected 2 fields, .*; got 1"),
        (
            "test.csv",
            b"seq,class\nACGT,1\n",
            "test",
            r"test\.csv:1: has the columns seq, class; expected seq and label among them",
        ),
        ("test.csv", b"seq,label\nACGT,\n", "test", r"test\.csv:2: expected a sequence and a label"),
        ("test.csv", b"", "test", r"test\.csv:1: expected the names of the columns; the file is empty"),
        (
            "train/pos/9.fa",
            b">x\n>y\n",
            "train",
            r"train/pos/9\.fa:2: expected a sequence below the header; the file has none",
        ),
        ("train/pos/9.txt", b"", "train", r"train/pos/9\.txt:1: expected a sequence on every line; the file has none"),
        (
            "test.csv",
            b"seq,label\nACGT,odd\n",
            "test",
            r"the test part has the class 'odd'; expected those of the train part, neg, pos",
        ),
        ("train/odd/1.txt", b"ACGT", "train", r"has 3 classes \(neg, odd, pos\), but classes=2; set it to 3"),
        ("test.csv", b"seq,label\n", "test", r"no sequences for split 'test'; expected more than a few"),
    ],
)
def test_bad_files(folder, name, text, split, message):
    write(folder / name, text)
    with pytest.raises(ValueError, match=message) as error:
        make(source=str(folder)).batch(0, split, 0, 2)
    assert "\n" not in str(error.value)


def test_missing_files(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"no sequences in train; expected train.csv, or files in train/<class> that end in .txt, .fa",
    ):
        make(source=str(tmp_path)).batch(0, "train", 0, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"source": "human_enhancer_cohn"},
            r"source='human_enhancer_cohn': no such folder; did you mean 'human_enhancers_cohn'",
        ),
        ({"length": 35}, "length=35: expected at least 36 with source='motifs'"),
        ({"classes": 3}, "classes=3: expected 2 with source='motifs'"),
        ({"classes": 1}, "classes=1: expected at least 2"),
        ({"segment_len": -1}, "segment_len=-1: expected 0 or more"),
    ],
)
def test_invalid_config(config, message):
    with pytest.raises(ValueError, match=message):
        make(**config)


def test_the_hub(monkeypatch):
    """Rows of a set on the hub; a hub that is out of reach, and a set with other columns, are told in one line."""
    asked = []
    rows = {
        "train": [{"seq": "acgtn" * (i + 1), "label": i % 2} for i in range(30)],
        "test": [{"seq": "ACGT", "label": 1}],
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or rows[split])
    load_sequences.cache_clear()
    task = make(source="human_nontata_promoters", length=10)
    assert told(task, "test") == [("ACGT", 1)] and ("ACGTN", 0) in told(task, "train")
    assert set(asked) == {
        ("katarinagresova/Genomic_Benchmarks_human_nontata_promoters", part) for part in ("train", "test")
    }
    rows["train"] = [{"sequence": "A"}]
    with pytest.raises(ValueError, match="has the columns sequence; expected seq and label among them"):
        make(source="human_ocr_ensembl").batch(0, "train", 0, 1)

    def unreachable(name, split):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        FileNotFoundError,
        match=r"human_enhancers_cohn: .* is not in reach on the Hugging Face hub \(ConnectionError\); "
        r"check the network",
    ):
        make(source="human_enhancers_cohn").batch(0, "train", 0, 1)
    load_sequences.cache_clear()


@pytest.mark.parametrize("suffix", [".txt", ".FASTA", ".fna", ".fas"])
def test_folders_below_a_class_are_of_that_class(tmp_path, suffix):
    for label in ("neg", "pos"):
        for place in ("chr1", "chr2"):
            (tmp_path / "train" / label / place).mkdir(parents=True)
            mark = "" if suffix == ".txt" else ">x\n"
            text = "".join(f"{mark}{'AC' if label == 'neg' else 'GT'}{'A' * n}\n" for n in range(20))
            (tmp_path / "train" / label / place / f"x{suffix}").write_text(text)
    found = load_sequences(str(tmp_path), "train", 2)
    assert found.names == ["neg", "pos"] and len(found.classes) > 60
    first = [BASES[found.bases[start]] for start in found.starts[:-1]]
    assert first == ["AG"[label] for label in found.classes]


def test_the_class_stands_in_the_segment_that_asks_for_it():
    with pytest.raises(ValueError, match="segment_len=1: expected 0, or at least 2"):
        make(segment_len=1)
