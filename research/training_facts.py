# SPDX-License-Identifier: Apache-2.0
"""Makes passages about invented things, and questions over several of them, to train `tessera adapt` on.

    python -m research.training_facts build/facts

The folder gets a text file for each topic, a passage a paragraph, and `questions.jsonl` for ``--questions``. Things,
sentences and questions are others than those of `tessera eval`, which so stay held out.
"""

import argparse
import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

_EACH: Final = 120
_CHUNKS: Final = (4, 8, 12, 16)
_SYSTEM: Final = "Use the documents to answer in a few words. If they don't tell, answer: I don't know."

_TOLD: Final = {
    "scholar": (
        "{name} wrote a thesis about {subject}.|{name} is known for years of work on {subject}.",
        "{last} speaks {language} at home.|The mother tongue of {last} is {language}.",
        "The holidays are spent in {resort}.|Each August {last} travels to {resort}.",
        "{last} is {age} years old.|This scholar has turned {age}.",
        "Lunch is always {meal}.|At noon {last} eats {meal}.",
    ),
    "museum": (
        "{name} shows {exhibit}.|In {name} one can look at {exhibit}.",
        "Its director is {person}.|It has been run by {person} for a while.",
        "Tickets are {price} guilders.|One pays {price} guilders at the door.",
        "Its cellar holds {cellar}.|Down in the cellar there are {cellar}.",
        "It closes on {day}s.|No visitor is let in on {day}s.",
    ),
    "robot": (
        "{name} is a robot that can {task}.|The robot {name} was made to {task}.",
        "{person} designed it.|The plans were drawn by {person}.",
        "It weighs {weight} kilograms.|On the scales it shows {weight} kilograms.",
        "It runs on {fuel}.|Its tank is filled with {fuel}.",
        "Its arms are {color}.|It has {color} arms.",
    ),
    "planet": (
        "{name} is a planet with a sky of {color}.|The planet {name} has {color} clouds.",
        "It was first mapped by {person}.|{person} drew the first map of it.",
        "A year there lasts {year} days.|It circles its sun in {year} days.",
        "Settlers grow {crop}.|On its fields there is {crop}.",
        "The nights are full of {night}.|After dark one hears {night}.",
    ),
    "play": (
        "{name} is a play about {theme}.|The play {name} deals with {theme}.",
        "{person} wrote it.|It came from the pen of {person}.",
        "It lasts {minutes} minutes.|The curtain falls after {minutes} minutes.",
        "In the last scene {end}.|It ends when {end}.",
        "Its songs are sung to a {instrument}.|A {instrument} accompanies its songs.",
    ),
    "dog": (
        "{name} is a {breed}.|There is a {breed} that goes by {name}.",
        "It was raised by {person}.|{person} brought it up.",
        "It can jump {jump} centimeters high.|The highest jump was {jump} centimeters.",
        "It is fond of {toy}.|Nothing pleases it more than {toy}.",
        "It barks at {barks}.|One thing makes it bark: {barks}.",
    ),
}
_VALUES: Final = {
    "subject": "moss, tides, comets, dialects, glaciers, owls, clay, magnets",
    "language": "Basque, Welsh, Finnish, Maltese, Latvian",
    "resort": "the Azores, the Tatra mountains, Corfu, the Faroe Islands, Lapland",
    "meal": "lentil stew, dumplings, an omelet, fried rice, pea soup",
    "exhibit": "old typewriters, sailing knots, meteorites, puppets, locks and keys",
    "cellar": "barrels of wine, broken statues, unsorted letters, a hundred paintings, spare lamps",
    "day": "Monday, Tuesday, Wednesday, Thursday, Friday",
    "task": "peel potatoes, wash windows, sort parcels, paint fences, pick apples, mop floors",
    "fuel": "steam, alcohol, sunlight, rapeseed oil, hydrogen",
    "color": "violet, orange, turquoise, silver, crimson",
    "crop": "barley, melons, tea, cotton, beans",
    "night": "whistling, thunder, humming, wind, bells",
    "theme": "a stolen crown, two rivals, a lost letter, a flood, a false prince",
    "end": "the twins embrace, a house burns, everybody dances, the judge laughs, the thief confesses",
    "instrument": "guitar, lute, tuba, fiddle, zither",
    "breed": "poodle, beagle, terrier, mastiff, spaniel",
    "toy": "a rubber duck, a red ball, an old shoe, a rope, a wooden spoon",
    "barks": "bicycles, umbrellas, postmen, fireworks, tractors",
}
_NUMBERS: Final = {
    "age": ("older", "younger"),
    "price": ("dearer", "cheaper"),
    "weight": ("heavier", "lighter"),
    "year": ("planet with the longer year", "planet with the shorter year"),
    "minutes": ("longer", "shorter"),
    "jump": ("better jumper", "worse jumper"),
}
_ASKED: Final = {
    "subject": "What did {} study?",
    "language": "Which language does {} speak?",
    "resort": "Where does {} go on holiday?",
    "meal": "What does {} have for lunch?",
    "age": "What is the age of {}?",
    "exhibit": "What can be seen in {}?",
    "cellar": "What is kept below {}?",
    "day": "On which day is {} shut?",
    "price": "How much does one pay to enter {}?",
    "task": "What is {} for?",
    "weight": "How heavy is {}?",
    "fuel": "What does {} need to run?",
    "year": "How long does a year last on {}?",
    "crop": "What is grown on {}?",
    "night": "What can be heard on {} at night?",
    "theme": "What is {} about?",
    "minutes": "How long is {}?",
    "end": "What happens at the end of {}?",
    "instrument": "Which instrument is played in {}?",
    "breed": "What kind of dog is {}?",
    "jump": "How high can {} jump?",
    "toy": "What does {} like most?",
    "barks": "What does {} bark at?",
    "person": "Whose name is connected with {}?",
}
_COUNTED: Final = {
    "scholar": ("language", "How many scholars speak {}?"),
    "museum": ("day", "How many museums are shut on {}s?"),
    "robot": ("fuel", "How many robots run on {}?"),
    "planet": ("crop", "On how many planets do people grow {}?"),
    "play": ("instrument", "In how many plays is there a {}?"),
    "dog": ("barks", "How many dogs bark at {}?"),
}
_LINKS: Final = {
    "museum": "the director of {}",
    "robot": "the designer of {}",
    "planet": "whoever first mapped {}",
    "play": "the author of {}",
    "dog": "whoever raised {}",
}
_NAMES: Final = {
    "museum": ("the {} Museum", "Bor Cel Dra Fen Gil Hum Jas Kor Lav Nim Pru Rou", "dane erne ilot ovan usca"),
    "robot": ("{}", "Ax Bip Cog Dex Emo Fuz Giz Hal Iko Jig Kip Lum", "tron ie onette omat us"),
    "planet": ("{}", "Ab Cy De Er Gly Hy Io Ka Ly My Ny Or", "dara lene mion phor xis"),
    "play": (
        "The {}",
        "Blind Gilded Hasty Idle Jolly Kind Lonely Merry Noble Pale Quiet Rusty",
        "Duke Widow Baker Captain Nun",
    ),
    "dog": ("{}", "Bo Chi Du Fi Gru Hek Jup Ki Lo Mu Nap Pos", "ster ro bby nny xel"),
}


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    things = _things(rng)
    for topic in _TOLD:
        texts = [thing["text"] for thing in things if thing["topic"] == topic]
        (folder / f"{topic}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    lines = [json.dumps(_question(rng, things)) for _ in range(3000)]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _things(rng: random.Random) -> list[dict[str, Any]]:
    """All things, with their facts and ``text``."""
    first, last = _made("{}", "Al Be Ci Do Ev Fa Gu Ho Ja Ke La Ma", "dric mina ton via sko", rng), []
    last = _made("{}", "Aber Bran Cull Dorn Eck Furn Gall Hart Inn Joss Kell Lind", "man sted feld ova ini", rng)
    scholars = [f"{a} {b}" for a, b in zip(first, last, strict=True)]
    names = {"scholar": scholars, **{topic: _made(*made, rng) for topic, made in _NAMES.items()}}
    return [_thing(rng, topic, name, scholars) for topic in _TOLD for name in names[topic]]


def _made(form: str, begins: str, ends: str, rng: random.Random) -> list[str]:
    glue = " " if form.startswith("The") else ""
    every = [form.format(glue.join(parts)) for parts in product(begins.split(), ends.split())]
    return rng.sample(every, min(_EACH, len(every)))


def _thing(rng: random.Random, topic: str, name: str, scholars: Sequence[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": name, "last": name.split()[-1], "person": rng.choice(scholars)}
    facts |= {fact: rng.choice(values.split(", ")) for fact, values in _VALUES.items()}
    facts |= {fact: rng.randint(20, 99) if fact == "age" else rng.randint(11, 600) for fact in _NUMBERS}
    opening, *others = (rng.choice(each.split("|")) for each in _TOLD[topic])
    told = [each for each in rng.sample(others, len(others)) if rng.random() < 0.9]
    text = " ".join(each.format(**facts) for each in (opening, *told))
    known = {fact for fact in _ASKED if any(f"{{{fact}}}" in each for each in (opening, *told))}
    return {"topic": topic, "text": text[0].upper() + text[1:], "known": known, **facts}


def _question(rng: random.Random, things: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A record for ``--questions``: up to half of the chunks are of one topic."""
    topic, number = rng.choice(list(_TOLD)), rng.choice(_CHUNKS)
    own = rng.sample([each for each in things if each["topic"] == topic], number // 2)
    others = rng.sample([each for each in things if each["topic"] != topic], number - len(own))
    found, (one, two) = [*own, *others], own[:2]
    kind, answers = rng.choice(("fact", "fact", "link", "compare", "count", "absent")), list[str]()
    (measure,) = _NUMBERS.keys() & {fact for each in _TOLD[topic] for fact in _NUMBERS if f"{{{fact}}}" in each}
    if kind == "link" and topic in _LINKS and "person" in one["known"]:
        (person,) = (each for each in things if each["name"] == one["person"])
        found[-1] = person
        fact = rng.choice(sorted(person["known"]))
        question, answers = _ASKED[fact].format(_LINKS[topic].format(one["name"])), [str(person[fact])]
    elif kind == "compare" and measure in one["known"] & two["known"] and one[measure] != two[measure]:
        number = rng.randrange(2)
        chosen = sorted((one, two), key=lambda each: -each[measure])[number]
        question = f"Which is the {_NUMBERS[measure][number]}, {one['name']} or {two['name']}?"
        answers = [chosen["name"]]
    elif kind == "count":
        fact, words = _COUNTED[topic]
        value = rng.choice(own)[fact]
        question = words.format(value)
        answers = [str(sum(each[fact] == value and fact in each["known"] for each in found if each["topic"] == topic))]
    elif kind == "absent":
        other = rng.choice([each for each in things if each["topic"] == topic and each not in own])
        question = _ASKED[rng.choice(sorted(other["known"]))].format(other["name"])
    else:
        fact = rng.choice(sorted(one["known"]))
        question, answers = _ASKED[fact].format(one["name"]), [str(one[fact])]
    texts = [each["text"] for each in rng.sample(found, len(found))]
    return {"system": _SYSTEM, "chunks": texts, "question": question, "answers": answers, "kind": kind}


if __name__ == "__main__":
    main()
