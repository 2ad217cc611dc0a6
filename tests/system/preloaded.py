"""A process that imports the libraries of commands once, and forks a process for each command.

`python -m MODULE` spends seconds on imports, but a fork of this process has the libraries already.
The fork runs the module like `python -m`, from parsing the flags to the exit of the interpreter.

Requests and responses are lines of JSON on standard input and output.
"""

import gc
import json
import os
import runpy
import sys
import threading

# Commands are not imported here, because each command defines its own flags.
LIBRARIES = ("vit_jax.runs.loop", "vit_jax.evaluation.imagenet", "vit_jax.planning.estimate")
# Each run imports these for its log and its report.
LIBRARIES += ("tensorboard.summary.writer.record_writer", "vit_jax.inspection.figures")


def main() -> None:
    for name in LIBRARIES:
        __import__(name)
    # A fork has only one of the threads.
    assert threading.active_count() == 1, threading.enumerate()
    # The garbage collectors of the forks skip the imported objects, and do not copy their memory
    # pages.
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            become(**request)
            return
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"returncode": os.waitstatus_to_exitcode(status)}), flush=True)


def become(module: str, arguments: list[str], cwd: str, out: str, err: str) -> None:
    """Runs the command in this process, with its output in two files."""
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
