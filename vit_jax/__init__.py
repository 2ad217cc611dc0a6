"""Vision Transformers in JAX: pre-train, fine-tune, look inside.

`create_model("ViT-B/16", num_classes=10)` creates a model. `train(config, workdir)` trains a model,
`load_model(workdir)` loads it, and `save_model(model, path)` saves it for other libraries.
docs/python.md describes these functions.
"""

from typing import TYPE_CHECKING, Any

from vit_jax.libtpu import expect_no_tpu_where_none_is
from vit_jax.simulated_devices import give_threads_to_simulated_devices

if TYPE_CHECKING:
    from vit_jax.dense import load_depth, load_detector, load_segmenter
    from vit_jax.errors import UserError
    from vit_jax.image_text import load_image_text, zero_shot
    from vit_jax.interface import FineTuned, Pretrained, finetune, pretrain, train
    from vit_jax.load import load_model
    from vit_jax.models import MODELS, ModelCard, create_model, list_models, model_card
    from vit_jax.models.prediction import Prediction
    from vit_jax.save import save_model

__version__ = "0.1.0"
__all__ = [
    "MODELS",
    "FineTuned",
    "ModelCard",
    "Prediction",
    "Pretrained",
    "UserError",
    "create_model",
    "finetune",
    "list_models",
    "load_depth",
    "load_detector",
    "load_image_text",
    "load_model",
    "load_segmenter",
    "model_card",
    "pretrain",
    "save_model",
    "train",
    "zero_shot",
]

# Maps each public name to its module. A module is imported when one of its names is first used, so
# `import vit_jax` is fast.
_MODULES = {
    "FineTuned": "interface",
    "MODELS": "models",
    "ModelCard": "models",
    "Prediction": "models.prediction",
    "Pretrained": "interface",
    "UserError": "errors",
    "create_model": "models",
    "finetune": "interface",
    "list_models": "models",
    "load_image_text": "image_text",
    "load_model": "load",
    "load_depth": "dense",
    "load_detector": "dense",
    "load_segmenter": "dense",
    "model_card": "models",
    "pretrain": "interface",
    "save_model": "save",
    "train": "interface",
    "zero_shot": "image_text",
}

expect_no_tpu_where_none_is()
give_threads_to_simulated_devices()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vit_jax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"vit_jax.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
