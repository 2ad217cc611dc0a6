"""Text towers of SigLIP and SigLIP 2 in big_vision's npz files.

The parameters of the text encoder have the same names as the parameters of the image encoder. The
files contain neither the tokenizer nor the kind of pooling. vit_jax assumes the pooling of all
SigLIP text towers: the output of the last token.
"""

from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import google
from vit_jax.interop.google import google_vit
from vit_jax.interop.layout import BLOCK, LEADING, Rule
from vit_jax.interop.library import Tensors, TextFormat
from vit_jax.interop.tensor_files import Tensor, without_prefix
from vit_jax.options.text import TextOptions

_STARTS = (*google.STARTS, "")
_TOWER, _ENCODER, _IMAGE_ENCODER = "txt/", "Encoder_0/", "Transformer/"
_OWN = (BLOCK, "norm/", "head/")  # Modules whose parameters have the same names as in a ViT.
RULES = (
    Rule("token_embedding/embedding", "Embed_0/embedding"),
    Rule("position_embedding/embedding", google_vit.POSITIONS, LEADING),
    *(rule for rule in google_vit.RULES if rule.path.startswith(_OWN)),
)
_LAYER = "Transformer/encoderblock_0/"


def read_text_tower(config: Mapping, tensors: Tensors) -> TextFormat:
    """Returns the text tower in the tensors of an npz file.

    Raises:
      UserError: the model has no text tower, or its text tower is unsupported.
    """
    start, tower = _tower(tensors)
    tower = google_vit.rename(_as_image_model(tower), {})
    vocabulary, dim = tower["Embed_0/embedding"].shape
    options = TextOptions(
        vocabulary=vocabulary,
        length=tower[google_vit.POSITIONS].shape[1],
        dim=dim,
        depth=sum(name.endswith("/MlpBlock_3/Dense_0/bias") for name in tower),
        heads=tower[_LAYER + "MultiHeadDotProductAttention_1/query/kernel"].shape[1],
        mlp_dim=tower[_LAYER + "MlpBlock_3/Dense_0/bias"].shape[0],
        output_dim=tower["head/kernel"].shape[1],
        causal=False,
        pooling="last",
        end=0,
        head_bias=True,
        gelu="tanh",
        dtype="float32",
        norm_epsilon=1e-6,
    )
    bias = f"{start}b" if f"{start}b" in tensors else None
    return TextFormat(
        "big_vision",
        options,
        RULES,
        tower,
        "sigmoid" if bias else "softmax",
        "big_vision",
        logit_scale=f"{start}t",
        logit_bias=bias,
    )


def _tower(tensors: Tensors) -> tuple[str, Tensors]:
    """Returns the prefix of the model in the file, such as `params/`, and the text tower's tensors.

    The returned tensors have names without this prefix and without `txt/`.

    Raises:
      UserError: the model has no text tower, or its text tower is unsupported.
    """
    starts = [s for s in _STARTS if any(name.startswith(s + _TOWER) for name in tensors)]
    if not starts:
        raise UserError("the checkpoint has no text tower: there are no arrays called txt/...")
    prefix = starts[0] + _TOWER
    tower = without_prefix(tensors, prefix)
    for name, words in {
        "Embed_0/embedding": "of another kind, such as the BERT of LiT",
        "head/kernel": "without a projection to the embeddings",
    }.items():
        if name not in tower:
            raise UserError(
                f"Unsupported: a text tower {words} (there is no txt/{name}). Supported: "
                "big_vision's text_transformer, as in SigLIP."
            )
    if any(name.startswith("MAPHead_0/") for name in tower):
        raise UserError("Unsupported: a text tower of big_vision with pool_type='map'")
    return starts[0], tower


def _as_image_model(tower: Tensors) -> Tensors:
    """Renames the text encoder's tensors to the names of an image encoder's tensors.

    The files of early text towers contain two tables of position embeddings, which the model adds.
    They are replaced by one table, which contains their sum.
    """
    tower = dict(tower)
    positions = tower.get("pos_embedding")
    more = tower.pop(_ENCODER + "pos_embedding", None)
    if positions is not None and more is not None:
        tower["pos_embedding"] = Tensor(
            positions.shape, "float32", lambda: np.add(positions.read(), more.read())
        )
    return {
        _IMAGE_ENCODER + name.removeprefix(_ENCODER) if name.startswith(_ENCODER) else name: tensor
        for name, tensor in tower.items()
    }


def big_vision_name(name: str) -> str:
    """Converts a tensor name from `RULES` to the name in big_vision's files, such as `txt/...`."""
    name = google_vit.big_vision_name(name)
    if name.startswith(_IMAGE_ENCODER):
        name = _ENCODER + name.removeprefix(_IMAGE_ENCODER)
    return _TOWER + name
