"""The one exception that is shown to a user without a traceback."""

import difflib
import errno
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake the user can mend: commands print it as one line and exit with code 2.

    The message says what was wrong, where, and what would be right.
    """


def mistake(error: BaseException) -> str | None:
    """The line for an error that the user can mend, or a full disk; None for a fault."""
    if isinstance(error, UserError):
        message = str(error)
    elif isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
    ):
        message = f"{error.strerror}: {error.filename or 'a file of the run'}; what was saved before is whole"
    else:
        return None
    return " ".join(message.split())


def nearest(word: str, choices: Iterable[str]) -> str:
    """Ends an error message about an unknown `word`: the closest choice, or all of them."""
    choices = sorted(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(choices)}"
