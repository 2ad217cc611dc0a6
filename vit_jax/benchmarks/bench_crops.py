"""Compares programs by the TPU compiler's estimates: DINO's step, and two ways to encode crops.

The first comparison is between DINO's training step and a supervised training step. The second one
is between a separate forward pass for each crop size, and one pass over all crops.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.benchmarks import other_projects
from vit_jax.benchmarks.bench_tpu import STEPS
from vit_jax.benchmarks.figures import Table
from vit_jax.config import with_values
from vit_jax.models import model_factory
from vit_jax.models.attention import attend
from vit_jax.models.model_card import abstract
from vit_jax.models.vit import ViT
from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import GIB
from vit_jax.parallel.mesh import make_mesh, replicated, split_batch
from vit_jax.planning.compile import (
    Compiled,
    Slice,
    compile_lowered,
    compile_step,
    find_slice,
    topology_devices,
)
from vit_jax.planning.hlo import total

CROPS = {224: 2, 96: 8}  # Number of crops per image, by side in pixels.


def measure(configs: Mapping[str, RunOptions], slices: Sequence[str], images: int) -> dict:
    """Prints and returns FLOPs, estimated cycles and memory of four programs for each model.

    The programs are a supervised step, DINO's step, and the backbone's forward and backward pass in
    two variants. The first variant has a pass for large crops and a pass for small crops. The
    second variant has a single pass: the tokens of all crops are packed into one sequence, as in
    DINOv2's code, and each crop attends only to itself.

    Args:
      configs: the config of DINO's training step for each ViT, by the ViT's name. The supervised
        step trains the same ViT.
      slices: chip and topology, such as `v5e:2x2`.
      images: images per device.
    """
    columns = {"TFLOP a device": ".2f", "FLOPs to the first": ".2f"}
    columns |= {"M cycles (estimated)": ".1f", "cycles to the first": ".2f", "GiB": ".2f"}
    table = Table("program, slice", columns)
    for (name, teacher), each in itertools.product(configs.items(), slices):
        chip, _, topology = each.partition(":")
        where = find_slice(chip, topology)
        batch_size, steps = images * where.devices, {}
        supervised = other_projects.our_config(name, max(CROPS), "bfloat16", batch_size)
        taught = with_values(teacher, {"batch_size": batch_size})
        for label, config in {"supervised step": supervised, "DINO's step": taught}.items():
            steps[label] = compile_step(config, where, other_projects.CLASSES, STEPS)
        show(table, name, where, steps)
        forms = {label: compile_form(form, name, where, images) for label, form in FORMS.items()}
        show(table, name, where, forms)
    return table.figures


def show(table: Table, name: str, where: Slice, programs: Mapping[str, Compiled]) -> None:
    """Adds a row for each program. The last column is the memory of temporaries in GiB."""
    sums = {
        label: [total(compiled.operations, key) for key in ("flops", "cycles")]
        for label, compiled in programs.items()
    }
    first = next(iter(sums.values()))
    for label, (flops, cycles) in sums.items():
        memory = programs[label].memory.temporaries / GIB
        relative = flops / first[0], cycles / first[1]
        values = flops / 1e12, relative[0], cycles / 1e6, relative[1], memory
        table.row(f"{name}, {label}, {where}", *values)


def compile_form(form: Callable, name: str, where: Slice, images: int) -> Compiled:
    """Compiles the forward and backward pass of a ViT over the crops of `images` images per device.

    The loss is the mean square of the output tokens.

    Args:
      form: function that encodes the crops, `pass_by_pass` or `packed`.
      images: number of images per device, before they are cropped.
    """
    mesh = make_mesh(devices=topology_devices(where))
    model = abstract(model_factory(name, num_classes=0, image_size=max(CROPS), dtype="bfloat16"))
    graphdef, weights = nnx.split(model)

    def of(shape, dtype, sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    weights = jax.tree.map(lambda x: of(x.shape, x.dtype, replicated(mesh)), weights)
    crops = [
        of((images * where.devices * count, size, size, 3), jnp.uint8, split_batch(mesh))
        for size, count in CROPS.items()
    ]

    def loss(weights, crops):
        tokens = form(nnx.merge(graphdef, weights), crops)
        return sum(jnp.square(x.astype(jnp.float32)).mean() for x in tokens)

    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss)).lower(weights, crops)
    return compile_lowered(lowered, where, [], [])


def pass_by_pass(model: ViT, crops: Sequence[jax.Array]) -> list[jax.Array]:
    """Encodes the crops of each size in a separate pass.

    Returns:
      The last layer's tokens `[crops, tokens, dim]` for each crop size.
    """
    sized = (model.resized(images.shape[1:3]) for images in crops)
    pairs = zip(sized, crops, strict=True)
    return [each.encode(each.assemble(each.patches(images))) for each, images in pairs]


def packed(model: ViT, crops: Sequence[jax.Array]) -> list[jax.Array]:
    """Encodes all crops in a single pass: the tokens of all crops form one sequence.

    A token attends only to tokens of the same crop.

    Returns:
      The last layer's tokens `[crops, tokens, dim]` for each crop size.
    """
    sized = [model.resized(images.shape[1:3]) for images in crops]
    parts = [each.assemble(each.patches(images)) for each, images in zip(sized, crops, strict=True)]
    shapes = [part.shape[:2] for part in parts]
    ends = [sum(count * tokens for count, tokens in shapes[:end]) for end in range(1, len(shapes))]

    def unpack(row):
        pieces = zip(jnp.split(row, ends), shapes, strict=True)
        return [piece.reshape(*shape, *row.shape[1:]) for piece, shape in pieces]

    def pack(pieces):
        return jnp.concatenate([piece.reshape(-1, *piece.shape[2:]) for piece in pieces])

    x = pack(parts)
    for block in model.blocks.values():
        heads = zip(*map(unpack, block.attention.project(block.norm1(x))), strict=True)
        x = x + block.attention.out(pack([attend(*each) for each in heads]))
        x = x + block.mlp(block.norm2(x))
    return unpack(x)


FORMS = {"a pass for each size": pass_by_pass, "one packed pass": packed}
