"""The documentation site: sphinx-build -W -c docs . build/site

The pages are those of the repository, starting with README, and link to each other as in the
repository. The sidebar's contents are defined here, because README has no list of them.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
project, author, copyright = "vit_jax", "the vit_jax authors", "the vit_jax authors, Apache-2.0"
root_doc = "README"
include_patterns = [
    "README.md",
    "LEDGER.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**.md",
    "experiments/launch/README.md",
]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]

autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_attr_annotations = True

html_theme = "furo"
html_title = "vit_jax"
html_copy_source = False
html_search_scorer = str(ROOT / "docs" / "search_order.js")
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "github-dark"

# The sidebar: titles of sections, with their pages by the names in the sidebar.
MARGIN = {
    "Begin": {"Install": "docs/install"},
    "Tutorials": {
        "Train on your own images": "docs/tutorials/train",
        "Fine-tune a trained model": "docs/tutorials/finetune",
        "Learn without labels": "docs/tutorials/self_supervised",
    },
    "Choose": {
        "Which model, which training": "docs/which_model",
        "Models and their arguments": "docs/models",
        "Published weights": "docs/published_weights",
        "What loads of other libraries": "docs/coverage",
    },
    "How to": {
        "Read images": "docs/data",
        "Compose images without end": "docs/growing_data",
        "Prepare a data set": "docs/preparing_data",
        "Augment": "docs/augmentation",
        "Pre-train with labels": "docs/pretraining",
        "Pre-train without labels": "docs/self_supervised",
        "Train on images with captions": "docs/image_text",
        "Segmentation, detection, depth": "docs/dense_prediction",
        "Masks, boxes and depth maps": "docs/dense_data",
        "Fine-tune": "docs/finetuning",
        "Transfer: two examples": "docs/transfer",
        "Evaluate": "docs/evaluation",
        "Predict and embed": "docs/prediction",
        "Serve": "docs/serving",
        "Look inside": "docs/visualization",
        "Read and write checkpoints": "docs/checkpoints",
        "Export for serving": "docs/export",
        "Watch a run": "docs/monitoring",
        "Stop, resume, survive": "docs/fault_tolerance",
        "When something goes wrong": "docs/problems",
        "Add parts of your own": "docs/extending",
    },
    "Pods": {
        "From nothing to a running slice": "docs/pods",
        "Train on several hosts": "docs/multi_host",
        "Launch": "experiments/launch/README",
        "Shard, and save memory": "docs/sharding",
        "Plan memory, time and cost": "docs/planning",
        "Performance": "docs/performance",
    },
    "Reference": {
        "Python": "docs/python",
        "Functions and classes": "docs/reference",
        "Commands": "docs/commands",
        "Values of a config": "docs/config",
    },
    "Results": {
        "The ledger": "LEDGER",
        "Tables and figures as commands": "docs/ledger",
        "The paper's gaps and choices": "docs/paper",
    },
    "Design": {
        "Architecture": "docs/architecture",
        "Decisions": "docs/decisions",
        "Measurements": "docs/measurements",
        "Contributing": "CONTRIBUTING",
        "Changes": "CHANGELOG",
    },
}

# Search terms that a page does not contain, in addition to its name in the sidebar.
KEYWORDS = {
    "docs/data": "custom dataset image folder own",
    "docs/export": "push hub deploy",
    "docs/fault_tolerance": "stopped interrupted preempted resume run continue",
    "docs/install": "gpu cuda tpu",
    "docs/monitoring": "compare comparison runs wandb",
    "docs/multi_host": "multiple machines nodes",
    "docs/pods": "train pod tpu",
    "docs/problems": "error nan oom slow",
    "docs/tutorials/finetune": "pretrained checkpoint photographs",
    "docs/tutorials/self_supervised": "unlabelled",
    "docs/tutorials/train": "photographs custom dataset",
    "docs/visualization": "maps heatmap attention",
    "docs/which_model": "should use choose size",
}


def add_keywords(app, name, source):
    """Adds words to a page by which the site's search finds it."""
    names = [title for pages in MARGIN.values() for title, path in pages.items() if path == name]
    words = " ".join([*names, KEYWORDS.get(name, "")]).lower()
    keywords = ", ".join(re.findall(r"\w+", words))
    if keywords:
        source[0] += f"\n\n```{{eval-rst}}\n.. meta::\n   :keywords: {keywords}\n```\n"


def add_margin(app, name, source):
    """Adds the site's table of contents to the first page."""
    if name == root_doc:
        for caption, pages in MARGIN.items():
            lines = [f"{title} <{path}>" for title, path in pages.items()]
            options = [":hidden:", f":caption: {caption}"]
            source[0] += "\n".join(["", "```{toctree}", *options, "", *lines, "```", ""])


def lead_to_first_page(app, error):
    """Writes `index.html`, which redirects to the first page."""
    if error is None:
        lead = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        Path(app.outdir, "index.html").write_text(f"<!doctype html><title>{project}</title>{lead}")


def mark_code(app, what, name, subject, options, lines):
    """Converts `code` in docstrings to reStructuredText."""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app):
    """Registers the functions of this file as Sphinx event handlers."""
    app.connect("autodoc-process-docstring", mark_code)
    app.connect("source-read", add_keywords)
    app.connect("source-read", add_margin)
    app.connect("build-finished", lead_to_first_page)
