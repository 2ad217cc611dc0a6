"""Classes of a model and of a data set are matched by their names."""

import pytest

from vit_jax.data.class_names import match_classes, parse_names
from vit_jax.errors import UserError


@pytest.mark.parametrize(
    ("model", "data", "order", "note"),
    [
        (("cat", "dog", "owl"), ("cat", "dog", "owl"), [0, 1, 2], ""),
        (
            ("owl", "cat", "dog"),
            ("cat", "dog", "owl"),
            [1, 2, 0],
            "another order: they are matched by name",
        ),
        (("sea_lion", "Dog"), ("dog", "Sea-Lion"), [1, 0], "another order"),
        (("1", "0"), ("0", "1"), [1, 0], "another order"),
        (
            (),
            ("cat", "dog"),
            [0, 1],
            "a model has no class names: classes are matched by index",
        ),
        (("cat", "dog"), ("0", "1"), [0, 1], "the data have no class names"),
        ((), ("0", "1"), [0, 1], ""),
        (("cat", "dog"), ("cat", "hound"), [0, 1], "by index: 'dog' is 'hound' here"),
    ],
)
def test_classes_are_matched_by_name_where_they_have_names(model, data, order, note):
    match = match_classes(model, data, "a model")
    assert match.order.tolist() == order and note in match.note and bool(note) == bool(match.note)
    assert match.reordered == (order != sorted(order))


def test_classes_that_moved_among_others_are_refused():
    with pytest.raises(
        UserError, match="its class 0 is 'apple', that of the data 'berry', its class 1"
    ):
        match_classes(("apple", "berry", "cherry"), ("berry", "cherry", "zapple"), "a model")


def test_names_longer_than_a_path_are_names():
    names = [f"class number {number}" for number in range(400)]
    assert parse_names(",".join(names)) == names
