"""DINOv3's small reference, ViT-L/16 on ImageNet-1k (2508.10104; the authors' `vitl_im1k_lin834`).

    python -m vit_jax.main --config=configs/dinov3.py --workdir=DIR

The losses are those of DINOv2, with Sinkhorn-Knopp, a separate head for patches, and prototypes of
any norm. The model has rotary positions. The authors report 82.0 % with k-NN and 83.5 % with a
linear probe, after 14 hours on 32 H100 GPUs.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import DINOV2, self_distillation

RECIPE = DINOV2._replace(learning_rate=1e-3 * 4 * (2048 / 1024) ** 0.5)  # Their `sqrt_wrt_1024`.


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-L/16")
    config = self_distillation(RECIPE, 2048)
    config.model.name = values["model"]
    config.model.update(dict(layer_scale=1e-5, gelu="erf", initialization="deit"))
    config.model.update(
        dict(
            position="none",
            rope="dinov3",
            stochastic_depth=0.3,
            uniform_depth=True,
            depth_by="subset",
        )
    )
    config.dino.update(dict(centring="sinkhorn", prototype_lengths="free", patch_prototypes=65_536))
    config.dino.update(dict(patch_weight=1.0, koleo=0.1, koleo_group=64))
    config.optimizer.clip, config.optimizer.layer_decay = "module", 0.9
    config.optimizer.embedding_rate = 0.2
    return choose(config, argument)
