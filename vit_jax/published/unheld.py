"""Unsupported published models that resemble supported models, with the reasons."""

import re

from vit_jax.errors import UserError

# Keys: regular expressions for unsupported models, by their authors' names or by timm's names of
# the architectures. Values: the reasons why they are unsupported.
UNHELD = {
    r"PE-core-G(/\d+)?|vit_pe_core_gigantic\w*": (
        "the MLP of its attention pooling has another width than those of its layers"
    ),
    r"Sapiens2\S*|vit_\w+_sapiens2": "several of its heads share keys and values",
    r"vit_(dwee|dlittle)_\w+": "its layers are of differential attention",
    r"vit_dpwee_\w+": "its layers are parallel branches with differential attention",
    r"vit_pwee_\w+|vit_\w+_\d+x2_\w+": "its layers are parallel branches",
}


def refuse_unheld(name: str) -> None:
    """Raises UserError for the name of an unsupported model.

    A prefix `timm/` and a tag after a dot are ignored.
    """
    bare = re.sub(r"\.\w+$", "", name.removeprefix("timm/"))
    for pattern, reason in UNHELD.items():
        if re.fullmatch(pattern, bare):
            raise UserError(f"{name} is unsupported: {reason}")
