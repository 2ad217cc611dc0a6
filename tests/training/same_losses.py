"""Compares the losses of smoke runs in two checkouts, bit for bit.

    python -m tests.training.same_losses --before=CHECKOUT [--configs=quickstart,dino]

Each config runs for its two steps in this checkout and in the other one, each in its own process.
Every metric that is in both `metrics.jsonl` and does not measure time must be equal. The command
checks changes that should not affect training. `git worktree add CHECKOUT COMMIT` makes a checkout.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags

ROOT = Path(__file__).parents[2]
CONFIGS = ("quickstart", "vit_s16_i1k", "masked_patch_b16", "mae_b16", "fcmae", "dino", "dinov2")
CONFIGS += ("eva", "beit", "vqkd", "dvae", "swin", "convnext")
# Prefixes of the names of metrics that measure time.
TIMED = ("time/", "goodput", "train/images_per_second")

BEFORE = flags.DEFINE_string("before", None, "The other checkout.", required=True)
NAMES = flags.DEFINE_list("configs", list(CONFIGS), "Names of configs, without `:smoke`.")


def metrics_of(checkout: Path, config: str) -> list[dict]:
    """Runs a config's smoke version in a checkout and returns the rows of its metrics."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, "-m", "vit_jax.main", f"--workdir={workdir}"]
        command.append(f"--config={checkout}/configs/{config}.py:smoke")
        run = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise SystemExit(f"{config} failed in {checkout}:\n{run.stdout}{run.stderr}")
        lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{key: x for key, x in row.items() if not key.startswith(TIMED)} for row in rows]


def agree(before: dict, after: dict) -> bool:
    """Returns True if two rows have equal values of the metrics that both have."""
    return all(before[key] == after[key] for key in before.keys() & after.keys())


def main(argv: list[str]) -> None:
    del argv
    different = 0
    for config in NAMES.value:
        before, after = metrics_of(Path(BEFORE.value), config), metrics_of(ROOT, config)
        same = all(map(agree, before, after)) and len(before) == len(after)
        different += not same
        loss = after[-1].get("test/loss")
        print(f"{config:20} {'same' if same else 'DIFFERENT'}, test loss {loss}", flush=True)
        if not same:
            print(f"  before: {before}\n  after:  {after}")
    sys.exit(different > 0)


if __name__ == "__main__":
    app.run(main)
