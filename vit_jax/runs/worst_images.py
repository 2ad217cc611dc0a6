"""Test images with the worst predictions, stored in the workdir for the report."""

import json
from pathlib import Path
from typing import Any

from vit_jax.inspection.html_page import write_text
from vit_jax.small_files import read_small

WORST_IMAGES = "worst_images.json"


def keep_worst(workdir: Path, worst: dict[str, Any]) -> None:
    """Writes the worst images (variables of the HTML template `segments.html`) as JSON."""
    write_text(workdir / WORST_IMAGES, json.dumps(worst))


def kept_worst(workdir: Path) -> dict[str, Any] | None:
    """Reads the variables that `keep_worst` wrote to a workdir; None if missing or damaged."""
    try:
        values = json.loads(read_small(workdir / WORST_IMAGES))
        return {key: values[key] for key in ("title", "note", "legend", "figures", "card")}
    except (OSError, ValueError, LookupError, TypeError):
        return None
