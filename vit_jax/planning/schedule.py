"""Schedules of a compiled TPU program, read from the text that the TPU compiler can write.

The compiler writes one file per operation with its final instruction bundles. A TPU core executes
one bundle per cycle if it does not wait. So the schedule of an operation, the number of bundles
times the iterations of the loops around them, is a lower bound of its cycles. It contains no
stalls, such as waits for memory, and no overlap with other operations.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from vit_jax.planning.hlo import UNKNOWN_LOOP, Operation

_PASS = "final_bundles"
_BUNDLE = re.compile(r"^ *0(?:x[0-9a-f]+)? +(?:[A-Z]{2})?:", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel \(!?(%p\w+)\) target = \$region(\d+)")
# `exit` marks the test of a loop that the compiler pipelines over blocks of an operation.
_TEST = r" = scmp\.(ge|gt)\.s32\.totalorder %\w+, (\d+)\b(?P<exit> /\* loop exit test)?"
PIPELINE = 2  # Iterations of a pipelined loop in which the computation is skipped.


@contextlib.contextmanager
def dumped_schedules() -> Iterator[Path]:
    """Context in which the TPU compiler writes schedules to the temporary folder that is yielded.

    The process must not have loaded libtpu before, because libtpu reads its flags only once.
    """
    given = os.environ.get("LIBTPU_INIT_ARGS")
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        dump += f" --xla_jf_dump_llo_pass_label_regex=^{_PASS}$"
        os.environ["LIBTPU_INIT_ARGS"] = f"{given or ''} {dump}".strip()
        try:
            yield Path(folder)
        finally:
            if given is None:
                del os.environ["LIBTPU_INIT_ARGS"]
            else:
                os.environ["LIBTPU_INIT_ARGS"] = given


def take_schedules(folder: Path) -> dict[str, int]:
    """Returns the cycles of the schedule of each operation by name, and empties the folder."""
    schedules = {}
    for path in sorted(folder.iterdir()):
        match = re.fullmatch(rf"\d+-(.*)-\d+-{_PASS}\.txt", path.name)
        if match and not match[1].endswith("schedule-analysis"):
            schedules[match[1]] = count_bundles(path.read_text())
        path.unlink()
    return schedules


def with_schedules(
    operations: Iterable[Operation], schedules: Mapping[str, int]
) -> list[Operation]:
    """Returns those operations that take time, with their schedules.

    The compiler writes equal operations once. An operation without a file therefore has the
    schedule of an operation with equal kind, cycles, FLOPs and memory traffic; of several such
    operations, one of the same part is preferred. Without such an operation, its schedule is
    `estimated_cycles`.

    Args:
      operations: result of `read_operations(text, every=True)`.
      schedules: result of `take_schedules`.
    """

    def features(operation: Operation) -> tuple:
        return tuple(getattr(operation, x) for x in ("kind", "cycles", "flops", "traffic"))

    operations = list(operations)
    written = [x for x in operations if x.name in schedules]
    equal = {features(x): schedules[x.name] for x in written}
    of_part = {(x.part, features(x)): schedules[x.name] for x in written}

    def schedule(operation: Operation) -> int:
        if operation.name in schedules:
            return schedules[operation.name]
        key = features(operation)
        return of_part.get((operation.part, key), equal.get(key, operation.cycles))

    scheduled = (replace(x, schedule=schedule(x)) for x in operations)
    return [x for x in scheduled if x.schedule or x.flops or x.sent or x.kind == UNKNOWN_LOOP]


def larger_cycles(operation: Operation, bytes_per_cycle: float) -> float:
    """Returns the larger of an operation's schedule and its memory traffic, in cycles of a step.

    The copies of an operation overlap with its computation, so it takes at least the larger of
    both. Stalls, overlaps between operations and asynchronous copies are not included.
    Traffic is overestimated where an operation reads or writes a slice of an array,
    as in loops over stacked layers.

    Args:
      operation: an operation with a schedule.
      bytes_per_cycle: the chip's memory bandwidth per cycle.
    """
    return operation.times * max(operation.schedule, operation.traffic / bytes_per_cycle)


def count_bundles(text: str) -> int:
    """Returns the number of bundles times the iterations of the loops around them.

    A loop ends with a branch back to the start of its region. Its iterations are the constant with
    which the branch's condition compares the counter. A loop that compares with a register is
    counted once. The outer loop over an operation's blocks is pipelined: one iteration copies the
    next block, computes a block and copies the previous result. The first and the last iteration
    only copy, so they are not counted.

    Args:
      text: content of one file of final bundles.
    """
    starts = [match.start() for match in _BUNDLE.finditer(text)]
    bundles = [text[i:j] for i, j in zip(starts, [*starts[1:], len(text)], strict=True)]
    regions = {
        region: i
        for i, bundle in enumerate(bundles)
        for region in re.findall(r"Start region (\d+)", bundle)
    }
    executions = [1] * len(bundles)
    for end, bundle in enumerate(bundles):
        for condition, region in _BRANCH.findall(bundle):
            start = regions.get(region, end + 1)
            if start <= end:
                iterations = _iterations(condition, bundles, start, end)
                for i in range(start, end + 1):
                    executions[i] *= iterations
    return sum(executions)


def _iterations(condition: str, bundles: list[str], start: int, end: int) -> int:
    """Returns the iterations of the loop that these bundles form, or 1 if they are unknown."""
    test = re.search(re.escape(condition) + _TEST, "".join(bundles[start : end + 1]))
    if test is None:
        return 1
    iterations = int(test[2]) + (test[1] == "gt")
    outer = bundles[start].partition("{")[0].count(">") == 1
    if test["exit"] and outer and iterations > PIPELINE:
        iterations -= PIPELINE
    return max(1, iterations)
