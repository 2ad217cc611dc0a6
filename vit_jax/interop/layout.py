"""Names and array layouts of vit_jax's parameters in the files of other libraries.

A format is a list of rules, one for each kind of parameter. A rule maps vit_jax's path of a
parameter to the library's tensor names. The layout in the rule converts the array in both
directions. A parameter without a rule cannot be stored in the format.

In this module, "our" names and arrays are vit_jax's, and "their" names and tensors are the other
library's.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.tensor_files import aligned_empty, transpose_into


class Layout(NamedTuple):
    """A conversion of arrays between vit_jax's layout and another library's layout."""

    there: Callable[[np.ndarray], np.ndarray]  # Converts our array to their tensor.
    back: Callable[[np.ndarray, np.ndarray], None]  # Writes their tensor into our array.


def _layout(there: Callable, view: Callable) -> Layout:
    """Returns a layout from two functions, one for writing files and one for reading files.

    Args:
      there: called with vit_jax's array; returns the library's tensor.
      view: called with the library's tensor and the shape of vit_jax's array; returns a view of the
        tensor with this shape.
    """

    def back(theirs, ours):
        ours[...] = view(theirs, ours.shape)

    return Layout(there, back)


SAME = _layout(lambda x: x, lambda y, shape: y)
# A linear layer. PyTorch's weight is [out, in]. vit_jax's kernel is [in, out], where `out` may
# be several axes, such as [heads, head_dim].
LINEAR = Layout(
    lambda x: x.reshape(len(x), -1).T,
    lambda y, ours: transpose_into(ours.reshape(len(ours), -1), y),
)
# The output projection of attention. vit_jax's kernel is [heads, head_dim, dim]. PyTorch's weight
# is [dim, heads * head_dim].
LINEAR_OUT = Layout(
    lambda x: x.reshape(-1, x.shape[-1]).T,
    lambda y, ours: transpose_into(ours.reshape(-1, ours.shape[-1]), y),
)
FLAT = _layout(lambda x: x.reshape(-1), lambda y, shape: y.reshape(shape))
CONV = _layout(lambda x: x.transpose(3, 2, 0, 1), lambda y, shape: y.transpose(2, 3, 1, 0))
# A dense layer that is stored as a 1x1 convolution, [out, in, 1, 1] or [1, 1, in, out].
LINEAR_CONV = _layout(lambda x: x.T[:, :, None, None], lambda y, shape: y[:, :, 0, 0].T)
DENSE_CONV = _layout(lambda x: x[None, None], lambda y, shape: y[0, 0])
# A table, such as relative position biases. All axes of vit_jax's array except the last, such as
# [rows, columns, heads], are one axis of the library's tensor: [rows * columns, heads].
TABLE = _layout(lambda x: x.reshape(-1, x.shape[-1]), lambda y, shape: y.reshape(shape))
# vit_jax's array has an additional first axis of length one.
MATRIX = _layout(lambda x: x[0], lambda y, shape: y[None])
# The library's tensor has an additional first axis of length one.
LEADING = _layout(lambda x: x[None], lambda y, shape: y[0])
# One number for each head. vit_jax's array is [heads], the library's tensor is [heads, 1, 1].
HEADS = _layout(lambda x: x[:, None, None], lambda y, shape: y.reshape(shape))
# Google's group norms, [1, 1, 1, channels].
CHANNELS = _layout(lambda x: x[None, None, None], lambda y, shape: y.reshape(shape))


# Prefixes of our paths.
BLOCK = r"blocks/(\d+)/"  # An encoder layer.
UNIT = r"resnet/stages/(\d+)/(\d+)/"  # A residual unit of a ResNet.
STAGED = r"stages/(\d+)/(\d+)/"  # A block in a model with several stages.


class Rule(NamedTuple):
    """The library's name and layout of one kind of parameter, such as `fc1/kernel` of all blocks.

    Attributes:
      path: regular expression for vit_jax's path. Its groups are inserted in the names: `{0}` is
        the first group, and `{m[0]}` is the first group as a number minus one.
      names: name of the library's tensor; or several names, if the library stores vit_jax's array
        as several tensors, split along `axis`.
      layout: layout of the library's tensor, or of each of several tensors.
    """

    path: str
    names: str | tuple[str, ...]
    layout: Layout = SAME
    axis: int | None = None


def names_of(rule: Rule) -> tuple[str, ...]:
    """Returns the tensor names of a rule as a tuple, also if there is only one."""
    return (rule.names,) if isinstance(rule.names, str) else rule.names


def torch_dense(
    ours: str, theirs: str, kernel: Layout = LINEAR, bias: Layout = FLAT
) -> tuple[Rule, Rule]:
    """Returns the rules for kernel and bias of a PyTorch layer.

    `ours` is vit_jax's path of the layer, a regular expression; `theirs` is the library's name.
    """
    return Rule(f"{ours}/kernel", f"{theirs}.weight", kernel), Rule(
        f"{ours}/bias", f"{theirs}.bias", bias
    )


def torch_norm(ours: str, theirs: str) -> tuple[Rule, Rule]:
    """Returns the rules for scale and bias of a PyTorch norm."""
    return Rule(f"{ours}/scale", f"{theirs}.weight"), Rule(f"{ours}/bias", f"{theirs}.bias")


def moved(rules: Iterable[Rule], start: str, other: str) -> tuple[Rule, ...]:
    """Selects the rules whose tensor names start with `start`; replaces this prefix by `other`."""
    found = []
    for rule in rules:
        names = names_of(rule)
        if all(name.startswith(start) for name in names):
            found.append(
                rule._replace(names=tuple(other + name.removeprefix(start) for name in names))
            )
    return tuple(found)


def count_units(names: Iterable[str], pattern: str, first: int) -> tuple[int, ...]:
    """Returns the number of residual units in each stage of a model, from its tensor names.

    Args:
      pattern: regular expression for the name of a unit's tensor, with groups for the index of the
        stage and the index of the unit.
      first: index of the first unit of a stage, 0 or 1.
    """
    units = {}
    for name in names:
        if match := re.match(pattern, name):
            stage, unit = map(int, match.groups())
            units[stage] = max(unit + 1 - first, units.get(stage, 0))
    return tuple(units[stage] for stage in sorted(units))


def resnet_width(channels: int) -> float:
    """Returns the width factor of a ResNet, from the number of channels of its first layer."""
    return channels // 64 if channels % 64 == 0 else channels / 64


def resnet_root(side: int, channels: int) -> dict:
    """Returns the arguments `resnet_width` and `resnet_stem`, from a ResNet's first convolution.

    Args:
      side: height and width of the convolution's kernel in pixels, 7 or 3.
      channels: number of output channels.

    Raises:
      UserError: the first layer is unsupported.
    """
    stem = {7: "large", 3: "small"}.get(side)
    if stem is None:
        raise UserError(
            f"a ResNet's first kernel of {side}x{side} is unsupported; supported: 7x7, 3x3"
        )
    return dict(resnet_width=resnet_width(channels), resnet_stem=stem)


class Entry(NamedTuple):
    """A parameter of a model, and the names and layout of its tensors in a library's format."""

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    layout: Layout
    axis: int | None

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Converts vit_jax's array to the library's tensors, by name."""
        if self.axis is None:
            return {self.names[0]: self.layout.there(array)}
        parts = np.split(array, len(self.names), self.axis)
        return {
            name: self.layout.there(part.squeeze(self.axis))
            for name, part in zip(self.names, parts, strict=True)
        }

    def join(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Converts the library's tensors to vit_jax's array."""
        if self.layout is SAME and self.axis is None and arrays[0].flags.writeable:
            return arrays[0]  # No copy is needed, because the array is writable.
        joined = aligned_empty(self.shape, np.float32)
        if self.axis is None:
            self.layout.back(arrays[0], joined)
        else:
            for part, array in enumerate(arrays):
                self.layout.back(array, joined[(slice(None),) * self.axis + (part,)])
        return joined

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the library's tensors, by name; no parameter values are needed."""
        return {
            name: x.shape
            for name, x in self.split(np.broadcast_to(np.float32(0), self.shape)).items()
        }


def entries(rules: Iterable[Rule], shapes: dict[str, tuple[int, ...]], library: str) -> list[Entry]:
    """Returns an `Entry` for each parameter of a model, by the first rule that matches its path.

    Raises:
      UserError: the format has no rule for a parameter.
    """
    found = []
    for path, shape in shapes.items():
        for rule in rules:
            if match := re.fullmatch(rule.path, path):
                groups = [int(group) if group.isdigit() else group for group in match.groups()]
                less = [group - 1 if isinstance(group, int) else None for group in groups]
                names = tuple(name.format(*groups, m=less) for name in names_of(rule))
                found.append(Entry(path, tuple(shape), names, rule.layout, rule.axis))
                break
        else:
            remedy = "; --pre_logits=false leaves it out" if path.startswith("pre_logits") else ""
            raise UserError(f"{library} has no place for {path} {list(shape)}{remedy}")
    return found
