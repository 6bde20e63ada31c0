"""What the embedded model must answer. Owns: the evaluation's cases and the pinned conversations.

The memory and repetition cases use exactly the combinations that training never drew.
"""

import random
from dataclasses import dataclass

from . import corpus, prose, words
from .corpus import held_out

Message = dict[str, str]


@dataclass(frozen=True)
class Case:
    """A conversation up to a user message, and the answer that must follow it."""

    group: str
    messages: tuple[tuple[str, str], ...]  # (role, content)
    answer: str

    def as_messages(self) -> list[Message]:
        """The conversation as chat messages."""
        return [{"role": role, "content": content} for role, content in self.messages]


def case(group: str, user: str, answer: str, system: str | None = None) -> Case:
    """A case of one user message."""
    head = (("system", system),) if system is not None else ()
    return Case(group, (*head, ("user", user)), answer)


def hello() -> list[Case]:
    """The first question of every lesson, in several forms."""
    forms = (
        "Say hello in one word.",
        "say hello in one word.",
        "Say hello in one word",
        "Say hello in one word!",
        "Please say hello in one word.",
        "Say hello in a single word.",
        "say hello in one word",
        "Say hello.",
    )
    out = [case("hello", form, "Hello.") for form in forms]
    for system in corpus.SYSTEMS:
        out.append(case("hello", forms[0], "Hello.", system))
    out.append(case("hello", "Say goodbye in one word.", "Goodbye."))
    return out


def _variants(group: str, question: str, answer: str) -> list[Case]:
    bare = question.rstrip("?.")
    return [
        case(group, question, answer),
        case(group, corpus.lower(question), answer),
        case(group, bare, answer),
        case(group, question, answer, corpus.SYSTEMS[0]),
    ]


def facts() -> list[Case]:
    """Capitals, colours, opposites, the calendar, animals."""
    out: list[Case] = []
    for country, city in words.CAPITALS.items():
        question = f"What is the capital of {country}?"
        out += _variants("capital", question, f"The capital of {country} is {city}.")
    for thing, colour in words.COLOUR_OF.items():
        answer = f"{corpus.upper(thing)} is {colour}."
        out += _variants("colour of", f"What colour is {thing}?", answer)
    for word, other in corpus.OPPOSITE.items():
        question = f"What is the opposite of {word}?"
        out += _variants("opposite", question, f"The opposite of {word} is {other}.")
    for circle, kind in ((words.DAYS, "day"), (words.MONTHS, "month")):
        for here, after in zip(circle, circle[1:] + circle[:1], strict=True):
            question = f"What {kind} comes after {here}?"
            out += _variants("calendar", question, f"{after} comes after {here}.")
    for animal, legs in words.LEGS.items():
        name = corpus.article(animal)
        answer = f"{corpus.upper(name)} has {legs} legs."
        out += _variants("animal", f"How many legs does {name} have?", answer)
    return out


def sums() -> list[Case]:
    """Sums of two numbers up to ten, in words."""
    n = words.NUMBERS
    return [
        case(
            "sum",
            f"What is {n[a]} plus {n[b]}?",
            f"{corpus.upper(n[a])} plus {n[b]} is {n[a + b]}.",
        )
        for a in range(11)
        for b in range(11)
    ]


def courtesy() -> list[Case]:
    """Greetings, thanks and questions about the model."""
    out: list[Case] = []
    for question, answer in prose.COURTESY.items():
        asked = question if question[-1] in ".?" else question + "."
        out += _variants("courtesy", asked, answer)
    return out


def free_text() -> list[Case]:
    """Sentences, remarks and stories."""
    out = [case("story", "Tell me a short story.", prose.STORY)]
    for topic, (first, more) in prose.TOPICS.items():
        out.append(case("sentence", f"Tell me a sentence about {topic}.", first))
        out.append(case("sentence", f"Tell me about {topic}.", f"{first} {more}"))
    for hero in words.ANIMALS:
        question = f"Tell me a story about {corpus.article(hero)}."
        out.append(case("story", question, corpus.story_answer(hero)))
    return out


def repetition() -> list[Case]:
    """A word many times: unseen pairs of word and count, and words never repeated in training."""
    out: list[Case] = []
    for word in words.nouns():
        for n in range(1, 21):
            unseen = word in words.HELD_OUT_WORDS
            if word != "kestrel" and not unseen and not held_out("repeat", word, str(n)):
                continue
            times = f"{words.NUMBERS[n]} times" if n > 1 else "once"
            group = "repeat, new word" if unseen else "repeat"
            question = f"Repeat the word {word} {times}."
            out.append(case(group, question, corpus.repeat_answer(word, n)))
    return random.Random(3).sample(out, 300) + [c for c in out if " kestrel " in c.messages[0][1]]


def counting() -> list[Case]:
    """Counting up from one."""
    return [
        case("count", f"Count from one to {words.NUMBERS[n]}.", " ".join(words.NUMBERS[1 : n + 1]))
        for n in range(2, 21)
    ]


def lists() -> list[Case]:
    """Lists copied, as they are and with one change."""
    r = random.Random(11)
    out: list[Case] = []
    for _ in range(60):
        items = r.sample(words.nouns(), r.randint(3, 8))
        new = items.pop()
        listed = ", ".join(items)
        out.append(case("copy list", f"Copy this list: {listed}.", f"{listed}."))
        old = r.choice(items)
        changed = ", ".join(new if item == old else item for item in items)
        question = f"Copy this list, but change {old} to {new}: {listed}."
        out.append(case("change list", question, f"{changed}."))
    return out


FILLERS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Say hello in one word.", "Hello."),
    ("What colour is grass?", "Grass is green."),
    ("My sister lives in Rome.", "I see, your sister lives in Rome."),
    ("What is two plus three?", "Two plus three is five."),
    ("Repeat the word stone three times.", "stone stone stone"),
    ("Tell me a sentence about the sea.", prose.TOPICS["the sea"][0]),
    ("Thank you.", "You are welcome."),
)


def memory() -> list[Case]:
    """Colour and city told, other turns, both asked back: every unseen pair, both orders."""
    r = random.Random(5)
    out: list[Case] = []
    for colour in words.COLOURS:
        for city in words.CITIES:
            if held_out("memory", colour, city):
                for fillers in (0, r.randint(1, 5)):
                    out += _memory_cases(r, colour, city, fillers)
    return out


def _memory_cases(r: random.Random, colour: str, city: str, fillers: int) -> list[Case]:
    told = [
        (f"My favourite colour is {colour}.", f"I see, your favourite colour is {colour}."),
        (f"I live in {city}.", f"I see, you live in {city}."),
    ]
    if r.random() < 0.3:
        told = [(question, "OK.") for question, _ in told]
    r.shuffle(told)
    turns: list[tuple[str, str]] = list(told)
    for filler in r.sample(FILLERS, fillers):
        turns.insert(r.randint(1, len(turns)), filler)
    asked = [
        ("What is my favourite colour?", f"Your favourite colour is {colour}."),
        ("Where do I live?", f"You live in {city}."),
    ]
    r.shuffle(asked)
    group = "memory, other turns between" if fillers else "memory"
    out: list[Case] = []
    for question, answer in asked:
        past = [m for q, a in turns for m in (("user", q), ("assistant", a))]
        out.append(Case(group, (*past, ("user", question)), answer))
        turns.append((question, answer))
    return out


def all_cases() -> list[Case]:
    """Every case of the evaluation."""
    groups = (hello, facts, sums, courtesy, free_text, repetition, counting, lists, memory)
    return [c for make in groups for c in make()]


def pinned() -> list[Case]:
    """Conversations that tests elsewhere rely on; a subset in spirit of the groups above."""
    single = [
        ("Say hello in one word.", "Hello."),
        ("Say goodbye in one word.", "Goodbye."),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is the capital of Norway?", "The capital of Norway is Oslo."),
        ("What colour is grass?", "Grass is green."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("What day comes after Monday?", "Tuesday comes after Monday."),
        ("How many legs does a spider have?", "A spider has eight legs."),
        ("What is two plus three?", "Two plus three is five."),
        ("Thank you.", prose.COURTESY["Thank you"]),
        ("Goodbye.", prose.COURTESY["Goodbye"]),
        ("What are you?", prose.COURTESY["What are you?"]),
        ("What are the days of the week?", prose.COURTESY["What are the days of the week?"]),
        ("Count from one to ten.", " ".join(words.NUMBERS[1:11])),
        ("Repeat the word kestrel sixteen times.", corpus.repeat_answer("kestrel", 16)),
        ("Repeat the word river five times.", corpus.repeat_answer("river", 5)),
        ("Repeat the word apple twelve times.", corpus.repeat_answer("apple", 12)),
        ("Tell me a sentence about the sea.", prose.TOPICS["the sea"][0]),
        ("Tell me a sentence about a kestrel.", prose.TOPICS["a kestrel"][0]),
        ("Tell me a short story.", prose.STORY),
        ("Copy this list: river, stone, cloud, lamp.", "river, stone, cloud, lamp."),
    ]
    out = [case("pinned", question, answer) for question, answer in single]
    out.append(case("pinned", "Say hello in one word.", "Hello.", corpus.SYSTEMS[0]))
    colour, city = "My favourite colour is blue.", "I live in Oslo."
    ack_colour, ack_city = "I see, your favourite colour is blue.", "I see, you live in Oslo."
    two_told = (("user", colour), ("assistant", ack_colour), ("user", city))
    longer = (
        *two_told,
        ("assistant", ack_city),
        ("user", FILLERS[0][0]),
        ("assistant", FILLERS[0][1]),
    )
    ask_colour = ("user", "What is my favourite colour?")
    say_colour = "Your favourite colour is blue."
    out += [
        Case("pinned", two_told[:1], ack_colour),
        Case("pinned", two_told, ack_city),
        Case("pinned", (*longer, ask_colour), say_colour),
        Case(
            "pinned",
            (*longer, ask_colour, ("assistant", say_colour), ("user", "Where do I live?")),
            "You live in Oslo.",
        ),
    ]
    return out
