"""Probabilities of image files equal those of the source library with its own preprocessing."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.data.image_files import find_images
from vit_jax.evaluation.features import extractor_of, likeliest
from vit_jax.interop.open import open_checkpoint
from vit_jax.load import build_model
from vit_jax.parallel.mesh import make_mesh

CLASSES = 10
EXACT = 1e-3  # The largest accepted difference of a probability.
# For the decoder that reads JPEGs at reduced size. The largest measured difference was 0.01.
FAST = 0.02

IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CLIP = dict(mean=(0.4815, 0.4578, 0.4082), std=(0.2686, 0.2613, 0.2758))
HALF = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
TINY = dict(embed_dim=48, depth=2, num_heads=3)
SWIN = dict(embed_dim=24, depths=(2, 2), num_heads=(2, 4))
# Architecture, its arguments, and timm's `pretrained_cfg`.
TIMM = {
    "AugReg": (
        "vit_tiny_patch16_224",
        dict(img_size=96),
        HALF | dict(interpolation="bicubic", crop_pct=0.9),
    ),
    "DeiT": (
        "deit_tiny_distilled_patch16_224",
        dict(img_size=96),
        IMAGENET | dict(interpolation="bicubic", crop_pct=0.9),
    ),
    "DINOv2": (
        "vit_small_patch14_dinov2",
        dict(img_size=70),
        IMAGENET | dict(interpolation="bicubic", crop_pct=1.0),
    ),
    "bilinear, not square": (
        "vit_tiny_patch16_224",
        dict(img_size=(64, 96)),
        IMAGENET | dict(interpolation="bilinear", crop_pct=0.875),
    ),
    "squash": (
        "vit_tiny_patch16_224",
        dict(img_size=80, global_pool="avg", class_token=False, fc_norm=False),
        CLIP | dict(interpolation="bilinear", crop_pct=1.0, crop_mode="squash"),
    ),
    "ConvNeXt": (
        "convnext_tiny",
        dict(depths=(1, 1, 2, 1), dims=(16, 24, 32, 40)),
        IMAGENET | dict(interpolation="bicubic", crop_pct=0.875),
    ),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        SWIN | dict(img_size=96, window_size=6),
        IMAGENET | dict(interpolation="bicubic", crop_pct=0.9),
    ),
    "Swin V2, not square": (
        "swinv2_tiny_window8_256",
        SWIN | dict(img_size=(64, 96), window_size=8),
        IMAGENET | dict(interpolation="bicubic", crop_pct=0.9),
    ),
    "squash, registers": (
        "vit_tiny_patch16_224",
        dict(img_size=96, reg_tokens=3, no_embed_class=True),
        HALF | dict(interpolation="lanczos", crop_pct=0.875, crop_mode="squash"),
    ),
}
HIDDEN = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96)
CONVNEXT = dict(depths=[1, 1, 2, 1], hidden_sizes=[16, 24, 32, 40])
SQUARE = {"height": 96, "width": 96}
# Model type, its config, the class of the image processor, and the content of its file.
TRANSFORMERS = {
    "ViT": ("ViT", HIDDEN | dict(image_size=96), "ViTImageProcessor", dict(size=SQUARE)),
    "DeiT": (
        "DeiT",
        HIDDEN | dict(image_size=96),
        "DeiTImageProcessor",
        dict(size={"height": 109, "width": 109}, crop_size=SQUARE),
    ),
    "DINO": (
        "ViT",
        HIDDEN | dict(image_size=96),
        "BitImageProcessor",
        dict(
            size={"shortest_edge": 110},
            crop_size=SQUARE,
            resample=2,
            image_mean=list(IMAGENET["mean"]),
            image_std=list(IMAGENET["std"]),
        ),
    ),
    "BiT": (
        "Bit",
        dict(depths=[1, 1], hidden_sizes=[256, 512], embedding_size=64),
        "BitImageProcessor",
        dict(size={"shortest_edge": 96}, crop_size=SQUARE),
    ),
    "ConvNeXt": (
        "ConvNext",
        CONVNEXT | dict(image_size=96),
        "ConvNextImageProcessor",
        dict(size={"shortest_edge": 96}, crop_pct=0.875),
    ),
    "Swin": (
        "Swin",
        dict(image_size=96, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=6),
        "ViTImageProcessor",
        dict(
            size=SQUARE,
            resample=3,
            image_mean=list(IMAGENET["mean"]),
            image_std=list(IMAGENET["std"]),
        ),
    ),
    "Swin V2": (
        "Swinv2",
        dict(image_size=96, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=6),
        "ViTImageProcessor",
        dict(
            size=SQUARE,
            resample=3,
            image_mean=list(IMAGENET["mean"]),
            image_std=list(IMAGENET["std"]),
        ),
    ),
    "ConvNeXt V2 of 384 pixels, whole": (
        "ConvNextV2",
        CONVNEXT | dict(image_size=384),
        "ConvNextImageProcessor",
        dict(size={"shortest_edge": 384}),
    ),
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> list[Path]:
    """Writes five images of different shapes, sizes and formats, from two photographs."""
    from sklearn.datasets import load_sample_images

    folder = tmp_path_factory.mktemp("photographs")
    china, flower = (Image.fromarray(image) for image in load_sample_images().images)
    made = {
        "landscape.jpg": china,
        "portrait.jpg": flower.crop((150, 0, 443, 427)),
        "grey.jpg": china.crop((40, 30, 411, 402)).convert("L"),
        "lossless.png": flower.resize((311, 207)),
        "small.png": china.resize((71, 90)),
    }
    for name, image in made.items():
        image.save(folder / name, **(dict(quality=90) if name.endswith("jpg") else {}))
    return [folder / name for name in made]


def drawn(torch, model, images):
    """Draws all parameters at random, such that each image's logits have a range of 3 or more."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            mean = 1.0 if p.ndim == 1 and name.endswith("weight") else 0.0
            if p.ndim == 1 or "token" in name or "pos" in name:
                p.copy_(mean + 0.3 * torch.randn(p.shape, generator=generator))
            else:
                p.copy_(1.5 * torch.randn(p.shape, generator=generator) / p[0].numel() ** 0.5)
        model.eval()
        spread = min(
            float(logits.max() - logits.min()) for logits in probabilities(torch, model, images)[1]
        )
        for name, p in model.named_parameters():
            if ("head" in name and "norm" not in name) or "classifier" in name:
                p.mul_(3.01 / spread)
    return model


def probabilities(torch, model, images):
    """Returns the probabilities of each image, and the logits."""
    with torch.no_grad():
        found = [model(image[None]) for image in images]
    logits = torch.cat([getattr(one, "logits", one) for one in found])
    return logits.softmax(-1).numpy(), logits


def ours(folder: Path, paths: list[Path], mode: str) -> np.ndarray:
    """Returns the probabilities that `predict` computes for files, in the order of the classes."""
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint, log=str)
    crop = checkpoint_crop(checkpoint, model.image_size, mode)
    mesh = make_mesh()
    extractor, params = extractor_of(
        model, mesh, crop, compute=likeliest(CLASSES), batch_size=len(paths)
    )
    (found,) = extractor.stream(params, find_images([*map(str, paths)]))
    chances, classes = found["values"]
    return np.take_along_axis(chances, classes.argsort(axis=1), axis=1)[found["mask"]]


def compare(folder: Path, paths: list[Path], wanted: np.ndarray, record_property) -> None:
    exact, fast = (np.abs(ours(folder, paths, mode) - wanted).max() for mode in ("exact", "fast"))
    record_property("exact", f"{exact:.1e}")
    record_property("fast", f"{fast:.1e}")
    print(f"probabilities differ by {exact:.1e}, with the fast decoder by {fast:.1e}")
    assert exact <= EXACT
    assert fast <= FAST


@pytest.mark.parametrize("case", TIMM)
def test_timm_computes_the_same_probabilities(
    case, torch, timm, photographs, tmp_path, record_property
):
    name, arguments, said = TIMM[case]
    size = arguments.get("img_size", 96)  # A ConvNeXt accepts any size.
    arguments = TINY | arguments if name.startswith(("vit", "deit")) else arguments
    size = (size, size) if isinstance(size, int) else size
    said = said | dict(input_size=(3, *size), fixed_input_size="img_size" in arguments)
    theirs = timm.create_model(name, num_classes=CLASSES, pretrained_cfg_overlay=said, **arguments)
    config = timm.data.resolve_data_config({}, model=theirs)
    transform = timm.data.create_transform(**config)
    images = [transform(Image.open(path).convert("RGB")) for path in photographs]
    timm.models.save_for_hf(drawn(torch, theirs, images), str(tmp_path), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert json.dumps(timm.data.resolve_data_config({}, model=again)) == json.dumps(config)
    wanted, logits = probabilities(torch, again, images)
    assert (logits.max(1).values - logits.min(1).values).min() >= 3
    compare(tmp_path, photographs, wanted, record_property)


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_transformers_computes_the_same_probabilities(
    case, torch, transformers, photographs, tmp_path, record_property
):
    kind, arguments, processor, said = TRANSFORMERS[case]
    said = dict(image_processor_type=processor) | said  # Other values are the processor's defaults.
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    process = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    opened = [Image.open(path).convert("RGB") for path in photographs]
    images = [process(image, return_tensors="pt")["pixel_values"][0] for image in opened]
    config = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, **arguments)
    theirs = getattr(transformers, f"{kind}ForImageClassification")(config)
    drawn(torch, theirs, images).save_pretrained(tmp_path)
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    wanted, logits = probabilities(torch, again, images)
    assert (logits.max(1).values - logits.min(1).values).min() >= 3
    compare(tmp_path, photographs, wanted, record_property)
