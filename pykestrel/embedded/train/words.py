"""The word lists behind the training text. Owns: which words the embedded model knows.

Every word here becomes one token of the tokenizer, so the lists are also its vocabulary budget.
"""


def _w(text: str) -> list[str]:
    return text.split()


def _pairs(text: str) -> dict[str, str]:
    """Parse "a:b c:d" into a dictionary; an underscore stands for a space."""
    items = (item.split(":") for item in text.split())
    return {a.replace("_", " "): b.replace("_", " ") for a, b in items}


COLOURS = _w(
    "red blue green yellow orange purple pink brown black white grey silver gold violet "
    "turquoise crimson scarlet beige indigo lilac olive maroon ivory amber"
)

CITIES = _w(
    "Oslo Paris London Berlin Madrid Rome Vienna Lisbon Dublin Prague Warsaw Athens Helsinki "
    "Stockholm Copenhagen Budapest Brussels Amsterdam Zurich Geneva Milan Hamburg Munich Porto "
    "Bergen Cairo Nairobi Lagos Tokyo Osaka Kyoto Seoul Beijing Shanghai Delhi Mumbai Sydney "
    "Toronto Boston Chicago Lima Quito Ankara Riga Tallinn Vilnius"
)

NAMES = _w(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olga Peter Rosa Sam "
    "Tom Vera Will Zoe Nina Oscar Lucy Max Ella Hugo Alice Erik"
)

NUMBERS = _w(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)

DAYS = _w("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = _w("January February March April May June July August September October November December")

SEASONS = _w("spring summer autumn winter")

ANIMALS = _w(
    "fox otter owl kestrel hare badger wolf bear deer mouse cat dog horse cow sheep goat duck hen "
    "frog bee whale seal crow robin swan lion tiger camel rabbit turtle"
)

FOODS = _w(
    "apple pear plum cherry peach lemon fig grape melon bread cheese soup rice pasta honey butter "
    "cake salad potato carrot onion tomato mushroom pepper bean nut egg fish pie porridge"
)

THINGS = _w(
    "river stone cloud lamp table chair window door garden bridge tower boat train ship wheel "
    "hammer nail rope basket bottle cup plate spoon knife fork candle mirror clock book paper "
    "pencil letter map coin key ring glove hat coat boot shirt button needle thread carpet pillow "
    "blanket drum flute violin bell song dance game ball kite puzzle picture statue castle village "
    "market station harbour island valley mountain forest meadow field desert beach ocean lake "
    "storm thunder rain snow wind frost shadow light fire smoke ash dust sand mud moss leaf branch "
    "root seed flower rose tulip daisy oak pine maple willow feather shell bone horn wing nest egg "
    "planet star moon comet rocket engine motor piston valve spring copper iron steel tin glass "
    "wood wool silk cotton leather rubber plastic circle square triangle line corner edge number "
    "signal cable socket battery magnet sensor robot screen kernel cache token prefix thread layer "
    "tensor vector matrix queue buffer packet server client laptop board chip ladder bucket shovel "
    "saddle anchor sail pilot sailor farmer baker doctor teacher painter writer singer king queen "
    "pocket ticket parcel bridge tunnel canal lantern compass velvet marble ribbon saddle thimble"
)

RELATIVES = _w("sister brother mother father friend aunt uncle cousin neighbour teacher")

CAPITALS = _pairs(
    "France:Paris Norway:Oslo England:London Germany:Berlin Spain:Madrid Italy:Rome Austria:Vienna "
    "Portugal:Lisbon Ireland:Dublin Poland:Warsaw Greece:Athens Finland:Helsinki Sweden:Stockholm "
    "Denmark:Copenhagen Hungary:Budapest Belgium:Brussels Egypt:Cairo Kenya:Nairobi Japan:Tokyo "
    "China:Beijing India:Delhi Peru:Lima Ecuador:Quito Turkey:Ankara Latvia:Riga Estonia:Tallinn "
    "Lithuania:Vilnius Russia:Moscow Canada:Ottawa Australia:Canberra"
)

COLOUR_OF = _pairs(
    "grass:green the_sky:blue snow:white coal:black blood:red a_lemon:yellow a_banana:yellow "
    "milk:white the_sea:blue a_carrot:orange an_orange:orange a_tomato:red a_leaf:green "
    "chocolate:brown a_crow:black a_swan:white the_sun:yellow a_cherry:red ash:grey a_frog:green"
)

OPPOSITES = _pairs(
    "hot:cold big:small tall:short fast:slow day:night up:down left:right open:closed wet:dry "
    "light:dark happy:sad young:old hard:soft full:empty loud:quiet early:late good:bad near:far "
    "high:low rich:poor strong:weak clean:dirty easy:difficult first:last yes:no in:out true:false "
    "black:white thick:thin new:old"
)

# Words that are nobody's opposite in the other direction, so that the answer stays a function.
ONE_WAY = {"new", "black", "white", "old"}

SOUNDS = _pairs(
    "dog:barks cat:purrs cow:moos sheep:bleats duck:quacks lion:roars owl:hoots frog:croaks "
    "bee:buzzes horse:neighs wolf:howls mouse:squeaks"
)

LEGS = _pairs("spider:eight dog:four cat:four horse:four bird:two bee:six ant:six hen:two cow:four")

YOUNG = _pairs("cat:kitten dog:puppy cow:calf sheep:lamb horse:foal hen:chick goat:kid bear:cub")

GREETINGS = _pairs(
    "hello:Hello goodbye:Goodbye yes:Yes no:No thanks:Thanks welcome:Welcome sorry:Sorry "
    "please:Please"
)

# Seen and copied in lists, but never repeated in training: they prove that repeating is general.
HELD_OUT_WORDS = _w("lantern comet velvet otter marble piston willow ribbon thimble compass")


def nouns() -> list[str]:
    """Every lower-case noun that the copy tasks draw from, without duplicates, in a fixed order."""
    return list(dict.fromkeys(THINGS + ANIMALS + FOODS))


def everything() -> list[str]:
    """Every listed word in the form in which it is written, for the tokenizer's vocabulary."""
    out: list[str] = []
    for group in (COLOURS, CITIES, NAMES, NUMBERS, DAYS, MONTHS, SEASONS, nouns(), RELATIVES):
        out += group
    for table in (CAPITALS, COLOUR_OF, OPPOSITES, SOUNDS, LEGS, YOUNG, GREETINGS):
        for a, b in table.items():
            out += a.split() + b.split()
    return list(dict.fromkeys(out))
