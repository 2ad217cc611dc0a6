"""Reference implementations of the models in NumPy float64, for one image, written as loops.

They are written from the papers. They share only the names of parameters with `vit_jax.models`. A
reference takes the same arguments as the model, so a parameter that an option requires and that the
model does not have raises a KeyError here.
"""

import cmath

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.special import erf

from vit_jax.models import abstract, count_parameters, model_factory

# These images have a grid of 2x3 patches.
TINY = dict(image_size=(8, 12), num_classes=5, patch_size=4, dim=16, depth=2, mlp_dim=24, heads=4)


HURRIED = {"xla_backend_optimization_level": 0}  # These models take longer to compile than to run.


def fresh_model(name: str = "ViT-Ti/4", **arguments) -> nnx.Module:
    """Returns a model with its initial parameters."""
    build = model_factory(name, **arguments)
    init = jax.jit(lambda: nnx.state(build(rngs=nnx.Rngs(0))), compiler_options=HURRIED)
    return nnx.merge(nnx.graphdef(abstract(build)), init())


def random_model(name: str = "ViT-Ti/4", **arguments) -> nnx.Module:
    """Returns a model with random parameters, none of them zero, so that each affects the output.

    The output channels of a ResNet's kernels differ in scale by up to a factor of a million.
    Otherwise norms would hide the effect of weight standardisation on small kernels.
    """
    rng = np.random.default_rng(0)

    def draw(path, x):
        values = rng.normal(0, 0.3, x.shape)
        if "resnet" in str(path[0]) and x.ndim == 4:
            values = values * 10 ** rng.uniform(-6, 0, x.shape[-1])
        return jnp.asarray(values, jnp.float32)

    graphdef, shapes = nnx.split(abstract(model_factory(name, **arguments)))
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, shapes))


def random_images(count: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    return (
        np.random.default_rng(1).uniform(-1, 1, (count, height, width, channels)).astype(np.float32)
    )


def parameters(model: nnx.Module) -> dict:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model)))


def forward(module: nnx.Module, x: np.ndarray, seed: int | None = None) -> np.ndarray:
    """Returns the output of the compiled module; with a seed for dropout, that of training."""
    graphdef, params = nnx.split(module)

    def call(params, x):
        module = nnx.merge(graphdef, params)
        return module(x) if seed is None else module(x, nnx.Rngs(dropout=seed))

    return np.asarray(jax.jit(call, compiler_options=HURRIED)(params, x))


def count(name: str, num_classes: int = 1000, image_size: int = 224, **overrides) -> int:
    """Returns the number of parameters."""
    return count_parameters(
        abstract(model_factory(name, num_classes=num_classes, image_size=image_size, **overrides))
    )


def assert_vit_equals_reference(**overrides):
    """Asserts that `TINY` with other arguments has the logits of `vit`, for two images."""
    arguments = TINY | overrides
    model = random_model(**arguments)
    images = random_images(2, *arguments["image_size"], arguments.get("channels", 3))
    params = parameters(model)
    expected = np.stack([vit(params, image, **arguments) for image in images])
    np.testing.assert_allclose(forward(model, images), expected, atol=2e-5)


def assert_vit_gradients_equal_differences(**overrides):
    """Asserts that gradients of `TINY` with other arguments equal finite differences of `vit`.

    For each parameter, the derivatives in one random direction are compared.
    """
    arguments = TINY | overrides
    model, image = random_model(**arguments), random_images(1, *arguments["image_size"])
    graphdef, params = nnx.split(model)
    weights = np.linspace(-1, 1, arguments["num_classes"])

    def loss(params):
        return nnx.merge(graphdef, params)(image)[0] @ jnp.asarray(weights, jnp.float32)

    gradients = jax.jit(jax.grad(loss), compiler_options=HURRIED)(params)
    found, plain = dict(nnx.to_flat_state(gradients)), parameters(model)
    largest = max(np.linalg.norm(x[...]) for x in found.values())
    rng = np.random.default_rng(2)
    for path, x in jax.tree.leaves_with_path(plain):
        direction, ends = rng.normal(size=x.shape), []
        for step in (1e-5, -1e-5):
            change = {path: step * direction}
            moved = jax.tree.map_with_path(lambda p, y, change=change: y + change.get(p, 0), plain)
            ends.append(vit(moved, np.float64(image[0]), **arguments) @ weights)
        names = tuple(key.key for key in path)
        slope = np.sum(np.float64(found[names][...]) * direction)
        np.testing.assert_allclose(
            slope, (ends[0] - ends[1]) / 2e-5, atol=2e-4 * largest, err_msg=str(names)
        )


# Layers.


def linear(x, p):
    return x @ p["kernel"] + p.get("bias", 0)


def layer_norm(x, p, epsilon=1e-6):
    """Applies layer norm, or RMS norm if there is no bias."""
    if "bias" not in p:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * p["scale"]
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * p["scale"] + p["bias"]


def group_norm(x, p, epsilon):
    """Normalizes groups of neighbouring channels, with statistics over a whole image.

    There are 32 groups, but at least 2 channels in each.
    """
    parts = np.split(x, 32 if x.shape[-1] >= 64 else x.shape[-1] // 2, axis=-1)
    groups = [(part - part.mean()) / np.sqrt(part.var() + epsilon) for part in parts]
    return np.concatenate(groups, axis=-1) * p["scale"] + p["bias"]


def relu(x):
    return np.maximum(x, 0)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def activate(x, gelu):
    if gelu == "quick":
        return x / (1 + np.exp(-1.702 * x))
    if gelu == "erf":
        return x * (1 + erf(x / np.sqrt(2))) / 2
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def feed_forward(x, p, kind, gelu, epsilon=1e-6):
    if kind == "swiglu":
        biases = p["fc1"].get("bias", (0, 0))
        gate, value = (x @ p["fc1"]["kernel"][:, i] + biases[i] for i in range(2))
        hidden = gate / (1 + np.exp(-gate)) * value
    else:
        hidden = activate(linear(x, p["fc1"]), gelu)
    return linear(layer_norm(hidden, p["norm"], epsilon) if "norm" in p else hidden, p["fc2"])


# Positions.


def position_table(p, kind, special, rows, columns, dim):
    """Returns the position embeddings `[special + rows * columns, dim]`."""
    if kind == "1d":
        return p["table"][0]
    patches = []
    for row in range(rows):
        for column in range(columns):
            if kind == "2d":
                patches.append(np.concatenate([p["x"][column], p["y"][row]]))
            else:
                last = dim // 4 - (kind == "sincos2d")
                rates = [10_000 ** (-i / last) for i in range(dim // 4)]
                waves = [
                    [f(at * w) for w in rates] for at in (column, row) for f in (np.sin, np.cos)
                ]
                patches.append(np.concatenate(waves))
    if kind == "2d" and special:
        return np.concatenate([p["special_table"], patches])
    return np.concatenate([np.zeros((special, dim)), patches])


def relative_row(query, key, special, patches):
    """Returns a row of the table of relative positions.

    The table has a row for each difference of two patches, and three rows for other pairs of
    tokens.
    """
    inside = range(special, special + patches)
    if query in inside and key in inside:
        return query - key + patches - 1
    if key in inside:
        return 2 * patches - 1
    if query in inside:
        return 2 * patches
    return 2 * patches + 1


def bias_row(query, key, special, rows, columns):
    """Returns a row of the table of biases.

    The table has a row for each offset of two patches, and three rows for other pairs of tokens.
    """
    inside = range(special, special + rows * columns)
    offsets = (2 * rows - 1) * (2 * columns - 1)
    if query in inside and key in inside:
        row, column = divmod(query - special, columns)
        key_row, key_column = divmod(key - special, columns)
        return (row - key_row + rows - 1) * (2 * columns - 1) + column - key_column + columns - 1
    if key in inside:
        return offsets
    if query in inside:
        return offsets + 1
    return offsets + 2


def turned(vector, angles, halves=False):
    """Rotates pairs of the vector's channels as complex numbers.

    Pairs are neighbouring channels, or one channel of each half if `halves` is True.
    """
    result = np.array(vector)
    for i, angle in enumerate(angles):
        pair = [i, i + len(angles)] if halves else [2 * i, 2 * i + 1]
        z = complex(*vector[pair]) * cmath.exp(1j * angle)
        result[pair] = z.real, z.imag
    return result


def angles_of(kind, row, column, rows, columns, unit, first, width):
    """Returns the rotation angles of a patch, one for each of the `width` / 2 pairs of a head."""
    quarter = width // 4
    powers = [i / quarter for i in range(quarter)]
    if kind == "dinov3":
        centres = (2 * (row + 0.5) / rows - 1, 2 * (column + 0.5) / columns - 1)
        return [2 * np.pi * centre / 100**power for centre in centres for power in powers]
    if kind == "axial":
        return [place / 100**power for place in (column, row) for power in powers]
    stretch = unit[0] / rows, unit[1] / columns
    if kind == "pe":
        places = (column + first) * stretch[1], (row + first) * stretch[0]
    else:
        places = row * stretch[0], column * stretch[1]
    return [place / 10_000**power for place in places for power in powers]


# The Vision Transformer.


def self_attention(x, p, *, epsilon=1e-6, relative=None, bias=None, turn=None, sizes=None):
    """Returns the attention of one image's tokens.

    Args:
      relative: function of the indices of query and key; returns a row of the table of relative
        positions.
      bias: function of the indices of query and key; returns a row of the table of biases.
      turn: function of a token's index, a head and a vector; returns the rotated vector.
      sizes: how many times each token is attended to.
    """
    biases = p["qkv"].get("bias")
    if biases is None:
        biases = np.zeros(p["qkv"]["kernel"].shape[1:])
    elif len(biases) == 2:  # Biases of queries and values only.
        biases = np.stack([biases[0], 0 * biases[0], biases[1]])
    heads = []
    for head in range(len(p["out"]["kernel"])):
        query, key, value = (x @ p["qkv"]["kernel"][:, i, head] + biases[i, head] for i in range(3))
        if "query_norm" in p:
            query = layer_norm(query, p["query_norm"], epsilon)
            key = layer_norm(key, p["key_norm"], epsilon)
        if turn:
            query, key = (
                np.array([turn(i, head, v) for i, v in enumerate(y)]) for y in (query, key)
            )
        scores = np.zeros((len(x), len(x)))
        for i in range(len(x)):
            for j in range(len(x)):
                scores[i, j] = query[i] @ key[j]
                if relative:
                    scores[i, j] += query[i] @ p["relative_embedding"][relative(i, j)]
                scores[i, j] /= np.sqrt(query.shape[-1])
                if bias:
                    scores[i, j] += p["bias_table"][bias(i, j)][head]
        seen = np.repeat(np.arange(len(x)), 1 if sizes is None else sizes)
        heads.append(softmax(scores[:, seen]) @ value[seen])
    attended = np.concatenate(heads, axis=-1)
    if "norm" in p:
        attended = layer_norm(attended, p["norm"], epsilon)
    return attended @ p["out"]["kernel"].reshape(attended.shape[-1], -1) + p["out"].get("bias", 0)


def merge_patches(x, sizes, inputs, p, patches: range, count: int, epsilon: float):
    """Merges `count` patches of one image; returns the tokens and their sizes.

    `inputs` are the inputs of the attention, whose keys are compared.
    """
    keys = []
    for head in range(len(p["out"]["kernel"])):
        bias = p["qkv"]["bias"][1, head] if "bias" in p["qkv"] else 0
        key = inputs @ p["qkv"]["kernel"][:, 1, head] + bias
        keys.append(layer_norm(key, p["key_norm"], epsilon) if "key_norm" in p else key)
    keys = np.mean(keys, axis=0)
    keys = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    even, odd = ([t for t in patches if t % 2 == rest] for rest in (0, 1))
    most_similar = {t: max(odd, key=lambda other: keys[t] @ keys[other]) for t in even}
    even.sort(key=lambda t: -keys[t] @ keys[most_similar[t]])
    sums, sizes = x * sizes[:, None], sizes.copy()
    for token in even[: min(count, len(patches) // 2)]:
        sums[most_similar[token]] += sums[token]
        sizes[most_similar[token]] += sizes[token]
    kept = even[min(count, len(patches) // 2) :]
    kept = sorted(kept) if patches.start else kept
    order = [*range(patches.start), *kept, *odd, *range(patches.stop, len(x))]
    return sums[order] / sizes[order, None], sizes[order]


def attention_pooling(x, p, gelu, epsilon):
    """Attends to all tokens `x` with one learned query and applies an MLP; returns `[dim]`."""
    total = p["out"]["bias"]
    for head, out in enumerate(p["out"]["kernel"]):
        query = p["probe"][0, 0] @ p["query"]["kernel"][:, head] + p["query"]["bias"][head]
        key, value = (
            x @ p["key_value"]["kernel"][:, i, head] + p["key_value"]["bias"][i, head]
            for i in (0, 1)
        )
        total = total + softmax(key @ query / np.sqrt(len(query))) @ value @ out
    return total + feed_forward(layer_norm(total, p["norm"], epsilon), p["mlp"], "gelu", gelu)


def vit(
    params: dict,
    image: np.ndarray,
    *,
    num_classes: int,
    patch_size: int,
    dim: int,
    resnet_blocks=None,
    resnet_stem="large",
    pooling="cls",
    pool_all=False,
    cls_token=False,
    fc_norm=False,
    final_norm=True,
    stem_norm="none",
    distillation="none",
    position="1d",
    position_at="stem",
    rope="none",
    rope_grid=None,
    registers=0,
    attention="full",
    mlp="gelu",
    gelu="tanh",
    norm_at="before",
    layer_scale=None,
    pre_logits=False,
    norm_epsilon=1e-6,
    merge_tokens=0,
    **_,
) -> np.ndarray:
    """Returns the logits of one image; the arguments are the model's."""
    features = (
        image if resnet_blocks is None else hybrid_trunk(params["resnet"], image, resnet_stem)
    )
    rows, columns = features.shape[0] // patch_size, features.shape[1] // patch_size
    patches = windows(features, patch_size, patch_size).reshape(rows * columns, -1)
    kernel = params["patch_embedding"]["kernel"].reshape(-1, dim)
    x = patches @ kernel + params["patch_embedding"].get("bias", 0)
    if stem_norm == "patches":
        x = layer_norm(x, params["patch_norm"], norm_epsilon)
    if distillation != "none":
        x = np.concatenate([params["distillation_token"][0], x])
    if pooling in ("cls", "cls_gap") or cls_token:
        x = np.concatenate([params["cls"][0], x])
    placed = len(x)  # End of the tokens with positions; registers follow.
    special = placed - rows * columns

    def table(p):
        table = position_table(p, position, special, rows, columns, dim)
        return np.concatenate([table, np.zeros((registers, dim))])

    if registers:
        x = np.concatenate([x, params["register_tokens"][0]])
    if position_at == "stem" and position in ("1d", "2d", "sincos2d", "sincos2d_mae"):
        x = x + table(params.get("position_embedding"))

    if stem_norm == "tokens":
        x = layer_norm(x, params["stem_norm"], norm_epsilon)

    def attend(x, p):
        def turn(token, head, vector):
            if not special <= token < placed:
                return vector
            row, column = divmod(token - special, columns)
            if rope == "mixed":
                frequencies = p["frequencies"][:, head]
                return turned(vector, column * frequencies[0] + row * frequencies[1])
            first, unit = pooling in ("cls", "cls_gap") or cls_token, rope_grid or (rows, columns)
            angles = angles_of(rope, row, column, rows, columns, unit, first, len(vector))
            return turned(vector, angles, halves=rope == "dinov3")

        ways = dict(epsilon=norm_epsilon, turn=None if rope == "none" else turn, sizes=sizes)
        if position == "relative":
            ways["relative"] = lambda query, key: relative_row(query, key, special, rows * columns)
        if position == "bias":
            ways["bias"] = lambda query, key: bias_row(query, key, special, rows, columns)
            p = p | {name: params[name] for name in ("bias_table",) if position_at == "shared"}
        return self_attention(x, p, **ways)

    sizes = np.ones(len(x), int) if merge_tokens else None

    def merged(before, after, p):
        """Merges patches of the tokens after attention, by the keys of the tokens before it."""
        nonlocal sizes, placed
        inputs = before if norm_at == "after" else layer_norm(before, p["norm1"], norm_epsilon)
        x, sizes = merge_patches(
            *(after, sizes, inputs, p["attention"]),
            *(range(special, placed), merge_tokens, norm_epsilon),
        )
        placed -= len(after) - len(x)
        return x

    def block(x, p):
        before = x
        for number, branch in (
            ("1", lambda x: attend(x, p["attention"])),
            ("2", lambda x: feed_forward(x, p["mlp"], mlp, gelu, norm_epsilon)),
        ):
            norm = p["norm" + number]
            if norm_at == "after":
                x = x + layer_norm(branch(x), norm, norm_epsilon)
            else:
                scale = 1 if layer_scale is None else p["scale" + number]
                x = x + branch(layer_norm(x, norm, norm_epsilon)) * scale
            x = merged(before, x, p) if merge_tokens and number == "1" else x
        return x

    for layer, p in sorted(params["blocks"].items()):
        if position_at == "every":
            x = x + table(params["position_embedding"][layer])
        elif position_at == "shared" and position != "bias":
            x = x + table(params["position_embedding"])
        if attention == "axial":
            grid = x.reshape(rows, columns, dim)
            grid = np.stack([block(grid[row], p["row"]) for row in range(rows)])
            grid = np.stack(
                [block(grid[:, column], p["column"]) for column in range(columns)], axis=1
            )
            x = grid.reshape(-1, dim)
        else:
            x = block(x, p)
    if final_norm and not fc_norm:
        x = layer_norm(x, params["norm"], norm_epsilon)

    patches = x if pool_all else x[special:placed]
    if pooling == "cls":
        pooled = x[0]
    elif pooling == "cls_gap":
        pooled = np.concatenate([x[0], patches.mean(0)])
    elif pooling == "gap":
        pooled = patches.mean(0)
    else:
        pooled = attention_pooling(patches, params["attention_pooling"], gelu, norm_epsilon)
    if fc_norm:
        pooled = layer_norm(pooled, params["fc_norm"], norm_epsilon)
    if pre_logits:
        pooled = np.tanh(linear(pooled, params["pre_logits"]))
    if not num_classes:
        return pooled
    logits = linear(pooled, params["head"])
    if distillation == "heads":
        logits = (logits + linear(x[1], params["distillation_head"])) / 2
    return logits


# ResNets. An image is `[height, width, channels]`.


def windows(x, size, stride):
    """Returns the window of a kernel at each position: `[rows, columns, size, size, channels]`."""
    rows, columns = ((side - size) // stride + 1 for side in x.shape[:2])
    return np.array(
        [
            [
                x[r * stride : r * stride + size, c * stride : c * stride + size]
                for c in range(columns)
            ]
            for r in range(rows)
        ]
    )


def pad_same(x, size, stride, value=0.0):
    """Pads so that ceil(side / stride) windows fit; the far side gets the odd pixel."""
    pads = []
    for side in x.shape[:2]:
        total = max(0, (-(-side // stride) - 1) * stride + size - side)
        pads.append((total // 2, total - total // 2))
    return np.pad(x, (*pads, (0, 0)), constant_values=value)


def pad_both(x, by):
    return np.pad(x, ((by, by), (by, by), (0, 0)))


def convolve(x, kernel, stride):
    size = kernel.shape[0]
    seen = windows(x, size, stride)
    return seen.reshape(*seen.shape[:2], -1) @ kernel.reshape(-1, kernel.shape[-1])


def hybrid_conv(x, p, stride=1):
    kernel = p["kernel"]
    kernel = (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)
    return convolve(pad_same(x, kernel.shape[0], stride), kernel, stride)


def hybrid_trunk(params, image, stem="large"):
    """Returns the features of a hybrid's ResNet (section 2.2).

    Activations follow convolutions, and all padding is SAME.
    """

    def norm(x, p):
        return group_norm(x, p, 1e-6)

    x = relu(
        norm(hybrid_conv(image, params["root"], 2 if stem == "large" else 1), params["root_norm"])
    )
    if stem == "large":
        x = windows(pad_same(x, 3, 2, -np.inf), 3, 2).max((2, 3))
    for stage, units in sorted(params.get("stages", {}).items()):
        for number, p in sorted(units.items()):
            stride = 2 if stage > "1" and number == "01" else 1
            shortcut = x
            if number == "01":
                shortcut = norm(hybrid_conv(x, p["conv_proj"], stride), p["norm_proj"])
            y = relu(norm(hybrid_conv(x, p["conv1"]), p["norm1"]))
            y = relu(norm(hybrid_conv(y, p["conv2"], stride), p["norm2"]))
            x = relu(shortcut + norm(hybrid_conv(y, p["conv3"]), p["norm3"]))
    return x


def bit_conv(x, p, stride=1):
    kernel = p["kernel"]
    kernel = (kernel - kernel.mean((0, 1, 2))) / np.sqrt(kernel.var((0, 1, 2)) + 1e-10)
    return convolve(pad_both(x, {1: 0, 3: 1, 7: 3}[kernel.shape[0]]), kernel, stride)


def bit_norm(x, p):
    return group_norm(x, p, 1e-5)


def bit(params, image, *, num_classes, resnet_stem="large", axial=False, **_):
    """Returns the logits of a BiT ResNet (section 3.1).

    Activations precede convolutions. Padding is symmetric; the max pooling pads with zeros.
    """
    resnet = params["resnet"]
    if resnet_stem == "large":
        x = windows(pad_both(bit_conv(image, resnet["root"], 2), 1), 3, 2).max((2, 3))
    else:
        x = bit_conv(image, resnet["root"])
    for stage, units in sorted(resnet["stages"].items()):
        for number, p in sorted(units.items()):
            stride = 2 if stage > "1" and number == "01" else 1
            first = relu(bit_norm(x, p["norm1"]))
            shortcut = bit_conv(first, p["conv_proj"], stride) if number == "01" else x
            y = relu(bit_norm(bit_conv(first, p["conv1"]), p["norm2"]))
            y = axial_attention(y, p["conv2"], stride) if axial else bit_conv(y, p["conv2"], stride)
            x = shortcut + bit_conv(relu(bit_norm(y, p["norm3"])), p["conv3"])
    x = relu(bit_norm(x, params["norm"])).mean((0, 1))
    return linear(x, params["head"]) if num_classes else x


def axial_attention(x, p, stride):
    """Attends within each column, then within each row; averages `stride` by `stride` positions."""
    x = axis_attention(x.swapaxes(0, 1), p["column"]).swapaxes(0, 1)
    x = axis_attention(x, p["row"])
    return windows(x, stride, stride).mean((2, 3))


def axis_attention(x, p, heads=8):
    """Attends within each line of `[lines, length, width]`, with 8 heads and relative positions.

    Each head has queries and keys of half the size `width / 8`, followed by values of that size.
    The learned relative embeddings have the same order.
    """
    lines, length, width = x.shape
    x = bit_norm(bit_conv(x, p["qkv"]), p["norm"])
    size = width // heads
    parts = slice(0, size // 2), slice(size // 2, size), slice(size, 2 * size)
    result = np.zeros((lines, length, width))
    for line in range(lines):
        for head in range(heads):
            of_head = x[line, :, 2 * size * head : 2 * size * (head + 1)]
            query, key, value = (of_head[:, part] for part in parts)
            for q in range(length):
                near = [p["relative_embedding"][q - k + length - 1] for k in range(length)]
                to_query, to_key, to_value = (
                    np.array([row[part] for row in near]) for part in parts
                )
                scores = [
                    query[q] @ key[k] + query[q] @ to_query[k] + key[k] @ to_key[k]
                    for k in range(length)
                ]
                mixed = softmax(np.array(scores) / np.sqrt(size // 2)) @ (value + to_value)
                result[line, q, size * head : size * (head + 1)] = mixed
    return bit_norm(result, p["out_norm"])
