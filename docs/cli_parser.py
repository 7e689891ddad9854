"""The command-line parser for the reference page: sphinx-argparse wants a function that returns it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.cli import main

if TYPE_CHECKING:
    import argparse


def parser() -> argparse.ArgumentParser:
    return main.parser()[0]
