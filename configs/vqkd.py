"""BEiT v2's tokenizer, learned from CLIP on ImageNet-1k without labels (VQ-KD, 2208.06366).

    python -m vit_jax.main --config=configs/vqkd.py --workdir=DIR

The values are from the authors' commands. A ViT-B/16 maps each patch to one of 8,192 codes, and a
decoder of 3 layers (one layer with `decoder=1`) predicts CLIP-B/16's projected features of the
patch from the code. `model=` trains another encoder. `teacher=` is another ViT with a head; for a
ViT without a head set `--config.objective.teacher_features=tokens`. `configs/beitv2.py` then trains
a model to predict the codes.
"""

from vit_jax.config import base_config, choose, chosen_teacher, named_values
from vit_jax.errors import UserError
from vit_jax.recipes import IMAGENET_IMAGES

TEACHER = "hf://timm/vit_base_patch16_clip_224.openai"
DECODERS = ("1", "3")


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-B/16", teacher="", decoder="3")
    if values["decoder"] not in DECODERS:
        raise UserError(
            f"no decoder={values['decoder']}; there are: {', '.join(DECODERS)} (layers)"
        )
    config = base_config()
    config.model.update(
        dict(name=values["model"], dtype="bfloat16", gelu="erf", initialization="vqkd")
    )
    config.model.update(dict(pooling="gap", cls_token=True, qkv_bias="qv"))
    config.objective.name = "vqkd"
    config.objective.teacher = chosen_teacher(values["teacher"], argument, TEACHER)
    config.objective.update(dict(teacher_features="head", teacher_dtype="bfloat16"))
    config.vqkd.decoder_depth = int(values["decoder"])
    config.epochs, config.batch_size = 100.0, 512
    config.data.source, config.data.path = "tfds", "imagenet2012"
    config.data.train_split, config.data.test_split = "train", "validation"
    config.data.image_size, config.data.test_resize = 224, 256
    config.data.crop, config.data.interpolation = "random_resized", "bicubic"
    config.data.crop_area = (0.08, 1.0)
    config.optimizer.learning_rate = 5e-5 * config.batch_size / 128
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 1e-5
    config.optimizer.warmup_steps = round(10 * IMAGENET_IMAGES / config.batch_size)
    config.optimizer.beta2, config.optimizer.weight_decay = 0.99, 1e-4
    config.optimizer.clip_norm, config.optimizer.count_from = 0.0, 0
    config.evaluate_every, config.checkpoint.every = 5000, 2000
    return choose(config, argument)
