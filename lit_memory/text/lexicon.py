"""The words of ``noise.py``: common ones by class, compounds and invented names, and the endings of regular English.

None is a person, a place or an object of bAbI.
"""

import hashlib
import re
from itertools import product

# The words of a class, the most frequent first. Verbs are regular; + doubles the last letter before -ed and -ing.
WORDS = {
    "VT": """
        mend polish paint carry borrow fold measure repair weigh admire examine sharpen empty fill collect wrap+ count
        clean cover sketch open lift lower turn study describe arrange rinse wash scrub+ carve decorate replace remove
        restore return recover rescue discover notice ignore destroy ruin crack scratch soak dry heat hammer nail glue
        pack unpack load unload drag+ push pull roll stack store guard protect deliver smuggle trade swap+ purchase
        inherit display praise curse value prize need want own share divide sniff stain mark stamp copy trace imitate
        improve alter adjust assemble dismantle fix oil grease patch stitch embroider loosen tighten fasten unfasten
        lock unlock bolt rattle rub+ squeeze press crush boil bake roast pickle misplace conceal reveal bury unearth
        abandon invent design hoard auction varnish gild dust inspect balance tilt burn
    """,
    "VH": """
        greet follow warn thank visit watch question advise assist accompany blame bother comfort console deceive
        defend despise detest distrust dread encourage entertain envy flatter help insult interrupt invite join love
        marry miss mistrust mock obey offend pity provoke pursue recognise reassure reproach respect reward ridicule
        salute scold serve summon support suspect tease tolerate trick trust welcome befriend outlive humour employ
        dismiss congratulate forewarn chaperone imitate overrule hire
    """,
    "VE": """
        trouble please amuse surprise alarm annoy astonish confuse delight disappoint distract embarrass fascinate
        frighten haunt impress interest irritate perplex puzzle shock soothe startle tempt tire torment unsettle worry
        cheer sadden sober bewilder console encourage horrify exhaust comfort
    """,
    "VM": """
        walk wander hurry march stroll climb drift limp ramble row sail crawl stumble race stagger gallop roam trudge
        saunter hike tramp shuffle slip+ hop+ trot+ dash rush scurry venture sneak stray plod+ paddle float glide
        waltz pace clamber scramble dawdle canter
    """,
    "VI": """
        wait sigh laugh smile nod+ rest shiver whistle hum+ cough yawn pause hesitate listen mutter grumble complain
        frown blush doze sob+ linger tremble gaze work snore dine argue dance pray mourn ponder loiter shrug+ chuckle
        groan gasp sneeze bow brood sulk daydream
    """,
    "VS": """
        believe declare remark notice claim suspect imagine insist explain announce admit+ suppose realise recall
        remember pretend promise complain report observe conclude guess fear hope argue assume maintain boast hint
        mention acknowledge confess predict prophesy
    """,
    "VX": """
        creak gleam rattle tremble glitter glimmer sway hum+ groan glow sparkle smoulder flicker crumble rust rot+
        fade shimmer shudder sag+ quiver echo drip+ hiss click clatter jingle steam smoke
    """,
    "ADJ": """
        quiet narrow heavy bright curious plain strange gentle solemn proud dusty careful pale gloomy bitter cheerful
        clumsy weary happy steady faint dim bold broad clever cold damp dark deep dull fair faithful fierce foolish
        fresh grand grave grim harsh honest humble idle keen kind loud loyal mild modest neat nervous noble odd
        patient peculiar polite poor prompt queer rapid rare reckless restless rich rough rude sad secret serious
        severe shallow sharp silent simple slender slow smooth sober soft sour splendid stale stern stiff stout
        stubborn sudden sullen sweet swift tender thick tidy timid tranquil vague vain vast vivid warm wary wicked
        wild wise worthy thoughtful hopeful mournful graceful thankful doubtful dreadful fearful peaceful playful
        shameful tasteful wasteful watchful youthful careless fearless harmless heartless helpless nameless noiseless
        priceless shapeless speechless thankless thoughtless useless worthless hasty sleepy lazy merry sturdy dreary
        crooked rugged wretched brittle feeble hollow shabby grubby lofty mossy foggy frosty misty rusty sandy stormy
        thorny windy
    """,
    "ABSTRACT": """
        patience courage sorrow wisdom anger hope pride pity delight despair surprise silence curiosity gratitude
        ambition amusement astonishment relief regret suspicion confidence excitement disappointment admiration
        indifference satisfaction melancholy jealousy modesty prudence haste grief terror wonder doubt contempt
        devotion enthusiasm resignation solemnity envy mischief reluctance tenderness impatience embarrassment
        disapproval dignity
    """,
    "PERSON": """
        widow sailor clerk baker miller weaver carpenter farmer shepherd tailor innkeeper schoolmaster magistrate
        painter printer barber butcher cobbler tinker pedlar piper poacher sexton vicar curate governess nurse cook
        butler footman coachman postman watchman fisherman boatman ferryman huntsman merchant banker lawyer notary
        orphan stranger pilgrim neighbour soldier beggar smuggler gambler juggler fiddler drummer trumpeter poet
        scholar librarian astronomer apothecary surgeon midwife engineer mason glazier plumber potter tanner dyer
        hatter glover draper grocer brewer vintner jeweller goldsmith
    """,
    "THING": """
        lantern kettle umbrella ladder violin basket barrel clock mirror teapot candle hammer bucket saddle trunk
        parcel letter map ribbon hat coat boot glove shawl blanket pillow carpet curtain cradle chair table bench
        cupboard drawer bottle jug plate spoon saucer stove lamp mattress piano flute drum trumpet bell compass
        telescope barometer anchor oar rope net cart wagon wheel harness plough scythe sickle rake spade broom brush
        comb razor needle thimble button buckle brooch ring necklace locket coin purse ledger notebook pencil quill
        inkwell envelope portrait statue vase cushion parasol chessboard dictionary almanac newspaper pamphlet knife
    """,
    "PLACE": """
        harbour market orchard cellar attic stable bakery library chapel churchyard tower bridge lighthouse mill forge
        quarry meadow river canal forest valley hill moor marsh pond well square alley courtyard staircase corridor
        parlour schoolhouse inn tavern brewery warehouse barn cottage farmhouse vicarage museum theatre ballroom
        nursery pantry laundry conservatory terrace lawn hedge gate ditch lane cliff cove beach island jetty quay
        vineyard graveyard greenhouse workshop
    """,
    "COUNT": """
        two three four five six seven eight nine ten twelve twenty eleven fifteen thirteen fourteen sixteen seventeen
        eighteen nineteen
    """,
    "ORDINAL": """
        first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth
        fifteenth twentieth
    """,
    "YEAR": " ".join(str(year) for year in range(1899, 1699, -1)),
}

MATTER = """
    lamp clock salt river bell candle ferry mill stone rope sail glass wool copper timber barley thatch harbour
    orchard cider silver iron tin pewter leather linen velvet paper ink honey pepper tobacco corn hay straw wheat oat
    bean onion turnip goose hen sheep horse ox fish eel oyster herring water wind rain snow frost moon star shadow
    marsh moor heath oak elm ash willow pine birch thorn
"""
SOUNDS = """
    Al Am An Ar As Bar Bel Ber Bran Cal Car Cas Cor Dar Del Dor Ed El Em Es Fal Fen Fer Gal Gar Gil Hal Har Hel Is Jor
    Kel Ken Lan Lor Mal Mel Mor Nel Nor Os Per Quil Ral Ros Sel Sil Tal Tam Tar Ul Ver Wal Wil Win Wes Yar Zel
"""
# Further words of a class, less frequent: every first part joined to every second part, in the order of a hash.
COMPOUNDS = {
    "ADJ": (
        "un",
        "kind fair happy lucky steady tidy worthy wise common even pleasant clear certain easy familiar "
        "fortunate grateful graceful healthy helpful just ready",
    ),
    "PERSON": (
        MATTER,
        "maker keeper seller mender carrier monger wright watcher gatherer master minder hauler",
    ),
    "THING": (
        MATTER,
        "box jar hook wheel basket bowl chain pot rack bag stand frame cart case tub tray peg press pan crate "
        "sack stool chest drum cup",
    ),
    "PLACE": (
        MATTER,
        "yard house field bridge gate lane hill wood pool stead market tower cellar loft barn meadow bank "
        "brook row walk shed green corner",
    ),
    "NAME": (
        SOUNDS,
        "a an bert da dric el en eth ia ick in ina is la lan lia lin mond na nor on ric rin sa ta than tho vin wen wyn",
    ),
    "SURNAME": (
        SOUNDS,
        "worth field well brook more son sted grave stone lock wood gate ridge shaw low",
    ),
    "TOWN": (
        SOUNDS,
        "ford wick mere ham ton combe stow minster haven ley bury by thorpe hurst bourne mouth cester pool dale",
    ),
    "COUNT": (
        "twenty- thirty- forty- fifty- sixty- seventy- eighty- ninety-",
        "one two three four five six seven eight nine",
    ),
}
LOCAL = ("NAME", "SURNAME", "TOWN")
"""Classes whose most frequent words differ from book to book."""
ENDINGS = {
    "": ((r"\+?$", ""),),
    "ed": ((r"(.)\+$", r"\1\1ed"), (r"e$", "ed"), (r"([^aeiou])y$", r"\1ied"), (r"$", "ed")),
    "ing": ((r"(.)\+$", r"\1\1ing"), (r"e$", "ing"), (r"$", "ing")),
    "s": (
        (r"\+$", "s"),
        (r"man$", "men"),
        (r"fe$", "ves"),
        (r"([^aeiou])y$", r"\1ies"),
        (r"([sxz]|ch|sh)$", r"\1es"),
        (r"$", "s"),
    ),
    "ly": ((r"([^aeiou])le$", r"\1ly"), (r"ll$", "lly"), (r"y$", "ily"), (r"$", "ly")),
    "ness": ((r"y$", "iness"), (r"$", "ness")),
}
"""Ending -> (pattern of a stem, its replacement), of which the first that matches is applied."""


def inflected(name: str) -> list[str]:
    """The words of ``CLASS`` or ``CLASS.ending``, the most frequent first; [] for an unknown class."""
    kind, _, ending = name.partition(".")
    firsts, seconds = COMPOUNDS.get(kind, ("", ""))
    compounds = [first + second for first, second in product(firsts.split(), seconds.split())]
    compounds.sort(key=lambda word: hashlib.blake2b(word.encode()).digest())
    words = dict.fromkeys([*WORDS.get(kind, "").split(), *compounds])
    return [inflect(word, ending) for word in words]


def inflect(word: str, ending: str) -> str:
    """``word`` with an ending of ``ENDINGS``."""
    return next(re.sub(pattern, new, word, count=1) for pattern, new in ENDINGS[ending] if re.search(pattern, word))
