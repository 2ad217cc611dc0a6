"""Vision Transformers in JAX: pre-train, fine-tune, look inside.

`create_model("ViT-B/16", num_classes=10)` makes a model, `load_model(workdir)` reads one back.
"""

from vit_jax.libtpu import expect_no_tpu_where_none_is

__version__ = "0.1.0"
__all__ = [
    "MODELS",
    "ModelCard",
    "UserError",
    "create_model",
    "list_models",
    "load_model",
    "model_card",
]

expect_no_tpu_where_none_is()


def __getattr__(name: str):
    # Loaded when asked for, so that `import vit_jax` costs nothing.
    if name in ("MODELS", "ModelCard", "create_model", "list_models", "model_card"):
        from vit_jax import models

        return getattr(models, name)
    if name == "load_model":
        from vit_jax.load import load_model

        return load_model
    if name == "UserError":
        from vit_jax.errors import UserError

        return UserError
    raise AttributeError(f"module 'vit_jax' has no attribute {name!r}")
