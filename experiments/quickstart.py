"""The quickstart over several seeds: python experiments/quickstart.py --out=/tmp/quickstart

Trains configs/quickstart.py once for each seed, one after another, and prints the table of
README.md: test accuracy, and what its mean and standard deviation over the seeds are.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs; finished ones are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()

    accuracies = []
    for seed in arguments.seeds:
        workdir = arguments.out / f"seed{seed}"
        command = [sys.executable, "-m", "vit_jax.main", "--config=configs/quickstart.py"]
        subprocess.run([*command, f"--config.seed={seed}", f"--workdir={workdir}"], check=True)
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        accuracies.append([row["test/accuracy"] for row in rows if "test/accuracy" in row][-1])

    print("\n| seed | test accuracy |\n|---|---|")
    for seed, accuracy in zip(arguments.seeds, accuracies, strict=True):
        print(f"| {seed} | {accuracy:.2%} |")
    deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    print(f"| mean | {statistics.mean(accuracies):.2%} ± {100 * deviation:.2f} |")


if __name__ == "__main__":
    main()
