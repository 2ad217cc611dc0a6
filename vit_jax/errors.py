"""The one exception that is shown to a user without a traceback."""

import contextlib
import difflib
import errno
import os
import re
import select
import signal
import sys
from collections.abc import Iterable

# Failures of disks and file systems: full, read-only, not ours, damaged, or no longer there.
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
    """A mistake the user can mend: commands print it as one line and exit with code 2.

    The message says what was wrong, where, and what would be right. It is one line, whatever names
    of a file's own are in it.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


def mistake(error: BaseException) -> str | None:
    """The line for an error that the user can mend, or of a file system; None for a fault."""
    if isinstance(error, UserError):
        message = str(error)
    elif isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        message = f"{error.strerror}: {str(error.filename)[:100]}..."
    elif isinstance(error, OSError) and error.errno in OF_SYSTEM:
        message = (
            f"{error.strerror}: {error.filename or 'a file of the run'}; what was saved before is "
            "whole"
        )
    elif (asked := bytes_asked(error)) is not None:
        message = "out of memory" + (f": {asked / 2**30:,.1f} GiB were asked for" if asked else "")
        message += "; a smaller batch needs less (--batch_size, in training --config.batch_size)"
    else:
        return None
    return " ".join(message.split())


@contextlib.contextmanager
def readers_may_leave():
    """Ends the process without a traceback, as SIGPIPE would, where nobody reads its output: `|
    head`.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _unread(sys.stdout.fileno()):
            raise
        # Python would write what is left when it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _unread(descriptor: int) -> bool:
    """Is true of a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)  # Errors are told unasked.
    return bool(poll.poll(0))


def bytes_asked(error: BaseException) -> int | None:
    """Number of bytes that could not be had, 0 where an error does not say; None for one of another
    kind.
    """
    text = str(error)
    of_device = isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in text
    of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (isinstance(error, MemoryError) or of_device or of_system):
        return None
    if not (
        said := re.search(
            r"allocat\w+ ([\d.]+) ?(bytes|[kKMGTP]i?B)|Used ([\d.]+)([KMGT]) of", text
        )
    ):
        return 0
    amount, unit = (said[1], said[2]) if said[1] else (said[3], said[4])
    return int(float(amount) * 1024 ** " KMGTP".index(unit[0].upper().replace("B", " ")))


def as_text(path: str) -> str:
    """Returns a path as text that any file or terminal of UTF-8 takes: a byte that is none as
    `\\udce9`.
    """
    return path.encode("utf-8", "backslashreplace").decode()


def nearest(word: str, choices: Iterable[str]) -> str:
    """Ends an error message about an unknown `word`: the closest choice, or all of them."""
    choices = sorted(choices)
    spelled = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(word.casefold(), spelled, n=1, cutoff=0.5)
    return f"did you mean {spelled[close[0]]!r}?" if close else f"there are: {', '.join(choices)}"
