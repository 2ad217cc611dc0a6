"""Errors about data sets with the flags of the command `evaluate` instead of config options."""

import contextlib
import re
from collections.abc import Iterator

from vit_jax.errors import UserError

# Patterns of a run's config options in errors of data sources, and the flags in their place.
FLAGS = (
    (r"(?:--config\.)?\bdata\.(caption_key|label_key)\b", r"--\1"),
    (r"\bdata\.train_split='([^']*)' and data\.test_split='([^']*)'", r"--set=KIND:PATH@\1,\2"),
    (r"\bdata\.train_split and data\.test_split\b", "--set=KIND:PATH@TRAIN,TEST"),
    (r"\bdata\.train_split=(\w+)", r"--set=KIND:PATH@\1,TEST"),
    (r"\(data\.path\b", "(--set=KIND:PATH"),
    (r"(?<=folder of the data, )--config\.data\.path=", "--set=KIND:"),
    (r"\(data\.source=(\w+)\)", r"(--set=\1:PATH)"),
    (
        r"\bgive --config\.data\.num_classes\b",
        "evaluate a segmentation run, which has the number of its classes",
    ),
)


@contextlib.contextmanager
def naming_flags() -> Iterator[None]:
    """Context that replaces config options in errors of data sources by flags of `evaluate`."""
    try:
        yield
    except UserError as error:
        text = str(error)
        for option, flag in FLAGS:
            text = re.sub(option, flag, text)
        error.args = (text,)
        raise
