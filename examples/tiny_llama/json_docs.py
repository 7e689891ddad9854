"""JSON documents of the corpus: configurations, catalogues, weather, routes, teams, playlists.

A JSON document stands alone: no prose beside it and no sentence in its values.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

from . import words
from .words import listed

KEYS = listed(
    "id name title label city place owner author team color size width height weight price cost "
    "stock count total rate level score rank unit status state mode path host port user group "
    "role email phone street code start end open close date created updated year month day hour "
    "enabled visible active items tags notes parts list first last next from to amount quantity "
    "number item type kind due time with"
)


def scalar(rng: Random) -> Any:
    """A random short value."""
    make: Callable[[Random], Any] = rng.choice(
        [
            words.person, words.city, words.product, words.given_name, words.surname, words.code,
            words.clock, words.address, amount, lambda r: words.day(r).isoformat(),
            lambda r: words.stem(r, 2),
            lambda r: r.randint(0, 10 ** r.randint(1, 4)), lambda r: words.chance(r, 0.5),
        ]
    )  # fmt: skip
    return make(rng)


def amount(rng: Random) -> int | float:
    text = words.price(rng)
    return float(text) if "." in text else int(text)


def fields(rng: Random) -> dict[str, Any]:
    """A flat object with random keys; now and then a value comes back under another key."""
    names = rng.sample(KEYS, rng.randint(2, 7))
    values: list[Any] = []
    for _ in names:
        repeat = values and words.chance(rng, 0.15)
        values.append(rng.choice(values) if repeat else scalar(rng))
    return dict(zip(names, values, strict=True))


def config(rng: Random) -> Any:
    sections = rng.sample(["server", "client", "cache", "log", "queue", "mail", "job"], 2)
    return {section: fields(rng) for section in sections}


def catalogue(rng: Random) -> Any:
    names = rng.sample(KEYS, rng.randint(0, 2))
    rows = []
    for _ in range(rng.randint(1, 5)):
        row = {"product": words.product(rng, rng.choice([1, 2])), "price": amount(rng)}
        rows.append(row | {name: scalar(rng) for name in names})
    return {"shop": words.city(rng), "products": rows} if words.chance(rng, 0.6) else rows


def weather(rng: Random) -> Any:
    days = [
        {
            "date": words.day(rng).isoformat(),
            "sky": rng.choice(["sun", "rain", "fog", "snow", "wind"]),
            "temp": rng.randint(-20, 38),
        }
        for _ in range(rng.randint(1, 4))
    ]
    return {"station": words.city(rng), "days": days}


def team(rng: Random) -> Any:
    members = [words.person(rng) for _ in range(rng.randint(2, 5))]
    rooms = {name: rng.randint(1, 400) for name in members}
    return {"team": words.stem(rng, 2), "lead": members[0], "members": members, "rooms": rooms}


def route(rng: Random) -> Any:
    stops = [words.city(rng) for _ in range(rng.randint(2, 5))]
    legs = [{"from": a, "to": b, "km": rng.randint(2, 900)} for a, b in pairwise(stops)]
    return {"stops": stops, "legs": legs, "departs": words.clock(rng)}


def playlist(rng: Random) -> Any:
    return {
        "list": words.stem(rng, 2),
        "songs": [
            {
                "singer": words.person(rng),
                "song": words.product(rng),
                "seconds": rng.randint(60, 600),
            }
            for _ in range(rng.randint(1, 4))
        ],
    }


def values_list(rng: Random) -> Any:
    make = rng.choice([words.person, words.city, words.product, words.code, amount])
    return [make(rng) for _ in range(rng.randint(2, 8))]


def json_document(rng: Random) -> str:
    """One JSON value, compact or indented."""
    maker = rng.choices(
        [fields, config, catalogue, weather, team, route, playlist, values_list],
        [5, 2, 3, 1, 1, 1, 1, 1],
    )[0]
    value = maker(rng)
    draw = rng.random()
    if draw < 0.5:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return json.dumps(value, indent=2 if draw < 0.75 else None, ensure_ascii=False)


def json_lines(rng: Random) -> str:
    """Objects with the same keys, one a line."""
    names = rng.sample(KEYS, rng.randint(2, 5))
    makers = [type_of_column(rng) for _ in names]
    rows = [
        {name: make(rng) for name, make in zip(names, makers, strict=True)} for _ in range(rng.randint(2, 5))
    ]
    return "\n".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in rows)


def type_of_column(rng: Random) -> Callable[[Random], Any]:
    return rng.choice([words.person, words.city, words.product, words.code, amount, scalar])
