"""Kills a training run many times: python -m tests.system.soak --kills=50 --out=DIR

A run of two processes over loopback is killed with SIGKILL and started again. Either one process or
all of them are killed, at random moments of the start, the steps and the checkpoints. After the
given number of kills the run may end. Each image has its own class, so the labels of the steps'
batches identify the images that training used. There are two such runs. One always has two
processes, and must have the same parameters as an undisturbed run. The other's number of processes
changes between 1, 2 and 4.
"""

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

from tests.system.conftest import ROOT, SMALL, free_port, parameters

IMAGES, BATCH, SAVE_EVERY = 320, 32, 7
LEAVE_SECONDS = 30  # The other processes end within this time after one of them died.


class Soak:
    """One run and its kills.

    Args:
      kills: the number of kills.
      counts: numbers of processes that a start may have; the first is the usual one.
      log: a function that is called with a row of facts on each kill.
    """

    def __init__(self, folder: Path, kills: int, counts: tuple[int, ...], seed: int, log=print):
        self.folder, self.kills, self.counts, self.log = folder, kills, counts, log
        self.steps = (15 * kills + 20) // 10 * 10
        self.random = random.Random(seed)
        self.workdir = folder / "run"
        self.starts: list[list[Path]] = []  # For each start, the records of its processes.
        self.rows: list[dict] = []

    def run(self) -> dict:
        """Kills and restarts the run until it has ended, and returns a summary."""
        self.folder.mkdir(parents=True)
        began, startup = time.monotonic(), 10.0
        while len(self.rows) < self.kills:
            usual = not self.starts or self.random.random() < 0.5
            processes = self._start(
                self.counts[0] if usual else self.random.choice(self.counts), pace=0.05
            )
            try:
                startup = self._kill_at_random(processes, startup)
            finally:
                for process in processes:
                    process.kill()
            left = (time.monotonic() - began) / len(self.rows) * (self.kills - len(self.rows))
            row = self.rows[-1]
            self.log(
                f"kill {len(self.rows)}/{self.kills}: {row['killed']} of {row['processes']} "
                f"processes, {row['moment']}, at step {row['step']}/{self.steps}; {left / 60:.0f} "
                "min left"
            )
        last = self._start(self.counts[0], pace=0.0)
        assert [process.wait(600) for process in last] == [0] * len(last), self._log()
        return {
            "kills": len(self.rows),
            "steps": self.steps,
            "epochs": self.steps * BATCH // IMAGES,
            "seconds": round(time.monotonic() - began),
            "moments": collections.Counter(row["moment"] for row in self.rows),
            "processes": collections.Counter(row["processes"] for row in self.rows),
            "slowest_end_of_the_others_seconds": max(
                row["others_ended_seconds"] for row in self.rows
            ),
            "steps_made": sum(len(whole_lines(records[0])) for records in self.starts),
            "epochs_with_every_image_once": self.epochs_seen_once(),
        }

    def undisturbed(self) -> Path:
        """Returns the workdir of the same run without kills, with the usual number of processes."""
        other = Soak(self.folder / "undisturbed", 0, self.counts, 0)
        other.folder.mkdir(parents=True)
        other.steps = self.steps
        processes = other._start(self.counts[0], pace=0.0)
        assert [process.wait(600) for process in processes] == [0] * len(processes), other._log()
        return other.workdir

    def epochs_seen_once(self) -> int:
        """Returns the number of epochs in which training used every image once.

        If a step was repeated, only its last repetition counts.
        """
        seen = {}
        for records in self.starts:
            parts = [
                {int(line.split()[0]): line.split()[1:] for line in whole_lines(path)}
                for path in records
            ]
            for step in set().union(*parts):
                # A step that only some processes began was not finished: a later start repeats it.
                seen[step] = [int(number) for part in parts for number in part.get(step, ())]
        assert sorted(seen) == list(range(1, self.steps + 1)), "steps are missing"
        images = [number for step in sorted(seen) for number in seen[step]]
        epochs = [sorted(images[first : first + IMAGES]) for first in range(0, len(images), IMAGES)]
        return sum(epoch == list(range(IMAGES)) for epoch in epochs)

    def _start(self, count: int, pace: float) -> list[subprocess.Popen]:
        arguments = [
            *SMALL,
            "--config.data.source=folder",
            f"--config.data.path={images(self.folder.parent / 'images')}",
            f"--config.batch_size={BATCH}",
            f"--config.steps={self.steps}",
            "--config.log_every=10",
            f"--config.checkpoint.every={SAVE_EVERY}",
            "--config.evaluate_every=49",
            f"--workdir={self.workdir}",
        ]
        address = f"--coordinator=localhost:{free_port()}"
        records, processes = [], []
        for index in range(count):
            several = [address, f"--processes={count}", f"--process={index}"] if count > 1 else []
            records.append(self.folder / f"start{len(self.starts):03d}-{index}.txt")
            cache = {"XDG_CACHE_HOME": str(self.folder.parent / "cache"), "JAX_PLATFORMS": "cpu"}
            with records[-1].with_suffix(".log").open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.system.recorded", *arguments, *several],
                        cwd=ROOT,
                        env=os.environ | cache | {"RECORD": str(records[-1]), "PACE": str(pace)},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        self.starts.append(records)
        return processes

    def _kill_at_random(self, processes: list[subprocess.Popen], startup: float) -> float:
        """Kills processes at a random moment; returns the time from the start to step 2."""
        began = time.monotonic()
        kind = self.random.choices(["starting", "training", "saving"], [3, 5, 2])[0]
        if kind == "starting":
            # Fewer processes start faster. This condition limits the steps as for other kills.
            self._wait(
                processes, self.random.uniform(0, startup), lambda: self._begun() > 4 * SAVE_EVERY
            )
        else:
            # The record contains the first step before the step is compiled.
            self._wait_for_steps(processes, 2)
            startup = time.monotonic() - began
            if kind == "training":
                self._wait_for_steps(processes, 2 + self.random.randint(0, 4 * SAVE_EVERY))
                self._wait(processes, self.random.uniform(0, 0.1), lambda: False)
            else:
                writing = lambda: any(self.workdir.glob("checkpoints/*.orbax-checkpoint-tmp*"))  # noqa: E731
                self._wait(processes, 20, writing)
                self._wait(processes, self.random.uniform(0, 0.1), lambda: not writing())
        for process in processes:
            assert process.poll() is None, (
                f"a process exited before its kill with {process.returncode}: {self._log()}"
            )
        # The other processes cannot notice the death of a process that is not connected yet, and
        # would wait for it.
        every = kind == "starting" or self.random.random() < 0.5
        victims = processes if every else [self.random.choice(processes)]
        for process in victims:
            process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        for process in processes:
            process.wait(LEAVE_SECONDS)
        begun = max((whole_lines(record) for record in self.starts[-1]), key=len)
        self.rows.append(
            {
                # The first step is still being compiled.
                "moment": "starting"
                if len(begun) < 2
                else "training"
                if kind == "starting"
                else kind,
                "step": int(begun[-1].split()[0]) if begun else 0,
                "processes": len(processes),
                "killed": len(victims),
                "others_ended_seconds": round(time.monotonic() - killed, 1),
            }
        )
        return startup

    def _begun(self) -> int:
        """Returns the number of steps that the processes have begun since their start."""
        return max(len(whole_lines(record)) for record in self.starts[-1])

    def _wait_for_steps(self, processes: list[subprocess.Popen], steps: int) -> None:
        self._wait(
            processes, 300, lambda: all(len(whole_lines(r)) >= steps for r in self.starts[-1])
        )

    def _wait(self, processes: list[subprocess.Popen], seconds: float, reached) -> None:
        until = time.monotonic() + seconds
        while (
            time.monotonic() < until and not reached() and all(p.poll() is None for p in processes)
        ):
            time.sleep(0.002)

    def _log(self) -> str:
        return "\n".join(r.with_suffix(".log").read_text()[-2000:] for r in self.starts[-1])


def images(folder: Path) -> Path:
    """Returns a folder of tiny images, each with its own class."""
    if not folder.exists():
        rng = np.random.default_rng(0)
        for split, count in (("train", IMAGES), ("test", BATCH)):
            for number in range(count):
                path = folder / split / f"{number:03d}" / "0.png"
                path.parent.mkdir(parents=True)
                Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    return folder


def whole_lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


def same_parameters(one: Path, other: Path) -> bool:
    return all(
        np.array_equal(a, b) for a, b in zip(parameters(one), parameters(other), strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="of each of the two runs")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    out = chosen.out.absolute()
    results = {}
    for name, counts in {"two processes": (2,), "1, 2 or 4 processes": (2, 1, 4)}.items():
        print(f"{name}:", flush=True)
        soak = Soak(
            out / name.replace(",", "").replace(" ", "_"), chosen.kills, counts, chosen.seed
        )
        results[name] = soak.run()
        if len(counts) == 1:
            same = same_parameters(soak.workdir, soak.undisturbed())
            results[name]["parameters_as_undisturbed"] = same
        (out / "soak.json").write_text(json.dumps(results, indent=2) + "\n")
    for key in results["two processes"]:
        values = [
            str(dict(v) if isinstance(v := r.get(key, ""), dict) else v) for r in results.values()
        ]
        print(f"{key:36}" + "".join(f"{value:60}" for value in values))
    whole = all(r["epochs_with_every_image_once"] == r["epochs"] for r in results.values())
    sys.exit(0 if whole and results["two processes"]["parameters_as_undisturbed"] else 1)


if __name__ == "__main__":
    main()
