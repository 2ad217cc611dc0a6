"""The quickstart over several seeds: python experiments/quickstart.py --out=/tmp/quickstart

Trains configs/quickstart.py once for each seed, one after another, and prints the table of
README.md: test accuracy, and what its mean and standard deviation over the seeds are.
"""

import argparse
import statistics
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.jobs import Job, accuracies_of

CONFIG = f"--config={Path(__file__).parents[1] / 'configs' / 'quickstart.py'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs; finished ones are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()

    out = arguments.out.absolute()
    jobs = {seed: Job(out / f"seed{seed}", (CONFIG, f"--config.seed={seed}")) for seed in arguments.seeds}
    try:
        accuracies = list(accuracies_of(jobs).values())
    except UserError as error:
        parser.exit(2, f"error: {error}\n")

    print("\n| seed | test accuracy |\n|---|---|")
    for seed, accuracy in zip(arguments.seeds, accuracies, strict=True):
        print(f"| {seed} | {accuracy:.2%} |")
    deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    print(f"| mean | {statistics.mean(accuracies):.2%} ± {100 * deviation:.2f} |")


if __name__ == "__main__":
    main()
