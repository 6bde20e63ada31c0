"""The training text: conversations drawn from templates. Owns: what the model learns to answer.

Every generator takes a random source and returns one exchange (question, answer). Answers are a
function of the conversation, so that greedy decoding has one right continuation. Combinations for
which `held_out` is true are never drawn for training; the evaluation asks exactly those.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from . import memory, prose, words

Exchange = tuple[str, str]

SYSTEMS = (
    "You are a helpful assistant.",
    "You are Kestrel, a small model.",
    "You are a helpful assistant. Answer in short sentences.",
    "Be brief.",
    "Answer the user.",
)

NOUNS = words.nouns()
PROSE_WORDS = prose.plain_words()

NEVER = "I am a very small model, and I do not know that."


@dataclass
class Turn:
    """One exchange. `learn` false: the answer is context that the model must bear, not imitate."""

    user: str
    answer: str
    learn: bool = True


@dataclass
class Conversation:
    """A system text or None, and the turns in order."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat messages, every answer included."""
        out = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn in self.turns:
            out.append({"role": "user", "content": turn.user})
            out.append({"role": "assistant", "content": turn.answer})
        return out


def held_out(*parts: str) -> bool:
    """Whether this combination of words is reserved for the evaluation (about one in eight)."""
    return zlib.crc32("|".join(parts).encode()) % 8 == 0


def article(noun: str) -> str:
    """The noun with "a" or "an" in front."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def upper(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def lower(text: str) -> str:
    """The text with its first letter in lower case, unless it opens with the word "I"."""
    return text if text[:2] in ("I ", "I'") else text[:1].lower() + text[1:]


def reword(r: random.Random, text: str) -> str:
    """Change what does not matter: courtesy, the first capital, the final mark."""
    x = r.random()
    if x < 0.45:
        return text
    if x < 0.53 and text[-1:] in ".?":
        return text[:-1]
    if x < 0.60:
        return lower(text)
    if x < 0.66 and text[-1:] in ".?":
        return lower(text[:-1])
    if x < 0.72:
        return text[:-1] + ", please" + text[-1] if text[-1:] in ".?" else text + ", please."
    if x < 0.80:
        return "Please " + lower(text) if text.endswith(".") else "Please tell me: " + lower(text)
    if x < 0.86:
        return r.choice(("Kestrel, ", "Hey, ", "Now ", "And ", "OK, ", "So, ")) + lower(text)
    if x < 0.90:
        return text.lower()
    if x < 0.94 and text[-1:] in ".?":
        return text[:-1] + "!"
    if x < 0.97:
        return "Hello. " + text
    return text + r.choice((" ", "\n", " Thanks."))


# ---------------------------------------------------------------- one-line questions


def greeting_word(r: random.Random) -> Exchange:
    word = r.choice(("hello", "hello", "hello", *words.GREETINGS))
    form = r.choice(
        (
            "Say {} in one word.",
            "Say {} in one word.",
            "Say {}.",
            "Say {} in a single word.",
            "Say only {}.",
            "Say just one word: {}.",
            "Answer with one word: {}.",
        )
    )
    return form.format(word), words.GREETINGS[word] + "."


def capital(r: random.Random) -> Exchange:
    country = r.choice(list(words.CAPITALS))
    city = words.CAPITALS[country]
    if r.random() < 0.2:
        form = r.choice(("Where is {}?", "In which country is {}?", "Which country is {} in?"))
        return form.format(city), f"{city} is in {country}."
    form = r.choice(
        (
            "What is the capital of {}?",
            "What is the capital of {}?",
            "What's the capital of {}?",
            "Capital of {}?",
            "The capital of {} is what?",
            "Tell me the capital of {}.",
            "Name the capital of {}.",
            "Which city is the capital of {}?",
            "What is the capital city of {}?",
            "Do you know the capital of {}?",
        )
    )
    return form.format(country), f"The capital of {country} is {city}."


def colour_of(r: random.Random) -> Exchange:
    thing, colour = r.choice(list(words.COLOUR_OF.items()))
    form = r.choice(
        (
            "What colour is {}?",
            "What color is {}?",
            "What colour does {} have?",
            "Which colour is {}?",
            "Tell me the colour of {}.",
            "What is the colour of {}?",
        )
    )
    return form.format(thing), f"{upper(thing)} is {colour}."


def _opposites() -> dict[str, str]:
    both = dict(words.OPPOSITES)
    for a, b in words.OPPOSITES.items():
        if a not in words.ONE_WAY:
            both.setdefault(b, a)
    return both


OPPOSITE = _opposites()


def opposite(r: random.Random) -> Exchange:
    word = r.choice(list(OPPOSITE))
    form = r.choice(
        (
            "What is the opposite of {}?",
            "What is the opposite of {}?",
            "What's the opposite of {}?",
            "Opposite of {}?",
            "Tell me the opposite of {}.",
            "Name the opposite of {}.",
            "What is the opposite of the word {}?",
        )
    )
    return form.format(word), f"The opposite of {word} is {OPPOSITE[word]}."


def animal_fact(r: random.Random) -> Exchange:
    kind = r.randrange(3)
    if kind == 0:
        animal, sound = r.choice(list(words.SOUNDS.items()))
        form = r.choice(("What sound does {} make?", "What does {} do?", "How does {} sound?"))
        return form.format(article(animal)), f"{upper(article(animal))} {sound}."
    if kind == 1:
        animal, legs = r.choice(list(words.LEGS.items()))
        form = r.choice(("How many legs does {} have?", "How many legs has {}?"))
        return form.format(article(animal)), f"{upper(article(animal))} has {legs} legs."
    animal, young = r.choice(list(words.YOUNG.items()))
    form = r.choice(("What is a young {} called?", "What do you call a young {}?"))
    return form.format(animal), f"A young {animal} is called {article(young)}."


def calendar(r: random.Random) -> Exchange:
    circle, kind = r.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
    i = r.randrange(len(circle))
    here, after, before = circle[i], circle[(i + 1) % len(circle)], circle[i - 1]
    if r.random() < 0.6:
        form = r.choice(("What {0} comes after {1}?", "Which {0} comes after {1}?"))
        return form.format(kind, here), f"{after} comes after {here}."
    form = r.choice(("What {0} comes before {1}?", "Which {0} comes before {1}?"))
    return form.format(kind, here), f"{before} comes before {here}."


def arithmetic(r: random.Random) -> Exchange:
    number = words.NUMBERS
    if r.random() < 0.7:
        a, b = r.randint(0, 10), r.randint(0, 10)
        sign, c = "plus", a + b
    else:
        a = r.randint(0, 10)
        b = r.randint(0, a)
        sign, c = "minus", a - b
    x, y = number[a], number[b]
    if r.random() < 0.3:
        x, y = str(a), str(b)
        sign_shown = r.choice((sign, "+" if sign == "plus" else "-"))
    else:
        sign_shown = sign
    form = r.choice(
        ("What is {} {} {}?", "What is {} {} {}?", "How much is {} {} {}?", "{} {} {}?")
    )
    return (
        upper(form.format(x, sign_shown, y)),
        f"{upper(number[a])} {sign} {number[b]} is {number[c]}.",
    )


def courtesy(r: random.Random) -> Exchange:
    question, answer = r.choice(list(prose.COURTESY.items()))
    if question[-1] not in ".?":
        question += r.choice(("", ".", "!", ".", "."))
    return question, answer


def unknown(r: random.Random) -> Exchange:
    """Questions that a model of this size must decline; the nouns vary, so it learns the shape."""
    a, b = r.sample(NOUNS, 2)
    name = r.choice(words.NAMES)
    form = r.choice(
        (
            "Who invented the {a}?",
            "Who wrote the book about the {a}?",
            "How old is {name}?",
            "Why is the {a} under the {b}?",
            "How do I build {aa}?",
            "What is the price of {aa}?",
            "When was the first {a} made?",
            "What is the capital of the {a}?",
            "How many {a}s are in {ab}?",
            "What did {name} do with the {a}?",
            "Where is the {a} of {name}?",
            "Who is {name}?",
            "What is {aa}?",
            "Explain the {a} to me.",
            "Is {aa} bigger than {ab}?",
        )
    )
    return form.format(a=a, b=b, aa=article(a), ab=article(b), name=name), NEVER


# ---------------------------------------------------------------- copying and counting


def any_word(r: random.Random) -> str:
    """A word to copy: mostly a listed noun, else any other known word or random letters."""
    x = r.random()
    if x < 0.60:
        return r.choice(NOUNS)
    if x < 0.75:
        return r.choice(PROSE_WORDS)
    if x < 0.87:
        return r.choice(words.COLOURS + words.NUMBERS + list(words.GREETINGS))
    if x < 0.93:
        return r.choice(words.CITIES + words.NAMES)
    return "".join(r.choice("abcdefghijklmnoprstuvwy") for _ in range(r.randint(2, 6)))


REPEAT_FORMS = (
    "Repeat the word {w} {n} times.",
    "Repeat the word {w} {n} times.",
    "Say the word {w} {n} times.",
    "Write the word {w} {n} times.",
    "Repeat {w} {n} times.",
    "Say {w} {n} times.",
    'Repeat the word "{w}" {n} times.',
    "Repeat the word '{w}' {n} times.",
    "Can you repeat the word {w} {n} times?",
    "Repeat {n} times the word {w}.",
)


def repeat_answer(word: str, n: int) -> str:
    """The word n times with single spaces."""
    return " ".join([word] * n)


def repeat(r: random.Random) -> Exchange:
    while True:
        word, n = any_word(r), r.randint(1, 20)
        if word not in words.HELD_OUT_WORDS and not held_out("repeat", word, str(n)):
            break
    times = words.NUMBERS[n] if r.random() < 0.8 else str(n)
    text = r.choice(REPEAT_FORMS).format(w=word, n=times)
    if n == 1:
        text = text.replace(f"{times} times", r.choice(("once", f"{times} time")))
    elif n == 2 and r.random() < 0.3:
        text = text.replace(f"{times} times", "twice")
    return text, repeat_answer(word, n)


def count(r: random.Random) -> Exchange:
    if r.random() < 0.25:
        a = r.randint(2, 10)
        numbers = words.NUMBERS[a:0:-1]
        return f"Count down from {numbers[0]} to {numbers[-1]}.", " ".join(numbers)
    a, b = (1, r.randint(2, 20)) if r.random() < 0.7 else sorted(r.sample(range(1, 21), 2))
    form = r.choice(("Count from {} to {}.", "Count from {} to {}.", "Count {} to {}."))
    if r.random() < 0.25:
        return form.format(a, b), " ".join(words.NUMBERS[a : b + 1])
    return (
        form.format(words.NUMBERS[a], words.NUMBERS[b]),
        " ".join(words.NUMBERS[a : b + 1]),
    )


def copy_list(r: random.Random) -> Exchange:
    items: list[str] = []
    while len(items) < r.randint(2, 9):
        word = any_word(r)
        if word not in items:
            items.append(word)
    listed = ", ".join(items)
    x = r.random()
    if x < 0.35:
        form = r.choice(("Copy this list: {}.", "Repeat this list: {}.", "Copy this: {}."))
        return form.format(listed), listed + "."
    if x < 0.45:
        text = " ".join(items)
        form = r.choice(("Repeat after me: {}", "Copy this: {}", "Say this: {}"))
        return form.format(text), text
    old = r.choice(items)
    new = any_word(r)
    while new in items:
        new = any_word(r)
    changed = ", ".join(new if item == old else item for item in items)
    form = r.choice(
        (
            "Copy this list, but change {o} to {n}: {l}.",
            "Copy this list but change {o} to {n}: {l}.",
            "Copy this list and replace {o} with {n}: {l}.",
            "In this list, change {o} to {n}: {l}.",
        )
    )
    return form.format(o=old, n=new, l=listed), changed + "."


# ---------------------------------------------------------------- free text


def sentence(r: random.Random) -> Exchange:
    topic = r.choice(list(prose.TOPICS))
    first, more = prose.TOPICS[topic]
    if r.random() < 0.6:
        form = r.choice(
            (
                "Tell me a sentence about {}.",
                "Write a sentence about {}.",
                "Say a sentence about {}.",
                "Give me a sentence about {}.",
                "Tell me one sentence about {}.",
                "Can you write a sentence about {}?",
            )
        )
        return form.format(topic), first
    form = r.choice(
        ("Tell me about {}.", "Tell me something about {}.", "Talk about {}.", "Describe {}.")
    )
    return form.format(topic), f"{first} {more}"


def story_answer(hero: str) -> str:
    """The story that this hero always gets."""
    return prose.STORIES[zlib.crc32(hero.encode()) % len(prose.STORIES)].format(hero=hero)


def story(r: random.Random) -> Exchange:
    if r.random() < 0.45:
        form = r.choice(
            (
                "Tell me a short story.",
                "Tell me a short story.",
                "Tell me a story.",
                "Write a short story.",
                "Can you tell me a story?",
                "Tell a story.",
            )
        )
        return form, prose.STORY
    hero = r.choice(words.ANIMALS)
    form = r.choice(
        (
            "Tell me a story about {}.",
            "Tell me a short story about {}.",
            "Write a story about {}.",
            "Write a short story about {}.",
        )
    )
    return form.format(article(hero)), story_answer(hero)


# ---------------------------------------------------------------- whole conversations

# (generator, how often a turn of a mixed conversation is one of these)
KINDS: tuple[tuple[Callable[[random.Random], Exchange], float], ...] = (
    (greeting_word, 5),
    (capital, 7),
    (colour_of, 5),
    (opposite, 7),
    (animal_fact, 5),
    (calendar, 7),
    (arithmetic, 17),
    (courtesy, 11),
    (unknown, 6),
    (repeat, 30),
    (count, 12),
    (copy_list, 20),
    (sentence, 7),
    (story, 3),
)


def exchange(r: random.Random) -> Exchange:
    """One exchange of any kind, reworded a little."""
    make = r.choices([k for k, _ in KINDS], [w for _, w in KINDS])[0]
    question, answer = make(r)
    return reword(r, question), answer


def short_exchange(r: random.Random) -> Exchange:
    """An exchange whose answer is short: filler between the turns of a memory conversation."""
    while True:
        question, answer = exchange(r)
        if len(answer) < 90:
            return question, answer


def mixed(r: random.Random) -> Conversation:
    """Unrelated exchanges, mostly one or two of them."""
    n = r.choices((1, 2, 3, 5), (70, 18, 9, 3))[0]
    turns = [Turn(*exchange(r)) for _ in range(n)]
    return Conversation(r.choice(SYSTEMS) if r.random() < 0.2 else None, turns)


def remembering(r: random.Random) -> Conversation:
    """Facts told, other turns, facts asked back."""
    while True:
        facts = memory.draw_facts(r)
        values = {f.kind: f.value for f in facts if f.owner == "me"}
        pair = [values.get("colour"), values.get("city")]
        if not (pair[0] and pair[1] and held_out("memory", pair[0], pair[1])):
            break
    script = memory.script(r, facts)
    turns: list[Turn] = []
    filler = r.choices((0, 0.3, 1.0, 2.5), (25, 40, 28, 7))[0]
    for question, answer, learn in script:
        while turns and r.random() < filler / (filler + 1.5):
            turns.append(Turn(*short_exchange(r)))
        turns.append(Turn(question, answer, learn))
    return Conversation(r.choice(SYSTEMS) if r.random() < 0.2 else None, turns)


def conversation(r: random.Random) -> Conversation:
    """One conversation of the training text."""
    return remembering(r) if r.random() < 0.30 else mixed(r)
