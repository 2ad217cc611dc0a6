"""The quickstart over several seeds: python experiments/quickstart.py --out=/tmp/quickstart_seeds

Trains configs/quickstart.py once for each seed, one after another, and prints the table of
README.md: test accuracy, and what its mean and standard deviation over the seeds are.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from vit_jax import command
from vit_jax.runs.jobs import Job, accuracies_of

CONFIG = f"--config={Path(__file__).parents[1] / 'configs' / 'quickstart.py'}"


def report(out: Path, seeds: Sequence[int]) -> None:
    """A table of the runs' test accuracies.

    Raises:
      UserError: a run failed.
    """
    jobs = {seed: Job(out / f"seed{seed}", (CONFIG, f"--config.seed={seed}")) for seed in seeds}
    found = accuracies_of(jobs)
    accuracies = list(found.values())
    print("\n| seed | test accuracy |\n|---|---|")
    for seed, accuracy in found.items():
        print(f"| {seed} | {accuracy:.2%} |")
    deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    print(f"| mean | {statistics.mean(accuracies):.2%} ± {100 * deviation:.2f} |")


if __name__ == "__main__":
    command.run_experiment(report, seeds=dict(type=int, nargs="+", default=[0, 1, 2]))
