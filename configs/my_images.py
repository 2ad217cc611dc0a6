"""Fine-tuning on your own images, with all values chosen from data, checkpoint and device.

Two commands for the same run:

    python -m vit_jax.main --config=configs/my_images.py --config.data.path=PHOTOS --workdir=DIR
    vit-jax finetune PHOTOS

Each choice is printed with its reason and with the flag that changes it; the rules are in
vit_jax/runs/choices/finetuning.py. The paper's recipe is configs/finetune.py.
"""

from vit_jax.config import base_config, choose


def get_config(argument=None):
    config = base_config()
    config.auto = "finetune"
    config.model.name = ""  # The checkpoint's.
    config.data.interpolation = None  # The checkpoint's.
    config.data.source = "folder"
    config.data.train_split, config.data.dev_split = "all[:70%]", "all[70%:85%]"
    config.data.test_split = "all[85%:]"
    config.data.crop = "random_resized"
    config.optimizer.update(dict(layer_decay=0.75, weight_decay=0.05, schedule="cosine"))
    config.checkpoint.update(dict(keep_last=1, keep_best=1, final="best"))
    config.early_stopping = 4
    config.evaluate_every = config.checkpoint.every = 100
    return choose(config, argument)
