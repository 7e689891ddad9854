"""Recipes and rows, good and bad ones, as text."""

from __future__ import annotations

LINEAR = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
RECIPE = """model:
  name: "{model}"
data:
  name: "{data}"
adapter:
  type: lora
  r: 8
train:
  learning_rate: 1e-4
  max_steps: 4
"""
CHAT = '{"messages": [%s]}'
USER, ANSWER = '{"role": "user", "content": "a"}', '{"role": "assistant", "content": "b"}'
GOOD_ROW = CHAT % f"{USER}, {ANSWER}"


def rows(*lines: str, good: int = 0) -> bytes:
    """JSON lines, and after them so many good ones, each different."""
    more = [GOOD_ROW.replace('"a"', f'"a{index}"') for index in range(good)]
    return ("\n".join([*lines, *more]) + "\n").encode()
