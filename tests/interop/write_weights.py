"""Writes `vit_jax/published/weights.tsv` of timm's registry: python -m tests.interop.write_weights

A line is a repository of timm's on the Hugging Face Hub: our name of the model, timm's tag of the weights,
the repository, the images' side in pixels, the classes (0: none), the licence, and the GELU that the weights
were trained with where the repository means another one (else `-`): of a CLIP that was trained with quick
GELU timm has two names and one repository, which bears the name of exact GELU.
"""

import re

import numpy as np

from tests.conftest import name_missing_operators
from tests.interop.coverage_page import BIT, MODULES
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import complete, model_name
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.timm import LIBRARY
from vit_jax.models import parse_name
from vit_jax.published.weights import FILE, HEADER


def our_name(timm, torch, architecture: str) -> str | None:
    """Our name of an architecture of timm's, by what its tensors and its name say; None if it is not read."""
    with torch.device("meta"):
        model = timm.create_model(architecture)
    tensors = {
        name: Tensor(tuple(x.shape), np.dtype(np.float32), lambda: None)
        for name, x in model.state_dict().items()
    }
    size = list(model.pretrained_cfg["input_size"])
    config = dict(architecture=architecture, pretrained_cfg=dict(input_size=size))
    if isinstance(pooling := getattr(model, "global_pool", None), str):
        config["global_pool"] = pooling
    try:
        tensors, config = LIBRARY.prepare(None, tensors, config)
        form = LIBRARY.read_format(config, tensors)
        values, _ = form.arguments(form.rename(tensors, config), config, None)
        name = model_name(form.model, complete(form.model, values))
        # The one family whose models are another's in all but their training.
        return name.replace("BEiT-", "BEiTv2-") if architecture.startswith("beitv2_") else name
    except UserError:
        return None


def is_name(text: str | None) -> bool:
    """True for a name by which a model can be made, and not for words about its sizes."""
    try:
        return text is not None and bool(parse_name(text))
    except UserError:
        return False


def quick_repositories(timm) -> dict[str, str]:
    """The repositories of CLIPs that were trained with quick GELU, by timm's full names of these models."""
    found = {}
    for full in timm.list_models("vit_*_clip_quickgelu_*", module="vision_transformer", pretrained=True):
        repository = timm.get_pretrained_cfg(full).hf_hub_id
        if repository == f"timm/{full.replace('_quickgelu', '')}":
            found[full] = repository
    return found


def lines(timm, torch) -> list[tuple]:
    """The file's lines, in timm's order."""
    names, found, quick = {}, [], quick_repositories(timm)
    for module in MODULES:
        for full in timm.list_models(module=module, pretrained=True):
            architecture, _, tag = full.partition(".")
            about = timm.get_pretrained_cfg(full)
            if module == "resnetv2" and not re.fullmatch(BIT, architecture):
                continue
            own = about.hf_hub_id == f"timm/{full}" and about.hf_hub_id not in quick.values()
            if not (own or full in quick) or about.hf_hub_filename:
                continue  # Not in timm's own form, or another's weights under its name.
            if full in quick and tag != "openai":
                architecture = architecture.replace("_quickgelu", "")  # OpenAI's alone have a name of ours.
            if architecture not in names:
                names[architecture] = our_name(timm, torch, architecture)
            if is_name(name := names[architecture]):
                side, gelu = about.input_size[-1], "quick" if full in quick else "-"
                licence = about.license or "not said"
                found.append((name, tag, about.hf_hub_id, side, about.num_classes, licence, gelu))
    return found


if __name__ == "__main__":
    import torch

    name_missing_operators(torch)
    import timm

    text = "\n".join("\t".join(map(str, line)) for line in (HEADER, *lines(timm, torch)))
    FILE.write_text(text + "\n")
    print(FILE)
