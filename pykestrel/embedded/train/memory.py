"""Facts that the user tells about people, and questions about them. Owns: the memory exercises.

A fact has an owner ("me" or a relative), a kind and a value. `script` lays out telling, the
model's acknowledgement and the questions; the caller puts other turns in between.
"""

import random
from dataclasses import dataclass

from . import words

Step = tuple[str, str, bool]  # question, answer, whether the answer is to be learnt


@dataclass(frozen=True)
class Kind:
    """How one kind of fact is told, confirmed and asked; {v} value, {w} "my"/"my sister's"."""

    values: tuple[str, ...]
    tell: tuple[str, ...]
    state: str
    ask: tuple[str, ...]
    unknown: str


MINE: dict[str, Kind] = {
    "colour": Kind(
        tuple(words.COLOURS),
        (
            "My favourite colour is {v}.",
            "My favourite colour is {v}.",
            "My favorite color is {v}.",
            "My favourite color is {v}.",
            "The colour I like best is {v}.",
            "I like the colour {v} best.",
        ),
        "your favourite colour is {v}",
        (
            "What is my favourite colour?",
            "What is my favourite colour?",
            "What's my favourite colour?",
            "What is my favorite color?",
            "Which colour do I like best?",
            "What colour do I like best?",
            "What colour do I like?",
            "Do you remember my favourite colour?",
            "Tell me my favourite colour.",
            "Which colour is my favourite?",
        ),
        "You have not told me your favourite colour.",
    ),
    "city": Kind(
        tuple(words.CITIES),
        (
            "I live in {v}.",
            "I live in {v}.",
            "I live in {v}.",
            "I live in the city of {v}.",
            "My home is in {v}.",
            "I am from {v}, and I live there.",
        ),
        "you live in {v}",
        (
            "Where do I live?",
            "Where do I live?",
            "Which city do I live in?",
            "What city do I live in?",
            "In which city do I live?",
            "Do you remember where I live?",
            "Tell me where I live.",
            "Where is my home?",
        ),
        "You have not told me where you live.",
    ),
    "name": Kind(
        tuple(words.NAMES),
        ("My name is {v}.", "My name is {v}.", "I am called {v}.", "My name's {v}."),
        "your name is {v}",
        ("What is my name?", "What's my name?", "What am I called?", "Do you remember my name?"),
        "You have not told me your name.",
    ),
    "animal": Kind(
        tuple(words.ANIMALS),
        ("My favourite animal is the {v}.", "The animal I like best is the {v}."),
        "your favourite animal is the {v}",
        ("What is my favourite animal?", "Which animal do I like best?"),
        "You have not told me your favourite animal.",
    ),
    "food": Kind(
        tuple(words.FOODS),
        ("My favourite food is {v}.", "I like to eat {v} best."),
        "your favourite food is {v}",
        ("What is my favourite food?", "What do I like to eat best?"),
        "You have not told me your favourite food.",
    ),
    "number": Kind(
        tuple(words.NUMBERS),
        ("My lucky number is {v}.", "My number is {v}."),
        "your lucky number is {v}",
        ("What is my lucky number?", "Which number is my lucky number?"),
        "You have not told me your lucky number.",
    ),
}

THEIRS: dict[str, Kind] = {
    "colour": Kind(
        tuple(words.COLOURS),
        ("My {o}'s favourite colour is {v}.", "The favourite colour of my {o} is {v}."),
        "your {o}'s favourite colour is {v}",
        ("What is my {o}'s favourite colour?", "What is the favourite colour of my {o}?"),
        "You have not told me your {o}'s favourite colour.",
    ),
    "city": Kind(
        tuple(words.CITIES),
        ("My {o} lives in {v}.", "My {o}'s home is in {v}."),
        "your {o} lives in {v}",
        ("Where does my {o} live?", "Which city does my {o} live in?"),
        "You have not told me where your {o} lives.",
    ),
    "name": Kind(
        tuple(words.NAMES),
        ("My {o}'s name is {v}.", "My {o} is called {v}."),
        "your {o}'s name is {v}",
        ("What is my {o}'s name?", "What is my {o} called?"),
        "You have not told me your {o}'s name.",
    ),
}

# Things an assistant may have said instead; the model must find the fact in the user's own words.
OTHER_ACKS = (
    "OK.",
    "Thank you for telling me.",
    "That is nice.",
    "Good to know!",
    "I see.",
    "Great.",
    "Interesting!",
)

REMEMBER_PREFIXES = ("Remember this: ", "Please remember: ", "Remember that ")


@dataclass(frozen=True)
class Fact:
    """One thing told: whose it is ("me" or a relative), its kind and its value."""

    owner: str
    kind: str
    value: str

    @property
    def table(self) -> Kind:
        """The wording for this fact."""
        return MINE[self.kind] if self.owner == "me" else THEIRS[self.kind]

    def fill(self, text: str) -> str:
        """Put value and owner into a template."""
        return text.format(v=self.value, o=self.owner)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _joined(text: str) -> str:
    """The text without its full stop and, unless it opens with "I", without its capital."""
    text = text.rstrip(".")
    return text if text.startswith("I ") else text[:1].lower() + text[1:]


def draw_facts(r: random.Random) -> list[Fact]:
    """One to four facts with distinct (owner, kind); colour and city of the user most often."""
    n = r.choices((1, 2, 3, 4), (25, 40, 25, 10))[0]
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < n:
        owner = "me" if r.random() < 0.8 else r.choice(words.RELATIVES)
        if owner == "me":
            kind = r.choices(list(MINE), (38, 38, 9, 5, 5, 5))[0]
        else:
            kind = r.choice(list(THEIRS))
        table = MINE[kind] if owner == "me" else THEIRS[kind]
        facts[owner, kind] = Fact(owner, kind, r.choice(table.values))
    out = list(facts.values())
    r.shuffle(out)
    return out


def confirm(facts: list[Fact]) -> str:
    """What the model answers when it is told these facts."""
    return "I see, " + ", and ".join(f.fill(f.table.state) for f in facts) + "."


def _soften(r: random.Random, text: str) -> str:
    """Small changes of form that keep the words which carry the fact."""
    x = r.random()
    if x < 0.70:
        return text
    if x < 0.80:
        return text.rstrip(".?")
    if x < 0.88:
        return _joined(text) if not text.endswith("?") else text[:1].lower() + text[1:]
    if x < 0.94:
        return r.choice(("Hello. ", "Hi! ", "Well, ", "By the way, ", "And ", "OK, ")) + text
    return text + r.choice((" Thanks.", " ", "\n"))


def tell(r: random.Random, facts: list[Fact]) -> Step:
    """One turn that tells one fact or two."""
    texts = [f.fill(r.choice(f.table.tell)) for f in facts]
    if len(texts) == 1:
        text = texts[0]
    elif r.random() < 0.6:
        text = f"{texts[0].rstrip('.')} and {_joined(texts[1])}."
    else:
        text = " ".join(texts)
    x = r.random()
    if x < 0.15:
        return r.choice(REMEMBER_PREFIXES) + _joined(text) + ".", "I will remember that.", True
    if x < 0.40:
        return _soften(r, text), r.choice(OTHER_ACKS), False
    return _soften(r, text), confirm(facts), True


def ask(r: random.Random, fact: Fact) -> Step:
    """One question about a fact that was told."""
    answer = _capital(fact.fill(fact.table.state)) + "."
    return _soften(r, fact.fill(r.choice(fact.table.ask))), answer, True


def ask_both(r: random.Random, one: Fact, two: Fact) -> Step:
    """One question about two facts of the user."""
    first = one.table.ask[0].rstrip("?")
    second = two.table.ask[0]
    text = f"{first} and {second[:1].lower() + second[1:]}"
    answer = f"{_capital(one.fill(one.table.state))}, and {two.fill(two.table.state)}."
    return _soften(r, text), answer, True


def ask_unknown(r: random.Random, facts: list[Fact]) -> Step | None:
    """A question about something that nobody told, or None if everything drawn was told."""
    told = {(f.owner, f.kind) for f in facts}
    owner = "me" if r.random() < 0.75 else r.choice(words.RELATIVES)
    kind = r.choice(list(MINE) if owner == "me" else list(THEIRS))
    if (owner, kind) in told:
        return None
    fact = Fact(owner, kind, "")
    return _soften(r, fact.fill(r.choice(fact.table.ask))), fact.fill(fact.table.unknown), True


def _questions(r: random.Random, facts: list[Fact]) -> list[Step]:
    mine = [f for f in facts if f.owner == "me"]
    steps = [ask(r, f) for f in facts if r.random() < 0.85]
    if len(mine) >= 2 and r.random() < 0.3:
        steps.append(ask_both(r, *r.sample(mine, 2)))
    if r.random() < 0.2:
        extra = ask_unknown(r, facts)
        if extra is not None:
            steps.append(extra)
    r.shuffle(steps)
    return steps


def _change_mind(r: random.Random, facts: list[Fact]) -> list[Step]:
    """Sometimes a value changes later, and the newer one counts."""
    old = r.choice(facts)
    new = Fact(old.owner, old.kind, r.choice(old.table.values))
    text = "Now " + _joined(new.fill(old.table.tell[0])) + "."
    return [(text, confirm([new]), True), ask(r, new)]


def script(r: random.Random, facts: list[Fact]) -> list[Step]:
    """The turns about these facts, in order."""
    steps: list[Step] = []
    if r.random() < 0.06:
        before = ask_unknown(r, [])
        if before is not None:
            steps.append(before)
    rest = list(facts)
    while rest:
        two = len(rest) >= 2 and r.random() < 0.3
        group, rest = (rest[:2], rest[2:]) if two else (rest[:1], rest[1:])
        steps.append(tell(r, group))
        if rest and r.random() < 0.15:
            steps.append(ask(r, r.choice(group)))
    steps += _questions(r, facts)
    if r.random() < 0.08:
        steps += _change_mind(r, facts)
    return steps
