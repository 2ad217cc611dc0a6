r"""CLIP: training on images and captions with a softmax over the batch (2103.00020, table 19).

    python -m vit_jax.main --config=configs/clip.py:model=ViT-B/32 --config.data.path=PAIRS \
        --config.contrastive.tokenizer=FOLDER --workdir=DIR

PAIRS is a folder with `train.csv` and `test.csv` (columns `file` and `caption`), and FOLDER
contains CLIP's `vocab.json` and `merges.txt`. Without a tokenizer the tokens are bytes. The authors
train 32 epochs of 400 million pairs in batches of 32,768: zero-shot ImageNet accuracy is 63.2
(ViT-B/32), 68.3 (ViT-B/16) and 75.3 % (ViT-L/14).
"""

from vit_jax.config import base_config, choose, named_values
from vit_jax.errors import UserError, nearest

# Learning rate, width of the embeddings, width and heads of the text tower, and width of the image
# tower (tables 18 and 20).
MODELS = {
    "ViT-B/32": (5e-4, 512, 512, 8, 768),
    "ViT-B/16": (5e-4, 512, 512, 8, 768),
    "ViT-L/14": (4e-4, 768, 768, 12, 1024),
}
# CLIP's image statistics.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-B/32")
    if values["model"] not in MODELS:
        raise UserError(f"no model {values['model']!r}; {nearest(values['model'], MODELS)}")
    rate, embedding, width, heads, dim = MODELS[values["model"]]
    config = base_config()
    config.model.update(dict(name=values["model"], pooling="cls", stem_norm="tokens"))
    config.model.update(dict(gelu="quick", norm_epsilon=1e-5, dtype="bfloat16"))
    config.model.update(dict(mean=MEAN, std=STD, head_std=dim**-0.5))
    config.data.update(dict(source="csv", crop="short_side", image_size=224, crop_resize=224))
    config.data.update(dict(test_crop="short_side", test_resize=224, flip=False))
    config.data.interpolation = "bicubic"
    config.objective.name = "contrastive"
    config.contrastive.update(dict(loss="softmax", text_tower="clip", text_length=77))
    config.contrastive.update(dict(text_dim=width, text_heads=heads, embedding_dim=embedding))
    config.contrastive.update(dict(initial_scale=1 / 0.07, max_scale=100.0))
    config.batch_size, config.epochs = 32768, 32.0
    beta2, epsilon = (0.98, 1e-6)
    config.optimizer.update(dict(name="adam", learning_rate=rate, beta2=beta2, epsilon=epsilon))
    config.optimizer.update(dict(weight_decay=0.2, warmup_steps=2000, clip_norm=0.0))
    config.optimizer.decay = "matrices"
    config.optimizer.update(dict(schedule="cosine", end_learning_rate=0.0, count_from=0))
    config.evaluate_every, config.checkpoint.every = 5000, 1000
    return choose(config, argument)
