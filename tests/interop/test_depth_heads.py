"""Depth heads that DINOv2's authors published have the outputs of an implementation in PyTorch."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import random_model, write
from safetensors.numpy import load_file
from test_torch_files import convert

import vit_jax
from vit_jax.dense import objective_at
from vit_jax.errors import UserError
from vit_jax.interop.dense import DEPTH, with_head
from vit_jax.interop.depth_heads import read_depth_head
from vit_jax.interop.open import open_checkpoint
from vit_jax.interop.torch_files import read_tensors, unpack
from vit_jax.models.dense.depth import even_layers
from vit_jax.save import write_checkpoint

NAME = "ViT-Ti/4"
SIZES = dict(dim=16, depth=4, mlp_dim=32, heads=2, image_size=16, num_classes=0)
WIDTH, DIM, BINS = 16, 8, 12


def shapes_of(kind: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a head's tensors in a file, without the prefix `decode_head.`."""
    if kind != "dpt":
        inputs = 2 * WIDTH * (4 if kind == "linear4" else 1)
        return {"conv_depth.weight": (BINS, inputs, 1, 1), "conv_depth.bias": (BINS,)}
    shapes, widths = {}, [2, 4, 8, 16]

    def add(name, weight, bias=True, outputs=None):
        shapes[f"{name}.weight"] = weight
        if bias:
            shapes[f"{name}.bias"] = (outputs or weight[0],)

    for level, width in enumerate(widths):
        add(f"reassemble_blocks.readout_projects.{level}.0", (WIDTH, 2 * WIDTH))
        add(f"reassemble_blocks.projects.{level}.conv", (width, WIDTH, 1, 1))
        add(f"convs.{level}.conv", (DIM, width, 3, 3), bias=False)
        add(f"fusion_blocks.{level}.project.conv", (DIM, DIM, 1, 1))
        for unit in (1, 2) if level else (2,):
            for conv in (1, 2):
                name = f"fusion_blocks.{level}.res_conv_unit{unit}.conv{conv}.conv"
                add(name, (DIM, DIM, 3, 3), bias=False)
    for level, factor in ((0, 4), (1, 2)):
        width = widths[level]
        add(f"reassemble_blocks.resize_layers.{level}", (width, width, factor, factor))
    add("reassemble_blocks.resize_layers.3", (16, 16, 3, 3))
    add("project.conv", (DIM, DIM, 3, 3))
    add("conv_depth.head.0", (DIM // 2, DIM, 3, 3))
    add("conv_depth.head.2", (32, DIM // 2, 3, 3))
    add("conv_depth.head.4", (1, 32, 1, 1))
    return shapes


def head_of(kind: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {
        f"decode_head.{name}": rng.normal(size=shape, scale=np.prod(shape[1:]) ** -0.5)
        for name, shape in shapes_of(kind).items()
    }
    if kind == "dpt":
        # Makes some depths lie below 0 and others above 10.
        tensors["decode_head.conv_depth.head.4.weight"] *= 30
        tensors["decode_head.conv_depth.head.4.bias"][:] = 5
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def depth_by_pytorch(torch, kind, tensors, layers, size):
    """Returns the depth of DINOv2's head, resized to the image.

    Args:
      layers: patches `[batch, dim, rows, columns]` and class token `[batch, dim]` of each layer.
    """
    call = torch.nn.functional
    tensors = {name.removeprefix("decode_head."): torch.tensor(x) for name, x in tensors.items()}

    def conv(name, x, **options):
        return call.conv2d(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), **options)

    def twice(x):
        return call.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)

    def residual(name, x):
        inner = conv(f"{name}.conv1.conv", call.relu(x), padding=1)
        return x + conv(f"{name}.conv2.conv", call.relu(inner), padding=1)

    both = [torch.cat([x, t[:, :, None, None].expand_as(x)], 1) for x, t in layers]
    if kind != "dpt":
        x = call.interpolate(torch.cat(both, 1), scale_factor=4, mode="bilinear")
        weights = call.relu(conv("conv_depth", x)) + 0.1
        bins = torch.linspace(0.001, 10, BINS)
        depth = torch.einsum("bkrc,k->brc", weights / weights.sum(1, keepdim=True), bins)
        return call.interpolate(depth[:, None], size, mode="bilinear")[:, 0]
    pyramid, start = [], "reassemble_blocks."
    for level, x in enumerate(both):
        name = f"{start}readout_projects.{level}.0"
        x = call.linear(x.movedim(1, -1), tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        x = conv(f"{start}projects.{level}.conv", call.gelu(x).movedim(-1, 1))
        name = f"{start}resize_layers.{level}"
        if level < 2:
            stride = (4, 2)[level]
            weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
            x = call.conv_transpose2d(x, weight, bias, stride=stride)
        elif level == 3:
            x = conv(name, x, stride=2, padding=1)
        pyramid.append(conv(f"convs.{level}.conv", x, padding=1))
    x = None
    for block, level in enumerate(reversed(pyramid)):
        name = f"fusion_blocks.{block}"
        if x is not None:
            added = call.interpolate(level, x.shape[2:], mode="bilinear")
            level = x + residual(f"{name}.res_conv_unit1", added)
        x = conv(f"{name}.project.conv", twice(residual(f"{name}.res_conv_unit2", level)))
    x = twice(conv("conv_depth.head.0", call.relu(conv("project.conv", x, padding=1)), padding=1))
    x = conv("conv_depth.head.4", call.relu(conv("conv_depth.head.2", x, padding=1)))
    depth = (call.relu(x) + 0.001).clamp(0.001, 10)
    return call.interpolate(depth, size, mode="bilinear")[:, 0]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """Writes a folder with a small ViT."""
    folder = tmp_path_factory.mktemp("backbone") / "vit"
    return write(random_model(NAME, **SIZES), folder, "timm", NAME, **SIZES)


@pytest.mark.parametrize("kind", ["linear", "linear4", "dpt"])
def test_depth_of_a_published_head_is_the_authors(torch, backbone, kind):
    tensors, checkpoint = head_of(kind), open_checkpoint(backbone)
    file = f"dinov2_vits14_nyu_{kind}_head.pth"
    head = read_depth_head(file, tensors, checkpoint.options, max_depth=None)
    model = vit_jax.load_model(backbone, log=str)
    depths = with_head(DEPTH, checkpoint._replace(objective=head), model)
    images = np.random.default_rng(1).integers(256, size=(2, 16, 16, 3), dtype=np.uint8)
    _, captured = model(images, capture=("tokens",))
    layers = []
    for layer in even_layers(model.depth) if kind != "linear" else (model.depth - 1,):
        tokens = torch.tensor(np.asarray(captured["tokens"][layer + 1]))
        patches = tokens[:, model.patch_tokens].reshape(2, *model.grid, -1).movedim(-1, 1)
        layers.append((patches, tokens[:, 0]))
    expected = depth_by_pytorch(torch, kind, tensors, layers, (40, 40)).numpy()
    ours = torch.tensor(np.asarray(depths(images))).movedim(-1, 1)
    ours = torch.nn.functional.interpolate(ours, (40, 40), mode="bilinear")[:, 0]
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=3e-5)
    if kind == "dpt":
        assert expected.min() < 0.1 and expected.max() > 9.9


@pytest.mark.parametrize("other", ["folder", "head.npz"])
def test_errors_about_heads_that_are_not_pytorch_files_name_them(tmp_path, other):
    with pytest.raises(UserError, match=rf"{other} is no file of PyTorch, which ends in \.pth"):
        read_tensors(str(tmp_path / other), tmp_path)


def test_converted_head_is_loaded_with_its_backbone(torch, backbone, tmp_path):
    file, folder = tmp_path / "dinov2_vits14_kitti_linear4_head.pth", tmp_path / "depth"
    tensors = {name: torch.tensor(x) for name, x in head_of("linear4").items()}
    torch.save({"meta": {"epoch": 1}, "state_dict": tensors, "optimizer": {"state": {}}}, file)
    with pytest.raises(UserError, match=f"BACKBONE FOLDER --depth_head={file}"):
        unpack(str(file), tmp_path)
    done = convert(backbone, folder, f"--depth_head={file}")
    assert done.returncode == 0, done.stderr
    assert objective_at(str(folder)) == "depth" and objective_at(str(backbone)) is None
    model = vit_jax.load_depth(folder, log=str)
    assert model.head.range == (0.001, 80.0)
    assert model.model.options.position_resize == "bicubic_offset"  # The rule of DINOv2's code.
    kernel = load_file(folder / "objective.safetensors")["head/classifier/kernel"]
    np.testing.assert_array_equal(kernel, tensors["decode_head.conv_depth.weight"][..., 0, 0].T)
    (depth,) = model.predict([np.zeros((20, 30, 3), np.uint8)])
    assert depth.shape == (20, 30) and 0.001 <= depth.min() <= depth.max() <= 80


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_converted_depth_model_is_resized_as_before(backbone, tmp_path, library):
    checkpoint = open_checkpoint(backbone)
    head = read_depth_head("nyu.pth", head_of("linear"), checkpoint.options, max_depth=None)
    options = dataclasses.replace(checkpoint.options, position_resize="linear")
    converted = checkpoint._replace(options=options, objective=head)
    write_checkpoint(converted, tmp_path / "depth", library, str)
    larger = vit_jax.load_depth(tmp_path / "depth", image_size=24, log=str)
    expected = vit_jax.load_model(backbone, image_size=24, position_resize="linear", log=str)
    images = np.random.default_rng(1).integers(256, size=(2, 24, 24, 3), dtype=np.uint8)
    np.testing.assert_array_equal(larger.model(images)[0], expected(images)[0])


def test_unknown_arguments_of_a_folder_with_a_head_are_rejected(backbone, tmp_path):
    checkpoint = open_checkpoint(backbone)
    head = read_depth_head("nyu.pth", head_of("linear"), checkpoint.options, max_depth=None)
    write_checkpoint(checkpoint._replace(objective=head), tmp_path / "depth", "timm", str)
    described = tmp_path / "depth" / "objective.json"
    content = json.loads(described.read_text())
    described.write_text(json.dumps(content | {"model": {"pooling": "gap"}}))
    with pytest.raises(UserError, match="unknown arguments of the model: pooling"):
        open_checkpoint(tmp_path / "depth")


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("head.pth", {}, "does not name its data, nyu or kitti: give --max_depth"),
        ("nyu.pth", {"conv_depth.weight": (BINS, 48, 1, 1)}, "reads 48 numbers of each patch"),
        ("nyu.pth", {"bn.weight": (3,)}, "no depth head of DINOv2: it has the tensor"),
        ("nyu.pth", {"project.conv.bias": (3,)}, "parameters of another head: head/fused/bias"),
    ],
)
def test_other_heads_are_rejected(backbone, file, change, words):
    zeros = {f"decode_head.{name}": np.zeros(shape, "f4") for name, shape in change.items()}
    options = open_checkpoint(backbone).options
    with pytest.raises(UserError, match=words):
        read_depth_head(file, head_of("linear") | zeros, options, max_depth=None)
