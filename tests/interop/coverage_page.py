"""Compares published architectures with their original library, and writes `docs/coverage.md`.

    python -m tests.interop.coverage_page --jobs=2              # writes the page
    python -m tests.interop.coverage_page 'beit*' swin_transformer  # prints some architectures only

Arguments are patterns that select architectures, timm's modules, model types of Transformers, or a
library. Each model is built by its own library with random tensors and written as a folder in the
format of the Hub. `vit_jax.load_model` loads the folder, and both models get the same two images.
"""

import argparse
import contextlib
import fnmatch
import gc
import json
import re
import tempfile
import time
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import name_missing_operators  # Importing it also makes programs compile fast.
from vit_jax.errors import UserError
from vit_jax.progress import duration

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
# The largest accepted difference of outputs, relative to the largest output. In a ResNet, rounding
# in float32 causes differences of 2e-5.
BAR = 5e-5
MOST = 30e6  # Models with more parameters are built with reduced depth.
TOKENS = 700  # Plain Transformers with more tokens get smaller images.

MODULES = (
    "vision_transformer",
    "deit",
    "vision_transformer_hybrid",
    "beit",
    "eva",
    "swin_transformer",
)
MODULES += ("swin_transformer_v2", "convnext", "resnetv2")
BIT = r"resnetv2_\d+x\d+_bit"  # The only models of resnetv2 that are compared.

_TOKENS = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96)
_WINDOWS = dict(embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4, image_size=64)
_STAGES = dict(depths=[1, 2], hidden_sizes=[16, 24], num_stages=2, image_size=32)
_FEW = _TOKENS | dict(image_size=64)
_DINOV2 = dict(patch_size=14, image_size=70) | _TOKENS
# Model classes of each model type, and the sizes of a small model.
TRANSFORMERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "vit": (("ViTModel", "ViTForImageClassification"), _TOKENS),
    "deit": (
        ("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
        _TOKENS,
    ),
    "bit": (
        ("BitModel", "BitForImageClassification"),
        dict(depths=[1, 1], hidden_sizes=[256, 512]),
    ),
    "convnext": (("ConvNextModel", "ConvNextForImageClassification"), _STAGES),
    "convnextv2": (("ConvNextV2Model", "ConvNextV2ForImageClassification"), _STAGES),
    "swin": (("SwinModel", "SwinForImageClassification"), _WINDOWS),
    "swinv2": (
        ("Swinv2Model", "Swinv2ForImageClassification"),
        _WINDOWS | dict(pretrained_window_sizes=[2, 2]),
    ),
    "dinov2": (("Dinov2Model", "Dinov2ForImageClassification"), _DINOV2),
    "dinov2_with_registers": (
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
        _DINOV2,
    ),
    "dinov3_vit": (("DINOv3ViTModel",), _FEW),
    "beit": (("BeitModel", "BeitForImageClassification"), _FEW),
    "siglip_vision_model": (("SiglipVisionModel",), _FEW),
    "clip_vision_model": (
        ("CLIPVisionModel", "CLIPVisionModelWithProjection"),
        _FEW,
    ),
    "ijepa": (("IJepaModel", "IJepaForImageClassification"), _FEW),
    "vit_mae": (("ViTMAEModel",), _FEW | dict(mask_ratio=0.0)),
    "vit_msn": (("ViTMSNModel", "ViTMSNForImageClassification"), _FEW),
}


class Case(NamedTuple):
    """An architecture that is compared.

    Attributes:
      library: `timm` or `Transformers`.
      group: timm's module, or the model type in Transformers.
      name: timm's name, or the class in Transformers.
      heads: whether weights are published with classes (True), without (False), or both.
      options: sizes that differ from the published ones; for Transformers all sizes.
    """

    library: str
    group: str
    name: str
    heads: tuple[bool, ...]
    options: dict[str, Any]


class Finding(NamedTuple):
    """The result of a case.

    Attributes:
      outcome: `equal`, `refused` or `wrong`.
      apart: the largest difference of outputs, relative to the largest output.
      reason: why the outcome is not `equal`.
    """

    case: Case
    outcome: str
    apart: float = 0.0
    reason: str = ""


def timm_cases() -> list[Case]:
    """Returns all architectures of timm with published weights."""
    import timm

    heads: dict[tuple[str, str], set[bool]] = {}
    for module in MODULES:
        for weight in timm.list_models(module=module, pretrained=True):
            name = weight.partition(".")[0]
            if module != "resnetv2" or re.fullmatch(BIT, name):
                classes = timm.get_pretrained_cfg(weight).num_classes
                heads.setdefault((module, name), set()).add(bool(classes))
    return [
        Case("timm", module, name, tuple(sorted(found)), {})
        for (module, name), found in heads.items()
    ]


def reduced(name: str) -> dict[str, Any]:
    """Returns arguments that make large models shallower, and images of many tokens smaller."""
    import timm
    import torch

    with torch.device("meta"):
        whole = timm.create_model(name)
    options = {}
    if sum(p.numel() for p in whole.parameters()) > MOST:
        if hasattr(whole, "blocks"):
            options["depth"] = 2
            if "sapiens2" in name:
                # These models have a number of key-value heads for each layer. The first and last
                # layers have most.
                heads = [block.attn.num_kv_heads for block in whole.blocks]
                options["num_kv_heads"] = (heads[0], heads[len(heads) // 2])
        elif name.startswith("resnetv2"):
            options["layers"] = (1, 1, 1, 1)
        else:  # Every second block of a Swin has shifted windows, so each stage has two.
            options["depths"] = (2, 2, 2, 2) if name.startswith("swin") else (1, 1, 1, 1)
    patch = getattr(getattr(whole, "patch_embed", None), "patch_size", None)
    size = whole.pretrained_cfg["input_size"][-1]
    if hasattr(whole, "blocks") and patch and (size // patch[0]) ** 2 > TOKENS:
        options["img_size"] = 20 * patch[0]
    return options


def transformers_cases() -> list[Case]:
    """Returns small models of each class in Transformers."""
    return [
        Case("Transformers", kind, name, ("Classification" in name,), options)
        for kind, (names, options) in TRANSFORMERS.items()
        for name in names
    ]


def build_timm(case: Case, head: bool) -> Any:
    """Returns timm's model with 7 classes or none."""
    import timm
    import torch
    from torch.overrides import TorchFunctionMode

    class Unfilled(TorchFunctionMode):
        """Skips the initial random values, which take most time: all are drawn again later."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function in (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.erfinv_):
                return args[0]
            return function(*args, **(kwargs or {}))

    options = dict(case.options, num_classes=7 if head else 0)
    with Unfilled():
        if "layers" in options:  # `create_model` does not accept this argument for these names.
            width = int(re.search(r"x(\d+)", case.name)[1])
            return timm.models.resnetv2._create_resnetv2_bit(
                case.name, width_factor=width, **options
            )
        return timm.create_model(case.name, **options)


def save_timm(theirs: Any, folder: Path, options: dict[str, Any]) -> None:
    """Writes a folder in the format of the Hub; `config.json` has only the changed arguments."""
    import timm

    timm.models.save_for_hf(theirs, str(folder), safe_serialization=True)
    config = json.loads((folder / "config.json").read_text())
    config["model_args"] = options
    (folder / "config.json").write_text(json.dumps(config))


def build_transformers(case: Case, head: bool) -> Any:
    """Returns the model of Transformers."""
    import transformers

    kind = getattr(transformers, case.name)
    return kind(kind.config_class(**case.options, **(dict(num_labels=7) if head else {})))


def written(case: Case, head: bool, folder: Path) -> Any:
    """Returns the library's model with random tensors, after writing it to a folder."""
    import torch

    from tests.interop.helpers import randomise

    if case.library == "timm":
        theirs = randomise(torch, build_timm(case, head))
        save_timm(theirs, folder, case.options)
    else:
        theirs = randomise(torch, build_transformers(case, head))
        theirs.save_pretrained(folder)
    return theirs


def look(case: Case) -> Finding:
    """Compares an architecture; returns the worst result of its models with and without a head."""
    import jax
    import torch

    import vit_jax
    from tests.interop.helpers import distance

    if case.library == "timm":
        case = case._replace(options=reduced(case.name))
    found = Finding(case, "equal")
    for head in case.heads:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                theirs = written(case, head, folder)
                ours = vit_jax.load_model(folder, log=str)
                apart = float(distance(torch, ours, theirs))
            except UserError as error:
                return Finding(case, "refused", reason=str(error).replace(str(folder), "the file"))
            # An unexpected error does not stop the comparison of other architectures.
            except Exception as error:
                return Finding(case, "wrong", reason=f"{type(error).__name__}: {error}")
            if not apart < BAR:
                return Finding(case, "wrong", apart, f"outputs are {apart:.1e} apart")
            found = found._replace(apart=max(found.apart, apart))
        del theirs, ours
        jax.clear_caches()
        gc.collect()
    return found


def prepare() -> None:
    """Prepares the libraries in a process: no log messages, and one thread."""
    import torch

    torch.set_num_threads(1)
    name_missing_operators(torch)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def look_at_all(cases: list[Case], jobs: int) -> list[Finding]:
    """Returns the findings in the order of the cases; prints each, with the remaining time."""
    start, found = time.monotonic(), {}
    with get_context("spawn").Pool(jobs, prepare, maxtasksperchild=25) as pool:
        for done, finding in enumerate(pool.imap_unordered(look, cases), 1):
            found[finding.case.library, finding.case.group, finding.case.name] = finding
            left = (time.monotonic() - start) / done * (len(cases) - done)
            what = finding.reason or f"{finding.apart:.1e} apart"
            how_far = f"[{done} of {len(cases)}, {duration(left)} left]"
            print(f"{how_far} {finding.case.name}: {finding.outcome}, {what}", flush=True)
        pool.close()
        pool.join()
    return [found[case.library, case.group, case.name] for case in cases]


def table(findings: list[Finding]) -> str:
    """Returns a table with the counts and the largest difference of each group and of all cases."""
    lines = ["| | architectures | equal | refused | wrong | furthest apart |", "| --- " * 6 + "|"]
    groups = list(dict.fromkeys((finding.case.library, finding.case.group) for finding in findings))
    for group in [*groups, None]:
        those = [f for f in findings if group in (None, (f.case.library, f.case.group))]
        counts = [
            sum(f.outcome == outcome for f in those) for outcome in ("equal", "refused", "wrong")
        ]
        apart = f"{max(f.apart for f in those if f.outcome == 'equal'):.0e}" if counts[0] else ""
        title = f"{group[0]}: {group[1]}" if group else "all"
        share = f" ({100 * counts[0] / len(those):.1f} %)" if group is None else ""
        lines.append(
            f"| {title} | {len(those)} | {counts[0]}{share} | {counts[1]} | {counts[2]} | {apart} |"
        )
    return "\n".join(lines)


def reasons(findings: list[Finding]) -> str:
    """Returns a table of the models that are not equal, with one line for each reason."""
    names: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        if finding.outcome != "equal":
            reason = finding.reason.replace(finding.case.name, "...").replace("|", "\\|")
            names.setdefault((finding.outcome, reason), []).append(finding.case.name)
    lines = [
        f"| {', '.join(those)} | {outcome} | {reason} |"
        for (outcome, reason), those in names.items()
    ]
    return "\n".join(["| | | why |", "| --- | --- | --- |", *lines]) if lines else "None."


def equals(findings: list[Finding]) -> str:
    """Returns a paragraph of equal models for each group; reduced models have a star."""
    groups: dict[str, list[str]] = {}
    for finding in findings:
        case = finding.case
        if finding.outcome == "equal":
            star = "\\*" if case.library == "timm" and case.options else ""
            groups.setdefault(f"{case.library}: {case.group}", []).append(case.name + star)
    return "\n\n".join(f"**{title}**: {', '.join(names)}" for title, names in groups.items())


def page(findings: list[Finding]) -> str:
    """Returns the page in Markdown."""
    theirs = f"timm {version('timm')}", f"Transformers {version('transformers')}"
    return f"""\
# Published models that load

Written by `python -m tests.interop.coverage_page`: the architectures that have published weights in
{theirs[0]} (of resnetv2 the BiTs), and classes of model types of {theirs[1]}.
Each was built by its library with every tensor drawn at random, written as a folder of the Hub is, with
classes and without where both are published, and loaded by `vit_jax.load_model`. It is equal where its
outputs for two images are within {BAR:.0e} of the library's own in float64, relative to the largest; ours
are computed in float32. Those of timm that have more than {MOST / 1e6:.0f} M parameters were built at
reduced depth, those of more than {TOKENS} tokens for smaller images (\\*); Transformers' are small models of
each class. What is refused is so in one line, and gives no output.

{table(findings)}

## Refused

{reasons(findings)}

## Equal

{equals(findings)}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help="which; all without, for the page"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    prepare()
    cases = timm_cases() + transformers_cases()
    if options.patterns:
        known = cases
        cases = [
            case
            for case in known
            if any(
                fnmatch.fnmatch(word, pattern) for word in case[:3] for pattern in options.patterns
            )
        ]
    findings = look_at_all(cases, options.jobs)
    print(f"\n{table(findings)}\n\n{reasons(findings)}")
    if not options.patterns:
        PAGE.write_text(page(findings))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
