"""`finetune report`: write the HTML page of a run."""

from __future__ import annotations

import argparse
import os
from typing import Any

from finetune.cli.inputs import opened


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Write an HTML report of a run: results, curves, settings that ran."""
    from finetune.reporting import html_report

    # An incomplete run folder is enough
    path = options.run if os.path.exists(options.run) else opened(options).path
    page, verdict = html_report.run(path, options.output)
    html_report.show(page, verdict, quiet=options.quiet)
    return {"page": page, "verdict": verdict}
