"""Plain-text documents of the corpus: stories, towns, shops, dialogues, notes, lists, calendars."""

import datetime
from random import Random

from . import events, words
from .words import chance

WEATHER = [
    "The sun was shining", "It rained all day", "The wind was cold", "Snow fell on the roofs",
    "The sky was grey", "It was a warm evening", "Fog lay over the fields", "The night was clear",
]  # fmt: skip
THOUGHTS = [
    "had been waiting for this day", "did not want to be late", "had a long list to work through",
    "liked the smell of fresh bread", "knew every street of the town", "was new in the town",
    "had promised to help", "wanted to see the river", "was looking for a present",
    "had saved some money", "could not find the key", "had slept badly",
    "had an appointment at noon", "had to pay an invoice", "was waiting for a customer",
    "had placed an order by letter", "was expected at a meeting", "had billed nobody this month",
]  # fmt: skip


def story(rng: Random) -> str:
    """A person goes through a few events of one day and sums them up."""
    name, town = words.person(rng), words.city(rng)
    given = name.split()[0]
    pronoun = rng.choice(["He", "She"])
    lines = [
        f"{rng.choice(WEATHER)} in {town}. {name}, a {rng.choice(words.JOBS)}, was "
        f"{rng.choice(words.FEELINGS)} and {rng.choice(THOUGHTS)}."
    ]
    bought = []
    for _ in range(rng.randint(1, 4)):
        quantity = words.count(rng)
        item = words.product(rng, quantity)
        bought.append(f"{words.count_text(rng, quantity)} {item}")
        place = rng.choice(words.PLACES)
        lines.append(
            rng.choice(
                [
                    f"At the {place} {pronoun.lower()} found {bought[-1]}.",
                    f"{given} went to the {place} and paid {words.price(rng)} for {bought[-1]}.",
                    f"{pronoun} carried {bought[-1]} from the {place} to the {rng.choice(words.PLACES)}.",
                ]
            )
        )
    friend = words.person(rng)
    lines.append(f'On the way {pronoun.lower()} met {friend}. "{speech(rng, given)}"')
    lines.append(f'"I have {words.join_words(bought)}," said {given}.')
    lines.append(f"{friend.split()[0]} and {given} went back to {town} together.")
    return " ".join(lines)


REQUESTS = [
    "Please send me your answer soon.",
    "Could you book a room for me?",
    "Your parcel was received.",
    "The invoice is still to be paid; it is due next month.",
    "Our customer wants it delivered.",
    "Remind me of the meeting.",
    "I arranged an appointment for you.",
    "The total is not yet known.",
    "Your order was dated wrongly.",
    "Nobody owes us anything.",
    "We would like to settle this.",
    "It must be sent by the end of the week.",
    "The number of the house is worth knowing.",
]


def speech(rng: Random, name: str) -> str:
    return rng.choice(
        [
            f"Good morning, {name}!",
            f"Hello {name}, how are you?",
            f"What do you have there, {name}?",
            f"Where are you going, {name}?",
            f"Nice to see you, {name}. What is in your bag?",
        ]
    )


def chronicle(rng: Random) -> str:
    """Several sentences about events, of one person or of many."""
    name = words.person(rng) if chance(rng, 0.3) else None
    return " ".join(events.tell(rng, events.new_event(rng, name))[0] for _ in range(rng.randint(1, 5)))


def notes(rng: Random) -> str:
    """A text and reading-comprehension notes on it."""
    happened = [events.new_event(rng) for _ in range(rng.randint(1, 3))]
    told = [events.tell(rng, event, full=chance(rng, 0.3)) for event in happened]
    lines = [" ".join(sentence for sentence, _ in told), ""]
    for _ in range(rng.randint(2, 5)):
        index = rng.randrange(len(happened))
        question = events.ask if len(happened) == 1 else events.ask_by_name
        asked, answer = question(rng, happened[index], told[index][1])
        style = rng.choice(["{} {}.", "Q: {} A: {}", "{} -> {}"])
        lines.append(style.format(asked, answer))
    return "\n".join(lines)


def town(rng: Random) -> str:
    name, other = words.city(rng), words.city(rng)
    goods = [words.product(rng, 2) for _ in range(3)]
    founder = words.person(rng)
    return (
        f"{name} is a {rng.choice(words.ADJECTIVES)} town {rng.randint(2, 90)} km from {other}. "
        f"It has {words.number_word(rng.randint(2, 20))} streets, a {rng.choice(words.PLACES)} and "
        f"a {rng.choice(words.PLACES)}. People in {name} make {words.join_words(goods)}. "
        f"The first mayor of {name} was {founder}, who came from {other} in "
        f"{rng.randint(1700, 2020)}. A road of the town is called {founder.split()[-1]} Street. "
        f"{rng.choice(WEATHER)} when {founder} first saw {name}."
    )


def shop(rng: Random) -> str:
    owner, place = words.person(rng), words.city(rng)
    stock = [(words.product(rng), words.price(rng)) for _ in range(rng.randint(2, 6))]
    lines = [f"{owner} keeps a shop in {place}. These goods are for sale:"]
    lines += [f"- {item}: {amount}" for item, amount in stock]
    item, amount = rng.choice(stock)
    lines.append(f"At the shop of {owner} a {item} costs {amount}.")
    return "\n".join(lines)


def dialogue(rng: Random) -> str:
    first, second = words.given_name(rng), words.given_name(rng)
    place = words.city(rng)
    quantity = words.count(rng)
    item, amount = words.product(rng, quantity), words.price(rng)
    number = words.count_text(rng, quantity)
    return "\n".join(
        [
            f"{first}: {speech(rng, second)}",
            f"{second}: I am on my way to {place}.",
            f"{first}: To {place}? What will you do in {place}?",
            f"{second}: I need {number} {item}. They cost {amount} there.",
            f"{first}: {number.capitalize()} {item} for {amount}? That is "
            f"{rng.choice(['cheap', 'a lot', 'a fair price'])}, {second}.",
            f"{second}: Come with me, {first}!",
        ][: rng.randint(3, 6)]
    )


def shopping_list(rng: Random) -> str:
    items = [words.product(rng) for _ in range(rng.randint(3, 8))]
    bullet = rng.choice(["- {}", "* {}", "{}", "[ ] {}"])
    head = f"List of {words.person(rng)}:"
    return "\n".join([head, *(bullet.format(item) for item in items), words.join_words(items)])


def card(rng: Random) -> str:
    """A plain card of `Key: value` lines, on its own."""
    pool = [
        ("Name", words.person(rng)), ("City", words.city(rng)), ("Job", rng.choice(words.JOBS)),
        ("Born", words.day(rng).isoformat()), ("Room", str(rng.randint(1, 400))),
        ("Code", words.code(rng)), ("Open", words.clock(rng)), ("Price", words.price(rng)),
        ("Likes", words.product(rng, 2)), ("Friend", words.person(rng)),
        ("Mail", words.address(rng)), ("Share", f"{rng.randint(1, 99)} %"),
        ("Fee", f"${words.price(rng)}"),
    ]  # fmt: skip
    return "\n".join(f"{key}: {value}" for key, value in rng.sample(pool, rng.randint(3, 7)))


def arithmetic(rng: Random) -> str:
    """Prices in words and figures."""
    lines = []
    for _ in range(rng.randint(2, 5)):
        number, each = rng.randint(2, 12), rng.randint(1, 12)
        item, money = words.product(rng, number), rng.choice(words.CURRENCIES)
        total = number * each
        lines.append(
            rng.choice(
                [
                    f"{words.number_word(number)} {item} at {words.number_word(each)} {money} each "
                    f"cost {number} x {each} = {total} {money}.",
                    f"{number} {item} at {each} {money} each cost {words.number_word(total % 100)} {money}."
                    if total < 100
                    else f"{number} {item} cost {total} {money}.",
                ]
            ).capitalize()
        )
    return "\n".join(lines)


def calendar(rng: Random) -> str:
    """Dates in prose form beside their ISO form."""
    style = rng.choice(["{} = {}", "{} | {}", "{}: {}", "{} is written {}.", "{} ({})"])
    swap = chance(rng, 0.3)
    lines = []
    for _ in range(rng.randint(3, 8)):
        date = words.day(rng)
        pair = (words.date_text(rng, date), date.isoformat())
        lines.append(style.format(*(pair[::-1] if swap else pair)))
    return "\n".join(lines)


def diary(rng: Random) -> str:
    date = words.day(rng)
    lines = []
    for _ in range(rng.randint(2, 5)):
        head = f"{words.WEEKDAYS[date.weekday()]}, {date.day} {words.MONTHS[date.month - 1]}"
        lines.append(
            f"{head} {date.year} [{date.isoformat()}]: {rng.choice(WEATHER)}. "
            f"{words.person(rng)} {rng.choice(THOUGHTS)}."
        )
        date += datetime.timedelta(days=rng.randint(1, 9))
    return "\n".join(lines)


def counting(rng: Random) -> str:
    style = rng.choice(["{} ({})", "{} = {}", "{} -> {}", "{}: {}"])
    if chance(rng, 0.5):
        start = rng.randint(0, 80)
        numbers = list(range(start, start + rng.randint(3, 12)))
    else:
        numbers = [rng.randint(0, 20) for _ in range(rng.randint(3, 12))]
    pairs = [(words.number_word(number), str(number)) for number in numbers]
    swap = chance(rng, 0.3)
    joiner = rng.choice(["\n", ", "])
    return joiner.join(style.format(*(pair[::-1] if swap else pair)) for pair in pairs)


def amounts(rng: Random) -> str:
    """Prices with and without their trailing zero."""
    style = rng.choice(["{} = {}", "{} or {}", "{} ({})"])
    prices = [words.price(rng) for _ in range(rng.randint(3, 8))]
    return "\n".join(style.format(amount, events.short_number(amount)) for amount in prices)


def lookup(rng: Random) -> str:
    """A table and questions that look its entries up."""
    value = rng.choice([words.code, words.price, words.city, words.clock, words.person, words.address])
    key = rng.choice([words.person, words.city, words.product, words.code])
    table = [(key(rng), value(rng)) for _ in range(rng.randint(3, 8))]
    lines = [f"{left}{rng.choice([' ', ': '])}{right}" for left, right in table]
    asked = rng.sample(table, min(3, len(table)))
    return "\n".join([*lines, "", *(f"{left}? {right}" for left, right in asked)])


def letter(rng: Random) -> str:
    sender, reader, place = words.person(rng), words.person(rng), words.city(rng)
    return (
        f"{place}, {words.date_text(rng, words.day(rng))}\n\nDear {reader},\n\n"
        f"{events.tell(rng, events.new_event(rng, city=place))[0]} {rng.choice(WEATHER)} here in "
        f"{place}, and I am {rng.choice(words.FEELINGS)}. {rng.choice(REQUESTS)} "
        f"{events.tell(rng, events.new_event(rng, person=sender))[0]}\n\n"
        f"{rng.choice(['Yours', 'Best wishes', 'Kind regards'])},\n{sender}"
    )
