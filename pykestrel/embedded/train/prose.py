"""The connected prose that the embedded model learns by heart. Owns: sentences and stories.

Written for this project. Each topic has one sentence and one further remark; a sentence keeps to
plain words and does not repeat itself, because the exercises use it where speculation must miss.
"""

# topic (as it stands after "about") -> (a sentence, something more)
TOPICS: dict[str, tuple[str, str]] = {
    "the sea": (
        "The sea lies calm at dawn, and small waves carry silver light to the shore.",
        "Most of our planet is covered by salt water, and much of it is still unknown.",
    ),
    "the moon": (
        "The moon rises slowly over the hills and paints every roof in pale light.",
        "It turns once around the earth in about four weeks.",
    ),
    "the sun": (
        "The sun warms the stones until lizards come out to rest on them.",
        "It is a star, and its light needs eight minutes to reach us.",
    ),
    "rain": (
        "Rain taps softly on the window while the kettle begins to sing.",
        "Drops form when tiny bits of water in a cloud join and grow heavy.",
    ),
    "snow": (
        "Snow fell all night, and by morning the village had lost its sounds.",
        "Each flake is a crystal with six arms.",
    ),
    "a river": (
        "A river finds its way down from the mountain and never asks for directions.",
        "Water shapes the valley a little more every year.",
    ),
    "a mountain": (
        "The mountain waits behind the clouds like a patient old friend.",
        "Its top is colder than the land below, even in summer.",
    ),
    "the forest": (
        "In the forest, old oaks hold quiet meetings with the wind.",
        "Many animals find food and shelter between its trees.",
    ),
    "the wind": (
        "The wind runs across the field and combs the tall grass flat.",
        "Air moves because some places are warmer than others.",
    ),
    "winter": (
        "Winter draws white flowers of frost on every kitchen window.",
        "Nights are long then, and a warm stove is good company.",
    ),
    "summer": (
        "Summer smells of cut hay, warm dust and ripe cherries.",
        "Days are long, and children swim in the lake until evening.",
    ),
    "autumn": (
        "Autumn shakes the maple until the path is red and gold.",
        "Farmers bring in the harvest before the first cold night.",
    ),
    "spring": (
        "Spring wakes the garden with mild rain and the song of a robin.",
        "Seeds begin to grow as soon as the ground is warm.",
    ),
    "a cat": (
        "The cat sleeps on the warmest chair and pretends to own the house.",
        "Cats can see well at night and land on their feet.",
    ),
    "a dog": (
        "A dog waits by the door because he has heard his favourite steps.",
        "Dogs have lived with people for many thousands of years.",
    ),
    "a horse": (
        "The horse lifts its head, listens, and gallops along the fence for joy.",
        "A foal can stand an hour after it is born.",
    ),
    "a kestrel": (
        "A kestrel hangs in the air above the meadow and watches for a mouse.",
        "It is a small falcon that can stay still against the wind.",
    ),
    "an owl": (
        "The owl turns her head without a sound and looks straight through the dark.",
        "Soft feathers make her flight almost silent.",
    ),
    "a fox": (
        "A red fox crosses the quiet road and vanishes between two hedges.",
        "Foxes hunt alone and hear a mouse under the snow.",
    ),
    "a whale": (
        "Far below the ships, a whale sings a song that travels for miles.",
        "The blue whale is the largest animal on earth.",
    ),
    "bees": (
        "Bees visit every flower on the hill and bring home sweet news.",
        "A hive needs thousands of workers and one queen.",
    ),
    "birds": (
        "Birds gather on the wire each evening to plan their journey south.",
        "Their light bones help them fly.",
    ),
    "bread": (
        "Fresh bread cools on the shelf, and the whole street smells of it.",
        "Flour, water, salt and time are all it needs.",
    ),
    "cheese": (
        "Good cheese rests in a cool cellar until it has something to say.",
        "It begins as milk and can ripen for years.",
    ),
    "tea": (
        "Hot tea and a soft chair can mend the worst of days.",
        "Green and black kinds come from leaves of one plant.",
    ),
    "coffee": (
        "Strong coffee pulls the sleepy baker out of his dreams.",
        "The beans are roasted until they turn dark brown.",
    ),
    "music": (
        "Music fills the empty hall and makes strangers tap their feet together.",
        "A tune is a pattern of high and low notes in time.",
    ),
    "books": (
        "A good book opens a small door in an ordinary wall.",
        "Printed pages have carried ideas for hundreds of years.",
    ),
    "a train": (
        "The night train rolls past sleeping farms with all its windows lit.",
        "Steel wheels on steel rails waste very little energy.",
    ),
    "a ship": (
        "An old ship comes into the harbour with salt on its brass bell.",
        "Its crew has not seen land for three weeks.",
    ),
    "a city": (
        "The city hums at noon, and trams ring their way through the crowd.",
        "Millions of people can live there side by side.",
    ),
    "a garden": (
        "Behind the house, a garden keeps beans, roses and one lazy turtle.",
        "It wants water in the morning and patience all year.",
    ),
    "time": (
        "Time walks at one speed but feels quick when we are happy.",
        "Clocks measure it with something that swings or shakes evenly.",
    ),
    "friends": (
        "Friends laugh at the same joke twice and forgive the third telling.",
        "They are the people who stay when things go wrong.",
    ),
    "a computer": (
        "A computer does exactly what it is told, which is its charm and its trouble.",
        "Inside, tiny switches open and close billions of times each second.",
    ),
    "stars": (
        "On clear nights the stars look close enough to pick like berries.",
        "Some of them are so far away that their light is older than we are.",
    ),
}

STORY = (
    "Once there was a young sailor who lost his compass in a storm. For three days he saw nothing "
    "but grey water. Then a small bird landed on the mast, rested for a moment, and flew away. He "
    "turned his boat to follow it. Before night came, he could smell pine trees and smoke. His "
    "family stood on the beach with lanterns. From then on, he always left bread crumbs on deck."
)

# Stories with a hero; each animal of the list always meets the same one of them.
STORIES = (
    "Early one morning a little {hero} left home to find the end of the road. It crossed a bridge, "
    "passed a sleeping village and climbed a steep hill. At the top there was no end, only another "
    "valley full of light. The {hero} sat down, shared some berries with a snail, and decided that "
    "the road was long enough. By evening it was back in bed, smiling.",
    "A clever {hero} once found a golden key beneath the snow. No door in the forest would open "
    "with it. After many weeks an old woman asked for help, because her music box had been locked "
    "for years. The key turned at once. Sweet notes rose into the cold air, and every creature "
    "came to listen. Nobody in that place felt lonely again.",
    "Long ago a shy {hero} was afraid of thunder. When clouds grew dark, it hid under the roots of "
    "an oak. One night a lost child crept in beside it and began to cry. To comfort her, the "
    "{hero} hummed a tune until the storm was over. In the morning both of them laughed, for they "
    "had forgotten to be scared.",
)

# prompt -> answer, for things people ask a model about itself and for plain courtesy
COURTESY: dict[str, str] = {
    "Hello": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hello there": "Hello! How can I help you?",
    "Good morning": "Good morning! How can I help you?",
    "Good evening": "Good evening! How can I help you?",
    "Good night": "Good night, sleep well.",
    "Thank you": "You are welcome.",
    "Thanks": "You are welcome.",
    "Thank you very much": "You are welcome.",
    "Goodbye": "Goodbye, and take care.",
    "Bye": "Goodbye, and take care.",
    "See you tomorrow": "Goodbye, and take care.",
    "How are you?": "I am well, thank you for asking.",
    "How are you today?": "I am well, thank you for asking.",
    "What are you?": "I am a very small language model that lives inside Kestrel.",
    "Who are you?": "I am a very small language model that lives inside Kestrel.",
    "What is your name?": "My name is Kestrel.",
    "What is Kestrel?": "Kestrel is a small library that runs language models and lets you look "
    "inside.",
    "What can you do?": "I can answer short questions, remember what you tell me, repeat words and "
    "tell a story.",
    "Are you a human?": "No, I am a very small language model.",
    "Are you a robot?": "No, I am a very small language model.",
    "Can you help me?": "Yes, what would you like to know?",
    "How big are you?": "I have a little more than one million parameters.",
    "Who made you?": "The authors of Kestrel trained me on a text of their own.",
    "Tell me a joke": "Why did the token cross the road? To reach the next context.",
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many seasons are there?": "There are four seasons.",
    "How many minutes are in an hour?": "There are sixty minutes in an hour.",
    "Name the days of the week": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
    "What are the days of the week?": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, "
    "Sunday.",
    "Name the months of the year": "January, February, March, April, May, June, July, August, "
    "September, October, November, December.",
    "Name the four seasons": "Spring, summer, autumn, winter.",
    "Name three colours": "Red, green, blue.",
    "Name three animals": "Fox, otter, owl.",
    "Name three fruits": "Apple, pear, plum.",
    "Is the sky blue?": "Yes, the sky is blue.",
    "Is snow black?": "No, snow is white.",
    "Can fish swim?": "Yes, fish can swim.",
    "Can a horse fly?": "No, a horse cannot fly.",
    "Where does the sun rise?": "The sun rises in the east.",
    "Where does the sun set?": "The sun sets in the west.",
    "What is ice?": "Ice is frozen water.",
    "What do bees make?": "Bees make honey.",
    "What do cows eat?": "Cows eat grass.",
}


def plain_words() -> list[str]:
    """The lower-case words of all the prose above, once each, sorted."""
    texts = [part for pair in TOPICS.values() for part in pair]
    texts += [STORY, *STORIES, *COURTESY.values()]
    found = {word.strip(".,!?") for text in texts for word in text.split()}
    return sorted(word for word in found if word.isalpha() and word.islower())
