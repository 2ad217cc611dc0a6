"""Typed config values."""

from vit_jax.config import base_config, check

config = base_config()
config.optimizer.learning_rate = 1e-3
config.optimizer.learning_rate *= 2
config.model.name = "ViT-B/16"
config.data.dev_split = None
rate: float = config.optimizer.learning_rate
steps: int | None = config.steps
print(rate, steps, config.data.train_split.partition("["))
check(config)
