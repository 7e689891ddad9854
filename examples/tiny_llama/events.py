"""Events: somebody does something somewhere. They are told in sentences and asked about.

`tell` shuffles the parts of a sentence, so the same facts stand in many orders; `ask` makes a
question and its short answer, which is always a single fact.
"""

import datetime
from dataclasses import dataclass
from random import Random

from . import words
from .words import listed

TRADES = listed(
    "bought sold carried ordered packed brought delivered repaired found lost borrowed returned "
    "painted collected sent received unpacked cleaned counted needed wanted wrapped stored lent"
)
MEETINGS = ["met", "visited", "called", "thanked", "helped", "greeted", "saw", "joined", "invited"]
TRIPS = ["travelled", "drove", "walked", "moved", "sailed", "flew", "came", "went", "returned"]


@dataclass(frozen=True)
class Event:
    """The facts of one event; a sentence tells only some of them."""

    kind: str
    verb: str
    person: str
    partner: str
    item: str
    quantity: int
    price: str
    currency: str
    city: str
    date: datetime.date
    clock: str


def new_event(rng: Random, person: str | None = None, city: str | None = None) -> Event:
    kind = rng.choices(["trade", "meeting", "trip"], [6, 2, 2])[0]
    quantity = words.count(rng)
    return Event(
        kind=kind,
        verb=rng.choice({"trade": TRADES, "meeting": MEETINGS, "trip": TRIPS}[kind]),
        person=person or words.person(rng),
        partner=words.person(rng),
        item=words.product(rng, quantity),
        quantity=quantity,
        price=words.price(rng),
        currency=rng.choice(words.CURRENCIES),
        city=city or words.city(rng),
        date=words.day(rng),
        clock=words.clock(rng),
    )


def core(rng: Random, event: Event) -> tuple[str, set[str]]:
    """The clause without its adjuncts, and the facts it tells."""
    if event.kind == "meeting":
        return f"{event.person} {event.verb} {event.partner}", {"person", "partner"}
    if event.kind == "trip":
        return f"{event.person} {event.verb} to {event.city}", {"person", "city"}
    goods = f"{words.count_text(rng, event.quantity)} {event.item}"
    facts = {"person", "item", "quantity"}
    if words.chance(rng, 0.25):
        return (
            f"{goods} {'was' if event.quantity == 1 else 'were'} {event.verb} by {event.person}",
            facts,
        )
    return f"{event.person} {event.verb} {goods}", facts


def adjuncts(rng: Random, event: Event, told: set[str]) -> list[tuple[str, str]]:
    """Possible `(fact, phrase)` additions, shuffled."""
    date = words.date_text(rng, event.date)
    options = [
        ("date", f"on {date}"),
        ("clock", f"at {event.clock}"),
        ("city", rng.choice([f"in {event.city}", f"near {event.city}", f"from {event.city}"])),
        ("partner", rng.choice([f"with {event.partner}", f"for {event.partner}"])),
    ]
    if event.kind == "trade":
        amount = f"{event.price} {event.currency}"
        options.append(("price", rng.choice([f"for {amount}", f"at a price of {amount}"])))
    rng.shuffle(options)
    return [(fact, phrase) for fact, phrase in options if fact not in told]


def tell(rng: Random, event: Event, full: bool = False) -> tuple[str, set[str]]:
    """One sentence about the event, and the facts it tells."""
    clause, facts = core(rng, event)
    extras = adjuncts(rng, event, facts)
    extras = extras[: len(extras) if full else rng.randint(0, 4)]
    front = ""
    if extras and extras[0][0] in ("date", "clock", "city") and words.chance(rng, 0.4):
        phrase = extras[0][1]
        front = phrase[0].upper() + phrase[1:] + rng.choice([", ", " "])
    rest = [phrase for _, phrase in extras[1 if front else 0 :]]
    aside = ""
    if rest and words.chance(rng, 0.15):
        aside = f" ({rest.pop(0)})"
    sentence = front + " ".join([clause, *rest]) + aside + "."
    return sentence[0].upper() + sentence[1:], facts | {fact for fact, _ in extras}


def answers(rng: Random, event: Event) -> dict[str, list[tuple[str, str]]]:
    """`(question, answer)` pairs for every fact."""
    year, month = str(event.date.year), words.MONTHS[event.date.month - 1]
    iso = event.date.isoformat()
    return {
        "person": [
            (rng.choice(["Who was it?", "Who is the person?", "Name?"]), event.person),
            (f"Who {event.verb}?", event.person),
            ("What is the given name?", event.person.split()[0]),
        ],
        "partner": [
            (rng.choice(["With whom?", "Who else is named?", "Other person?"]), event.partner),
        ],
        "item": [
            (f"What was {event.verb}?", event.item),
            (rng.choice(["What goods?", "Which thing?", "Item?"]), event.item),
        ],
        "quantity": [
            (rng.choice(["How many?", "What quantity?", "Quantity?"]), str(event.quantity)),
            (f"How many {event.item}?", str(event.quantity)),
        ],
        "price": [
            (rng.choice(["How much?", "What price?", "Amount?"]), event.price),
            ("How much in all?", f"{event.price} {event.currency}"),
            ("Price as a number?", short_number(event.price)),
        ],
        "city": [(rng.choice(["Where?", "Which place?", "City?"]), event.city)],
        "date": [
            (rng.choice(["When?", "Which date?", "Date?", "Date in figures?"]), iso),
            (rng.choice(["What date in ISO form?", "ISO date?"]), iso),
            ("Which month?", month),
            ("Which year?", year),
        ],
        "clock": [(rng.choice(["At what time?", "Which hour?", "Time?"]), event.clock)],
    }


def short_number(amount: str) -> str:
    """`45.50` -> `45.5`."""
    return amount.rstrip("0").rstrip(".") if "." in amount else amount


def ask(rng: Random, event: Event, facts: set[str]) -> tuple[str, str]:
    """A question about one told fact, and its answer."""
    return rng.choice(answers(rng, event)[rng.choice(sorted(facts))])


def ask_by_name(rng: Random, event: Event, facts: set[str]) -> tuple[str, str]:
    """A question that says whose event it is about, for texts with several people."""
    name = event.person
    iso = event.date.isoformat()
    pool = {
        "partner": (f"Who is named beside {name}?", event.partner),
        "item": (f"What goods belong to {name}?", event.item),
        "quantity": (f"How many in the case of {name}?", str(event.quantity)),
        "price": (f"What amount goes with {name}?", event.price),
        "city": (f"Where was {name}?", event.city),
        "date": (f"On which date do we hear of {name}?", iso),
        "clock": (f"At what time do we hear of {name}?", event.clock),
        "person": (f"Is {name} named?", "Yes"),
    }
    return pool[rng.choice(sorted(facts))]
