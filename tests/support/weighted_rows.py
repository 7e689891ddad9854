"""Chats with weights of the loss, and their loss by a plain loop in float64."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from support.paths import DATA

if TYPE_CHECKING:
    from pathlib import Path

OF_MESSAGES = (0.5, 0.25, 1, 0.125)
OF_PARTS = (0.25, 1, 0, 0.75)
CUT = 40  # characters of a message


def write(path: Path, count: int = 8) -> Path:
    """Write chats of two turns: some have a weight for a message, some for parts, and some have none."""
    lines = (DATA / "train.jsonl").read_text().splitlines()[: 2 * count]
    rows = []
    for number in range(count):
        turns = [turn for line in lines[2 * number : 2 * number + 2] for turn in json.loads(line)["messages"]]
        for turn in turns:
            turn["content"] = turn["content"][: CUT + 9 * (number % 3)].strip()
        if number % 4 == 0:
            turns[1]["weight"] = OF_MESSAGES[number % len(OF_MESSAGES)]
        if number % 4 == 1:
            turns[1]["weight"], turns[3]["weight"] = 0, 0.5
        if number % 4 == 2:
            turns[3]["content"] = parts(turns[3]["content"], number)
        rows.append({"messages": turns})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def parts(content: str, number: int) -> list[dict[str, Any]]:
    """Divide a content into three parts at spaces or commas; the first has no weight of its own."""
    first, second = 12, 25
    weights = [None, OF_PARTS[number % len(OF_PARTS)], OF_PARTS[(number + 1) % len(OF_PARTS)]]
    texts = (content[:first], content[first:second], content[second:])
    return [
        {"type": "text", "text": text, **({} if weight is None else {"weight": weight})}
        for text, weight in zip(texts, weights, strict=True)
    ]


def loss_by_hand(model: Any, tokenizer: Any, path: Path) -> torch.Tensor:
    """Return the sum of weight times loss over the sum of weights, of one chat after another."""
    total, weight_of_all = torch.zeros((), dtype=torch.float64), 0.0
    for line in path.read_text().splitlines():
        text, of_characters = "", list[float]()
        for turn in json.loads(line)["messages"]:
            header = f"<|im_start|>{turn['role']}\n"
            text, of_characters = text + header, of_characters + [0.0] * len(header)
            is_answer, own = turn["role"] == "assistant", turn.get("weight", 1.0)
            content = turn["content"] if isinstance(turn["content"], list) else [{"text": turn["content"]}]
            for part in (*content, {"text": "<|im_end|>"}):
                text += part["text"]
                of_characters += [part.get("weight", own) * is_answer] * len(part["text"])
            text, of_characters = text + "\n", [*of_characters, 0.0]
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        ids, starts = encoded["input_ids"], []
        for start, end in encoded["offset_mapping"]:
            starts.append(next((place for place in range(start, end) if not text[place].isspace()), start))
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        for place in range(1, len(ids)):
            weight = of_characters[starts[place]]
            if weight:
                total = total - weight * logits[place - 1].log_softmax(-1)[ids[place]]
                weight_of_all += weight
    return total / weight_of_all
