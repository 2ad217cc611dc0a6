"""Runs all benchmarks, each in its own process, and keeps their figures as JSON files."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_jax.benchmarks.figures import Table, changes, numbers, read_record
from vit_jax.errors import UserError, nearest

_PEERS = "--against=onnxruntime,timm"
_TI = "--models=ViT-Ti/16"
# Arguments of each benchmark, the most important benchmark first; on a CPU with smaller sizes.
NAMES = (
    *("gpu", "train", "inference", "predict", "input", "serve", "tpu", "overhead", "objectives"),
    *("depth", "saving", "load", "resume", "fewshot", "memory", "crops"),
)
RUNS = dict.fromkeys(NAMES, ()) | {
    "train": ("--against=timm,vision_transformer,big_vision",),
    "inference": (_PEERS,),
    "predict": (_PEERS,),
    "serve": ("--seconds=15", "--against=onnxruntime"),
    "tpu": ("--against=vision_transformer,big_vision",),
}
ON_CPU = {name: (_TI, "--images=8") for name in ("train", "inference", "objectives", "depth")}
ON_CPU |= {"predict": (_TI,), "serve": (_TI,)}
PROGRAM = (sys.executable, "-m", "vit_jax.benchmark")


def measure(
    out: str | Path,
    minutes: float = math.inf,
    only: Sequence[str] = (),
    again: bool = False,
    more: Sequence[str] = (),
    runs: Mapping[str, Sequence[str]] = RUNS,
    program: Sequence[str] = PROGRAM,
    here: Mapping[str, Any] | None = None,
) -> None:
    """Runs the benchmarks that have no current figures in `out`, and prints the figures in `out`.

    Figures are current if commit, versions, machine and the benchmark's arguments are the same, and
    the checkout has no uncommitted changes.

    Args:
      out: folder with NAME.json of each benchmark.
      minutes: time limit; no benchmark starts after it.
      only: names of benchmarks; empty: all.
      again: also run benchmarks with current figures.
      runs: arguments of each benchmark, in the order of the runs.
      program: command that runs a benchmark, without the benchmark's name and arguments.
      here: the result of `figures.facts`; None: a new process returns it, because JAX would occupy
        the devices in this process.

    Raises:
      UserError: a name in `only` is unknown.
      SystemExit: a benchmark has failed.
    """
    for name in set(only) - set(runs):
        raise UserError(f"unknown benchmark {name!r} (--only); {nearest(name, runs)}")
    here = here or json.loads(_run([sys.executable, "-m", "vit_jax.benchmarks.figures"]).stdout)
    ends, results = time.monotonic() + 60 * minutes, {}
    for name in filter(only.__contains__, runs) if only else runs:
        sizes = ON_CPU.get(name, ()) if here["platform"] == "cpu" else ()
        arguments = [name, *runs[name], *sizes, *more]
        if not again and _is_current(read_record(out, name), arguments, here):
            results[name] = "not repeated, the figures are current (--again)"
        elif reason := _reason_to_skip(name, here, ends):
            results[name] = f"skipped: {reason}"
        else:
            print(f"\n## {name}\n", flush=True)
            done = _run([*program, *arguments, f"--out={out}"], stdout=None)
            results[name] = _result(done, read_record(out, name))
    print_figures(out, runs, here)
    print("\n" + "\n".join(f"{name}: {result}" for name, result in results.items()))
    if any(result.startswith("failed") for result in results.values()):
        sys.exit(1)


def _run(command: Sequence[str], stdout: int | None = subprocess.PIPE):
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    return done


def _reason_to_skip(name: str, here: Mapping, ends: float) -> str:
    if name == "gpu" and here["platform"] != "gpu":
        return "JAX finds no GPU"
    return "no time is left (--minutes)" if time.monotonic() >= ends else ""


def _is_current(record: Mapping | None, arguments: Sequence[str], here: Mapping) -> bool:
    return (
        record is not None
        and record["complete"]
        and record["arguments"] == arguments
        and not changes(record, here)
        and not here["commit"].endswith("changed")
    )


def _result(done: subprocess.CompletedProcess, record: Mapping | None) -> str:
    """Returns a word about a benchmark that has ended, and the reason if figures are missing."""
    if done.returncode:
        reason = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
        word = "skipped" if done.returncode == 2 else "failed"  # 2 is a user error.
        return f"{word}: {reason.removeprefix('error: ')}"
    figures = record["figures"] if record else {}
    rows = ((name, row, key) for name, row in figures.items() for key in ("reason", "error"))
    reasons = [f"{name}, {row[key]}" for name, row, key in rows if key in row]
    return "; ".join(["measured", *reasons])


def print_figures(out: str | Path, names: Iterable[str], here: Mapping[str, Any]) -> None:
    """Prints a table of the figures in a folder, with date, and `old` for outdated figures.

    `here` is the result of `figures.facts` now.
    """
    print()
    table = Table("figure", {"value": ",.4g", "date": "", "state": ""})
    for name in names:
        if record := read_record(out, name):
            old = changes(record, here)
            state = f"old: other {', '.join(old)}" if old else ""
            for figure, value in numbers(name, record["figures"]):
                table.row(figure, value, record["date"], state)
