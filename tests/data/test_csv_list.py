"""The source `csv`: lists of image files and labels."""

import os
from pathlib import Path

import pytest
from PIL import Image

from vit_jax.data.sources import data_set, open_source
from vit_jax.errors import UserError
from vit_jax.evaluation.fewshot import cut_in_two


@pytest.fixture
def images(tmp_path) -> Path:
    for name in ("a.png", "b.jpg", "sub/c.png", "d é.bmp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (3, 3)).save(tmp_path / name)
    return tmp_path


def listed(folder: Path, text: str | bytes, split: str = "all", **options):
    file = folder / "labels.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_source("csv", split, path=str(file), **options)


def rows(source) -> dict[str, list[str]]:
    names = [source.describe(index).split("/")[-1] for index in range(len(source))]
    return {
        name: [source.class_names[k] for k in source[index].labels]
        for index, name in enumerate(names)
    }


PETS = {"a.png": ["dog"], "b.jpg": ["cat"], "c.png": ["dog"]}


@pytest.mark.parametrize(
    "text",
    [
        "a.png,dog\nb.jpg,cat\nsub/c.png,dog\n",
        "\ufefffile,label\r\na.png,dog\r\nb.jpg,cat\r\n\r\nsub/c.png,dog",
        "label;width;Filename\ndog;3;a.png\ncat;3;b.jpg\ndog;3;sub/c.png\n",
        'path\tkind\n"a.png"\tdog\nb.jpg\tcat\nsub/c.png\tdog\n',
    ],
    ids=["plain", "header", "columns", "tabs"],
)
def test_rows_are_images_with_their_labels(text, images):
    source = listed(images, text)
    assert source.class_names == ("cat", "dog") and rows(source) == PETS
    assert source.label_table().tolist() == [[1], [0], [1]]
    assert [name for name, _ in source.stored_files()] == ["a.png", "b.jpg", "sub/c.png"]


def test_absolute_paths_and_names_in_any_encoding_are_found(images):
    os.rename(images / "b.jpg", os.fsencode(images) + b"/\xe9.jpg")
    text = f"{images}/a.png,dog\nd é.bmp,cat\n".encode() + b"\xe9.jpg,caf\xe9\n"
    source = listed(images, text)
    assert (
        source.class_names == ("caf\\udce9", "cat", "dog")
        and len([source[i] for i in range(3)]) == 3
    )
    assert source.describe(2).endswith("\\udce9.jpg")


def test_several_labels_are_in_columns_or_rows(images):
    expected = {"a.png": ["dog", "wet"], "b.jpg": ["wet"], "c.png": ["dog"]}
    assert (
        rows(listed(images, "file,label,label_2\na.png,dog,wet\nb.jpg,,wet\nsub/c.png,dog\n"))
        == expected
    )
    source = listed(images, "a.png,dog\na.png,wet\nb.jpg,wet\nsub/c.png,dog\nsub/c.png,dog\n")
    assert rows(source) == expected and source.max_labels == 2
    assert source.left_out == {"rows of a file listed before with the same labels or captions": 1}


def test_a_dot_before_a_file_refers_to_the_same_image(images):
    text = "file,label,site\n./a.png,dog,x\na.png,pet,x\nsub/./c.png,dog,y\n././sub/c.png,dog,y\n"
    source = listed(images, text, groups="site")
    assert rows(source) == {"a.png": ["dog", "pet"], "c.png": ["dog"]}
    assert source.groups("site") == ["x", "y"]


@pytest.mark.parametrize("name", ["label", "Class"])
def test_labels_alone_are_no_captions(name, images):
    text = f"file,{name}\na.png,dog\n"
    options = dict(labels=False, fields=("text",))
    with pytest.raises(UserError, match=rf"data.caption_key=NAME; .* there are: {name}"):
        listed(images, text, **options)
    assert listed(images, text, caption_key=name, **options).captions == (("dog",),)


def test_error_of_tars_contains_the_command_to_prepare_them(images):
    (images / "train-0.tar").touch()
    with pytest.raises(UserError, match=f"tars or Parquet.*vit_jax.prepare {images} --out=DIR"):
        open_source("csv", "train", path=str(images))


def test_numbers_are_classes_in_their_order_and_keep_their_names_in_other_splits(images):
    train = listed(images, "a.png,10\nb.jpg,9\nsub/c.png,2\n")
    assert train.class_names == ("2", "9", "10")
    assert rows(listed(images, "a.png,9\n", class_names=train.class_names)) == {"a.png": ["9"]}
    with pytest.raises(UserError, match=r"has the class '3', of a.png, that training lacks"):
        listed(images, "a.png,3\n", class_names=train.class_names)


def test_splits_are_files_or_a_column_or_slices(images):
    (images / "Train.csv").write_text("a.png,dog\nb.jpg,cat\n")
    (images / "test.csv").write_text("sub/c.png,dog\n")
    assert len(open_source("csv", "train", path=str(images))) == 2
    assert len(open_source("csv", "train[:50%]", path=str(images))) == 1
    with pytest.raises(UserError, match="no file .*/dev.csv .*there are: Train.csv, test.csv"):
        open_source("csv", "dev", path=str(images))
    text = "file,label,split\na.png,dog,Training\nb.jpg,cat,test\nsub/c.png,dog,train\n"
    assert [len(listed(images, text, split)) for split in ("train", "test", "all")] == [2, 1, 3]
    described = data_set(f"csv:{images}/labels.csv")
    assert described.name == "labels" and cut_in_two(described, print).train_split == "train"
    listed(images, "a.png,dog\nb.jpg,cat\n")
    assert cut_in_two(described, print).train_split == "all[:80%]"


def test_formats_that_are_not_decoded_are_counted(images):
    source = listed(images, "a.png,dog\nx.tif,cat\n._a.png,dog\n")
    assert len(source) == 1
    assert source.left_out == {".tif images (unsupported format)": 1, "AppleDouble files (._*)": 1}


def test_remedies_for_rows_with_more_cells_than_the_header_are_read(images):
    source = listed(images, 'file,label\na.png,dog\nb.jpg,"dog, big"\n')
    assert rows(source) == {"a.png": ["dog"], "b.jpg": ["dog, big"]}
    source = listed(images, "file,label1,label2\na.png,dog\nb.jpg,dog,cat\n")
    assert rows(source) == {"a.png": ["dog"], "b.jpg": ["dog", "cat"]}


def test_labels_are_not_needed_without_an_objective_for_them(images):
    assert listed(images, "file\na.png\nb.jpg\n", labels=False)[1].labels == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a.png\nb.jpg\n", "has no labels"),
        (
            "nothing.png,dog\n",
            "none of its first 1 files exists, such as .*/nothing.png: paths are from the",
        ),
        ("a.png,0,1\nb.jpg,1,0\n", "columns of zeros and ones"),
        (
            "file,cat,dog\na.png,0,1\n",
            "no column 'label': name .*data.label_key=NAME; .*cat, dog",
        ),
        (",dog\n", "row 1 names no file"),
        ("a.png,dog\n".encode("utf-16"), "no text in UTF-8"),
        ('"' + "a" * 200_000, "cannot be read as CSV: field larger than field limit"),
        (
            "file,label\na.png,dog\nb.jpg,cat, big\n",
            "row 3 has 3 cells, .* 2: put cells .* in quotes.* a column for each, such as label1,label2",
        ),
    ],
    ids=range(9),
)
def test_invalid_lists_raise_an_error(text, message, images):
    with pytest.raises(UserError, match=f"labels.csv.*{message}"):
        listed(images, text)


def test_a_header_of_unknown_columns_is_no_image(images):
    text = "id,label\na.png,dog\nb.jpg,cat\nsub/c.png,dog\n"
    with pytest.raises(
        UserError, match="the first row, id,label, names no column of files.*'file'"
    ):
        listed(images, text)
    assert rows(listed(images, text.replace("id,", "file,"))) == PETS


def test_error_of_a_list_without_splits_suggests_slices(images):
    with pytest.raises(UserError, match=r"one list, without a column split: .*all\[:80%\]"):
        listed(images, "a.png,dog\nb.jpg,cat\n", "train")
    assert len(listed(images, "a.png,dog\nb.jpg,cat\n", "all[:50%]")) == 1
    with pytest.raises(UserError, match="cannot read .*/gone.csv: No such file"):
        open_source("csv", "all", path=str(images / "gone.csv"))
