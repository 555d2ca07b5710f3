"""Synthetic English prose of any length: the text in which facts are hidden where no books have been downloaded.

A probabilistic grammar over a lexicon of stems, compounds, endings and invented names. The words of a class have Zipf's
frequencies, and every book has people and towns of its own. It names no person, place or object of bAbI and has no
clause in the form of bAbI's facts.

A whole book is expanded at once, one level of the grammar at a time: an array of symbols is replaced by the array of
their expansions, until only words are left. The random numbers are raw words of PCG64, whose stream numpy guarantees.

Source: ours.

Shape suffixes: T symbols of the text so far, A alternatives of all rules, W words of all classes.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.random import PCG64

from lit_memory.text.lexicon import COMPOUNDS, LOCAL, WORDS, inflected
from lit_memory.util.seeds import mixed_seed

PARAGRAPHS = 1000
"""Paragraphs of a book, which have about 50,000 words and marks."""

# A rule per line, continued on indented ones: a symbol and its alternatives, each after its weight. CLASS.ending is an
# inflected word of a class; everything else is literal. ^ capitalises the next word, “ and ” become straight quotes,
# ¶ ends a paragraph, "a" becomes "an" before a vowel, and a comma before another mark is dropped.
GRAMMAR = """
PARAGRAPH = 3 SENTENCE SENTENCE SENTENCE ¶ | 3 SENTENCE SENTENCE SENTENCE SENTENCE ¶ |
  2 SENTENCE SENTENCE SENTENCE SENTENCE SENTENCE SENTENCE ¶ | 2 TALK ¶ | 1 TALK SENTENCE ¶ | 1 SENTENCE TALK ¶
SENTENCE = 7 ^ CLAUSE . | 2 ^ CLAUSE WHERE . | 3 ^ OPENING , CLAUSE . | 3 ^ CLAUSE , LINK CLAUSE . |
  1 ^ CLAUSE ; CLAUSE . | 2 ^ SINCE CLAUSE , CLAUSE . | 1 ^ CLAUSE , ASIDE . | 1 ^ THERE . | 1 ^ WONDER
WONDER = 1 why should HUMAN VT OBJECT ? | 1 what would become of WHOM ? | 1 how ADJ the PLACE looked in the LIGHT ! |
  1 was it HUMAN who DOES ? | 1 and yet CLAUSE !
TALK = 2 “ ^ REMARK , ” SAID HUMAN . | 1 “ ^ REMARK , ” SAID HUMAN , ASIDE . | 1 “ ^ QUESTION ? ” asked HUMAN . |
  1 “ ^ REMARK , ” SAID HUMAN , “ and REMARK . ” | 1 “ ^ EXCLAMATION ! ” cried HUMAN . “ ^ REMARK . ”
SAID = 5 said | 1 answered | 1 whispered | 1 replied | 1 murmured | 1 added | 1 repeated
REMARK = 2 I have never VT.ed such a ADJ THING | 2 SHE will VT the THING before NOON |
  1 nobody in TOWN would VH a PERSON like NAME | 1 it is only a THING , and a rather ADJ one |
  2 you must not VH the PERSON | 1 we were COUNT PERSON.s then , and not one of us could VT a THING |
  1 my father was a PERSON in TOWN | 1 the PLACE is no place for a ADJ PERSON |
  1 SHE VT.s every THING that SHE can find | 1 there is more ADJ.ness in a PLACE than in all the THING.s of TOWN |
  1 I do not care for THING.s | 1 it was NAME who VT.ed the THING |
  1 NAME VH.s the PERSON.s , and the PERSON.s VH NAME
QUESTION = 2 why did NAME VT the THING | 1 who would VT a THING in such weather | 1 have you ever VH.ed a PERSON |
  1 do you suppose that SHE VT.ed it | 1 how many THING.s can one PERSON VT |
  1 was it not you who VH.ed the PERSON from TOWN
EXCLAMATION = 1 what a ADJ THING | 1 how ADJ it all is | 1 a THING , at last | 1 never | 1 nonsense | 1 to TOWN , then
SHE = 1 he | 1 she
CLAUSE = 12 HUMAN DOES | 3 PEOPLE DOES | 3 ITEM LAY | 2 SPOT STOOD | 2 IDEA STRUCK | 1 it was HUMAN who DOES |
  1 nobody VT.ed ITEM | 1 the weather TURNED | 1 it seemed that CLAUSE
HUMAN = 7 NAME | 4 he | 4 she | 4 the PERSON | 2 the ADJ PERSON | 1 the PERSON , who DOES , | 1 RANK SURNAME |
  1 the PERSON from TOWN | 1 a ADJ PERSON | 1 old NAME | 1 NAME SURNAME | 1 his KIN | 1 her KIN
WHOM = 4 NAME | 2 him | 2 her | 3 the PERSON | 1 the ADJ PERSON | 1 RANK SURNAME | 1 the KIN of NAME |
  1 COUNT PERSON.s | 1 a PERSON who DOES
PEOPLE = 3 the PERSON.s | 1 the PERSON.s of TOWN | 1 COUNT PERSON.s | 1 NAME and the PERSON | 1 most of the PERSON.s |
  1 they | 1 the ADJ PERSON.s
RANK = 2 Captain | 2 Doctor | 1 Professor | 1 Sergeant | 1 Judge
KIN = 2 brother | 2 sister | 1 uncle | 1 aunt | 1 cousin | 1 nephew | 1 grandmother | 1 daughter
ITEM = 5 the THING | 3 the ADJ THING | 1 the ADJ and ADJ THING | 1 the old THING | 1 the THING of NAME |
  1 the THING from TOWN | 1 his THING | 1 her THING | 1 the THING that HUMAN had VT.ed | 1 the THING.s
OBJECT = 3 ITEM | 3 a ADJ THING | 2 a THING | 2 COUNT THING.s | 1 every THING PLACED | 1 a pair of ADJ THING.s |
  1 the THING and the THING | 1 a THING , a THING and COUNT THING.s | 1 some of the THING.s
PLACED = 3 in the PLACE | 1 behind the PLACE | 1 beside the PLACE | 1 in TOWN | 1 at the PLACE | 1 by the ADJ PLACE |
  1 under a THING
SPOT = 4 the PLACE | 2 the ADJ PLACE | 2 TOWN | 1 the road from TOWN | 1 the PLACE of TOWN |
  1 the PLACE , which HUMAN had VT.ed ,
IDEA = 3 the ADJ.ness of the THING | 2 the ADJ.ness of NAME | 1 so much ADJ.ness | 1 a kind of ADJ.ness |
  1 the ABSTRACT of the PERSON | 1 the ABSTRACT | 1 this ABSTRACT | 1 his ABSTRACT | 1 her ABSTRACT
DOES = 7 VT.ed OBJECT | 3 VT.ed OBJECT PLACED | 4 VM.ed PATH | 3 VH.ed WHOM | 2 VI.ed ADJ.ly | 2 VI.ed PLACED |
  2 VS.ed that CLAUSE | 2 had already VT.ed OBJECT | 1 would not VT OBJECT | 1 VM.ed PATH and VT.ed OBJECT |
  2 could hardly VH WHOM without VT.ing OBJECT | 1 ADJ.ly VT.ed OBJECT | 1 hoped to VT OBJECT before NOON |
  1 spoke of IDEA | 1 had no ABSTRACT for THING.s | 1 went on VT.ing OBJECT | 1 took COUNT hours to VT OBJECT |
  1 preferred a ADJ THING to IDEA | 1 VT.ed OBJECT as if it were a ADJ THING | 1 gave no ABSTRACT |
  1 did not VH WHOM until NOON | 1 found IDEA more ADJ than OBJECT | 1 knew how to VT OBJECT
PATH = 2 along the PLACE | 2 past the PLACE | 1 through TOWN | 2 towards the ADJ PLACE |
  1 across the PLACE and into the PLACE | 1 beyond the PLACE | 1 as far as TOWN | 1 into the PLACE WITH |
  1 up and down the PLACE
WITH = 2 with a THING | 1 with COUNT THING.s | 1 without a word | 1 in great ABSTRACT | 1 like a PERSON
LAY = 2 lay PLACED | 2 belonged to WHOM | 2 had been VT.ed by WHOM | 2 looked ADJ in the LIGHT |
  1 smelled of THING.s | 1 cost COUNT shillings in TOWN | 1 fell into the PLACE | 1 VX.ed ADJ.ly |
  1 VX.ed like a ADJ THING | 1 could be seen from the PLACE | 1 pleased WHOM more than IDEA
STOOD = 2 stood between the PLACE and the PLACE | 2 seemed ADJ and ADJ | 1 was known for its THING.s |
  1 had been built by COUNT PERSON.s in YEAR | 1 was ADJ in WINTER and ADJ in SUMMER | 1 VX.ed in the LIGHT |
  1 belonged to WHOM | 1 had neither a PLACE nor a PLACE | 1 lay COUNT miles from TOWN
STRUCK = 3 VE.ed WHOM | 1 was not lost on WHOM | 1 grew with every THING | 1 reminded WHOM of OBJECT |
  1 made the PLACE seem ADJ | 1 led to the ABSTRACT of the PERSON.s | 1 was worth more than COUNT THING.s
TURNED = 2 turned ADJ | 1 kept them in the PLACE | 1 spoiled the THING.s | 1 VE.ed the PERSON.s
THERE = 3 there was a ADJ THING PLACED | 1 there was once a PERSON in TOWN who DOES |
  2 there were COUNT THING.s PLACED , and MOST of them THOSE | 1 there was nothing ADJ about IDEA |
  1 of all the PERSON.s in TOWN , only NAME DOES
MOST = 1 most | 1 some | 1 two | 1 none
THOSE = 1 had been VT.ed by WHOM | 1 VX.ed ADJ.ly | 1 belonged to WHOM
OPENING = 2 in the LIGHT | 1 in WINTER | 1 in YEAR | 1 for COUNT years | 1 after COUNT days |
  1 on the ORDINAL of MONTH | 1 towards NOON | 1 ADJ.ly | 1 without a word | 1 not far from TOWN | 1 at the PLACE |
  1 behind the ADJ PLACE | 1 with a THING in one hand | 1 to the ABSTRACT of the PERSON.s | 1 COUNT miles from TOWN |
  1 once more | 1 as a rule
WHERE = 1 PLACED | 1 in YEAR | 1 for COUNT years | 1 every morning | 1 on the ORDINAL of MONTH | 1 again and again |
  1 because CLAUSE | 1 with a ADJ THING | 1 before CLAUSE
LINK = 4 and | 3 but | 1 so | 1 for | 1 while | 1 although | 1 until
SINCE = 2 when | 1 although | 1 because | 1 while | 1 since | 1 before | 1 after | 1 whenever | 1 as soon as | 1 if |
  1 wherever
ASIDE = 2 VT.ing OBJECT | 1 VM.ing PATH | 1 as ADJ as a THING | 1 a ADJ PERSON of COUNT years | 1 more ADJ than ever |
  1 ADJ.ly and with ABSTRACT | 1 without VH.ing WHOM
NOON = 2 evening | 2 morning | 1 noon | 1 nightfall | 1 midnight | 1 supper | 1 dawn
LIGHT = 2 moonlight | 2 morning | 1 rain | 1 evening | 1 lamplight | 1 fog | 1 snow | 1 dusk
WINTER = 1 winter | 1 autumn | 1 January | 1 cold weather
SUMMER = 1 summer | 1 spring | 1 fine weather | 1 the rain
MONTH = 1 January | 1 February | 1 March | 1 April | 1 May | 1 June | 1 July | 1 August | 1 September | 1 October |
  1 November | 1 December
"""
MARKS = set(".,;:?!¶")
PRINTED = {"“": '"', "”": '"', "¶": "\n\n"}


def noise(split: str, index: int) -> str:
    """Book ``index`` of a split: about 250,000 characters, the same on every machine. Books have words in common, but
    no paragraphs."""
    tables, bits = _tables(), PCG64(mixed_seed(index, f"noise/{split}", 0))
    symbols_T = np.full(PARAGRAPHS, tables.start)
    while (symbols_T >= tables.rules).any():
        symbols_T = _expand(tables, symbols_T, bits)
    return _spell(tables, _choose_words(tables, symbols_T, bits))


def noise_key() -> str:
    """A hash of all that the books depend on: grammar, words and algorithm."""
    content = "\n".join([*_rules(), *_tables().spelled, noise("key", 0)])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _rules() -> Sequence[str]:
    """The rules of the grammar, one per line however it is wrapped."""
    return GRAMMAR.replace("\n  ", " ").strip().splitlines()


class _Tables(NamedTuple):
    """Grammar and lexicon as arrays. Symbols are numbered: literals, then classes, then rules. So are words: literals,
    then the words of all classes.

    A uniform number u selects an alternative of rule r where r + u falls in ``chances_A``, and a word of class c where
    c + u falls in ``chances_W``.
    """

    classes: int
    """Number of the first class."""
    rules: int
    """Number of the first rule."""
    start: int
    """Number of the rule that a book starts from."""
    chances_A: np.ndarray
    starts_A: np.ndarray
    """Index in ``bodies`` at which an alternative starts."""
    lengths_A: np.ndarray
    bodies: np.ndarray
    """Each symbol by itself, then the symbols of every alternative."""
    chances_W: np.ndarray
    first: np.ndarray
    """First word of a class."""
    size: np.ndarray
    """Number of words of a class."""
    local: np.ndarray
    """Whether a class is one of ``LOCAL``."""
    literal: dict[str, int]
    """Number of a literal."""
    spelled: list[str]
    """Every word, then every word capitalised, then all of these after a space."""
    vowel: np.ndarray
    """Whether "a" becomes "an" before a word."""


@lru_cache
def _tables() -> _Tables:
    rules: dict[str, list[tuple[int, list[str]]]] = {}
    for line in _rules():
        head, _, alternatives = line.partition(" = ")
        rules[head] = [(int(weight), body) for weight, *body in map(str.split, alternatives.split(" | "))]
    used = (name for alternatives in rules.values() for _, body in alternatives for name in body)
    names = dict.fromkeys(name for name in ("an", *used) if name not in rules)
    classes = [name for name in names if name.partition(".")[0] in WORDS | COMPOUNDS and name != "."]
    literals = [name for name in names if name not in classes]
    symbols = {name: i for i, name in enumerate([*literals, *classes, *rules])}
    weights = [[float(weight) for weight, _ in alternatives] for alternatives in rules.values()]
    bodies = [[symbols[name] for name in body] for alternatives in rules.values() for _, body in alternatives]
    lengths_A = np.array([len(body) for body in bodies])
    lexicon = [inflected(name) for name in classes]
    sizes = np.array([len(words) for words in lexicon])
    plain: list[str] = [PRINTED.get(word, word) for word in [*literals, *chain.from_iterable(lexicon)]]
    capital = [word[:1].upper() + word[1:] for word in plain]
    return _Tables(
        classes=len(literals),
        rules=len(literals) + len(classes),
        start=symbols["PARAGRAPH"],
        chances_A=_chances(weights),
        starts_A=len(symbols) + np.cumsum(lengths_A) - lengths_A,
        lengths_A=lengths_A,
        bodies=np.array([*range(len(symbols)), *chain.from_iterable(bodies)]),
        chances_W=_chances([[1 / (rank + 3) for rank in range(size)] for size in sizes]),
        first=len(literals) + np.cumsum(sizes) - sizes,
        size=sizes,
        local=np.array([name in LOCAL for name in classes]),
        literal={name: symbols[name] for name in literals},
        spelled=[*plain, *capital, *(f" {word}" for word in plain + capital)],
        vowel=np.array([word[:1].lower() in set("aeiou") for word in plain]),
    )


def _chances(weights: list[list[float]]) -> np.ndarray:
    """Cumulative probabilities of the entries of list i, plus i, one list after the other."""
    # not sum(), whose last bit depends on the version of Python
    totals = [list(accumulate(entries)) for entries in weights]
    return np.array([i + total / entries[-1] for i, entries in enumerate(totals) for total in entries])


def _uniform(bits: PCG64, count: int) -> np.ndarray:
    """Numbers in [0, 1) of 32 bits, so that their sum with a small integer is exact."""
    return (bits.random_raw(count) >> np.uint64(32)) * 2.0**-32


def _expand(tables: _Tables, symbols_T: np.ndarray, bits: PCG64) -> np.ndarray:
    """The text with every rule replaced by one of its alternatives."""
    at = np.flatnonzero(symbols_T >= tables.rules)
    chosen = np.searchsorted(tables.chances_A, symbols_T[at] - tables.rules + _uniform(bits, len(at)), side="right")
    start_T, length_T = symbols_T.copy(), np.ones_like(symbols_T)
    start_T[at], length_T[at] = tables.starts_A[chosen], tables.lengths_A[chosen]
    shift_T = start_T - (np.cumsum(length_T) - length_T)
    return tables.bodies[np.repeat(shift_T, length_T) + np.arange(length_T.sum())]


def _choose_words(tables: _Tables, symbols_T: np.ndarray, bits: PCG64) -> np.ndarray:
    """The text with every class replaced by one of its words. A book rotates the words of the local classes."""
    drawn = bits.random_raw(len(tables.local)) % tables.size.astype(np.uint64)
    shift = np.where(tables.local, drawn, 0).astype(np.int64)
    at = np.flatnonzero(symbols_T >= tables.classes)
    kinds = symbols_T[at] - tables.classes
    words = np.searchsorted(tables.chances_W, kinds + _uniform(bits, len(at)), side="right")
    ranks = tables.classes + words - tables.first[kinds]
    words_T = symbols_T.copy()
    words_T[at] = tables.first[kinds] + (ranks + shift[kinds]) % tables.size[kinds]
    return words_T


def _spell(tables: _Tables, words_T: np.ndarray) -> str:
    """The text as a string, with its capitals, forms of "a", and spaces."""
    literal, no = tables.literal, np.zeros(1, bool)
    marks = [i for name, i in literal.items() if name in MARKS]
    before_mark_T = np.append(np.isin(words_T[1:], marks), no)
    words_T = words_T[~((words_T == literal[","]) & before_mark_T)]
    after_caret_T = np.append(no, words_T[:-1] == literal["^"])
    is_word_T = words_T != literal["^"]
    words_T, capital_T = words_T[is_word_T], after_caret_T[is_word_T]
    before_vowel_T = np.append(tables.vowel[words_T[1:]], no)
    words_T = np.where((words_T == literal["a"]) & before_vowel_T, literal["an"], words_T)
    after_opening_T = np.isin(words_T[:-1], [literal["“"], literal["¶"]])
    spaced_T = ~np.isin(words_T, [*marks, literal["”"]]) & np.append(no, ~after_opening_T)
    forms_T = words_T + len(tables.vowel) * (capital_T + 2 * spaced_T)
    return "".join(map(tables.spelled.__getitem__, forms_T.tolist()))
