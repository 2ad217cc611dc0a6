"""Writes timm's part of accuracies.json: python -m tests.interop.write_accuracies CSV

The file is `vit_jax/published/accuracies.json`. CSV is `results/results-imagenet.csv` of
huggingface/pytorch-image-models, of which only the weights in `weights.tsv` are used. Accuracies
published by other authors stay unchanged.
"""

import csv
import json
import sys
from pathlib import Path

from vit_jax.published.weights import ACCURACIES, all_weights


def figures_of(table: Path) -> dict[str, list]:
    """Returns accuracy in per cent, image size in pixels and crop of weights, by repository."""
    with table.open() as file:
        rows = {f"timm/{row['model']}": row for row in csv.DictReader(file)}
    repositories = sorted(
        weights.repository for weights in all_weights() if weights.repository in rows
    )
    found = {name: rows[name] for name in repositories}
    return {
        name: [float(row["top1"]), int(row["img_size"]), float(row["crop_pct"])]
        for name, row in found.items()
    }


def written(groups: list[dict]) -> str:
    """Returns the content of the file, with a line for each accuracy."""
    parts = []
    for group in groups:
        about = "".join(f'  "{key}": {json.dumps(group[key])},\n' for key in ("source", "what"))
        lines = ",\n".join(
            f'   "{name}": {json.dumps(values)}' for name, values in group["figures"].items()
        )
        parts.append(f'{{\n{about}  "figures": {{\n{lines}\n  }}\n }}')
    return "[\n " + ",\n ".join(parts) + "\n]\n"


if __name__ == "__main__":
    groups = json.loads(ACCURACIES.read_text())
    groups[0]["figures"] = figures_of(Path(sys.argv[1]))
    ACCURACIES.write_text(written(groups))
    print(ACCURACIES)
