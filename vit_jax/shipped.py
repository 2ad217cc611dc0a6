"""Configs and experiments that come with the package.

In a checkout their folders are next to the package. In an installed package they are inside it.
"""

from pathlib import Path

from vit_jax.errors import UserError

PACKAGE = Path(__file__).parent
FOLDERS = ("configs", "experiments")
INSTALLED = (PACKAGE / "configs").is_dir()  # False in a checkout.
CONFIGS, EXPERIMENTS = ((PACKAGE if INSTALLED else PACKAGE.parent) / name for name in FOLDERS)


def config_names() -> list[str]:
    """Returns the names of all configs, such as `vit_l16_i21k`."""
    return sorted(path.stem for path in CONFIGS.glob("*.py"))


def demand_checkout(start: str) -> None:
    """Raises UserError if the package is not in a checkout of the project's repository.

    Args:
      start: start of the error message, such as "record writes into experiments/records".

    Raises:
      UserError: the package is installed without the project's files.
    """
    if INSTALLED:
        raise UserError(
            f"{start}, which an installed package lacks: run it in a checkout of the project"
        )
