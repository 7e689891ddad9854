"""Paths of the project, of the embedded model and of the shared models and data."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
MODEL = ROOT / "examples" / "tiny_llama" / "model"
DATA = ROOT / "examples" / "tiny_llama" / "data"
ASSETS = Path(os.environ.get("FINETUNE_TEST_ASSETS", ROOT.parent / "shared" / "assets"))
