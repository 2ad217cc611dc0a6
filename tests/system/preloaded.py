"""A process that has imported what commands import, and forks one process for each command that a
test runs.

`python -m MODULE` spends seconds on imports; a fork of this process has them already. It then runs
the module as `python -m` does, from its flags to the end of the interpreter.

Requests and answers are lines of JSON on standard input and output.
"""

import gc
import json
import os
import runpy
import sys
import threading

# No command among them: a command's flags are its own.
LIBRARIES = ("vit_jax.runs.loop", "vit_jax.evaluation.imagenet", "vit_jax.planning.estimate")
# Imported by each run, for its log and its report.
LIBRARIES += ("tensorboard.summary.writer.record_writer", "vit_jax.inspection.figures")


def main() -> None:
    for name in LIBRARIES:
        __import__(name)
    assert threading.active_count() == 1, threading.enumerate()  # A fork has but one of them.
    gc.freeze()  # No fork looks for cycles in what was imported, and copies the pages by that.
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            become(**request)
            return
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"returncode": os.waitstatus_to_exitcode(status)}), flush=True)


def become(module: str, arguments: list[str], cwd: str, out: str, err: str) -> None:
    """Runs the command in this process, with what it prints in two files."""
    os.setsid()
    os.chdir(cwd)
    for descriptor, path in ((0, os.devnull), (1, out), (2, err)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
