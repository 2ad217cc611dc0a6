"""Folders of images with masks or depth maps, in the layouts of common data sets."""

import os

import numpy as np
import pytest
from PIL import Image

from tests.data.malformed import exif
from tests.pages import ROOT
from vit_jax.command import read_config
from vit_jax.data.dense_fields import mask_field
from vit_jax.data.map_files import decode_depth, decode_mask
from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.sources import open_source
from vit_jax.data.sources.base import check_fields, fingerprint
from vit_jax.data.views import ViewSpec
from vit_jax.errors import UserError
from vit_jax.runs.choices.recognised import recognise

SIZE = 12, 8  # Width and height.


def save(file, values: np.ndarray, palette: bool = False) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    if palette:
        image = Image.fromarray(values, "P") if values.ndim == 2 else image
        image.putpalette([7 * (k % 37) for k in range(768)])
    image.save(file)


def photo(file, size=SIZE) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (9, 99, 199)).save(file)


def mask(*values: int) -> np.ndarray:
    """Returns a mask of vertical stripes with these values."""
    return np.resize(np.array(values, np.uint8), (SIZE[1], SIZE[0]))


@pytest.fixture
def own(tmp_path):
    """Returns a folder with masks of the classes 0, 1 and 2.

    There are two images for training and one for validation.
    """
    for split, names in {"train": "ab", "val": "c"}.items():
        for name in names:
            photo(tmp_path / f"images/{split}/{name}.jpg")
            save(tmp_path / f"masks/{split}/{name}.png", mask(0, 1, 2, 255))
    return tmp_path


def opened(path, split="train", kind="masks", **options):
    return open_source(kind, split, path=str(path), labels=False, **options)


def masks_of(source) -> list[np.ndarray]:
    return [source.fields_of(index)["mask"] for index in range(len(source))]


def test_masks_of_a_folder_have_the_classes_that_are_in_them(own):
    source = opened(own)
    assert source.class_names == ("0", "1", "2") and len(source) == 2
    np.testing.assert_array_equal(masks_of(source), [mask(0, 1, 2, 255)] * 2)
    assert source.describe(0) == str(own / "images/train/a.jpg")


@pytest.mark.parametrize("split", ["val", "valid", "dev", "validation"])
def test_split_for_development_has_several_names(own, split):
    assert len(opened(own, split)) == 1


def test_class_names_are_the_lines_of_a_file(own):
    (own / "classes.txt").write_text("road\nsky\ntree\ncar\n")
    assert opened(own).class_names == ("road", "sky", "tree", "car")
    assert opened(own, "val", class_names=opened(own).class_names).class_names[3] == "car"


def test_names_start_after_a_byte_order_mark_and_no_class_is_nameless(own):
    """If the blank line was dropped, the names after it would be those of other classes."""
    (own / "classes.txt").write_bytes(b"\xef\xbb\xbfroad\r\nsky\r\ntree\r\n\r\n")
    assert opened(own).class_names == ("road", "sky", "tree")
    (own / "classes.txt").write_text("road\n\ntree\n")
    with pytest.raises(UserError, match="classes.txt must have a line for each class"):
        opened(own)


def test_palettes_that_number_the_colours_differently_are_an_error(own):
    """For example, Pillow's `quantize` makes a palette for each image."""
    colours = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0]], np.uint8)

    def write(name, order) -> None:
        """Writes an image of the same colours with the palette indices `order`."""
        image = Image.frombytes("P", SIZE, np.array(order, np.uint8)[mask(0, 1, 2)].tobytes())
        image.putpalette(colours[np.argsort(order)].reshape(-1).tolist())
        image.save(own / f"masks/train/{name}.png")

    write("a", [0, 1, 2])
    write("b", [0, 1, 2])
    assert opened(own).class_names == ("0", "1", "2")
    write("b", [0, 2, 1])
    with pytest.raises(
        UserError, match=r"colour \(0, 255, 0\) has the index 2 .*a.png and 1 .*b.p"
    ):
        opened(own)


def test_splits_may_be_above_the_folders_of_images_and_masks(tmp_path):
    for split in ("training", "test"):
        photo(tmp_path / split / "images/a.png")
        save(tmp_path / split / "masks/a.png", mask(0, 1))
    assert len(opened(tmp_path)) == len(opened(tmp_path, "test")) == 1


def test_folders_without_splits_are_sliced(tmp_path):
    for number in range(10):
        photo(tmp_path / f"images/{number}.png")
        save(tmp_path / f"masks/{number}.png", mask(0, 1))
    parts = [opened(tmp_path, split) for split in ("all[:80%]", "all[80%:]")]
    assert [len(part) for part in parts] == [8, 2]
    with pytest.raises(UserError, match=r"has no split 'train', but all: .*'all\[:80%\]'"):
        opened(tmp_path)


def test_voc_is_recognized(tmp_path):
    lists = tmp_path / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    for split, names in {"train": "ab", "val": "c"}.items():
        (lists / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
    for name in "abcd":  # d has no mask and is not listed.
        photo(tmp_path / f"JPEGImages/{name}.jpg")
        if name != "d":
            save(tmp_path / f"SegmentationClass/{name}.png", mask(0, 20, 255), palette=True)
    source = opened(tmp_path)
    assert len(source) == 2 and source.class_names[20] == "tvmonitor"
    np.testing.assert_array_equal(masks_of(source)[0], mask(0, 20, 255))


def test_ade20k_is_recognized_with_its_classes_from_1(tmp_path):
    for split, folder in (("train", "training"), ("val", "validation")):
        name = f"ADE_{split}_00000001"
        photo(tmp_path / f"images/{folder}/{name}.jpg")
        save(tmp_path / f"annotations/{folder}/{name}.png", mask(0, 1, 150))
    source = opened(tmp_path)
    assert len(source.class_names) == 150
    np.testing.assert_array_equal(masks_of(source)[0], mask(255, 0, 149))
    rows = "".join(f"{k}\t0.1\t9\t9\tname {k}, other\n" for k in range(1, 151))
    (tmp_path / "objectInfo150.txt").write_text("Idx\tRatio\tTrain\tVal\tStuff\n" + rows)
    assert opened(tmp_path, "val").class_names[:2] == ("name 1", "name 2")


@pytest.mark.parametrize(
    ("kind", "stored"), [("labelIds", (7, 33, 4, 0)), ("labelTrainIds", (0, 18, 255, 255))]
)
def test_cityscapes_is_recognized(tmp_path, kind, stored):
    for split, city in (("train", "ulm"), ("val", "bonn")):
        photo(tmp_path / f"leftImg8bit/{split}/{city}/{city}_1_leftImg8bit.png")
        save(tmp_path / f"gtFine/{split}/{city}/{city}_1_gtFine_{kind}.png", mask(*stored))
        save(tmp_path / f"gtFine/{split}/{city}/{city}_1_gtFine_instanceIds.png", mask(1))
    source = opened(tmp_path)
    assert source.class_names[0] == "road" and source.class_names[18] == "bicycle"
    np.testing.assert_array_equal(masks_of(source)[0], mask(0, 18, 255, 255))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_masks_of_few_bits_keep_their_values(tmp_path, bits):
    values = mask(0, 1, 2**bits - 1)
    image = Image.fromarray(values, "L")
    if bits == 1:
        image = Image.fromarray(values.astype(bool))
        image.save(tmp_path / "a.png")
    elif bits == 8:
        image.save(tmp_path / "a.png")
    else:
        cv2_png(tmp_path / "a.png", values, bits)
    np.testing.assert_array_equal(decode_mask((tmp_path / "a.png").read_bytes()), values)


def cv2_png(file, values: np.ndarray, bits: int) -> None:
    """Writes a grey PNG of 2 or 4 bits, which Pillow can only write with a palette."""
    import struct
    import zlib

    rows = [np.unpackbits(row[:, None], axis=1)[:, -bits:].ravel() for row in values]
    raw = b"".join(b"\0" + np.packbits(row).tobytes() for row in rows)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], bits, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)


def test_masks_of_16_bits_are_read(tmp_path):
    values = mask(0, 1).astype(np.uint16) + 300
    save(tmp_path / "a.png", values)
    np.testing.assert_array_equal(decode_mask((tmp_path / "a.png").read_bytes()), values)


def test_batches_have_the_masks_of_their_images(own):
    """The mask equals the colours of its image, so the two crops must be equal."""
    values = np.arange(SIZE[0] * SIZE[1], dtype=np.uint8).reshape(SIZE[1], SIZE[0]) % 90
    (own / "classes.txt").write_text("".join(f"class {k}\n" for k in range(90)))
    for name in "ab":
        save(own / f"masks/train/{name}.png", values)
        os.remove(own / f"images/train/{name}.jpg")
        save(own / f"images/train/{name}.png", np.repeat(values[..., None], 3, -1))
    crop = TrainCrop(8, "scale_jitter", scale=(1.0, 1.0))
    batches = training_batches(
        opened(own),
        seed=0,
        batch_size=4,
        first_step=0,
        views=(ViewSpec("image", 8, crop),),
        fields=(mask_field(8),),
        workers=0,
    )
    batch = next(batches)
    batches.close()
    assert batch["mask"].dtype == np.uint8 and batch["mask"].shape == (4, 8, 8)
    np.testing.assert_array_equal(batch["image"][..., 0], batch["mask"])


@pytest.mark.parametrize(
    ("suffix", "size", "orientation"),
    [("jpg", SIZE, 2), ("png", SIZE, 3), ("webp", SIZE, 4), ("jpg", (8, 8), 6)],
)
def test_an_image_that_exif_turns_within_its_size_is_an_error(suffix, size, orientation, own):
    """Its mask may fit the upright or the stored pixels."""
    (own / "images/val/c.jpg").unlink()
    file = own / f"images/val/c.{suffix}"
    image = Image.new("RGB", size)
    save(own / "masks/val/c.png", np.resize(np.array([0, 1, 2], np.uint8), size[::-1]))
    image.save(file, exif=exif(1))
    assert len(opened(own, "val", fields=("mask",))) == 1
    image.save(file, exif=exif(orientation))
    words = rf"c.{suffix} has the EXIF orientation {orientation}, and .*masks/val/c.png may fit"
    with pytest.raises(UserError, match=words):
        opened(own, "val", fields=("mask",))
    assert len(opened(own, "val")) == 1  # The image is accepted without the masks.


def test_an_image_that_exif_turns_to_the_size_of_its_mask_is_read(own):
    Image.new("RGB", SIZE[::-1]).save(own / "images/val/c.jpg", exif=exif(6))
    assert len(opened(own, "val")) == 1


def test_changed_masks_are_noticed(own):
    before = fingerprint(opened(own))
    assert fingerprint(opened(own)) == before
    save(own / "masks/train/a.png", mask(0, 2, 1))
    assert fingerprint(opened(own)) != before


def test_mask_of_an_unread_image_is_noticed_by_its_size(own):
    source = opened(own)
    before = dict(source.stored_files())
    assert len(before) == 4
    save(own / "masks/train/b.png", np.random.default_rng(0).integers(0, 3, (8, 12), np.uint8))
    assert dict(source.stored_files()) != before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda own: save(own / "masks/train/b.png", mask(0, 1)[:4]),
            r"b.jpg has 12x8 pixels, and .*masks/train/b.png 12x4: save both at one size",
        ),
        (
            lambda own: (own / "masks/train/b.png").unlink(),
            r"1 of 2 images have no mask in .*masks/train: b; a mask has the name of its image",
        ),
        (
            lambda own: save(own / "masks/train/b.png", np.zeros((8, 12, 3), np.uint8)),
            r"b.png: a mask in colour \(RGB\) without a palette has no classes: save the class",
        ),
        (
            lambda own: (own / "masks/train/b.png").write_bytes(b"no image"),
            "b.png: it is not one of the formats",
        ),
        (
            lambda own: Image.new("L", SIZE).save(own / "masks/train/b.png", "JPEG"),
            "b.png: a mask of the format JPEG is unsupported, and its compression changes classes",
        ),
        (
            lambda own: save(own / "masks/train/b.png", mask(0, 1, 2, 7)),
            r"masks of .* have the values 0, 1, 2, 7, and 255 for unknown .* number the classes 0, 1, 2",
        ),
        (
            lambda own: [save(own / f"masks/train/{name}.png", mask(0, 255)) for name in "ab"],
            "values 0 and 255 only, and 255 is the value of unknown pixels, .* foreground as 1",
        ),
        (
            lambda own: photo(own / "images/train/b.png"),
            "two files of one name, b.jpg and b.png: rename",
        ),
    ],
    ids=["size", "missing", "colour", "text", "jpeg", "gap", "binary", "twice"],
)
def test_unusable_masks_are_named_with_the_remedy(own, spoil, message):
    spoil(own)
    with pytest.raises(UserError, match=message):
        opened(own)


def test_masks_with_an_ignored_foreground_are_rejected(own):
    (own / "classes.txt").write_text("background\ncrack\n")
    for name in "ab":
        save(own / f"masks/train/{name}.png", mask(0, 255))
    with pytest.raises(UserError, match="save the foreground as 1"):
        opened(own)
    save(own / "masks/train/b.png", mask(0, 1, 255))
    assert opened(own).class_names == ("background", "crack")


def test_values_beyond_the_classes_are_listed(own):
    (own / "classes.txt").write_text("road\nsky\n")
    with pytest.raises(
        UserError,
        match=r"masks/train/a.png: 2 \(24 pixels\) beyond the 2 classes, which are 0 to 1, and 255",
    ):
        opened(own)


def test_damaged_mask_is_named_when_it_is_read(own):
    source = opened(own)
    (own / "masks/train/a.png").write_bytes((own / "masks/train/a.png").read_bytes()[:50])
    with pytest.raises(UserError, match="masks/train/a.png: it cannot be decoded"):
        source.fields_of(0)
    (own / "masks/train/a.png").unlink()
    with pytest.raises(UserError, match="cannot read .*masks/train/a.png: No such file"):
        source.fields_of(0)


def test_masks_without_an_image_are_counted(own):
    save(own / "masks/train/x.png", mask(0))
    assert opened(own).left_out == {"masks without an image": 1}


def test_folder_without_masks_is_explained(tmp_path):
    photo(tmp_path / "cats/a.png")
    with pytest.raises(UserError, match=r"has no images with masks .* put them into .*images and"):
        opened(tmp_path)
    with pytest.raises(UserError, match="data.path is empty: give the folder of the data"):
        open_source("masks", "train", labels=False)
    with pytest.raises(UserError, match="there is no folder"):
        opened(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("field", "message"),
    [("mask", "no masks: give a folder"), ("boxes", "no boxes: give a COCO"), ("text", "captions")],
)
def test_missing_field_is_named_with_its_source(field, message):
    with pytest.raises(UserError, match=f"the training data have .*{message}"):
        check_fields(open_source("digits", "train"), (field,), "training")


def test_depth_maps_are_in_metres(tmp_path):
    millimetres = np.full((8, 12), 2500, np.uint16)
    millimetres[0, 0] = 0
    photo(tmp_path / "images/train/a.jpg")
    save(tmp_path / "depth/train/a.png", millimetres)
    photo(tmp_path / "images/train/b.jpg")
    metres = np.full((8, 12), 1.5)
    metres[0, :3] = -1, np.nan, np.inf
    np.save(tmp_path / "depth/train/b.npy", metres)
    first, second = (opened(tmp_path, kind="depth").fields_of(index)["depth"] for index in range(2))
    assert first.dtype == second.dtype == np.float32
    assert first[0, 0] == 0 and np.allclose(first[1:], 2.5)
    assert not second[0, :3].any() and np.allclose(second[1:], 1.5)
    kitti = opened(tmp_path, kind="depth", depth_scale=1 / 256).fields_of(0)["depth"]
    assert np.allclose(kitti[1:], 2500 / 256)


def test_depth_map_of_8_bits_is_rejected(tmp_path):
    save(tmp_path / "a.png", mask(0, 1))
    with pytest.raises(UserError, match="a grey PNG of 16 bits or a .npy in metres, not a PNG"):
        decode_depth((tmp_path / "a.png").read_bytes(), 0.001)
    np.save(tmp_path / "a.npy", np.zeros((4, 4, 3)))
    with pytest.raises(UserError, match=r"\[height, width\] of numbers, not \[4, 4, 3\]"):
        decode_depth((tmp_path / "a.npy").read_bytes(), 0.001)


def test_parts_of_a_mixture_have_the_same_classes(own, tmp_path):
    other = tmp_path / "other"
    photo(other / "images/train/a.png")
    save(other / "masks/train/a.png", mask(1, 0))
    parts = tuple(f"masks:{path}" for path in (own, other))

    def mixed():
        return open_source("mixture", "train", parts=parts, labels=False, fields=("mask",))

    for folder in (own, other):
        (folder / "classes.txt").write_text("road\n1\n2\n")
    source = mixed()
    assert source.fields == ("mask",) and len(source) == 3
    np.testing.assert_array_equal(source.fields_of(2)["mask"], mask(1, 0))
    (other / "classes.txt").write_text("sky\n1\n2\n")
    with pytest.raises(UserError, match="whose classes have other numbers"):
        mixed()


@pytest.mark.parametrize("names_source", [False, True])
def test_splits_of_a_layout_are_chosen(own, names_source):
    config = read_config(str(ROOT / "configs/quickstart.py"))
    config.data.update(dict(source="masks", path=str(own), test_split="test"))
    given = {"data.path"} | ({"data.source"} if names_source else set())
    lines = []
    recognise(config, given, lines.append)
    assert (config.data.train_split, config.data.test_split) == ("train", "val")
    assert lines[-1].split()[0] == "--config.data.test_split='val'"
