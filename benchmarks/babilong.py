"""BABILong's samples of 128k tokens: slices of tokenized books, beside tokenizing sentence by sentence for each sample.

"naive" has the text of the books in memory, split into sentences; it tokenizes until the sample is full and puts the
facts in between. Both give the same tokens.
"""

import itertools

import numpy as np

from benchmarks.work import Settings, Skipped, Timed, Work, device_of

SEGMENT, TOKENIZER, HAYSTACK = 512, "word", "noise"


def task_of(settings: Settings, tiny: bool):
    if device_of(settings) != "cpu":
        raise Skipped("text is read on the CPU")
    from lit_memory.tasks.babilong import BABILong

    sizes = {"segments": 4 if tiny else 256, "segment_len": SEGMENT, "vocab_size": 8192}
    return BABILong(BABILong.Config(tokenizer=TOKENIZER, haystack=HAYSTACK, **sizes))


def slices(settings: Settings, tiny: bool) -> Timed:
    task, steps = task_of(settings, tiny), itertools.count()

    def run():
        (sample,) = task.samples(0, "train", next(steps), 1)
        return sample.read(0, sample.context_len).tolist()

    return Timed(run, task.samples(0, "train", 0, 1)[0].context_len)


def naive(settings: Settings, tiny: bool) -> Timed:
    from lit_memory.tasks.babi.files import questions
    from lit_memory.text.corpus import load_corpus, sentences

    task, steps = task_of(settings, tiny), itertools.count()
    encode = task.tokenizer.encode
    kept = (s for book in load_corpus(HAYSTACK, "train").texts() for s in sentences(book))
    text = [s for s in kept if len(encode(f" {s}")) >= 10]

    def run() -> list[int]:
        step = next(steps)
        (sample,) = task.samples(0, "train", step, 1)
        told = [encode(f" {fact}").tolist() for fact in next(questions("qa1", 0, "train", step, 1)).facts]
        budget, noise = sample.context_len - sum(map(len, told)), []
        k, length = int(np.searchsorted(sample.noise.starts_S, sample.position)), 0
        while length < budget:
            noise.append(encode(f" {text[k % len(text)]}").tolist()[: budget - length])
            k, length = k + 1, length + len(noise[-1])
        before = np.cumsum([0, *map(len, told)])[:-1]
        gaps = np.searchsorted(np.cumsum([0, *map(len, noise)]), sample.starts_F - before).tolist()
        row: list[int] = []
        for gap, sentence in enumerate([*noise, []]):
            while gaps and gaps[0] == gap:
                row += told[len(told) - len(gaps)]
                gaps.pop(0)
            row += sentence
        return row

    return Timed(run, task.samples(0, "train", 0, 1)[0].context_len)


def works() -> dict[str, Work]:
    return {"babilong/sample": Work({"slices": slices, "naive": naive})}
