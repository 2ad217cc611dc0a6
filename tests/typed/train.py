"""Training on arrays, with a callback that gets the metrics of each log line."""

import numpy as np

import vit_jax
from vit_jax.command import read_config

rng = np.random.default_rng(0)
images = rng.integers(256, size=(64, 16, 16, 3), dtype=np.uint8)
labels = np.array(["cat", "dog"] * 32)

config = read_config("configs/quickstart.py")
config.steps, config.batch_size, config.optimizer.warmup_steps = 4, 16, 1
config.model.update(dict(dim=16, depth=1, mlp_dim=16, heads=2))
config.data.train_split, config.data.test_split = "train[:75%]", "train[75%:]"


def show(step: int, row: dict[str, float]) -> None:
    """Prints the training loss."""
    if "train/loss" in row:
        print(step, row["train/loss"])


figures = vit_jax.train(config, "runs/pets", train=(images, labels), on_log=show)
print(figures["accuracy"])
