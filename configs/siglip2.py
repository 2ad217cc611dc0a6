r"""SigLIP 2: SigLIP with captioning, self-distillation and masked prediction (2502.14786).

    python -m vit_jax.main --config=configs/siglip2.py:model=ViT-B/16 --config.data.path=PAIRS \
        --config.contrastive.tokenizer=FOLDER --workdir=DIR

PAIRS is a folder with `train.csv` and `test.csv` (columns `file` and `caption`), and FOLDER
contains SigLIP 2's `tokenizer.json`. Without a tokenizer the tokens are bytes. The authors train on
40 billion pairs in batches of 32,768. Zero-shot ImageNet accuracy is 79.1 (ViT-B/16) and 82.5 %
(ViT-L/16), at 256 pixels.

A caption decoder, half as deep as the text tower, is trained from the start. In the last fifth of
the run self-distillation and masked prediction are added. Their teacher is an EMA of the image
tower and reads the whole image. From each of eight local crops the image tower predicts the
teacher's output for the image, and for masked patches the teacher's output for these patches.
The paper does not specify the heads, the temperature and momentum of the teacher, and the
distortions of crops; here they are DINO's, with a constant momentum. Training on referring
expressions, on other image sizes and on curated data is not part of this config.
"""

from vit_jax.config import choose, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import siglip

# Sizes of the text tower (dim, depth, heads, mlp_dim), and weight of self-distillation.
MODELS = {
    "ViT-B/16": (768, 12, 12, 3072, 0.25),
    "ViT-L/16": (1024, 24, 16, 4096, 0.5),
    "ViT-So400m/16": (1152, 27, 16, 4304, 1.0),
}


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-B/16")
    if values["model"] not in MODELS:
        raise UserError(f"no model {values['model']!r}; {nearest(values['model'], MODELS)}")
    dim, depth, heads, mlp_dim, factor = MODELS[values["model"]]
    config = siglip(values["model"])
    config.data.update(dict(image_size=256, test_resize=256))
    config.steps = 40_000_000_000 // 32768
    config.contrastive.update(dict(text_dim=dim, text_depth=depth, text_heads=heads))
    config.contrastive.update(dict(text_mlp_dim=mlp_dim, captioning=1.0, parallel_captions=0.5))
    config.contrastive.update(dict(self_distillation=factor, self_distillation_from=0.8))
    config.dino.update(dict(global_crops=1, local_crops=8, local_size=96, local_area=(0.05, 0.4)))
    config.dino.update(dict(patch_weight=0.25, patch_mask_ratios=(0.5, 0.5)))
    config.dino.update(dict(patch_prototypes=65536, teacher_momentum=0.999))
    config.dino.teacher_momentum_end = 0.999
    return choose(config, argument)
