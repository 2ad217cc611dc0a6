"""Writes weights.tsv from timm's registry: python -m tests.interop.write_weights

The file is `vit_jax/published/weights.tsv`. Each line is a repository of timm on the Hugging Face
Hub. The columns are our name of the model, timm's tag of the weights, the repository, the images'
side in pixels, the number of classes (0: none), the data sets, the preprocessing, the licence, and
the GELU.

The GELU is `-`, unless the weights were trained with another one than the repository's name
implies. For a CLIP that was trained with quick GELU, timm has two names and one repository, which
has the name of the model with exact GELU.
"""

import re

import numpy as np

from tests.conftest import name_missing_operators
from tests.interop.coverage_page import BIT, MODULES
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import model_name
from vit_jax.interop.preprocessing import of_timm
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.timm import LIBRARY
from vit_jax.models import parse_name
from vit_jax.options.model import make_options
from vit_jax.published.weights import FILE, HEADER

# Data sets by the words in timm's tags, which are in the order of training. Most other words in
# tags describe training recipes.
DATA = {
    "in1k": "ImageNet-1k",
    "in12k": "ImageNet-12k",
    "in21k": "ImageNet-21k",
    "in22k": "ImageNet-21k",
    # Methods whose papers use ImageNet-1k only.
    "dino": "ImageNet-1k",
    "fcmae": "ImageNet-1k",
    "mae": "ImageNet-1k",
    "openai": "WIT-400M",
    "laion400m": "LAION-400M",
    "laion2b": "LAION-2B",
    "laiona": "LAION-Aesthetic",
    "metaclip_400m": "MetaCLIP-400M",
    "metaclip_2pt5b": "MetaCLIP-2.5B",
    "metaclip_altogether": "Altogether",
    "metaclip2_worldwide": "MetaCLIP 2",
    "datacompxl": "DataComp-1B",
    "dfn2b": "DFN-2B",
    "dfn5b": "DFN-5B",
    "dfndr2b": "DFNDR-2B",
    "yfcc15m": "YFCC-15M",
    "webli": "WebLI",
    "merged2b": "Merged-2B",
    "m30m": "Merged-30M",
    "m38m": "Merged-38M",
    "indomain": "COCO and Visual Genome",
    "lvd142m": "LVD-142M",
    "lvd1689m": "LVD-1689M",
    "sat493m": "SAT-493M",
    "bamboo": "Bamboo",
    "apple_pt": "AIMv2's",
    "c_radio": "C-RADIO's",
    "ogvl": "InternVL's",
    # Towers taken from PaliGemma, in which SigLIP's towers were trained further.
    "pali": "WebLI, PaliGemma's",
    "pali2": "WebLI, PaliGemma's",
    "mix": "PaliGemma's tasks",
    "ocrvqa": "OCR-VQA",
    "refcoco": "RefCOCO",
    "docci": "DOCCI",
}
# The first data sets, if only the architecture's name implies them. The keys are patterns of
# `architecture.tag`.
FIRST = {
    r"beit3_.*": "BEiT-3's",
    r"vit_pe_.*": "PE's",
    r"eva_giant_.*\.clip_.*": "LAION-400M",
}
_WORDS = re.compile(rf"(?<![^_])({'|'.join(sorted(DATA, key=len, reverse=True))})(?![^_])")


def data_of(architecture: str, tag: str) -> str:
    """Returns the names of the data on which weights were trained, in order.

    Raises:
      ValueError: the tag names no known data.
    """
    found = [
        data for pattern, data in FIRST.items() if re.fullmatch(pattern, f"{architecture}.{tag}")
    ]
    found += [DATA[word] for word in _WORDS.findall(tag)]
    if not found:
        raise ValueError(f"{architecture}.{tag} does not say on which data it was trained")
    if architecture.endswith("_miil"):  # These weights were trained on a part of ImageNet-21k.
        found = [data.replace("ImageNet-21k", "ImageNet-21k-P") for data in found]
    return ", ".join(data for place, data in enumerate(found) if found[place - 1 : place] != [data])


def our_name(timm, torch, architecture: str) -> str | None:
    """Returns our name of a timm architecture, from its tensors and name; None if unsupported."""
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
        name = model_name(make_options(form.model.options_type, values))
        # BEiT v2 differs from BEiT only in its training.
        return name.replace("BEiT-", "BEiTv2-") if architecture.startswith("beitv2_") else name
    except UserError:
        return None


def is_name(text: str | None) -> bool:
    """Returns True if a model can be created by this name, False for a description of sizes."""
    try:
        return text is not None and bool(parse_name(text))
    except UserError:
        return False


def quick_repositories(timm) -> dict[str, str]:
    """Returns repositories of CLIPs that were trained with quick GELU, by timm's full names."""
    found = {}
    for full in timm.list_models(
        "vit_*_clip_quickgelu_*", module="vision_transformer", pretrained=True
    ):
        repository = timm.get_pretrained_cfg(full).hf_hub_id
        if repository == f"timm/{full.replace('_quickgelu', '')}":
            found[full] = repository
    return found


def about_weights(about, architecture: str) -> tuple:
    """Returns the registry's values of weights: the columns from image side to std."""
    pixels, seen = of_timm(about.to_dict(), 3)
    mean, std = (
        " ".join(map(str, values if len(set(values)) > 1 else values[:1]))
        for values in (pixels["mean"], pixels["std"])
    )
    shown = float(seen.share), seen.kind, seen.interpolation
    return (
        about.input_size[-1],
        about.num_classes,
        data_of(architecture, about.tag),
        *shown,
        mean,
        std,
    )


def lines(timm, torch) -> list[tuple]:
    """Returns the lines of the file, in timm's order."""
    names, found, quick = {}, [], quick_repositories(timm)
    for module in MODULES:
        for full in timm.list_models(module=module, pretrained=True):
            architecture, _, tag = full.partition(".")
            about = timm.get_pretrained_cfg(full)
            if module == "resnetv2" and not re.fullmatch(BIT, architecture):
                continue
            own = about.hf_hub_id == f"timm/{full}" and about.hf_hub_id not in quick.values()
            if not (own or full in quick) or about.hf_hub_filename:
                continue  # Not in timm's own format, or another model's weights under this name.
            if full in quick and tag != "openai":
                architecture = architecture.replace(
                    "_quickgelu", ""
                )  # Only OpenAI's models have their own name here.
            if architecture not in names:
                names[architecture] = our_name(timm, torch, architecture)
            if is_name(name := names[architecture]):
                found.append(
                    (name, tag, about.hf_hub_id, *about_weights(about, architecture))
                    + (about.license or "not said", "quick" if full in quick else "-")
                )
    return found


if __name__ == "__main__":
    import torch

    name_missing_operators(torch)
    import timm

    text = "\n".join("\t".join(map(str, line)) for line in (HEADER, *lines(timm, torch)))
    FILE.write_text(text + "\n")
    print(FILE)
