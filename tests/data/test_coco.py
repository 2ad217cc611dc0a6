"""COCO files: their boxes and masks, the layouts of their folders, and files that contradict
images.
"""

import json

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.dense_fields import boxes_field
from vit_jax.data.pipeline import evaluation_batches
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources import open_source
from vit_jax.data.sources.base import fingerprint
from vit_jax.errors import UserError

SIZE = 20, 10  # Width and height.
SQUARE = [[2, 2, 8, 2, 8, 8, 2, 8]]  # A polygon.


def content(names=("a.png", "b.png"), annotations=None) -> dict:
    """Returns a COCO file. The first annotation belongs to the second image; category ids have
    gaps.
    """
    images = [
        {"id": 10 * k, "file_name": name, "width": SIZE[0], "height": SIZE[1]}
        for k, name in enumerate(names)
    ]
    if annotations is None:
        annotations = [
            annotation(10, [1, 2, 3, 4], 90),
            annotation(0, [2, 2, 6, 6], 7),
            annotation(0, [4, 4, 2, 2], 90, segmentation=[[4, 4, 6, 4, 6, 6, 4, 6]]),
        ]
    categories = [{"id": 90, "name": "dog"}, {"id": 7, "name": "cat"}]
    annotations = [one | {"id": 5 + number} for number, one in enumerate(annotations)]
    return {"images": images, "annotations": annotations, "categories": categories}


def annotation(image: int, bbox: list, category: int, **values) -> dict:
    return {"image_id": image, "bbox": bbox, "category_id": category} | {
        "segmentation": SQUARE,
        "iscrowd": 0,
        **values,
    }


def write(file, values: dict, images=None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values))
    for image in values["images"]:
        path = (images or file.parent) / image["file_name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", SIZE).save(path)


def opened(path, split="all", **options):
    return open_source("coco", split, path=str(path), labels=False, **options)


@pytest.fixture
def file(tmp_path):
    write(tmp_path / "list.json", content())
    return tmp_path / "list.json"


def test_boxes_are_corners_with_classes_in_the_order_of_ids(file):
    source = opened(file)
    assert source.class_names == ("cat", "dog") and source.fields == ("boxes",)
    first, second = (source.fields_of(index)["boxes"] for index in range(2))
    np.testing.assert_array_equal(first.corners, [[2, 2, 8, 8], [4, 4, 6, 6]])
    assert first.labels.tolist() == [0, 1] and second.labels.tolist() == [1]
    np.testing.assert_array_equal(second.corners, [[1, 2, 4, 6]])


def test_objects_are_those_of_pycocotools(file):
    coco = pytest.importorskip("pycocotools.coco").COCO(str(file))
    source = opened(file, fields=("boxes", "mask", "instances"))
    for index, image in enumerate(coco.getImgIds()):
        objects = coco.loadAnns(coco.getAnnIds(image))
        expected = np.zeros(SIZE[::-1], int)
        for one in sorted(objects, key=lambda one: -one["bbox"][2]):
            label = 1 + sorted(coco.getCatIds()).index(one["category_id"])
            expected[coco.annToMask(one) == 1] = label
        values = source.fields_of(index)
        np.testing.assert_array_equal(values["mask"], expected)
        corners = values["boxes"].corners
        bboxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
        np.testing.assert_allclose(bboxes, [one["bbox"] for one in objects])
        masks = [coco.annToMask(one) for one in objects]
        np.testing.assert_array_equal(values["instances"].masks, masks)
    assert source.class_names == ("background", "cat", "dog")


def test_a_file_without_objects_has_empty_masks(tmp_path):
    pytest.importorskip("pycocotools")
    write(tmp_path / "list.json", content(annotations=[]))
    values = opened(tmp_path / "list.json", fields=("boxes", "instances", "mask")).fields_of(0)
    assert values["instances"].masks.shape == (0, *SIZE[::-1])
    assert not values["mask"].any()


def test_sizes_that_differ_from_the_images_are_an_error(tmp_path, file):
    """The camera stored a rotation in EXIF, and the annotations refer to the stored pixels."""
    image = Image.new("RGB", SIZE)
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "b.jpg", exif=exif)
    write(tmp_path / "turned" / "list.json", content(("a.png", "b.jpg")))
    (tmp_path / "b.jpg").replace(tmp_path / "turned" / "b.jpg")
    with pytest.raises(UserError, match=r"b.jpg has 10x20 pixels, .* are of 20x10: scale .*EXIF"):
        opened(tmp_path / "turned" / "list.json")


def test_a_file_of_two_ids_is_an_error(tmp_path, file):
    """If this was allowed, each of the images would have only a part of the objects."""
    for name in ("a.png", "./a.png"):
        write(tmp_path / "twice.json", content(("a.png", "b.png", name)))
        with pytest.raises(UserError, match=r"a.png under two ids, 0 and 20: give the annotations"):
            opened(tmp_path / "twice.json")


def test_an_image_that_exif_turns_within_its_size_is_an_error(tmp_path, file):
    tags = Image.Exif()
    tags[0x0112] = 3
    Image.new("RGB", SIZE).save(tmp_path / "b.png", exif=tags)
    with pytest.raises(UserError, match=r"b.png has the EXIF orientation 3, and its objects in"):
        opened(file, fields=("boxes",))
    assert len(opened(file)) == 2  # The image is accepted without the boxes.


# Some programs write numbers as texts, or null for a missing value.
@pytest.mark.parametrize("no", [0, "0", False, None], ids=repr)
def test_crowds_are_marked_and_ignored_in_masks(no, tmp_path):
    pytest.importorskip("pycocotools")
    runs = {"size": [10, 20], "counts": [0, 10, 190]}  # The first column.
    crowd = annotation(0, [0, 0, 1, 10], 90, segmentation=runs, iscrowd=1)
    one = annotation(0, [2, 2, 6, 6], 7, iscrowd=no)
    write(tmp_path / "a.json", content(annotations=[one, crowd]))
    values = opened(tmp_path / "a.json", fields=("mask", "boxes")).fields_of(0)
    assert values["boxes"].crowd.tolist() == [False, True]
    assert (values["mask"][:, 0] == 255).all() and (values["mask"][:, 9:] == 0).all()


@pytest.mark.parametrize(
    ("lists", "images"),
    [
        ("annotations/instances_{}2017.json", "{}2017"),
        ("annotations/instances_{}.json", "images/{}"),
        ("annotations/{}.json", "images"),
        ("{}/_annotations.coco.json", "{}"),
        ("{}.json", ""),
    ],
)
def test_folders_of_splits_are_found(tmp_path, lists, images):
    for split, names in {"train": "ab", "val": "c"}.items():
        values = content([f"{name}.jpg" for name in names], [])
        write(tmp_path / lists.format(split), values, tmp_path / images.format(split))
    (tmp_path / "annotations").mkdir(exist_ok=True)
    (tmp_path / "annotations/captions_train2017.json").write_text("{}")
    assert [len(opened(tmp_path, split)) for split in ("train", "val", "valid")] == [2, 1, 1]
    with pytest.raises(UserError, match="has no split 'test', but train, val: choose by"):
        opened(tmp_path, "test")


def test_batch_has_boxes_and_images_without_objects_have_none(tmp_path):
    write(tmp_path / "a.json", content(annotations=[annotation(10, [2, 2, 6, 6], 90)]))
    batches = evaluation_batches(
        opened(tmp_path / "a.json"),
        batch_size=2,
        crop=TestCrop(20, "fit", 20),
        fields=(boxes_field(20, 2),),
        workers=0,
    )
    (batch,) = batches
    assert batch["boxes"][0].tolist() == [[0, 0, 0, 0, -1]] * 2
    assert batch["boxes"][1].tolist() == [[2, 2, 8, 8, 1], [0, 0, 0, 0, -1]]


def test_classes_are_those_of_training(tmp_path, file):
    other = content(annotations=[annotation(0, [2, 2, 6, 6], 1)])
    other["categories"] = [{"id": 1, "name": "dog"}]
    write(tmp_path / "other.json", other)
    source = opened(tmp_path / "other.json", class_names=("cat", "dog"))
    assert source.fields_of(0)["boxes"].labels.tolist() == [1]
    with pytest.raises(UserError, match="has classes that training lacks: cat"):
        opened(file, class_names=("dog",))


def test_boxes_without_area_are_counted(tmp_path):
    objects = [annotation(0, [3, 3, 0, 4], 7), annotation(0, [2, 2, 6, 6], 90)]
    write(tmp_path / "a.json", content(annotations=objects))
    source = opened(tmp_path / "a.json")
    assert source.left_out == {"boxes without area": 1}
    assert source.fields_of(0)["boxes"].labels.tolist() == [1]


def test_changed_objects_are_noticed(tmp_path, file):
    before = fingerprint(opened(file))
    assert fingerprint(opened(file)) == before
    values = content()
    values["annotations"][0]["bbox"] = [1, 2, 3, 5]
    write(file, values)
    assert fingerprint(opened(file)) != before


def _spoil(values: dict, **changes) -> dict:
    values["annotations"][0] |= changes
    return values


def _repeated(key: str, number: int) -> dict:
    """Returns a COCO file in which the first two entries of `key` have the same id."""
    values = content()
    for entry in values[key][:2]:
        entry["id"] = number
    return values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            _spoil(content(), bbox=[15, 2, 18, 8]),
            r"1 of 3 boxes are not within their image, such as \[15, 2, 18, 8\] of b.png, which "
            r"has 20x10 pixels: a bbox is \[left, top, width, height\]",
        ),
        (_spoil(content(), category_id=3), r"has objects of no category: \[3\]"),
        (_spoil(content(), image_id=3), "1 of 3 objects are of images that it does not list"),
        ({"images": []}, "is no COCO file of objects: COCO's form is"),
        (content(names=()), "lists no images"),
        (_spoil(content(), bbox=None), r"the annotation 5 has the bbox None: a bbox is \[left"),
        (_spoil(content(), bbox=[1, 2, 3]), r"annotation 5 has the bbox \[1, 2, 3\]: a bbox is"),
        (_spoil(content(), bbox=[1, 2, "x", 4]), r"list.json: ValueError: .*; COCO's form is"),
        (_repeated("images", 10), "1 ids occur several times in 'images', such as 10: give each"),
        (_repeated("categories", 7), "1 ids occur several times in 'categories', such as 7"),
        (
            content(annotations=[annotation(0, [0.2, 0.3, 0.5, 0.7], 7)]),
            "all 1 boxes are within one pixel, as if they were fractions of the image's sides",
        ),
    ],
    ids=[
        *("outside", "category", "image", "form", "empty", "null", "three", "text"),
        *("image ids", "category ids", "fractions"),
    ],
)
def test_files_that_contradict_themselves_are_explained(tmp_path, values, message):
    write(tmp_path / "list.json", values)
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "list.json")


def test_missing_images_are_counted(file):
    (file.parent / "b.png").unlink()
    with pytest.raises(UserError, match=r"1 of 2 images of .*list.json do not exist .*: b.png"):
        opened(file)
    (file.parent / "a.png").unlink()
    with pytest.raises(UserError, match=r"lists a.png, which is in none of: "):
        opened(file)


def test_a_segmentation_of_another_size_is_an_error(tmp_path):
    pytest.importorskip("pycocotools")
    runs = {"size": [5, 20], "counts": [0, 10, 90]}
    values = content(annotations=[annotation(0, [0, 0, 2, 5], 90, segmentation=runs)])
    write(tmp_path / "a.json", values)
    source = opened(tmp_path / "a.json", fields=("mask",))
    with pytest.raises(UserError, match="has 20x10 pixels .* a segmentation of 20x5"):
        source.fields_of(0)


def test_objects_without_segmentation_have_no_mask(tmp_path):
    pytest.importorskip("pycocotools")
    write(tmp_path / "a.json", _spoil(content(), segmentation=[]))
    with pytest.raises(UserError, match="1 of 3 objects have no segmentation, which masks need"):
        opened(tmp_path / "a.json", fields=("mask",))
