"""DALL-E's discrete autoencoder, an image tokenizer trained without labels (2102.12092).

    python -m vit_jax.main --config=configs/dvae.py --workdir=DIR

The values are the paper's (appendix A.2). The authors train on 250 million images for 3,000,000
updates. This config trains on ImageNet-1k and ends when the learning rate has decayed. Labels are
not read, so --config.data.source=folder --config.data.path=DIR can be any folder of images.
--config.dvae.codes=1024 sets fewer codes, and --config.model.widths=128,256,512,1024 a smaller
model. `configs/beit.py` trains a ViT to predict the codes.
"""

from vit_jax.config import base_config, choose


def get_config(argument=None):
    config = base_config()
    config.model.name, config.model.dtype = "DVAE", "bfloat16"
    config.objective.name = "dvae"
    config.batch_size, config.steps = 512, 1_200_000
    config.data.source, config.data.path = "tfds", "imagenet2012"
    config.data.train_split, config.data.test_split = "train", "validation"
    config.data.image_size = config.data.test_resize = 256
    # The side of the authors' crops is 2/3 to 8/9 of the short side. In a photograph of 4:3 this is
    # 33 to 59 % of the area.
    config.data.crop, config.data.crop_area = "random_resized", (0.33, 0.59)
    config.data.crop_aspect, config.data.interpolation = (1.0, 1.0), "area"
    config.optimizer.learning_rate, config.optimizer.end_learning_rate = 1e-4, 1.25e-6
    config.optimizer.schedule, config.optimizer.warmup_steps = "cosine", 0
    config.optimizer.weight_decay, config.optimizer.clip_norm = 1e-4, 0.0
    config.optimizer.average = 0.999
    config.evaluate_every = config.checkpoint.every = 5000
    return choose(config, argument)
