"""The example task: a sentence in, a JSON record out. Orders, appointments and invoices.

    python -m examples.tiny_llama.task        # writes data/train.jsonl and data/test.jsonl

Seeded. No person, city or article of the test set occurs in the training set; the phrasings are
shared.
"""

import datetime
import json
import re
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from . import task_words as names
from .words import CITIES, GIVEN, MONTHS, SURNAMES, number_word, plural

DATA = Path(__file__).parent / "data"
NUM_TRAIN, NUM_TEST = 2000, 300

ORDERS = [
    "{name} from {city} ordered {goods} for {amount} euros on {date}.",
    "On {date}, {name} ordered {goods} for {amount} euros, to be sent to {city}.",
    "An order came in on {date}: {goods} for {name} in {city}, {amount} euros in all.",
    "{name} would like {goods} delivered to {city}. The order of {date} comes to {amount} euros.",
    "Please send {goods} to {name} in {city}; ordered on {date} for {amount} euros.",
    "For {amount} euros, {name} of {city} ordered {goods} on {date}.",
    "We received an order from {city} on {date}. {name} wants {goods} and pays {amount} euros.",
    "{goods}, {amount} euros: that is what {name} from {city} ordered on {date}.",
    "{city}, {date}: {name} placed an order for {goods} worth {amount} euros.",
    "Our customer {name} ordered {goods} on {date}. Ship to {city}. Total: {amount} euros.",
    "The order of {name}, placed on {date}, is {goods} at {amount} euros, going to {city}.",
    "{amount} euros were paid by {name} on {date} for an order of {goods} to {city}.",
    "Order for {city}: {goods}, {amount} euros, from {name}, dated {date}.",
]
APPOINTMENTS = [
    "{name} has an appointment with {partner} in {city} on {date} at {time}.",
    "On {date} at {time}, {name} meets {partner} in {city}.",
    "Please book {name} with {partner} in {city} for {time} on {date}.",
    "{name} will see {partner} at {time} on {date} in {city}.",
    "The appointment of {name} in {city} is on {date} at {time}, with {partner}.",
    "In {city}, {name} is to meet {partner} on {date} at {time}.",
    "At {time} on {date}, {name} is expected in {city} by {partner}.",
    "Remind {name} of the meeting with {partner} on {date}, {time}, in {city}.",
    "There is a meeting in {city} on {date}: {name} sees {partner} at {time}.",
    "{city}, {date}, {time}: appointment of {name} with {partner}.",
    "I arranged for {name} to visit {partner} in {city}. It is at {time} on {date}.",
    "Could {name} come to {city} on {date} at {time} to meet {partner}?",
    "Appointment at {time} in {city} for {name}, with {partner}, on {date}.",
]
INVOICES = [
    "Invoice {number} to {name} in {city}: {goods}, {amount} euros, due on {date}.",
    "{name} in {city} gets invoice {number} of {amount} euros for {goods}, due {date}.",
    "By {date}, {name} of {city} has to pay invoice {number}: {amount} euros for {goods}.",
    "Invoice {number} over {amount} euros is due on {date}. It bills {name}, {city}, for {goods}.",
    "For {goods} we billed {name} from {city} {amount} euros; invoice {number} is due on {date}.",
    "Please pay {amount} euros by {date} for {goods}. Invoice {number}, {name}, {city}.",
    "{goods} were billed to {name}, {city}: {amount} euros, invoice {number}, due {date}.",
    "Due on {date}: invoice {number}, {amount} euros, {goods}, for {name} in {city}.",
    "We sent invoice {number} to {city}. {name} owes {amount} euros for {goods} by {date}.",
    "{name} in {city} must settle invoice {number} for {goods} by {date}. It is {amount} euros.",
    "An invoice, number {number}, went to {name} in {city} for {goods}: {amount} euros by {date}.",
    "{amount} euros are due on {date} from {name}, {city}, for {goods} on invoice {number}.",
    "Number {number} is the invoice of {name}, {city}, for {goods}: {amount} euros, due {date}.",
]


class Supply(NamedTuple):
    """The values a split draws from."""

    given: list[str]
    surnames: list[str]
    cities: list[str]
    goods: list[str]


TRAIN = Supply(names.TRAIN_GIVEN, names.TRAIN_SURNAMES, names.TRAIN_CITIES, names.TRAIN_GOODS)
TEST = Supply(names.TEST_GIVEN, names.TEST_SURNAMES, names.TEST_CITIES, names.TEST_GOODS)


def assert_disjoint() -> None:
    """No value in both splits, and no name or city in the corpus's lists."""
    known = {*GIVEN, *SURNAMES, *CITIES}
    shared = known & {*TRAIN[0], *TRAIN[1], *TRAIN[2], *TEST[0], *TEST[1], *TEST[2]}
    assert not shared, f"names of the corpus in the task: {sorted(shared)}"
    for kind in Supply._fields:
        shared = set(getattr(TRAIN, kind)) & set(getattr(TEST, kind))
        assert not shared, f"{kind} in both train and test: {sorted(shared)}"


def amount_text(rng: Random) -> str:
    whole = rng.randint(5, rng.choice([99, 999, 4999]))
    cents = rng.choice([0, 0, 50, 25, 75, 90, 99])
    return f"{whole}.{cents:02d}" if cents else str(whole)


def amount_value(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def date_text(rng: Random, date: datetime.date) -> str:
    month = MONTHS[date.month - 1]
    if rng.random() < 0.5:
        return f"{date.day} {month} {date.year}"
    return f"{month} {date.day}, {date.year}"


def full_name(rng: Random, supply: Supply) -> str:
    return f"{rng.choice(supply.given)} {rng.choice(supply.surnames)}"


def example(rng: Random, supply: Supply) -> tuple[str, dict[str, Any]]:
    """A sentence and its record."""
    kind = rng.choice(["order", "appointment", "invoice"])
    name, city = full_name(rng, supply), rng.choice(supply.cities)
    date = datetime.date(rng.randint(2022, 2029), rng.randint(1, 12), 1)
    date += datetime.timedelta(days=rng.randint(0, 27))
    facts: dict[str, Any] = {"name": name, "city": city, "date": date_text(rng, date)}
    if kind == "appointment":
        partner = full_name(rng, supply)
        time = f"{rng.randint(8, 19):02d}:{rng.choice([0, 10, 15, 20, 30, 40, 45, 50]):02d}"
        sentence = rng.choice(APPOINTMENTS).format(**facts, partner=partner, time=time)
        when = {"date": date.isoformat(), "time": time}
        return sentence, {"type": kind, "name": name, "with": partner, "city": city, **when}

    quantity, amount = rng.randint(1, 12), amount_text(rng)
    noun = rng.choice(supply.goods)
    item = noun if quantity == 1 else plural(noun)
    if rng.random() < 0.7:
        item = f"{rng.choice(names.MODIFIERS)} {item}"
    said = number_word(quantity) if rng.random() < 0.5 else str(quantity)
    facts |= {"goods": f"{said} {item}", "amount": amount}
    bought = {"item": item, "quantity": quantity, "amount": amount_value(amount)}
    if kind == "order":
        sentence = rng.choice(ORDERS).format(**facts)
        record = {"type": kind, "name": name, "city": city, **bought, "date": date.isoformat()}
    else:
        number = rng.randint(1000, 9999)
        sentence = rng.choice(INVOICES).format(**facts, number=number)
        record = {"type": kind, "number": number, "name": name, "city": city, **bought}
        record["due"] = date.isoformat()
    return polish(sentence, quantity), record


def polish(sentence: str, quantity: int) -> str:
    """Capital at the start, and a verb that agrees with a single article."""
    if quantity == 1:
        sentence = re.sub(r" were billed to ", " was billed to ", sentence)
    return sentence[0].upper() + sentence[1:]


def rows(seed: str, supply: Supply, num_rows: int) -> list[dict[str, Any]]:
    """Chat rows with distinct sentences."""
    rng, made = Random(seed), {}
    while len(made) < num_rows:
        sentence, record = example(rng, supply)
        made[sentence] = json.dumps(record, separators=(",", ":"))
    return [
        {
            "messages": [
                {"role": "user", "content": sentence},
                {"role": "assistant", "content": answer},
            ]
        }
        for sentence, answer in made.items()
    ]


def write(path: Path, examples: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in examples), encoding="utf-8")
    print(f"wrote {len(examples)} rows to {path.name}")


def main() -> None:
    assert_disjoint()
    write(DATA / "train.jsonl", rows("train", TRAIN, NUM_TRAIN))
    write(DATA / "test.jsonl", rows("test", TEST, NUM_TEST))


if __name__ == "__main__":
    main()
