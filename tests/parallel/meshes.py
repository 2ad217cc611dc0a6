"""Losses of models on meshes of 8 devices: python -m tests.parallel.meshes "ViT: fsdp" ...

test_meshes.py runs this module in another process, because JAX cannot change the number of devices
after its start. It prints JSON with a result for each case: the losses, the share of the state on a
device, and the number of collective operations that fetch data from other devices.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import vit_jax
from tests.training.objectives.small import set_objective
from tests.training.objectives.test_beitv2 import write_tokeniser
from vit_jax.config import base_config
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.runs.frozen_model import open_frozen
from vit_jax.training.objectives import objective_of
from vit_jax.training.program import abstract_batch, make_program

MESHES = {
    "one": (1, 1, 1),
    "data": (8, 1, 1),
    "fsdp": (1, 8, 1),
    "all": (2, 2, 2),
    "tensor": (1, 1, 8),
}
VIT = dict(name="ViT-Ti/4", dim=64, depth=2, mlp_dim=256, heads=8)
# For comparisons of losses and heads, which do not depend on the layers.
ONE_LAYER = VIT | dict(depth=1)
# Feature maps of 8x8 and 4x4 pixels. The windows of the first one are padded and shifted.
SWIN = dict(
    dim=64,
    blocks=(2, 1),
    stage_heads=(8, 8),
    window=3,
    patch_size=2,
    dropout=0.1,
    stochastic_depth=0.2,
)
DROPOUT = VIT | dict(dropout=0.1, stochastic_depth=0.2, pre_logits=True)
CONVNEXT = dict(name="ConvNeXt-T", blocks=(1, 2), widths=(32, 128), stochastic_depth=0.2)
CODES = dict(name="DVAE", blocks=(1, 1, 1), widths=(32, 32, 64))  # Codes of 4x4 pixels.
MODELS = {
    "ViT": DROPOUT,
    "shallow ViT": DROPOUT | dict(depth=1),
    "ViT scanned": DROPOUT | dict(scan=True),
    "ViT, dots": DROPOUT | dict(remat="dots"),
    "ViT, full": DROPOUT | dict(remat="full"),
    "ViT scanned, full": DROPOUT | dict(scan=True, remat="full"),
    "ViT, subset": DROPOUT | dict(depth_by="subset", stochastic_depth=0.4, uniform_depth=True),
    "relative ViT": VIT | dict(position="relative", qk_norm=True, rope="eva02"),
    "pooling ViT": VIT | dict(pooling="map", mlp="swiglu", registers=2),
    "later ViT": VIT
    | dict(position="bias", rope="dinov3", rope_rescale=2.0, qkv_bias="qv", sub_norm="both"),
    "learned rope": VIT
    | dict(rope="mixed", norm="rms", norm_at="after", bias=False, stem_norm="tokens"),
    "Axial-ViT": VIT | dict(name="Axial-ViT-Ti/4"),
    "hybrid": VIT | dict(name="R50+ViT-Ti/16", resnet_blocks=(1, 1)),
    "BiT": dict(name="BiT-R50x1", resnet_blocks=(1, 1), remat="full"),
    "AxialResNet50": dict(name="AxialResNet50", resnet_blocks=(1, 1)),
    "ConvNeXt": CONVNEXT | dict(remat="dots"),
    "ConvNeXt V2": CONVNEXT | dict(name="ConvNeXtV2-T"),
    "Swin": SWIN | dict(name="Swin-T"),
    "Swin V2": SWIN | dict(name="SwinV2-T/w8", remat="full"),
    "masked patches": ONE_LAYER,
    "MAE": ONE_LAYER | dict(position="sincos2d"),
    "FCMAE": CONVNEXT | dict(name="ConvNeXtV2-T"),
    "DINO": ONE_LAYER | dict(stochastic_depth=0.2),
    "DINOv2": VIT | dict(layer_scale=1e-5, registers=2, pooling="cls"),
    "distillation": ONE_LAYER | dict(distillation="heads"),
    "EVA": ONE_LAYER | dict(pooling="gap"),
    "BEiT": VIT | dict(position="bias", position_at="shared"),
    "DVAE": CODES,
    "VQ-KD": ONE_LAYER | dict(pooling="gap"),
    "BEiT v2": VIT | dict(position="bias", position_at="shared", stochastic_depth=0.2),
    "CLIP": ONE_LAYER | dict(head_std=0.02),
    "SigLIP": ONE_LAYER | dict(pooling="map"),
    "SigLIP 2": ONE_LAYER | dict(pooling="map"),
    "linear segmentation": ONE_LAYER,
    "UPerNet": CONVNEXT,
    "EoMT": DROPOUT,
    "detection": ONE_LAYER,
    "depth": VIT,
}
TEXT = dict(text_length=16, text_dim=64, text_depth=1, text_heads=8)
OBJECTIVES = {
    "masked patches": dict(name="masked_patch"),
    "MAE": dict(name="mae", mask_ratio=0.75, decoder_dim=32, decoder_depth=1, decoder_heads=8),
    # The initial predictions are 0. The loss depends on the masked patches, because targets are
    # their unnormalized pixels.
    "FCMAE": dict(name="fcmae", decoder_dim=32, normalize_targets=False),
    "DINO": dict(name="dino", head_hidden=64, prototypes=128, local_crops=3, local_size=8),
    "DINOv2": dict(
        **dict(name="dino", head_hidden=64, prototypes=128, local_crops=2, local_size=8, koleo=0.1),
        **dict(centring="sinkhorn", patch_weight=1.0, patch_prototypes=64),
    ),
    "distillation": dict(name="distillation"),
    "EVA": dict(name="eva", teacher_features="head"),
    "BEiT": dict(name="beit"),
    "DVAE": dict(name="dvae", codes=64),
    "VQ-KD": dict(
        **dict(name="vqkd", codes=32, code_dim=8, revive_below=0.1),
        **dict(decoder_dim=64, decoder_depth=1, decoder_heads=8),
    ),
    "BEiT v2": dict(name="beitv2", aggregate_from=1),
    "CLIP": dict(name="contrastive", loss="softmax", text_tower="clip", embedding_dim=32, **TEXT),
    "SigLIP": dict(name="contrastive", **TEXT),
    "SigLIP 2": dict(
        **dict(name="contrastive", captioning=1.0, self_distillation=0.5, patch_dropout=0.25),
        **dict(self_distillation_from=0.1, **TEXT),
    ),
    "linear segmentation": dict(name="segmentation"),
    "UPerNet": dict(name="segmentation", head="upernet", dim=32, auxiliary_dim=16),
    "EoMT": dict(
        **dict(name="segmentation", head="eomt", queries=8, query_layers=1, points=64),
        **dict(masked_until=(0.0,), unmasked_from=(1.0,)),
    ),
    "detection": dict(name="detection", dim=32, depth=1, queries=8, most=4, masks=True, points=64),
    "depth": dict(name="depth", head="dpt", dim=16, bins=16, gradient_weight=0.5, scale_steps=1),
}
SELF_DISTILLATION = dict(
    **dict(head_hidden=64, prototypes=128, local_crops=2, local_size=8, global_crops=1),
    **dict(patch_weight=0.25, patch_prototypes=64),
)
BATCH, STEPS, CLASSES = 16, 3, 5


def train(
    model: str, mesh_shape: tuple[int, int, int], batch_size: int = BATCH, **optimizer
) -> dict:
    """Trains a few steps.

    Returns:
      The losses of the steps, the share of parameters and optimizer moments on the first device,
      and the number of operations of forward and backward pass that fetch data from other devices.
    """
    config = base_config()
    config.batch_size = batch_size
    config.model.update(MODELS[model])
    # LAMB's update is proportional to the norm of the parameters, so the head must not be 0.
    if optimizer.get("name") == "lamb":
        config.model.head_std = 0.02
    config.data.image_size = 32 if re.search("16|BiT", config.model.name) else 16
    config.mesh.update(dict(zip(("data", "fsdp", "tensor"), mesh_shape, strict=True)))
    objective = OBJECTIVES.get(model, {})
    if objective:
        set_objective(config, **objective)
    if objective.get("name") in ("segmentation", "detection"):
        config.data.num_classes = CLASSES
    if model == "SigLIP 2":
        config.dino.update(SELF_DISTILLATION)
    labels = objective_of(config.objective.name).labels
    if not objective:
        config.augment.update(dict(mixup=0.5, erasing=0.3))
    config.optimizer.update(dict(warmup_steps=0, learning_rate=1e-3) | optimizer)
    mesh = make_mesh(config.mesh, jax.devices()[: int(np.prod(mesh_shape))])
    with tempfile.TemporaryDirectory() as folder:
        frozen = None
        if model in ("distillation", "EVA", "BEiT", "VQ-KD"):
            values = (CODES | dict(num_classes=64)) if model == "BEiT" else VIT
            config.objective.teacher = make_teacher(
                values, config.data.image_size, Path(folder) / "teacher"
            )
            frozen = open_frozen(config)
        if model == "BEiT v2":
            config.objective.teacher = write_tokeniser(Path(folder) / "tokeniser")
            frozen = open_frozen(config)
        classes = CLASSES if labels else objective_of(config.objective.name).outputs(config)
        shapes = frozen and frozen.model
        program = make_program(config, num_classes=classes, steps=10, mesh=mesh, frozen=shapes)
        state = program.initial_state(0, frozen=frozen and frozen.read())
    metrics, rng, losses = program.initial_metrics(), np.random.default_rng(0), []
    step = program.train_step.lower(state, metrics, abstract_batch(config, mesh)).compile()
    for _ in range(STEPS):
        batch = {
            name: rng.integers(256, size=like.shape, dtype=np.uint8).astype(like.dtype)
            for name, like in abstract_batch(config, mesh).items()
            if name != "labels"
        }
        if "mask" in batch:
            batch["mask"] %= CLASSES
        if "depth" in batch:
            batch["depth"] /= 25  # Depths in metres; 0 in some pixels.
        if "boxes" in batch:  # The last box of each image is padding.
            batch["boxes"][..., :4] = np.sort(batch["boxes"][..., :4] % config.data.image_size)
            batch["boxes"][..., 4] %= CLASSES
            batch["boxes"][:, -1, 4] = -1
        batch["labels"] = rng.integers(CLASSES, size=(batch_size, 1)).astype(np.int32)
        state, sums = step(state, metrics, to_devices(batch, mesh))
        losses.append(float(sums["loss"]))
    kept = jax.tree.leaves((state["params"], state["frozen"], state["optimizer"]))
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in kept)
    asking = r" (all-gather|all-to-all|collective-permute)(-start)?\(.*/gradients/"
    asked = len(re.findall(asking, step.as_text())) if "subset" in model else None
    return {"losses": losses, "share": here / sum(leaf.nbytes for leaf in kept), "asked": asked}


def make_teacher(values: dict, image_size: int, folder: Path) -> str:
    """Writes a model with confident predictions, and returns its folder."""
    name, values = values["name"], {key: value for key, value in values.items() if key != "name"}
    model = vit_jax.create_model(name, image_size=image_size, **dict(num_classes=CLASSES) | values)
    model.head.kernel[...] += np.random.default_rng(1).normal(size=model.head.kernel.shape)
    vit_jax.save_model(model, folder, library="timm" if name == VIT["name"] else "openai")
    return str(folder)


if __name__ == "__main__":
    # A case is "model: mesh", or "model: mesh: {values of the optimizer, or batch_size}".
    results = {}
    for case in sys.argv[1:]:
        model, mesh, *optimizer = case.split(": ", 2)
        results[case] = train(
            model, MESHES[mesh], **json.loads(optimizer[0] if optimizer else "{}")
        )
    print(json.dumps(results))
