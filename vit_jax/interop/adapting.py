"""Adapts a checkpoint's parameters to a model with other arguments: image size, head, channels.

Each family of models has its own rules, `Family.adaptation`. Heads and input convolutions are
adapted in the same way for all families.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, check_finite, model_name, sketch
from vit_jax.models import family_of
from vit_jax.models.family import Change
from vit_jax.models.model_card import parameter_shapes
from vit_jax.options.model import ImageOptions, argument_hint, make_options

Read = Callable[[], np.ndarray]


class Fit(NamedTuple):
    """Report of an adaptation: a description of each resized, new, dropped or copied parameter."""

    resized: list[str]
    fresh: list[str]
    dropped: list[str]
    copied: list[str]

    def describe(self) -> list[str]:
        """Returns a line of text for each kind of change, such as "dropped: head/bias"."""
        parts = (("resized", self.resized), ("new", self.fresh), ("dropped", self.dropped))
        parts += (("copied into each layer", self.copied),)
        return [f"{word}: {', '.join(paths)}" for word, paths in parts if paths]


class _Stored(NamedTuple):
    """A parameter of a checkpoint: its shape, and a function that reads its values."""

    shape: tuple[int, ...]
    read: Read


def fit(
    checkpoint: Checkpoint, changes: dict[str, Any], new_head: bool = False, seed: int = 0
) -> tuple[ImageOptions, dict[str, Read], Fit]:
    """Adapts a checkpoint's parameters to a model that differs in some arguments.

    - If the number of classes changes, the head is new. It is initialized with zeros, or from a
      normal distribution if `changes` contain its standard deviation, `head_std`. A pre-logits
      layer is removed unless `changes` contain `pre_logits`.
    - If the number of channels changes, kernels of input convolutions are converted as in timm.
    - The rules of the model's family convert other parameters; for example, they resize position
      embeddings.
    - Norms that only the new model has (`new_norms` of the family) get scale 1 and bias 0.
    - Parameters that the new model does not have are dropped.

    Args:
      checkpoint: the checkpoint.
      changes: arguments of the new model that differ from the checkpoint's.
      new_head: create a new head even if the number of classes does not change.
      seed: random seed of a new head's values.

    Returns:
      A tuple of three: the options of the new model; a dictionary from each parameter's path to a
      function that returns the parameter's values; the report.

    Raises:
      UserError: a name in `changes` is not an argument of the model, the checkpoint lacks a
        parameter, or the shape of a parameter cannot be adapted.
    """
    adapter = _Adapter(checkpoint, changes, new_head, seed)
    shapes = parameter_shapes(adapter.after)
    sources = {path: adapter.source(path, shape) for path, shape in shapes.items()}
    adapter.report_unused(shapes.keys())
    return adapter.options, sources, adapter.report


class _Adapter:
    """Adapts one checkpoint to a new model, one parameter at a time.

    The method `source` returns a function for each parameter of the new model. This function reads
    the checkpoint's parameter, and converts it to the new shape if necessary. For parameters of a
    new head or norm, the function returns initial values.
    """

    def __init__(self, checkpoint: Checkpoint, changes: dict[str, Any], new_head: bool, seed: int):
        known = checkpoint.arguments
        for name in changes:
            if name not in known:
                raise UserError(
                    f"{model_name(checkpoint.options)} has no argument {name!r}; "
                    f"{argument_hint(name, known)}"
                )
        self.checkpoint, self.rules = checkpoint, family_of(checkpoint.options).adaptation
        self.new_head = (
            new_head or changes.get("num_classes", known["num_classes"]) != known["num_classes"]
        )
        implied = _implied(known, changes, self.new_head) | self.rules.implied(known, changes)
        self.options = make_options(type(checkpoint.options), known | implied | changes)
        self.head_std, self.seed = changes.get("head_std", 0.0), seed
        self.before, self.after = sketch(checkpoint.options), sketch(self.options)
        self.computed = self.rules.computed(self.before)
        self.report = Fit([], [], [], [])

    def source(self, path: str, shape: tuple[int, ...]) -> Read:
        """Returns a function that reads a parameter of the adapted model.

        Raises:
          UserError: the checkpoint lacks the parameter, or its shape cannot be adapted.
        """
        stored = self._stored(path, shape)
        same_shape = stored is not None and stored.shape == shape
        if path.startswith(self.rules.heads) and (self.new_head or not same_shape):
            return self._new_head(path, shape, stored)
        if stored and (resized := self._resized(path, shape, stored)):
            return resized
        if stored and same_shape:
            return stored.read
        if path.startswith(self.rules.new_norms):
            return self._new_norm(path, shape)
        place = self.checkpoint.place
        if stored:
            raise UserError(
                f"{place}: {path} is {list(stored.shape)}, but the requested model has "
                f"{list(shape)}"
            )
        raise UserError(f"{place} has no {path} {list(shape)}, which the requested model has")

    def report_unused(self, paths: Any) -> None:
        """Adds two lists of the checkpoint's parameters to the report.

        The list `dropped` contains parameters that the new model does not use. The list `copied`
        contains parameters of all layers that the new model stores in each layer, such as a shared
        table of relative position biases. `paths` contains the paths of the new model's parameters.
        """
        stored = self.checkpoint.shapes
        used = {self.rules.source_of(path, stored) for path in paths}
        self.report.dropped.extend(path for path in stored if path not in used)
        self.report.copied.extend(sorted((used - paths) & stored.keys()))

    def _stored(self, path: str, shape: tuple[int, ...]) -> _Stored | None:
        """Returns the checkpoint's parameter for a path of the new model; None if it is missing.

        If the number of channels changes, the kernel of an input convolution is converted to the
        new number of channels.
        """
        source = self.rules.source_of(path, self.checkpoint.shapes)
        if path in self.computed:
            stored = _Stored(self.computed[path].shape, lambda: self.computed[path])
        elif source in self.checkpoint.shapes:
            name = f"{self.checkpoint.place}: {source}"
            stored = _Stored(
                self.checkpoint.shapes[source],
                lambda: check_finite(self.checkpoint.read(source), name),
            )
        else:
            return None
        before, after = self.checkpoint.options.channels, self.options.channels
        reads_pixels = len(stored.shape) == len(shape) == 4 and (stored.shape[2], shape[2]) == (
            before,
            after,
        )
        if before == after or not reads_pixels:
            return stored
        self.report.resized.append(f"{path} {before} channels -> {after}")
        return _Stored(
            (*stored.shape[:2], after, stored.shape[3]),
            partial(_other_channels, stored.read, after),
        )

    def _resized(self, path: str, shape: tuple[int, ...], stored: _Stored) -> Read | None:
        """Returns a function that resizes a stored parameter; None if no resizing is needed."""
        rule = self.rules.resize_of(path)
        if rule is None or stored.shape[-1] != shape[-1]:
            return None
        before, after = rule.size(self.before, stored.shape), rule.size(self.after, shape)
        if before == after and not (rule.has_tokens and stored.shape != shape):
            return None
        sizes = " -> ".join("x".join(map(str, size)) for size in (before, after))
        self.report.resized.append(f"{path} {sizes}{rule.note(before, after)}")
        change = Change(path, shape, self.before, self.after)
        return lambda: rule.resize(np.asarray(stored.read()), change)

    def _new_head(self, path: str, shape: tuple[int, ...], stored: _Stored | None) -> Read:
        std = self.head_std if path.endswith("/kernel") else 0.0
        start = f"normal of std {std:g}" if std else "zero"
        self.report.fresh.append(
            f"{path} {list(stored.shape) if stored else 'none'} -> {list(shape)}, {start}"
        )
        return partial(_drawn, shape, std, self.seed)

    def _new_norm(self, path: str, shape: tuple[int, ...]) -> Read:
        value = float(path.endswith("scale"))
        self.report.fresh.append(f"{path} {list(shape)}, {'one' if value else 'zero'}")
        return partial(np.full, shape, value, np.float32)


def _implied(known: dict[str, Any], changes: dict[str, Any], new_head: bool) -> dict[str, Any]:
    """Returns arguments of the new model that must change because of the requested `changes`.

    These rules apply to models of all families:

    - If the new model has a new head, `pre_logits` becomes False.
    - If the number of channels changes, and `mean` or `std` has one value for each channel, the
      values are replaced by their average over the channels.
    """
    implied = {}
    if new_head and known.get("pre_logits"):
        implied["pre_logits"] = False
    if changes.get("channels", known["channels"]) != known["channels"]:
        per_channel = {
            name: known[name] for name in ("mean", "std") if isinstance(known[name], tuple)
        }
        implied |= {name: float(np.mean(value)) for name, value in per_channel.items()}
    return implied


def _other_channels(read: Read, channels: int) -> np.ndarray:
    """Converts the kernel of an input convolution to another number of channels, as in timm.

    For one channel, the kernel is summed over its input channels. For several channels, the old
    input channels are repeated cyclically, and multiplied by the old number of channels divided by
    the new number. For example, 4 channels are red, green, blue and red, each multiplied by 3/4.
    """
    kernel = np.asarray(read())
    if channels == 1:
        return kernel.sum(axis=2, keepdims=True)
    before = kernel.shape[2]
    return kernel[:, :, np.arange(channels) % before] * np.float32(before / channels)


def _drawn(shape: tuple[int, ...], std: float, seed: int) -> np.ndarray:
    """Draws float32 values from a normal distribution around 0; all values are 0 if `std` is 0."""
    if not std:
        return np.zeros(shape, np.float32)
    return np.float32(std) * np.random.default_rng(seed).standard_normal(shape, np.float32)
