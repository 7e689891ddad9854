"""Chat documents of the corpus: questions on a text, echoes, lists, greetings, small conversions.

They train the chat tokens and the end of turn. No reply and no question holds JSON.
"""

from random import Random

from . import events, prose, words
from .words import chance

SYSTEMS = [
    "You are a helpful assistant.", "Answer shortly.", "You answer questions about a text.",
    "Be brief and exact.", "You are a careful clerk.",
]  # fmt: skip

Messages = list[dict[str, str]]


def render(messages: Messages) -> str:
    """The chat format; `model/chat_template.jinja` renders the same text."""
    return "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)


def turns(*contents: str) -> Messages:
    roles = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def greeting(rng: Random) -> Messages:
    name = words.given_name(rng)
    hello = rng.choice(["Hello", "Hi", "Good morning", "Good evening"])
    return rng.choice(
        [
            turns(f"{hello}!", f"{hello}! How can I help you?"),
            turns(f"{hello}, I am {name}.", f"{hello}, {name}! How can I help you?"),
            turns(f"My name is {name}. What is my name?", f"Your name is {name}."),
            turns(f"Thank you! Say goodbye to {name}.", f"Goodbye, {name}!"),
        ]
    )


def echo(rng: Random) -> Messages:
    """Repeat a text exactly."""
    text = rng.choice(
        [
            words.person, words.city, words.product, words.code, words.surname, words.address,
            lambda r: " ".join(words.mixed(r) for _ in range(r.randint(1, 6))),
            lambda r: " ".join(words.stem(r, r.randint(1, 3)) for _ in range(r.randint(1, 5))),
            lambda r: events.tell(r, events.new_event(r))[0],
        ]
    )(rng)  # fmt: skip
    order = rng.choice(["Say: {}", "Repeat: {}", "Echo this: {}", "Copy {}", "{}\nRepeat this."])
    return turns(order.format(text), text)


def listing(rng: Random) -> Messages:
    make = rng.choice([words.person, words.city, words.product])
    items = [make(rng) for _ in range(rng.randint(2, 6))]
    bullets = "\n".join(f"- {item}" for item in items)
    joined = words.join_words(items)
    return rng.choice(
        [
            turns(f"Make a list: {joined}", bullets),
            turns(f"Write in one line:\n{bullets}", joined),
            turns(f"Which comes first? {joined}", items[0]),
            turns(f"Which comes last? {joined}", items[-1]),
            turns(f"How many are these? {joined}", str(len(items))),
        ]
    )


def conversion(rng: Random) -> Messages:
    """Dates to ISO form, number words to digits, amounts to plain numbers."""
    draw = rng.random()
    if draw < 0.5:
        date = words.day(rng)
        ask = rng.choice(["{} as ISO date?", "Write {} in figures.", "{}"])
        return turns(ask.format(words.date_text(rng, date)), date.isoformat())
    if draw < 0.8:
        number = rng.randint(0, 20)
        ask = rng.choice(["{} in digits?", "Write {} as a number.", "{}"])
        return turns(ask.format(words.number_word(number)), str(number))
    amount = words.price(rng)
    return turns(f"{amount} as a short number?", events.short_number(amount))


def about_text(rng: Random) -> Messages:
    """One text, then questions on single facts in turns."""
    happened = [events.new_event(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    told = [events.tell(rng, event, full=chance(rng, 0.5)) for event in happened]
    question = events.ask if len(happened) == 1 else events.ask_by_name
    contents = []
    for _ in range(rng.randint(1, 6)):
        index = rng.randrange(len(happened))
        contents += question(rng, happened[index], told[index][1])
    text = " ".join(sentence for sentence, _ in told)
    contents[0] = f"{contents[0]}\n{text}" if chance(rng, 0.3) else f"{text}\n{contents[0]}"
    return turns(*contents)


def small_talk(rng: Random) -> Messages:
    """A message that only tells something, and a reply in prose."""
    event = events.new_event(rng)
    sentence, _ = events.tell(rng, event)
    reply = rng.choice(["Thank you for telling me about {}.", "I see. How is {}?", "Noted: {}."])
    return turns(sentence, reply.format(event.person))


def tell_more(rng: Random) -> Messages:
    make = rng.choice([prose.story, prose.town, prose.shop, prose.dialogue])
    kind = make.__name__
    return turns(rng.choice([f"Show me a {kind} text.", f"Write something: {kind}."]), make(rng))


def chat_document(rng: Random) -> str:
    make = rng.choices(
        [greeting, echo, listing, conversion, about_text, small_talk, tell_more],
        [1, 4, 3, 3, 10, 1, 1],
    )[0]
    messages = make(rng)
    if chance(rng, 0.15):
        messages = [{"role": "system", "content": rng.choice(SYSTEMS)}, *messages]
    return render(messages)
