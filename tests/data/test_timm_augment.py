"""timm's RandAugment equals timm's code: the pixels and the distribution of operations."""

import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import chi2_contingency, ks_2samp

from vit_jax.data import timm_augment
from vit_jax.data.randaugment import host_augmentation
from vit_jax.data.timm_augment import OPERATIONS, RESAMPLING, RandPolicy
from vit_jax.options.data import parse_rand_policy

FILL = (124, 116, 104)
# Operations that have a variant in timm whose effect increases with the level.
INCREASING = {"Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness"}
MOVING = {"TranslateX", "TranslateY"}


def theirs(name: str, increasing: bool) -> str:
    if name in MOVING:
        return name + "Rel"
    return name + "Increasing" if increasing and name in INCREASING else name


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    """Returns a smooth, colourful image with a darker channel."""
    small = np.random.default_rng(seed).integers(256, size=(5, 7, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    return Image.fromarray((pixels * (1, 0.5, 0.7) + (0, 60, 20)).clip(0, 255).astype(np.uint8))


@pytest.fixture
def timm_augmentations(timm):
    from timm.data import auto_augment

    return auto_augment


@pytest.mark.parametrize("increasing", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_timms_to_the_bit(name, increasing, timm_augmentations, monkeypatch):
    for size, resampling in ((56, 40), "bicubic"), ((33, 33), "bilinear"):
        image = photograph(*size)
        policy = RandPolicy(increasing=increasing, fill=FILL, resampling=resampling)
        values = dict(img_mean=FILL, interpolation=RESAMPLING[resampling])
        for level in (0.0, 1.7, 5.0, 9.0, 9.6, 10.0):
            operation = timm_augmentations.AugmentOp(theirs(name, increasing), 1.0, level, values)
            for sign in (1, -1):
                monkeypatch.setattr(random, "random", lambda sign=sign: 0.25 if sign > 0 else 0.75)
                ours = policy.apply(name, image, level, sign)
                bits = int(0.4 * level)
                if name == "Posterize" and bits == 4 * increasing:
                    # No bits are left, which newer versions of Pillow reject.
                    assert not np.asarray(ours).any()
                else:
                    np.testing.assert_array_equal(ours, operation(image))


def record_ours(policy: RandPolicy, images: int, monkeypatch) -> list[list[tuple]]:
    """Returns the operations and levels that were applied to each of a number of images."""
    record = []

    def recorder(name):
        def operation(policy, image, part, sign):
            record[-1].append((name, 10 * part, sign))
            return image

        return operation

    monkeypatch.setattr(timm_augment, "OPERATIONS", {name: recorder(name) for name in OPERATIONS})
    rng, pixels = np.random.default_rng(0), np.zeros((2, 2, 3), np.uint8)
    for _ in range(images):
        record.append([])
        policy(pixels, rng)
    return record


def record_theirs(auto_augment, text: str, images: int) -> list[list[tuple]]:
    record = []
    policy = auto_augment.rand_augment_transform(text, dict(img_mean=FILL))
    for operation in policy.ops:
        operation.level_fn = lambda level, _: (level,)
        operation.aug_fn = lambda image, level, name=operation.name, **_: record[-1].append(
            (name, level)
        )
    random.seed(0)
    np.random.seed(0)
    for _ in range(images):
        record.append([])
        policy(None)
    return record


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("rand-m9-mstd0.5-inc1", RandPolicy(9, deviation=0.5, increasing=True)),
        ("rand-m4-n3-p0.8-mstd2", RandPolicy(4, layers=3, probability=0.8, deviation=2)),
    ],
)
def test_operations_levels_and_their_number_are_distributed_as_timms(
    text, policy, timm_augmentations, monkeypatch
):
    ours, others = (
        record_ours(policy, 6000, monkeypatch),
        record_theirs(timm_augmentations, text, 6000),
    )

    def chance(count, values):
        """Returns the p-value of the hypothesis that both samples have the same distribution."""
        rows = [
            [sample.count(value) for value in values] for sample in (count(ours), count(others))
        ]
        return chi2_contingency(rows).pvalue

    assert chance(lambda record: [len(done) for done in record], range(policy.layers + 1)) > 0.01
    names = {theirs(name, policy.increasing): name for name in OPERATIONS}
    named = [
        [names.get(done[0], done[0]) for image in record for done in image]
        for record in (ours, others)
    ]
    assert set(named[0]) == set(named[1]) == set(OPERATIONS)
    assert chi2_contingency([[n.count(name) for name in OPERATIONS] for n in named]).pvalue > 0.01
    levels = [[done[1] for image in record for done in image] for record in (ours, others)]
    assert ks_2samp(*levels).pvalue > 0.01
    positive = np.mean([done[2] > 0 for image in ours for done in image])
    assert abs(positive - 0.5) < 0.03


@pytest.mark.parametrize(
    "text",
    [
        "rand",
        "rand-m9-mstd0.5-inc1",
        "rand-inc1-n3-m0",
        "rand-m7-p0.25-inc0-mstd12",
        "rand-mstd0.5-p1-n12-m10",
        "rand-p0",
    ],
)
def test_policy_texts_are_parsed_as_in_timm(text, timm_augmentations):
    ours = RandPolicy(**parse_rand_policy(text))
    policy = timm_augmentations.rand_augment_transform(text, dict(img_mean=FILL))
    assert [theirs(name, ours.increasing) for name in OPERATIONS] == [op.name for op in policy.ops]
    said = (
        policy.num_layers,
        policy.ops[0].magnitude,
        policy.ops[0].prob,
        policy.ops[0].magnitude_std,
    )
    assert (ours.layers, ours.magnitude, ours.probability, ours.deviation) == said


def test_policy_comes_before_colour_jitter():
    pixels = np.asarray(photograph(20, 20))
    policy = RandPolicy(probability=1.0)
    both = host_augmentation(color_jitter=(0.4, 0.0, 0.0), policy=policy)
    rng = np.random.default_rng(3)
    expected = host_augmentation(color_jitter=(0.4, 0.0, 0.0))(policy(pixels, rng), rng)
    np.testing.assert_array_equal(both(pixels, np.random.default_rng(3)), expected)


images = st.builds(
    lambda height, width, seed: np.random.default_rng(seed).integers(
        256, size=(height, width, 3), dtype=np.uint8
    ),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 99),
)


@settings(max_examples=100, deadline=None)
@given(images, st.integers(0, 2**32), st.integers(0, 4), st.floats(0, 10), st.booleans())
def test_policy_keeps_shape_and_input_and_replays(pixels, seed, layers, magnitude, increasing):
    before = pixels.copy()
    pixels.setflags(write=False)
    policy = pickle.loads(pickle.dumps(RandPolicy(magnitude, layers, 1.0, 2.0, increasing)))
    first, second = (policy(pixels, np.random.default_rng(seed)) for _ in range(2))
    assert (first.shape, first.dtype) == (pixels.shape, np.uint8)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(pixels, before)
