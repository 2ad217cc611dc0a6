"""Options of text towers."""

from vit_jax.errors import UserError
from vit_jax.options.model import MOST_LAYERS, check_options, required
from vit_jax.options.option import option, options
from vit_jax.options.rules import flag, number, one_of, whole

_WIDTH = whole(1, 2**20)


@options
class TextOptions:
    """Arguments of a text tower."""

    vocabulary: int = required(whole(1, 2**24), "Number of tokens in the vocabulary.")
    length: int = required(whole(1, 2**16), "Number of tokens of a text, with padding.")
    dim: int = required(_WIDTH, "Width of the encoder.")
    depth: int = required(whole(1, MOST_LAYERS), "Number of encoder layers.")
    heads: int = required(_WIDTH, "Attention heads.")
    mlp_dim: int = required(_WIDTH, "Hidden width of the MLP.")
    output_dim: int = required(_WIDTH, "Width of the embeddings.")
    causal: bool = option(
        False, flag(), "Each token attends to itself and to earlier tokens only (CLIP)."
    )
    pooling: str = option(
        "last",
        one_of("last", "end", "highest"),
        "Token that is read: the last one (SigLIP), the first one with the id `end` (CLIP), or the "
        "first one with the highest id (early CLIPs, whose end-of-text token has it).",
    )
    end: int = option(0, whole(0, 2**24), "Id of the end-of-text token.")
    head_bias: bool = option(True, flag(), "Bias of the projection to the embeddings.")
    gelu: str = option("tanh", one_of("tanh", "erf", "quick"), "GELU, as in `ViTOptions`.")
    dtype: str = option(
        "float32",
        one_of("float32", "bfloat16", "float16"),
        "Dtype of the computation; parameters and embeddings are float32.",
    )
    norm_epsilon: float = option(1e-6, number(above=0), "Epsilon of the layer norms.")

    def __post_init__(self) -> None:
        """Raises UserError if a value has another type, or is out of bounds."""
        check_options(self)
        if self.dim % self.heads:
            raise UserError(f"dim = {self.dim} must be divisible by heads = {self.heads}")
