"""Adapter types that the shipped recipes and most tests use."""

ADAPTERS = ("lora", "qlora", "dora", "qdora", "adalora", "ia3", "full")
