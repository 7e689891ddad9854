"""Sphinx builds the documentation from this folder: `make docs`, which needs no network."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from docutils import nodes  # noqa: E402 (after the path is set)

import finetune  # noqa: E402 (after the path is set)

project = "finetune"
copyright = "the finetune authors. Apache-2.0"
version = release = finetune.__version__
html_title = f"finetune {version}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinxarg.ext",
]
exclude_patterns = ["images/README.md"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "substitution", "attrs_block"]
myst_heading_anchors = 3
myst_substitutions = {"version": version}
suppress_warnings = ["myst.header", "myst.domains"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True

html_theme = "furo"
html_theme_options = {
    "source_view_link": "",
    "announcement": f"This site describes finetune {version}, which is unreleased.",
}
html_extra_path = ["llms.txt"]
html_copy_source = False
html_show_sourcelink = False
# Pages are opened from the disk too (file://), where no page may need a server or the network
html_use_opensearch = ""

nitpicky = True
# Pages of other projects for all names in annotations, so that `-n` ignores no name. Transformers, PEFT and
# TRL have no inventory, because Sphinx does not make their documentation. No annotation names a class of
# torch.
_PATH = "https://docs.python.org/3/library/pathlib.html#pathlib.Path"
_TRANSFORMERS = "https://huggingface.co/docs/transformers/main_classes"
LINKS = {
    "pathlib.Path": _PATH,
    "Path": _PATH,
    "PreTrainedModel": f"{_TRANSFORMERS}/model#transformers.PreTrainedModel",
    "TrainerCallback": f"{_TRANSFORMERS}/callback#transformers.TrainerCallback",
    "PeftModel": "https://huggingface.co/docs/peft/package_reference/peft_model#peft.PeftModel",
}
# Names in annotations, and the names under which the documentation describes them
ALIASES = {
    "finetune.recipe.schema.Recipe": "finetune.Recipe",
    "Recipe": "finetune.Recipe",
    "finetune.run.Run": "finetune.Run",
    "Run": "finetune.Run",
    "Translation": "finetune.import_recipe",
    "Plan": "finetune.planning.planner.Plan",
    "Quantization": "finetune.load_model",
}


def resolve_alias(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Resolve a name in an annotation that another project describes, or our pages under another name."""
    if link := LINKS.get(node.get("reftarget", "")):
        return nodes.reference("", "", content, refuri=link, internal=False)
    name = ALIASES.get(node.get("reftarget"))
    if not name:
        return None
    python = env.get_domain("py")
    kind = python.objects[name].objtype if name in python.objects else "class"
    return python.resolve_xref(
        env, node["refdoc"], app.builder, "func" if kind == "function" else "class", name, node, content
    )


def link_other_files(app: Any, document: str, source: list[str]) -> None:
    """Copy Markdown files outside of docs/ that a page links to, since they are no pages of the site."""
    source[0] = re.sub(r"\]\((\.\./\.\./[\w./-]+\.md)\)", r"](<path:\1>)", source[0])


def setup(app: Any) -> None:
    app.connect("missing-reference", resolve_alias)
    app.connect("source-read", link_other_files)
