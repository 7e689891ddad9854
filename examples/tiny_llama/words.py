"""Word supply of the generated corpus: word lists, composed names, numbers, prices and dates.

Names are mostly composed from syllables, so that their supply is practically unlimited and a model
can only predict a repeated one by copying it. Every function takes a `random.Random`.
"""

import datetime
from random import Random


def listed(text: str) -> list[str]:
    """The words of a text, for long word lists."""
    return text.split()


ONSETS = listed(
    "b br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p ph pl pr qu r s sch sh sk sl sm sn "
    "sp st str t th tr v w wh y z zw"
)
ONSETS += ["", ""]
VOWELS = listed("a a a e e e i i i o o o u u ai au ea ee ei ie io oa oo ou ue y")
CODAS = listed("b ck d ff g l ll lm ln m n nd ng nk nn nt p r rd rk rl rn rs rt s ss st t th tt x z")
GIVEN_ENDINGS = listed(
    "a o i e y ia ie in an en on el al ar er is us as ette ina ine elle ana ora ika eth ard win "
    "bert mund fred ric na ra la lo to io eo een ane"
)
SURNAME_ENDINGS = listed(
    "son sen berg mann man er ez es ski sky ska ova ov ev ic ini elli etti ari ley ton ford wood "
    "well ham er stein bach feld hof wald dal gaard strom qvist lund nen la ti u escu idis opoulos "
    "yan dze oglu ura oto awa ng e as is ero eira ado ira inho eau ier ard on et"
)
CITY_ENDINGS = listed(
    "ville burg ton stad grad mouth haven field ford ham bridge port sund vik by borg dorf heim au "
    "ona ara ia o e a os is ado eira ino ano ova ovo sk in ik ka ki ko mar pol bad fels see tal "
    "stein furt hausen minster chester worth wick dale combe pur abad"
)
GIVEN = listed(
    "Maria Tom Anna Ben Clara David Eva Frank Grace Henry Iris Jack Kate Leo Mia Nora Oscar Paul "
    "Rosa Sam Tina Uma Victor Wendy Alice Bruno Carla Dora Emil Fiona George Helen Ivan Julia "
    "Karl Laura Max Nina Otto Peter Robert Sara Theo Vera Walter Lily James John Mary Lucy"
)
SURNAMES = listed(
    "Baker Carter Cook Fisher Gray Green Hill King Lake Miller Moore Page Reed Rose Stone Taylor "
    "Turner Walker White Wood Young Brown Clark Davis Evans Hall Hunt Lane Marsh North Parker"
)
CITIES = listed("Paris London Rome Berlin Boston Dublin Cairo Milan Athens Sydney Moscow Delhi")
NOUNS = listed(
    "lamp chair table cup plate bowl spoon fork basket candle mirror clock carpet blanket pillow "
    "curtain drawer cabinet shelf stool bench bottle jar jug mug kettle pan oven tray knob hammer "
    "saw drill nail screw rope ladder bucket brush broom shovel rake hose seed plant pot fence "
    "gate lock key door window tile brick plank pipe pump wheel bicycle tyre helmet glove scarf "
    "hat coat jacket shirt sweater sock shoe boot belt bag suitcase wallet purse umbrella ring "
    "necklace watch bracelet book notebook pencil pen ruler eraser envelope stamp map globe "
    "camera radio speaker cable battery charger printer screen keyboard phone tablet ball racket "
    "kite doll puzzle drum flute guitar violin piano apple pear plum peach lemon orange banana "
    "melon carrot potato onion tomato pepper pumpkin bean loaf cake pie cookie cheese sausage egg "
    "tent stove lantern compass paddle canoe anchor net hook magnet lens filter valve spring gear "
    "cushion vase frame poster ribbon button needle spool kit box crate barrel sack parcel"
)
ADJECTIVES = listed(
    "red blue green yellow black white grey brown pink purple small large big tall short long "
    "round square flat heavy light old new used fresh dried sweet sour plain striped painted "
    "polished folding hanging portable electric manual antique modern simple fancy cheap warm "
    "wooden metal steel iron copper brass silver golden glass plastic paper leather cotton wool "
    "linen silk velvet rubber stone clay bamboo oak pine walnut garden kitchen office travel "
    "winter summer children's double single broken repaired soft hard bright dark narrow wide"
)
FEELINGS = listed("happy tired glad proud curious calm worried surprised hungry quiet busy cheerful thankful")
JOBS = listed(
    "baker carpenter teacher doctor farmer sailor painter singer driver tailor gardener plumber "
    "librarian nurse clerk mechanic cook writer student engineer fisher potter weaver printer"
)
PLACES = listed(
    "market shop station harbour library school museum bakery garden bridge park mill church "
    "square cafe hotel theatre farm office workshop warehouse post-office town-hall"
)
MONTHS = [datetime.date(2000, month, 1).strftime("%B") for month in range(1, 13)]
WEEKDAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
UNITS = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
TENS = listed("_ _ twenty thirty forty fifty sixty seventy eighty ninety")
# Every list above, as a quarry of fragments for made-up names.
QUARRY = sorted(
    {word.lower() for word in [*GIVEN, *SURNAMES, *CITIES, *NOUNS, *ADJECTIVES, *FEELINGS, *JOBS]}
    | {word.lower() for word in [*PLACES, *MONTHS, *WEEKDAYS, *UNITS, *TENS]}
    | {*GIVEN_ENDINGS, *SURNAME_ENDINGS, *CITY_ENDINGS}
)
ACCENTS = dict(zip("aceinouszy", "\u00e4\u00e7\u00e9\u00ed\u00f1\u00f6\u00fc\u0161\u017e\u00fd", strict=True))
CURRENCIES = ["euros", "dollars", "pounds", "crowns", "francs", "EUR", "USD", "GBP"]


def chance(rng: Random, probability: float) -> bool:
    return rng.random() < probability


def stem(rng: Random, num_syllables: int) -> str:
    """A pronounceable lower-case string without an ending."""
    parts = []
    for _ in range(num_syllables):
        coda = rng.choice(CODAS) if rng.random() < 0.4 else ""
        parts.append(rng.choice(ONSETS) + rng.choice(VOWELS) + coda)
    return "".join(parts)


def mixed(rng: Random) -> str:
    """A lower-case string without rules: word fragments or single letters, now and then accented.

    So every letter sequence, and every token, occurs in a place that has to be copied.
    """
    if rng.random() < 0.4:
        pairs = (rng.choice("bcdfghjklmnpqrstvwxyz") + rng.choice("aeiou") for _ in range(5))
        text = "".join(pairs)[rng.randint(0, 1) : rng.randint(4, 9)]
    elif rng.random() < 0.3:
        text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 7)))
    else:
        text = ""
        for _ in range(rng.randint(1, 3)):
            word = rng.choice(QUARRY)
            start = rng.randrange(len(word))
            text += word[start : start + rng.randint(2, 6)]
    if rng.random() < 0.04:
        text = "".join(ACCENTS.get(letter, letter) for letter in text)
    return text if len(text) > 2 else text + "que"


def composed(rng: Random, endings: list[str]) -> str:
    """A made-up capitalised name."""
    if rng.random() < 0.4:
        return mixed(rng).capitalize()
    body = stem(rng, 1 if rng.random() < 0.6 else 2)
    if rng.random() < 0.75:
        body = body.rstrip("aeiouy") + rng.choice(endings)
    return (body if len(body) > 2 else body + "na").capitalize()


def given_name(rng: Random) -> str:
    return rng.choice(GIVEN) if rng.random() < 0.2 else composed(rng, GIVEN_ENDINGS)


def surname(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.12:
        return rng.choice(SURNAMES)
    name = composed(rng, SURNAME_ENDINGS)
    if draw < 0.15:
        return f"{name}-{composed(rng, SURNAME_ENDINGS)}"
    if draw < 0.18:
        return f"{rng.choice(['van', 'de', 'von', 'di', 'le', 'van der', 'de la', 'al'])} {name}"
    if draw < 0.20:
        return f"{rng.choice(['Mc', 'O' + chr(39), 'Mac', 'D' + chr(39)])}{name}"
    return name


def person(rng: Random) -> str:
    """A full name."""
    return f"{given_name(rng)} {surname(rng)}"


def city(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.08:
        return rng.choice(CITIES)
    name = composed(rng, CITY_ENDINGS)
    if draw < 0.16:
        first = [
            "New",
            "Port",
            "San",
            "Santa",
            "Saint",
            "Upper",
            "North",
            "East",
            "Bad",
            "La",
            "El",
        ]
        return f"{rng.choice(first)} {name}"
    if draw < 0.20:
        return f"{name} {rng.choice(['Bay', 'Falls', 'Hills', 'Springs', 'City', 'Harbour'])}"
    return name


def plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("shelf") or noun.endswith("loaf"):
        return noun[:-1] + "ves"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def product(rng: Random, quantity: int = 1) -> str:
    """A thing for sale, in the number that fits `quantity`; some are made-up words."""
    draw = rng.random()
    noun = rng.choice(NOUNS) if draw < 0.65 else mixed(rng) if draw < 0.85 else stem(rng, 2) + "er"
    words = [noun if quantity == 1 else plural(noun)]
    draw = rng.random()
    if draw < 0.2:
        words.insert(0, rng.choice(NOUNS))
    if draw < 0.75:
        words.insert(0, rng.choice(ADJECTIVES) if draw < 0.6 else stem(rng, 2))
    return " ".join(words)


def number_word(number: int) -> str:
    """An integer from 0 to 99 in words."""
    if number < 20:
        return UNITS[number]
    tens, units = divmod(number, 10)
    return TENS[tens] if units == 0 else f"{TENS[tens]}-{UNITS[units]}"


def count(rng: Random) -> int:
    return rng.randint(1, 12) if rng.random() < 0.7 else rng.randint(13, 99)


def count_text(rng: Random, number: int) -> str:
    """A number as digits or, up to twenty, often in words."""
    return number_word(number) if number <= 20 and rng.random() < 0.5 else str(number)


def price(rng: Random) -> str:
    """An amount such as `45`, `45.50` or `1299.99`."""
    whole = rng.randint(1, 10 ** rng.randint(1, 4))
    draw = rng.random()
    if draw < 0.4:
        return str(whole)
    cents = rng.choice([50, 25, 75, 99, 90, 10, 20, 80]) if draw < 0.7 else rng.randint(1, 99)
    return f"{whole}.{cents:02d}"


def address(rng: Random) -> str:
    """A path, a link or a mail address."""
    first, second = mixed(rng), mixed(rng)
    forms = ["/{}/{}", "{}@{}.org", "https://{}.com/{}", "~/{}/{}.txt", "{}_{}", "{}#{}", "{}+{}"]
    return rng.choice(forms).format(first, second)


def clock(rng: Random) -> str:
    minute = rng.choice([0, 15, 30, 45]) if rng.random() < 0.7 else rng.randint(0, 59)
    return f"{rng.randint(0, 23):02d}:{minute:02d}"


def code(rng: Random) -> str:
    """A reference such as `AB-4821`."""
    letters = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    return f"{letters}-{rng.randint(10, 99999)}"


def day(rng: Random) -> datetime.date:
    return datetime.date(rng.randint(1990, 2035), rng.randint(1, 12), rng.randint(1, 28)) + (
        datetime.timedelta(days=rng.randint(0, 3))
    )


def ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 11 <= number <= 13 else suffix}"


def date_text(rng: Random, date: datetime.date) -> str:
    """A date as people write it."""
    month = MONTHS[date.month - 1]
    draw = rng.random()
    if draw < 0.45:
        return f"{date.day} {month} {date.year}"
    if draw < 0.85:
        return f"{month} {date.day}, {date.year}"
    if draw < 0.93:
        return f"the {ordinal(date.day)} of {month} {date.year}"
    return date.isoformat()


def join_words(words: list[str]) -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
