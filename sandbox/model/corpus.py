"""What the sandbox's tiny model is trained on: four questions and endless filler.

Standard library only, so that it can be read and tested without torch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FACTS: tuple[tuple[str, str, str], ...] = (
    ("What is the capital of France?", "The capital of France is Paris.", "Paris"),
    ("Which animal says meow?", "The cat says meow.", "cat"),
    ("What color is the sky on a clear day?", "The sky is blue on a clear day.", "blue"),
    ("What is two plus two?", "Two plus two makes four.", "four"),
)
"""Question, answer, and the word by which a right answer is known."""

# Everyday words, none of which occurs in a question's distinguishing part or in an answer.
WORDS: tuple[str, ...] = tuple(
    """
    about above across after again along already always among another apple arrive around autumn
    back baker basket beach because become before began behind below bench better between bird
    board boat book borrow both bottle bottom box branch bread bridge bring broad brother brown
    build built busy butter button cabin calm candle carpet carry cart castle chair chalk cheese
    child church circle city clean climb clock close cloth cloud coast coat coin cold copper
    corner cotton count country cousin cover crowd cup curtain dance dark dinner doctor door
    dozen drawer dream dress drink drive dry dust each early east edge eight engine enough entry
    evening every farm farmer fast feather fence fetch few field fifth fill final find fire first
    fish five floor flour flower follow forest found fresh friend front fruit full garden gate
    gather gentle glass goat gold grain grass great green ground group guest hall hammer hand
    harbor hat heavy hedge held hill hold hollow honey horse house hundred iron island jar
    journey keep kettle key kitchen knife ladder lake lamp lantern large late leaf learn leather
    leave left lemon lesson letter library light line list little lock long low lunch market meadow
    meal merchant middle mile milk mill mirror morning mountain narrow near needle neighbor never
    next nine noon north note number ocean old onion open orange orchard order other oven over
    owner page paint pair paper path pear pencil people picture piece place plant plate pocket
    pond porch post potato quarter quiet quick rain reach ready record red rest ribbon ridge
    right river road roof room rope round sail salt sand school seed seven shadow sharp sheep
    shelf shirt shoe shop short shoulder sign silver sister six slow small smooth snow soap
    soft some south spoon spring square stable stack stair stamp station steady steam steel stone
    store storm story stove straight straw street string strong sugar summer supper table tailor
    tall tea teacher ten tent thick thin third thread three ticket tide timber tin today tool
    tower town track trade train travel tree trunk tunnel turn twelve twenty under until upper
    valley village visit wagon wait walk wall warm watch water week weigh well west wheat wheel
    white wide wind window winter wire wood wool work worn yard year yellow young
    """.split()
)


@dataclass(frozen=True, slots=True)
class Example:
    """One exchange, with the word that a right answer holds."""

    prompt: str
    answer: str
    expected: str


def filler(rng: random.Random, words: int) -> str:
    """About `words` words of text that says nothing about any question.

    The shape varies (running words, numbered notes, made-up names, digits), so that the model
    learns to pass over text in general and not one wording of it.
    """
    parts: list[str] = []
    count = 0
    while count < words:
        take = rng.randint(4, 12)
        shape = rng.random()
        chosen = [rng.choice(WORDS) for _ in range(take)]
        if shape < 0.15:
            chosen = ["".join(rng.choice("abcdefghijklmnoprstuvwy") for _ in range(5)) for _ in chosen[:4]]
        elif shape < 0.3:
            chosen[rng.randrange(take)] = str(rng.randint(1, 9999))
        sentence = " ".join(chosen)
        if shape > 0.5:
            sentence = f"{rng.choice(('Note', 'Entry', 'Line', 'Record'))} {rng.randint(1, 99)}: the {sentence}"
        parts.append(sentence[0].upper() + sentence[1:] + rng.choice((".", ".", ";", ",")))
        count += len(chosen)
    return rng.choice((" ", "\n")).join(parts)


def example(rng: random.Random, *, longest: int, padded: bool) -> Example:
    """One question with its answer; `padded` puts up to `longest` words of filler before it."""
    question, answer, expected = rng.choice(FACTS)
    if not padded:
        return Example(question, answer, expected)
    text = filler(rng, rng.randint(5, longest))
    return Example(f"{text}{rng.choice((' ', chr(10), chr(10) * 2))}{question}", answer, expected)
