"""The one exception that is shown to a user without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake the user can mend: commands print it as one line and exit with code 2.

    The message says what was wrong, where, and what would be right.
    """


def nearest(word: str, choices: Iterable[str]) -> str:
    """Ends an error message about an unknown `word`: the closest choice, or all of them."""
    choices = sorted(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(choices)}"
