# SPDX-License-Identifier: Apache-2.0
"""Passages and questions made from lists of words: the same in each run.

Each passage is about one thing: a person, firm, bridge, hotel, ship or town. It tells facts with which others are
compared, counted, or found by way of a second passage. Questions have other words for the facts than passages have.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from string import Formatter
from typing import Final

from measuring.quality.questions.library import Asked, Kind, Library

_EACH: Final = 40
"""Things of each topic."""
_COMPARISONS: Final = 20
"""Of each sort; those of things that are alike are left out."""
_COUNTS: Final = 3
"""Of the same value, with other passages."""

_JOBS: Final = {
    "the baker": "sells fresh rye loaves to half the street",
    "the farrier": "fits iron shoes to horses",
    "the dentist": "fills holes in teeth",
    "the pilot": "flies mail planes over the mountains",
    "the veterinarian": "cures sick cows and cats",
    "the barber": "cuts hair and trims beards",
    "the beekeeper": "has forty hives and sells honey",
    "the plumber": "mends leaking pipes and taps",
    "the novelist": "writes long books about imaginary people",
    "the fisherman": "catches herring in a small boat",
    "the schoolteacher": "gives lessons in sums and spelling to children",
    "the tailor": "sews suits and coats to measure",
    "the carpenter": "builds tables and chairs of wood",
    "the lawyer": "defends people in court",
    "the astronomer": "watches stars through a telescope",
    "the chef": "cooks for sixty guests in a restaurant",
    "the librarian": "lends books and puts them back on shelves",
    "the miner": "digs coal under the ground",
    "the photographer": "takes portraits with an old camera",
    "the pharmacist": "sells pills and cough syrup",
    "the firefighter": "comes with hose and ladder when a house burns",
    "the postman": "brings letters to every door",
    "the farmer": "milks thirty cows at dawn and ploughs the fields",
    "the sculptor": "carves statues out of marble",
    "the police officer": "arrests thieves",
    "the midwife": "helps women give birth",
    "the butcher": "cuts meat and stuffs sausages",
    "the accountant": "adds up other people's bills and taxes",
    "the tourist guide": "shows visitors the sights",
    "the surgeon": "operates on broken bones",
    "the miller": "grinds wheat into flour",
    "the watchmaker": "repairs clocks of all sizes",
    "the electrician": "lays cables and mends fuses",
    "the journalist": "reports the news for a daily paper",
    "the comedian": "tells jokes on stage",
    "the nurse": "changes bandages on a hospital ward",
    "the hunter": "shoots deer in the woods",
    "the translator": "turns Danish books into English ones",
    "the sailor": "has gone round the world on a cargo boat",
    "the gardener": "plants roses and mows lawns",
}
"""Occupations as a passage tells them, and the nouns for who has them."""

_TOLD: Final = {
    "people": (
        "{name} {does}.",
        "{last} came into the world in {born}.",
        "Every evening {last} practises the {instrument}.",
        "{last} lives in {town}.",
        "All savings of {last} went into {firm}.",
        "A {pet} shares the flat with {last}.",
        "Nothing frightens {last} like {fear}.",
        "All drawers in the hall are full of old {collection}.",
    ),
    "firms": (
        "{name} makes {product}.",
        "In its halls {staff} people have jobs.",
        "The halls stand in {town}.",
        "Trading began in {began}.",
        "A {emblem} is painted on each of its vans.",
    ),
    "bridges": (
        "{name} is {length} meters long.",
        "It crosses {river}.",
        "Its deck is made of {deck}.",
        "{person} cut the ribbon.",
        "Carts first rolled over it in {opened}.",
    ),
    "hotels": (
        "{name} has {rooms} rooms.",
        "It belongs to {person}.",
        "A night costs {price} crowns.",
        "Guests are served {breakfast} for breakfast.",
        "It stands in {town}.",
    ),
    "ships": (
        "{name} carries {cargo}.",
        "Its top speed is {knots} knots.",
        "It sails from {town}.",
        "{person} broke the bottle over its bow.",
        "It left the yard in {launched}.",
    ),
    "towns": (
        "{name} has {inhabitants} inhabitants.",
        "Every {day} there are stalls on the square.",
        "Its bakers sell {pastry}.",
        "On the hill stands a mill from {mill}.",
    ),
}
"""Sentences that tell facts. The first opens the passage."""

_COLOR: Final = {
    "people": "Sundays are for long walks.|Two cousins visit in winter.|The kitchen was painted yellow last spring."
    "|Rain is no reason to stay indoors.|Sleep comes late and ends early.",
    "firms": "The chimney was rebuilt after a storm.|A brass bell ends each shift.|The canteen is praised for its soup."
    "|Visitors get a helmet.|The clock over the gate is slow.",
    "bridges": "Swallows nest under it.|Lamps burn at both ends.|Anglers lean on the rail at dusk."
    "|The toll was dropped long ago.|Frost makes it slippery.",
    "hotels": "The lift is out of order.|The roof terrace looks west.|The night porter sings."
    "|The curtains are dark red.|Dogs are welcome.",
    "ships": "The hull is dark blue.|The cook comes from the north.|Storms have never stopped it."
    "|The anchor weighs two tons.|Gulls follow it everywhere.",
    "towns": "A stork nests on the chapel.|The railway closed years ago.|Snow comes early there."
    "|The old wall is still whole.|Its fountain runs dry in August.",
}
"""Further sentences, which no question is about."""

_HIDDEN: Final = {
    "people": {
        "born": "When was {} born?",
        "instrument": "Which musical instrument does {} play?",
        "town": "In which place does {} reside?",
        "pet": "What kind of animal does {} keep?",
        "fear": "What is {} most afraid of?",
        "collection": "What does {} collect?",
    },
    "firms": {
        "began": "When was {} founded?",
        "emblem": "Which creature decorates the vehicles of {}?",
        "staff": "How large is the workforce of {}?",
    },
    "towns": {"inhabitants": "How large is the population of {}?", "day": "On which weekday is a market held in {}?"},
}
"""Asks for a fact without a word of the passage that tells it."""

_LINKS: Final = (
    ("people", "firm", "firms", "the company that {} invested in"),
    ("people", "town", "towns", "the place where {} lives"),
    ("bridges", "person", "people", "the person who inaugurated {}"),
    ("hotels", "person", "people", "the owner of {}"),
    ("ships", "person", "people", "the person who christened {}"),
)
"""A topic, the fact that names a thing of another topic, that topic, and words for the thing."""

_COMPARED: Final[tuple[tuple[str, str, Callable[..., "_Thing"], str, str], ...]] = (
    ("people", "born", min, "instrument", "Which instrument does the older of {} and {} practise?"),
    ("people", "born", max, "town", "In which town does the younger of {} and {} live?"),
    ("firms", "staff", max, "town", "Of {} and {}, where are the halls of the firm with more people?"),
    ("firms", "staff", min, "product", "Of {} and {}, what does the firm with fewer people make?"),
    ("bridges", "length", max, "river", "Which river does the longer of {} and {} cross?"),
    ("bridges", "length", min, "deck", "What is the deck of the shorter of {} and {} made of?"),
    ("hotels", "price", min, "breakfast", "What is served for breakfast at the cheaper of {} and {}?"),
    ("hotels", "rooms", max, "town", "Of {} and {}, in which town is the one with more rooms?"),
    ("ships", "knots", max, "cargo", "What does the faster of {} and {} carry?"),
    ("ships", "knots", min, "town", "From which town does the slower of {} and {} sail?"),
    ("towns", "inhabitants", max, "day", "Of {} and {}, on which day has the one with more inhabitants stalls?"),
    ("towns", "inhabitants", min, "pastry", "Of {} and {}, what do the bakers of the one with fewer inhabitants sell?"),
)
"""A topic, the fact by which two things are compared, which one is meant, the fact that is asked for, and the words."""

_COUNTED: Final = (
    ("people", "instrument", "How many of the people practise the {}?"),
    ("firms", "product", "How many of the firms make {}?"),
    ("bridges", "deck", "How many of the bridges have a deck made of {}?"),
    ("hotels", "breakfast", "How many of the hotels serve {} for breakfast?"),
    ("ships", "cargo", "How many of the ships carry {}?"),
    ("towns", "day", "How many of the towns have stalls on the square every {}?"),
)

Facts = Mapping[str, str | int]
"""Values by fact; ``name`` is what the passage is about."""


@dataclass(frozen=True, slots=True)
class _Thing:
    """The subject of a passage."""

    topic: str
    facts: Facts
    passage: str

    @property
    def name(self) -> str:
        return str(self.facts["name"])

    def hidden(self) -> dict[str, str]:
        """Questions for its facts by fact, which leave a place for what it is called."""
        return {fact: words for fact, words in _HIDDEN.get(self.topic, {}).items() if fact in self.facts}


_World = Mapping[str, Sequence[_Thing]]


@cache
def generated() -> Library:
    """Passages about 40 things of each topic, and the questions about them."""
    rng = random.Random("generated passages")
    world = {topic: [_told(rng, topic, each) for each in facts] for topic, facts in _facts(rng).items()}
    kinds = (_chains, _comparisons, _counts, _paraphrased, _broken_chains, _untold)
    questions = tuple(asked for kind in kinds for asked in kind(rng, world))
    return Library({topic: [thing.passage for thing in things] for topic, things in world.items()}, questions)


def _told(rng: random.Random, topic: str, facts: Facts) -> _Thing:
    """A passage with a sentence for each fact, in random order behind the first, and a further sentence."""
    opening, *sentences = (each for each in _TOLD[topic] if _fields(each) <= facts.keys())
    behind = [*(each.format(**facts) for each in sentences), rng.choice(_COLOR[topic].split("|"))]
    passage = " ".join([opening.format(**facts), *rng.sample(behind, len(behind))])
    return _Thing(topic, facts, passage[0].upper() + passage[1:])


def _fields(template: str) -> set[str]:
    return {field for _, field, _, _ in Formatter().parse(template) if field}


def _facts(rng: random.Random) -> dict[str, list[Facts]]:
    """The facts about the things of each topic."""

    def names(begins: str, ends: str) -> list[str]:
        return rng.sample(["".join(parts) for parts in product(begins.split(), ends.split())], _EACH)

    def dealt(values: str) -> list[str]:
        """The values, all as often."""
        listed = values.split(", ")
        return rng.sample(listed * (_EACH // len(listed)), _EACH)

    def numbers(low: int, high: int) -> list[int]:
        return rng.sample(range(low, high), _EACH)

    last = names("Brack Carv Dun Ester Fal Grim Hol Kest Lor Mard", "well by mont sen")
    people = [
        f"{first} {each}"
        for first, each in zip(names("Ar Bel Cor Dav El Fen Gar Hel Is Jor", "ina ick ola und"), last, strict=True)
    ]
    firms = names("Tol Vex Quor Zand Ull", "vane dock rith mere ax ondo evy ish")
    towns = names("Brom Cask Ell Fros Gran Hux Ives Odd", "holm stead wold haven carr")
    return {
        "people": _table(
            name=people,
            last=last,
            does=rng.sample(sorted(_JOBS.values()), _EACH),
            born=numbers(1931, 2001),
            instrument=dealt("cello, flute, trumpet, harp, banjo"),
            town=_shifted(towns, 7),
            firm=_shifted(firms, 3),
            pet=_every(3, 0, dealt("parrot, hedgehog, goat, tortoise, rabbit, ferret, donkey, snake")),
            fear=_every(3, 1, dealt("geese, lifts, thunder, needles, bats, clowns, moths, fog")),
            collection=_every(3, 2, dealt("stamps, coins, teapots, postcards, buttons, masks, maps, corkscrews")),
        ),
        "firms": _table(
            name=firms,
            product=dealt("kettles, umbrellas, candles, combs, mirrors"),
            staff=numbers(21, 400),
            town=_shifted(towns, 9),
            began=_every(2, 0, numbers(1801, 1931)),
            emblem=_every(2, 1, dealt("heron, fox, lion, salmon, crow, stag, beetle, swan")),
        ),
        "bridges": _table(
            name=[
                f"{name} Bridge"
                for name in names("Alder Birk Corn Drey Eska Finn Gorse Hather", "ley wick by thorp sey")
            ],
            length=numbers(31, 500),
            river=[f"the {name}" for name in names("Yar Pell Ouz Tam Wend Lisk Brae Corv", "ow ick een ar issa")],
            deck=dealt("oak, granite, steel, brick, larch"),
            person=_shifted(people, 9),
            opened=numbers(1801, 1931),
        ),
        "hotels": _table(
            name=[f"the Hotel {name}" for name in names("Sa Mo Ri Lu Ka Te No Vi", "randa linor vessa tika meru")],
            rooms=numbers(11, 120),
            person=_shifted(people, 11),
            price=numbers(31, 190),
            breakfast=dealt("porridge, pancakes, omelettes, kippers, waffles"),
            town=_shifted(towns, 11),
        ),
        "ships": _table(
            name=[f"the {name}" for name in names("Mor Pel Quin Ros Sten Tarn Umb Wex", "ander ilda ova uria ethe")],
            cargo=dealt("timber, salt, wool, cement, bananas"),
            knots=rng.choices(range(9, 30), k=_EACH),
            town=_shifted(towns, 13),
            person=_shifted(people, 13),
            launched=numbers(1931, 2001),
        ),
        "towns": _table(
            name=towns,
            inhabitants=numbers(101, 1000),
            day=dealt("Monday, Tuesday, Wednesday, Thursday, Friday"),
            pastry=dealt("ginger biscuits, plum cake, almond buns, poppy rolls, cheese straws"),
            mill=numbers(1701, 1801),
        ),
    }


def _table(**columns: Sequence[str | int | None]) -> list[Facts]:
    """Rows of the columns, without those that are ``None``."""
    rows = (zip(columns, row, strict=True) for row in zip(*columns.values(), strict=True))
    return [{fact: value for fact, value in row if value is not None} for row in rows]


def _every(step: int, first: int, values: Sequence[str | int]) -> list[str | int | None]:
    """Every second or third value."""
    return [value if i % step == first else None for i, value in enumerate(values)]


def _shifted(names: Sequence[str], step: int) -> list[str]:
    """The names in another order, none at its own place."""
    return [names[(i * step + step // 2) % _EACH] for i in range(_EACH)]


def _asked(kind: Kind, number: int, question: str, fact: str, *things: _Thing, apart: Sequence[str] = ()) -> Asked:
    """Asks for a fact of the last of the things; with passages ``apart``, nothing has the answer."""
    answers = () if apart or fact not in things[-1].facts else _answers(things[-1].facts[fact])
    passages = tuple(thing.passage for thing in things)
    name = f"{kind}/{things[0].topic}-{fact}-{number}"
    return Asked(kind, name, things[0].topic, question, answers, passages, tuple(apart))


def _answers(value: str | int) -> tuple[str, ...]:
    """The value in the forms in which it may be told."""
    text = str(value)
    return (text, f"{text}s") if text.endswith("day") else (text,)


def _linked(world: _World) -> Iterator[tuple[int, _Thing, _Thing, str]]:
    """Each two things of which the first names the second, numbered, with words that name the second by the first."""
    for topic, relation, other, words in _LINKS:
        by_name = {thing.name: thing for thing in world[other]}
        for number, thing in enumerate(world[topic]):
            yield number, thing, by_name[str(thing.facts[relation])], words.format(thing.name)


def _chains(rng: random.Random, world: _World) -> Iterator[Asked]:
    for number, thing, other, words in _linked(world):
        fact, question = rng.choice(sorted(other.hidden().items()))
        yield _asked("chain", number, question.format(words), fact, thing, other)


def _broken_chains(rng: random.Random, world: _World) -> Iterator[Asked]:
    for number, thing, other, words in _linked(world):
        fact, question = rng.choice(sorted(other.hidden().items()))
        yield _asked("unanswerable", number, question.format(words), fact, thing, apart=(other.passage,))


def _comparisons(rng: random.Random, world: _World) -> Iterator[Asked]:
    for topic, measure, choose, fact, words in _COMPARED:
        for number in range(_COMPARISONS):
            pair = rng.sample(world[topic], 2)
            chosen = choose(pair, key=lambda thing: thing.facts[measure])
            (other,) = (thing for thing in pair if thing is not chosen)
            if all(chosen.facts[each] != other.facts[each] for each in (measure, fact)):
                question = words.format(*(thing.name for thing in pair))
                yield _asked("comparison", number, question, fact, other, chosen)


def _counts(rng: random.Random, world: _World) -> Iterator[Asked]:
    for topic, fact, words in _COUNTED:
        for value in sorted({str(thing.facts[fact]) for thing in world[topic]}):
            passages = tuple(thing.passage for thing in world[topic] if thing.facts[fact] == value)
            for number in range(_COUNTS):
                name = f"count/{topic}-{value}-{number}"
                yield Asked("count", name, topic, words.format(value), (), passages)


def _paraphrased(rng: random.Random, world: _World) -> Iterator[Asked]:
    nouns = {does: noun for noun, does in _JOBS.items()}
    for number, person in enumerate(world["people"]):
        for fact, question in person.hidden().items():
            noun = nouns[str(person.facts["does"])]
            yield _asked("paraphrased", number, question.format(noun), fact, person)


def _untold(rng: random.Random, world: _World) -> Iterator[Asked]:
    for topic, words in _HIDDEN.items():
        for number, thing in enumerate(world[topic]):
            for fact in sorted(words.keys() - thing.facts.keys()):
                yield _asked("unanswerable", number, words[fact].format(thing.name), fact, thing)
