"""Tries invalid values of all config options: python -m tests.system.fuzz --out=DIR

Each case is a run of `vit_jax.main` in its own process. One config value is replaced by a negative
or huge number, zero, nan, infinity, a word, an empty text or an empty tuple. The run must either
print one line with an error and exit with code 2, or end normally. A traceback, another exit code,
or a run that exceeds --seconds is a fault. The program prints a table of the outcomes.
`DIR/cases.jsonl` contains a line for each case, and a second start continues after the last one.
`--keys=data` only tries options whose names begin with "data".
"""

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conftest import FAST_COMPILE
from tests.system.conftest import ROOT, SMALL
from vit_jax.config import VALUES

HOSTILE = {
    int: ("-1", "0", "1", "3", "1000000000", "1" + 30 * "0", "1.5", "nan", "x", ""),
    float: ("-1", "0", "1e-30", "1e30", "1", "nan", "inf", "-inf", "x", ""),
    str: ("", "x", "../..", "-1", "nan", "x" * 5000, "\N{SNOWMAN}\n\t"),
    bool: ("True", "False", "7", "maybe", ""),
    tuple: (
        "()",
        "(0,)",
        "(-1,)",
        "(0,0)",
        "(-1,2)",
        "(1e30,1e30)",
        "('nan',)",
        "('x',)",
        "(1,1)",
        "5",
        "x",
        "",
    ),
}
# Further options that are set so that the tested value is used, by the beginning of its name.
BESIDE = {
    "": (),
    "model.resnet": ("model.name=BiT-R50x1", "model.resnet_blocks=(1,)", "model.resnet_width=1"),
    "model.axial": ("model.name=BiT-R50x1", "model.resnet_blocks=(1,)", "model.resnet_width=1"),
    "model.position_at": ("model.position=2d",),
    "model.rope_grid": ("model.rope=eva02",),
    "data.crop_resize": ("data.crop=square",),
    "data.num_classes": ("data.source=synthetic",),
    "augment.": ("augment.mixup=0.2",),
    "finetune.lora_rank": ("finetune.train=lora",),
    "mae.": ("objective.name=mae", "mae.decoder_dim=16", "mae.decoder_depth=1"),
    "masked_patch.target": ("objective.name=masked_patch",),
    "optimizer.average_from": ("optimizer.average=0.9",),
    "fewshot.": (
        "fewshot.every=2",
        "fewshot.sets=('digits:',)",
        "fewshot.shots=(1,)",
        "fewshot.seeds=(0,)",
    ),
    "knn.": ("knn.every=2", "knn.sets=('digits:',)"),
}
OBJECTIVE = ("mae.decoder_heads=2",)
SHORT = (
    "steps=2",
    "optimizer.warmup_steps=1",
    "log_every=1",
    "checkpoint.every=2",
    "evaluate_every=2",
)


def cases(prefix: str) -> list[tuple[str, str]]:
    """Returns pairs of an option's name and the text of its value."""
    return [
        (key, text)
        for key, value in VALUES.items()
        if key.startswith(prefix)
        for text in dict.fromkeys(HOSTILE[value.rule.kind])
    ]


def arguments(key: str, text: str, workdir: Path) -> list[str]:
    """Returns the command line of a short run with one value replaced."""
    start = max((start for start in BESIDE if key.startswith(start)), key=len)
    beside = [*SHORT, *BESIDE[start], *(OBJECTIVE if start.startswith("objective.") else ())]
    if start in ("model.resnet", "model.axial"):
        given = [flag for flag in SMALL if "model." not in flag]
    else:
        given = [*SMALL]
    return [
        *given,
        f"--workdir={workdir}",
        *(f"--config.{one}" for one in beside),
        f"--config.{key}={text}",
    ]


def run_case(given: list[str], output: str) -> None:
    """Runs the command in this process, with its output in a file."""
    from vit_jax import command, main

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    sys.argv = ["vit_jax.main", *given]
    sys.modules["__main__"].__doc__ = main.__doc__
    command.run(main.main)


def outcome(code: int | None, output: str) -> str:
    """Returns the outcome of a case: `refused`, `ran`, or the kind of the fault."""
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    if code is None:
        return "HUNG"
    if "Traceback (most recent call last)" in output:
        return "TRACEBACK"
    if code == 0:
        return "ran"
    if code == 2 and len(errors) == 1 and output.rstrip().splitlines()[-1] == errors[0]:
        return "refused"
    return f"EXIT {code}, {len(errors)} lines"


def try_case(context, folder: Path, key: str, text: str, seconds: float) -> dict:
    """Runs one case, and returns its row of the table."""
    own = folder / str(time.monotonic_ns())
    own.mkdir()
    started, output = time.monotonic(), own / "output"
    process = context.Process(
        target=run_case, args=(arguments(key, text, own / "run"), str(output))
    )
    process.start()
    process.join(seconds)
    if process.exitcode is None:  # A long run, for example of 10^9 steps, stops at a signal.
        process.terminate()
        process.join(60)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    said = output.read_text(errors="replace") if output.exists() else ""
    shutil.rmtree(own, ignore_errors=True)
    last = said.rstrip().splitlines()[-1][:300] if said.strip() else ""
    row = dict(
        key=key,
        text=text[:40],
        outcome=outcome(code, said),
        seconds=round(time.monotonic() - started, 1),
    )
    return row | dict(last=last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keys", default="", help="only values whose names begin so")
    parser.add_argument(
        "--seconds",
        type=float,
        default=180,
        help="after which a case gets SIGTERM; 60 more, and it hangs",
    )
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1)), help="cases at once"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_COMPILE, "PYTHONPATH": str(ROOT)}
    os.environ["XDG_CACHE_HOME"] = str(given.out.absolute() / "cache")
    table = given.out / "cases.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []
    done = {(row["key"], row["text"]) for row in rows}
    left = [case for case in cases(given.keys) if (case[0], case[1][:40]) not in done]
    # Modules are imported once, in the process from which the cases are forked.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vit_jax.main", "vit_jax.runs.loop"])
    began = time.monotonic()

    def one(case):
        return try_case(context, given.out, *case, given.seconds)

    with (
        ThreadPoolExecutor(given.jobs) as pool,
        table.open("a") as file,
        contextlib.suppress(KeyboardInterrupt),
    ):
        for number, row in enumerate(pool.map(one, left), 1):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
            if row["outcome"] not in ("refused", "ran"):
                print(f"{row['key']}={row['text']!r}: {row['outcome']}: {row['last']}", flush=True)
            if number % 25 == 0:
                rest = (time.monotonic() - began) / number * (len(left) - number)
                print(f"{number} of {len(left)} cases, {rest / 60:.0f} min left", flush=True)
    counts = collections.Counter(
        row["outcome"] for row in rows if row["key"].startswith(given.keys)
    )
    for name, count in counts.most_common():
        print(f"{count:6,} {name}")
    sys.exit(1 if counts.keys() - {"refused", "ran"} else 0)


if __name__ == "__main__":
    main()
