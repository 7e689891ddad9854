"""`finetune report`: write the HTML page of a run."""

from __future__ import annotations

import argparse
import os

from finetune.cli.inputs import opened


def report(options: argparse.Namespace) -> None:
    """Write a page about a run: verdict, base against fine-tuned model, curves, run checks, data, recipe."""
    from finetune.reporting import html_report

    path = options.run if os.path.exists(options.run) else opened(options).path  # a part of a run is enough
    html_report.show(*html_report.run(path, options.output), quiet=options.quiet)
