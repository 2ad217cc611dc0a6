"""`UserError`, which commands print without a traceback, and functions for error messages."""

import contextlib
import difflib
import errno
import os
import re
import select
import signal
import sys
from collections.abc import Iterable

# Error numbers of disks and file systems: full, read-only, no permission, damaged, or removed.
OF_SYSTEM = {
    getattr(errno, name)
    for name in (
        *(
            "ENOSPC",
            "EDQUOT",
            "EROFS",
            "EACCES",
            "EPERM",
            "EIO",
            "ESTALE",
            "EREMOTEIO",
            "ENOTCONN",
            "ENODEV",
        ),
        *("ENXIO", "ETIMEDOUT", "EHOSTDOWN", "EMFILE", "ENFILE"),
    )
    if hasattr(errno, name)
}


class UserError(ValueError):
    """An error that the user can correct. Commands print its message and exit with code 2.

    The message describes the error, names the option or the file, and lists the allowed values. It
    is always a single line: line breaks in file names are replaced by spaces.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


def mistake(error: BaseException) -> str | None:
    """Returns a command's message for user, file system and memory errors; None: a bug."""
    if isinstance(error, UserError):
        message = str(error)
    elif isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        message = f"{error.strerror}: {str(error.filename)[:100]}..."
    elif isinstance(error, OSError) and error.errno in OF_SYSTEM:
        message = (
            f"{error.strerror}: {error.filename or 'a file of the run'}; earlier checkpoints "
            "are complete"
        )
    elif (asked := requested_bytes(error)) is not None:
        message = "out of memory" + (f": {asked / 2**30:,.1f} GiB were requested" if asked else "")
        message += "; a smaller batch needs less (--batch_size, in training --config.batch_size)"
    else:
        return None
    return " ".join(message.split())


@contextlib.contextmanager
def readers_may_leave():
    """Context manager that exits quietly if standard output is a closed pipe (`command | head`)."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _unread(sys.stdout.fileno()):
            raise
        # Replaces standard output by /dev/null. Otherwise Python would flush the remaining output
        # to the closed pipe at exit, and report a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _unread(descriptor: int) -> bool:
    """Returns True if the pipe with the file descriptor `descriptor` has no reader any more."""
    poll = select.poll()
    poll.register(descriptor, 0)  # With the mask 0, `poll` only reports errors.
    return bool(poll.poll(0))


def requested_bytes(error: BaseException) -> int | None:
    """Returns the bytes of a failed allocation; 0: not in the message; None: another error."""
    text = str(error)
    of_device = isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in text
    of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (isinstance(error, MemoryError) or of_device or of_system):
        return None
    if not (
        match := re.search(
            r"allocat\w+ ([\d.]+) ?(bytes|[kKMGTP]i?B)|Used ([\d.]+)([KMGT]) of", text
        )
    ):
        return 0
    amount, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
    return int(float(amount) * 1024 ** " KMGTP".index(unit[0].upper().replace("B", " ")))


def as_text(path: str) -> str:
    r"""Returns a path as valid UTF-8. Invalid bytes are escaped, for example as `\udce9`."""
    return path.encode("utf-8", "backslashreplace").decode()


def nearest(word: str, choices: Iterable[str]) -> str:
    """Returns a hint for an unknown word: the most similar choice, or otherwise all choices."""
    choices = sorted(choices)
    spelled = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(word.casefold(), spelled, n=1, cutoff=0.5)
    return f"did you mean {spelled[close[0]]!r}?" if close else f"there are: {', '.join(choices)}"
