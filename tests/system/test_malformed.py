"""A run on a folder in which most images are damaged."""

import re

import numpy as np
import pytest

from tests.data.malformed import UNREADABLE, corpus, encode, picture
from tests.system.conftest import SMALL


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:::PIL\.")
def test_run_on_damaged_images_ends_well_and_names_them(run, tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in ("a", "b"):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(30):
                pixels = picture() // 2 + rng.integers(0, 100, 3, np.uint8)
                (tmp_path / split / label / f"good-{number}.jpg").write_bytes(encode(pixels))
    for number, case in enumerate(corpus()):
        (tmp_path / "train" / "ab"[number % 2] / case.name).write_bytes(case.data)
        (tmp_path / "test" / "ab"[number % 2] / case.name).write_bytes(case.data)

    result = run(
        *SMALL,
        "--config.data.source=folder",
        f"--config.data.path={tmp_path}",
        "--config.data.max_unreadable=600",
        "--config.steps=10",
        "--config.evaluate_every=10",
        f"--workdir={tmp_path / 'run'}",
    )
    assert result.returncode == 0, result.stderr
    lines = re.findall(
        r"unreadable image skipped \((\d+)\): (\S+)", (tmp_path / "run" / "log.txt").read_text()
    )
    tested = [
        (int(count), name) for count, name in lines if name.startswith(str(tmp_path / "test"))
    ]
    # An evaluation reads every image, so it must report each image that is certainly broken, once.
    names = [name.rsplit("/", 1)[1] for _, name in tested]
    assert len(set(names)) == len(names)
    assert {case.name for case in corpus() if case.expected is UNREADABLE} <= set(names)
    assert not any(name.startswith("good") for name in names)
    assert not {case.name for case in corpus() if isinstance(case.expected, np.ndarray)} & set(
        names
    )
    assert [count for count, _ in tested] == list(range(1, len(tested) + 1))
    assert not re.search("PIL|Traceback|libjpeg", result.stderr)
