"""A checkpoint of any library: opened, fitted to a model, written.

`open_checkpoint` looks at names and shapes only; values are read when `Checkpoint.read` asks
for them, one tensor at a time.
"""

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.arguments import check_arguments
from vit_jax.errors import UserError, nearest
from vit_jax.interop import google, open_clip, openai, timm, transformers
from vit_jax.interop.beside import ObjectiveParams, Shapes, open_beside, write_beside
from vit_jax.interop.layout import Entry, entries
from vit_jax.interop.library import TRAINING_ONLY, ObjectiveFormat, Tensors
from vit_jax.interop.positions import resize_axis, resize_bias_table, resize_patches, resize_positions
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.interop.tensor_files import (
    TORCH_MODEL,
    TORCH_SUFFIXES,
    Tensor,
    check_float,
    open_sharded,
    open_tensors,
    whole,
    write_npz,
    write_safetensors,
)
from vit_jax.models import abstract, family_of
from vit_jax.models.image_model import ImageModel, TokenModel
from vit_jax.models.pixels import Statistic, plain_statistic
from vit_jax.models.position import FIXED
from vit_jax.small_files import read_small

PREPROCESSOR = "preprocessor_config.json"

# In the order in which they are asked whether a file is theirs.
LIBRARIES = {"google": google.LIBRARY, "transformers": transformers.LIBRARY, "open_clip": open_clip.LIBRARY}
LIBRARIES |= {"openai": openai.LIBRARY, "timm": timm.LIBRARY}  # timm's is asked last.
WRITTEN = [name for name, library in LIBRARIES.items() if library.written]

# What names, shapes and values of an unexpected kind lead to.
_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

_SHARED_BIASES = "bias_table"  # Path of the table that all layers of a ViT share.

# Those that a user may change so that a format can say them.
_FLAGS = {"gelu", "norm_epsilon", "resnet_epsilons", "image_size"}


class Checkpoint(NamedTuple):
    """Parameters somewhere, and the model that they are of."""

    place: str
    library: str
    model: type[ImageModel]
    arguments: dict[str, Any]  # Of the model, all that the checkpoint determines.
    shapes: dict[str, tuple[int, ...]]  # Of each parameter, by our path.
    read: Callable[[str], np.ndarray]  # The parameter of a path, in our layout.
    mapped: list[Entry] = []  # Empty for our own checkpoints.
    assumed: str = ""  # What the files do not say, in words.
    preprocessing: Preprocessing | None = None  # What the model should see of an image, where they say it.
    class_names: tuple[str, ...] = ()  # Of all classes, or none.
    objective: ObjectiveParams | None = None  # What else of training it holds.
    step: int | None = None  # Of the run that it is of.
    probabilities: str = "softmax"  # Of `PROBABILITIES`.

    def describe(self) -> str:
        """One line."""
        parameters = sum(int(np.prod(shape)) for shape in self.shapes.values())
        height, width = self.arguments["image_size"]
        head = f"{n:,} classes" if (n := self.arguments["num_classes"]) else "no head"
        head += " with a sigmoid each" if n and self.probabilities == "sigmoid" else ""
        return (
            f"{model_name(self.model, self.arguments)} of {self.library} ({self.place}): "
            f"{parameters / 1e6:,.2f} M parameters, {height}x{width} pixels{self._statistics()}, {head}"
            + (f", computes in {dtype}" if (dtype := self.arguments["dtype"]) != "float32" else "")
            + (f"; assumed: {self.assumed}" if self.assumed else "")
            + (f"; beside it {self.objective.words}" if self.objective else "")
        )

    def _statistics(self) -> str:
        """Mean and deviation of pixels, where they are not the usual ones."""
        mean, deviation = (self.arguments[name] for name in ("mean", "deviation"))
        if mean == deviation == 0.5:
            return ""
        return f" of mean {_numbers(mean)} and deviation {_numbers(deviation)}"


def _numbers(value: Statistic) -> str:
    """One number, or those of the channels, to four digits."""
    return " ".join(f"{x:.4g}" for x in (value if isinstance(value, tuple) else (value,)))


def open_checkpoint(path: Path, image_size=None) -> Checkpoint:
    """The checkpoint in a file, or in a folder with a `config.json`.

    Args:
      image_size: size of the images that it is wanted for; needed only for position tables that are
        not of square images, which some formats do not tell from others.

    Raises:
      UserError: it cannot be read, or is not of a model that exists here.
    """
    path = Path(path)
    config, tensors = _open_files(path)
    library = next(known for known in LIBRARIES.values() if known.claims(path, config, tensors))
    try:
        tensors, config = library.prepare(path, tensors, config)
        form = library.read_format(config, tensors)
        tensors = form.rename(tensors, config)
        for name, tensor in tensors.items():
            check_float(path, name, tensor.dtype)
        model, (values, assumed) = form.model, form.arguments(tensors, config, image_size)
        said, seen, unsaid = library.preprocessing(config, _beside(path, PREPROCESSOR), values["channels"])
        if not family_of(model).any_size or image_size is not None:  # Else the tensors leave it open.
            said.pop("image_size", None)
        values = complete(model, values | said)
        assumed = " and ".join(part for part in (assumed, unsaid) if part)
        names = all_names(library.class_names(config), values["num_classes"])
        probabilities = library.probabilities(config, values["num_classes"])
        layers = values.get("depth", 0)
        layers += sum(values.get("resnet_blocks") or ()) + sum(values.get("blocks") or ())
        if layers > len(tensors):
            raise UserError(f"{path} is said to have {layers:,} layers, but has {len(tensors):,} tensors")
        _, shapes = skeleton(model, values)
        mapped = entries(form.rules(values), shapes, library.title)
        tensors, own = _apart(form.objective, tensors)
        _check(path, mapped, tensors)
        objective = open_beside(path, _finite) if path.is_dir() else None
        if objective is None:
            objective = _objective_params(path, library.title, form.objective, own, config, values)
    except UserError:
        raise
    except _MALFORMED as error:
        raise UserError(
            f"{path} does not describe a model that is read ({type(error).__name__}: {error})"
        ) from error
    by_path = {entry.path: entry for entry in mapped}

    def read(wanted: str) -> np.ndarray:
        entry = by_path[wanted]
        return entry.join([tensors[name].read() for name in entry.names])

    return Checkpoint(
        str(path),
        library.title,
        model,
        values,
        shapes,
        read,
        mapped,
        assumed,
        seen,
        names,
        objective,
        probabilities=probabilities,
    )


def _apart(form: ObjectiveFormat | None, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The tensors of the model, and those of an objective beside it."""
    own = {name: x for name, x in tensors.items() if form and re.match(form.owns, name)}
    return {name: x for name, x in tensors.items() if name not in own}, own


def _objective_params(
    path: Path, title: str, form: ObjectiveFormat | None, own: Tensors, config: dict, values: dict
) -> ObjectiveParams | None:
    """The parameters of an objective, by their tensors; None where there are none."""
    if form is None or not own:
        return None

    def sources(shapes):
        tensors, mapped = form.rename(own, config), entries(form.rules(values), shapes, title)
        _check(path, mapped, tensors)
        return {entry.path: functools.partial(read, tensors, entry) for entry in mapped}

    def read(tensors, entry):
        array = entry.join([tensors[name].read() for name in entry.names])
        return _finite(array, f"{path}: {form.name}'s {entry.path}")

    shapes = None if form.shapes is None else functools.partial(form.shapes, values)
    return ObjectiveParams(form.name, form.values(own, config), sources, shapes)


def _open_files(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """The `config.json` that belongs to a path, or {}, and the tensors."""
    if not path.is_dir():
        start = "open_clip_" if path.name.startswith("open_clip_") else ""
        return _beside(path, start + "config.json"), open_tensors(path)
    config = _beside(path, "config.json")
    if (path / "model.safetensors").is_file():
        return config, open_tensors(path / "model.safetensors")
    if (path / "model.safetensors.index.json").is_file():
        return config, open_sharded(path / "model.safetensors.index.json")
    if (path / "open_clip_model.safetensors").is_file():
        return _open_files(path / "open_clip_model.safetensors")
    if (path / "pytorch_model.bin.index.json").is_file():
        raise UserError(
            f"the tensors of {path} are in several pickles, which are never read: with Transformers, "
            "AutoModel.from_pretrained(FOLDER).save_pretrained(NEW) writes safetensors"
        )
    pickles = [name for name in os.listdir(path) if name.endswith(TORCH_SUFFIXES)]
    if pickles:  # The model's before a trainer's optimizer and arguments.
        open_tensors(path / min(pickles, key=lambda name: (name != TORCH_MODEL, name)))  # Says why not.
    raise UserError(
        f"there is no model.safetensors in {path}: give a folder of timm or Transformers, a run's workdir, a "
        ".npz or .safetensors file, or hf://owner/name"
    )


def _beside(path: Path, name: str) -> dict:
    """The content of a JSON file that belongs to a path, or {}."""
    file = (path if path.is_dir() else path.parent) / name
    if path.suffix == ".npz" or not file.is_file():
        return {}
    try:
        said = json.loads(read_small(file))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(said, dict):
        raise UserError(f"{file} is not the description of a model")
    return said


def all_names(names: Sequence, classes: int) -> tuple[str, ...]:
    """The names of all classes: numbers where there are too few; none where there are none or too many."""
    if not 0 < len(names) <= classes:
        return ()
    return (*map(str, names), *map(str, range(len(names), classes)))


def _check(path: Path, mapped: list[Entry], tensors: dict[str, Tensor]) -> None:
    """Raises UserError unless the tensors are those of the model, in name and shape."""
    wanted = {}
    for entry in mapped:
        wanted |= entry.their_shapes()
    for name, shape in wanted.items():
        if name in tensors and tensors[name].shape != shape:
            raise UserError(f"{path}: {name} is {list(tensors[name].shape)}, but the model has {list(shape)}")
    for what, names in {
        "lacks": wanted.keys() - tensors.keys(),
        "has tensors that no part of the model takes:": tensors.keys() - wanted.keys(),
    }.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"{path} {what} {', '.join(sorted(names)[:3])}{more}")


def complete(model: type[ImageModel], values: dict) -> dict:
    """All arguments of a model but its keys, those not given as their defaults, sizes as pairs.

    Raises:
      UserError: an argument that the model does not have, or lacks, or that `check_arguments` refuses.
    """
    parameters = inspect.signature(model.__init__).parameters.values()
    known = {parameter.name: parameter.default for parameter in parameters}
    known = {name: default for name, default in known.items() if name not in ("self", "rngs")}
    for name in values:
        if name not in known:
            raise UserError(f"a {model.__name__} has no argument {name!r}; {nearest(name, known)}")
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in (known | values).items()}
    for name, value in values.items():
        if value is inspect.Parameter.empty:
            raise UserError(f"a {model.__name__} needs the argument {name!r}")
    check_arguments(values, model.arguments)
    size = values["image_size"]
    values["image_size"] = size if isinstance(size, tuple) else (size, size)
    return values | {name: plain_statistic(values[name]) for name in ("mean", "deviation")}


def skeleton(model: type, values: dict) -> tuple[nnx.GraphDef, dict[str, tuple[int, ...]]]:
    """A model without its parameters, and their shapes by path, such as `blocks/00/norm1/scale`."""
    return _skeleton(model, tuple(sorted(values.items())))


def sketch(model: type[ImageModel], values: dict) -> ImageModel:
    """The model with shapes in place of arrays."""
    return _sketch(model, tuple(sorted(values.items())))


@functools.lru_cache(maxsize=8)
def _sketch(model: type[ImageModel], values: tuple) -> ImageModel:
    return abstract(functools.partial(model, **dict(values)))


@functools.lru_cache(maxsize=8)
def _skeleton(model: type, values: tuple) -> tuple[nnx.GraphDef, dict[str, tuple[int, ...]]]:
    graphdef, params = nnx.split(_sketch(model, values))
    return graphdef, {"/".join(path): leaf.shape for path, leaf in nnx.to_flat_state(params)}


def model_name(model: type[ImageModel], values: dict) -> str:
    """The paper's name of a model, if it has one, or its sizes in words."""
    return family_of(model).spell(values)


class Fit(NamedTuple):
    """A record of what became of a checkpoint's parameters in a model."""

    resized: list[str]
    fresh: list[str]
    dropped: list[str]
    copied: list[str]

    def describe(self) -> list[str]:
        """Says in lines what was resized, made anew, dropped, and copied into each layer."""
        parts = (("resized", self.resized), ("new", self.fresh), ("dropped", self.dropped))
        parts += (("copied into each layer", self.copied),)
        return [f"{word}: {', '.join(paths)}" for word, paths in parts if paths]


def fit(
    checkpoint: Checkpoint, changes: dict, new_head: bool = False, seed: int = 0
) -> tuple[dict[str, Any], dict[str, Callable], Fit]:
    """Says how the parameters of a model with some arguments changed come from a checkpoint.

    A head of another number of classes starts at zero, or as `head_deviation` says where that is asked for,
    without the pre-logits layer unless `pre_logits` is; positions are resized; one table of biases by offset
    that all layers share becomes each layer's own where the model has such, as BEiT is fine-tuned; what the
    model has no place for is dropped. A kernel of pixels gets other channels by timm's rule. Without classes
    a model of two heads keeps its distillation token.

    Args:
      changes: arguments of the model, over the checkpoint's.
      new_head: also where the number of classes is the same.
      seed: of a new head's values.

    Returns:
      The model's arguments, a function for each of its parameters by path, and what was done.

    Raises:
      UserError: an argument that the model does not have, or parameters that the checkpoint lacks.
    """
    known = checkpoint.arguments
    for name in changes:
        if name not in known:
            raise UserError(
                f"{model_name(checkpoint.model, known)} has no argument {name!r}; {nearest(name, known)}"
            )
    new_head = new_head or changes.get("num_classes", known["num_classes"]) != known["num_classes"]
    changes = _implied(known, changes, new_head) | changes
    values = complete(checkpoint.model, known | changes)
    before, after = (sketch(checkpoint.model, v) for v in (known, values))
    old, new = (getattr(model, "grid", None) for model in (before, after))
    _, shapes = skeleton(checkpoint.model, values)
    sources, done = {}, Fit([], [], [], [])

    for path, shape in shapes.items():
        origin = _origin(path, checkpoint)
        found, read = checkpoint.shapes.get(origin), functools.partial(read_finite, checkpoint)
        if path == "position_embedding/table" and _has_fixed_positions(known):
            table = np.asarray(before.position_embedding())  # A model with a table may start from them.
            found, read = table.shape, {path: table}.get
        if found and _reads_pixels(found, shape, known, values):
            read = functools.partial(_other_channels, read, values["channels"])
            found = (*found[:2], values["channels"], found[3])
            done.resized.append(f"{path} {known['channels']} channels -> {values['channels']}")
        if path.startswith(("head/", "distillation_head/")) and (new_head or found != shape):
            deviation = changes.get("head_deviation", 0.0) if path.endswith("/kernel") else 0.0
            sources[path] = functools.partial(_drawn, shape, deviation, seed)
            start = f"normal of deviation {deviation:g}" if deviation else "zero"
            done.fresh.append(f"{path} {list(found) if found else 'none'} -> {list(shape)}, {start}")
        elif found == shape and (old == new or not (_is_table(path) or _is_by_offset(path, known))):
            sources[path] = functools.partial(read, origin)
        elif found and _is_table(path):
            sources[path] = functools.partial(_resized, read, path, before, after)
            done.resized.append(f"{path} {'x'.join(map(str, old))} -> {'x'.join(map(str, new))}")
        elif found and path == "patch_embedding/kernel" and found[2:] == shape[2:]:
            sources[path] = functools.partial(_other_patches, read, path, shape)
            line = f"{path} {'x'.join(map(str, found[:2]))} -> {'x'.join(map(str, shape[:2]))}"
            shrinks = any(after < before for before, after in zip(found[:2], shape[:2], strict=True))
            done.resized.append(line + (", an approximation, as patches shrink" if shrinks else ""))
        elif found and _is_by_offset(path, known) and old != new:
            sources[path] = functools.partial(_other_offsets, read, origin, before, after)
            done.resized.append(f"{path} {'x'.join(map(str, old))} -> {'x'.join(map(str, new))}")
        elif found and path.endswith("/bias_table") and len(shape) == 3 and found[2:] == shape[2:]:
            sources[path] = functools.partial(_other_windows, read, path, shape)
            done.resized.append(f"{path} {'x'.join(map(str, found[:2]))} -> {'x'.join(map(str, shape[:2]))}")
        elif found and path.endswith("/relative_embedding") and known.get("axial"):
            sources[path] = functools.partial(_other_line, read, path, shape)
            done.resized.append(f"{path} {found[0]} -> {shape[0]}")
        elif path.startswith("fc_norm/"):
            sources[path] = functools.partial(np.full, shape, float(path.endswith("scale")), np.float32)
            done.fresh.append(f"{path} {list(shape)}, {'one' if path.endswith('scale') else 'zero'}")
        elif found:
            raise UserError(
                f"{checkpoint.place}: {path} is {list(found)}, but the model asked for has {list(shape)}"
            )
        else:
            raise UserError(f"{checkpoint.place} has no {path} {list(shape)}, which the model asked for has")
    used = {_origin(path, checkpoint) for path in shapes}
    done.dropped.extend(path for path in checkpoint.shapes if path not in used)
    done.copied.extend(sorted((used - shapes.keys()) & checkpoint.shapes.keys()))
    return values, sources, done


def _implied(known: dict, changes: dict, new_head: bool) -> dict:
    """The arguments that other changes of a checkpoint's arguments change."""
    implied = {}
    if new_head and known.get("pre_logits"):
        implied["pre_logits"] = False
    if not changes.get("num_classes", known["num_classes"]) and known.get("distillation") == "heads":
        implied["distillation"] = "token"
    if changes.get("channels", known["channels"]) != known["channels"]:
        each = {name: known[name] for name in ("mean", "deviation") if isinstance(known[name], tuple)}
        implied |= {name: float(np.mean(value)) for name, value in each.items()}
    return implied


def _reads_pixels(found: tuple[int, ...], shape: tuple[int, ...], known: dict, values: dict) -> bool:
    """True for the kernel that reads the images, where their number of channels changes."""
    before, after = known["channels"], values["channels"]
    return before != after and len(found) == len(shape) == 4 and (found[2], shape[2]) == (before, after)


def _other_channels(read, channels: int, path: str) -> np.ndarray:
    """A kernel that reads images of another number of channels, by timm's rule.

    One channel gets the sum of all. Others get those there are in turn, times their number over the new one.
    """
    kernel = np.asarray(read(path))
    if channels == 1:
        return kernel.sum(axis=2, keepdims=True)
    before = kernel.shape[2]
    return kernel[:, :, np.arange(channels) % before] * np.float32(before / channels)


def _drawn(shape: tuple[int, ...], deviation: float, seed: int) -> np.ndarray:
    """Normal values around 0, float32; zeros where the deviation is 0."""
    if not deviation:
        return np.zeros(shape, np.float32)
    return np.float32(deviation) * np.random.default_rng(seed).standard_normal(shape, np.float32)


def read_finite(checkpoint: Checkpoint, path: str) -> np.ndarray:
    """The parameter of a path.

    Raises:
      UserError: it holds a NaN or an infinity.
    """
    return _finite(checkpoint.read(path), f"{checkpoint.place}: {path}")


def _finite(values: np.ndarray, what: str) -> np.ndarray:
    """The same values; raises UserError where one is a NaN or an infinity."""
    library = np if isinstance(values, np.ndarray) else jnp  # What is on a device is looked at there.
    flat = values.reshape(-1)
    # The product passes over the values once and keeps nothing; of finite ones it may overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        product = library.dot(flat, flat)
    if not np.isfinite(product) and not library.isfinite(flat).all():
        raise UserError(f"{what} holds values that are not finite (NaN or infinity)")
    return values


def _origin(path: str, checkpoint: Checkpoint) -> str:
    """The path in a checkpoint of what becomes this parameter: a layer's biases may be those of all."""
    shared = _SHARED_BIASES in checkpoint.shapes and path.endswith(f"/attention/{_SHARED_BIASES}")
    return _SHARED_BIASES if shared else path


def _is_table(path: str) -> bool:
    return path.startswith("position_embedding/") and path.split("/")[-1] in ("table", "x", "y")


def _is_by_offset(path: str, values: dict) -> bool:
    """True for a ViT's table by offset between two tokens of the grid."""
    position = values.get("position")
    return {"bias": "bias_table", "relative": "relative_embedding"}.get(position) == path.split("/")[-1]


def _has_fixed_positions(values: dict) -> bool:
    return values.get("position") in FIXED


def _resized(read, path: str, before: TokenModel, after: TokenModel) -> np.ndarray:
    """The table of one model's positions for another's grid and prefix tokens."""
    table, kind = np.asarray(read(path)), path.split("/")[-1]
    if kind != "table":
        return resize_axis(table, after.grid[kind == "x"], after.position_resize)
    if missing := [token for token in after.prefix_tokens if token not in before.prefix_tokens]:
        token = missing[0].removesuffix("_token")
        raise UserError(f"{path} has no row for the {token} token that the model asked for has")
    kept = [before.prefix_tokens.index(token) for token in after.prefix_tokens]
    table = np.concatenate([table[:, kept], table[:, before.prefix :]], axis=1)
    return resize_positions(table, before.grid, after.grid, after.prefix, after.position_resize)


def _other_windows(read, path: str, shape: tuple[int, ...]) -> np.ndarray:
    """A table of biases by offset, for windows of another size."""
    return resize_bias_table(read(path), *shape[:2])


def _other_offsets(read, path: str, before: TokenModel, after: TokenModel) -> np.ndarray:
    """A ViT's table by offset, for another grid and the same tokens beside it."""
    table = np.asarray(before.layout.resized(jnp.asarray(read(path)), after.grid))
    if len(table) != after.layout.rows:
        raise UserError(f"{path} has {len(table)} rows, but the tokens asked for need {after.layout.rows}")
    return table


def _other_line(read, path: str, shape: tuple[int, ...]) -> np.ndarray:
    """An axial attention's table of relative positions, for lines of another length."""
    return resize_axis(read(path), shape[0], "bicubic")


def _other_patches(read, path: str, shape: tuple[int, ...]) -> np.ndarray:
    """A patch embedding's kernel for patches of another size."""
    return resize_patches(read(path), *shape[:2])


def build(model: type, values: dict, sources: dict[str, Callable[[], np.ndarray]]) -> ImageModel:
    """The model with its parameters on the first device, read by as many threads as there are cores."""
    graphdef, shapes = skeleton(model, values)
    device = jax.local_devices()[0]
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        arrays = list(pool.map(lambda path: jax.device_put(sources[path](), device), shapes))
    flat = {tuple(path.split("/")): array for path, array in zip(shapes, arrays, strict=True)}
    return nnx.merge(graphdef, nnx.traversals.unflatten_mapping(flat))


def save(
    destination: Path,
    library: str,
    model: type,
    values: dict,
    read: Callable[[str], np.ndarray],
    preprocessing: Preprocessing | None = None,
    class_names: Sequence[str] = (),
    objective: ObjectiveParams | None = None,
    objective_shapes: Shapes | None = None,
    probabilities: str = "softmax",
) -> list[Entry]:
    """Writes a model's parameters in another library's format, and reads them back to be sure.

    Args:
      destination: a new file (google) or folder (timm, transformers).
      library: a key of `LIBRARIES`.
      values: the model's arguments, complete.
      read: the parameter of a path.
      preprocessing: what the model should see of an image; None: 7/8 of the short side, bilinear. Google's
        format cannot hold it, nor the names.
      class_names: of all classes, or none.
      objective: what of training is written beside the model: in the library's way where it has one, else in
        files of ours. Google's format has no place for it.
      objective_shapes: of its parameters, by our path.
      probabilities: of `PROBABILITIES`. Google's format cannot hold it.

    Raises:
      UserError: the format cannot hold the model or one of its options, or the destination exists.
    """
    written_by = LIBRARIES[library]
    form = written_by.format_of(model, values)
    _, shapes = skeleton(model, values)
    described = form.describe(values)
    mapped = form.number(entries(form.rules(values), shapes, written_by.title), values)
    arrays = {}
    for entry in mapped:
        arrays |= entry.split(np.asarray(read(entry.path)))
    arrays = form.finish(arrays, values)
    own, memory, among = {}, {}, False
    if objective:
        among = written_by.writes_objective(model, values, objective.name, objective.values)
        own = {path: source() for path, source in objective.sources(objective_shapes).items()}
        memory = {name: tensor.read() for name, tensor in objective.memory.items()}
    if among:
        prefix = form.objective.prefix
        mapped = [entry._replace(names=tuple(prefix + name for name in entry.names)) for entry in mapped]
        described |= form.objective.describe(values, objective.values)
        arrays = {prefix + name: array for name, array in arrays.items()}
        for entry in entries(form.objective.rules(values), objective_shapes, written_by.title):
            arrays |= entry.split(np.asarray(own[entry.path]))
        arrays |= form.objective.finish(values, objective.values)
    files = written_by.files(described, values, preprocessing, class_names, probabilities)
    with whole(destination) as temporary:
        if files is None:
            write_npz(temporary, arrays)
        else:
            temporary.mkdir()
            write_safetensors(temporary / "model.safetensors", arrays)
            for name, content in files.items():
                (temporary / name).write_text(json.dumps(content, indent=2) + "\n")
            if objective and not among:
                write_beside(temporary, objective.name, objective.values, own, memory)
        again = open_checkpoint(temporary, values["image_size"])
        _compare(again, written_by.title, model, values, read)
        if objective:
            _compare_objective(again.objective, written_by.title, objective.values, own, memory)
    return mapped


def _compare(written: Checkpoint, library: str, model: type, values: dict, read) -> None:
    """Raises UserError unless what was written is the model, bit for bit."""
    ignored = TRAINING_ONLY | ({"image_size"} if family_of(model).any_size else set())
    if values.get("mlp") == "swiglu" and values["pooling"] != "map":
        ignored |= {"gelu"}
    read_as = {
        name: written.arguments[name]
        for name, value in values.items()
        if name not in ignored and written.arguments[name] != value
    }
    if read_as:
        flags = " ".join(f"--{name}={_flag(value)}" for name, value in read_as.items())
        remedy = f"; if what it would be read as is meant, ask for that: {flags}"
        raise UserError(
            f"{library} cannot say {', '.join(f'{name}={_flag(values[name])}' for name in read_as)}"
            + (remedy if read_as.keys() <= _FLAGS else "")
        )
    for path in written.shapes:
        if not np.array_equal(written.read(path), np.asarray(read(path)), equal_nan=True):
            raise UserError(f"{library} does not hold {path} exactly")


def _compare_objective(written: ObjectiveParams, library: str, values: dict, own: dict, memory: dict) -> None:
    """Raises UserError unless what an objective has is what was written, bit for bit."""
    for name, value in written.values.items():
        if values.get(name, value) != value:
            raise UserError(f"{library} cannot say config.objective.{name}={values[name]!r}")
    sources = written.sources({path: array.shape for path, array in own.items()})
    for path, array in own.items():
        if not np.array_equal(sources[path](), array):
            raise UserError(f"{library} does not hold {written.name}'s {path} exactly")
    for name, array in memory.items():
        if not np.array_equal(written.memory[name].read(), array):
            raise UserError(f"{library} does not hold {written.name}'s {name} exactly")


def _flag(value) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def params_of(model: nnx.Module) -> dict[str, jax.Array]:
    """The parameters of a model by path."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(path): leaf[...] for path, leaf in flat}
