"""A short soak test. The long one is `python -m tests.system.soak --kills=50 --out=DIR`."""

import pytest

from tests.system.soak import Soak, same_parameters


@pytest.mark.study  # test_exactly_once.py and test_resume.py test the most important moments.
def test_two_processes_killed_at_random_moments_end_as_if_they_were_not(tmp_path):
    soak = Soak(tmp_path / "soak", kills=2, counts=(2,), seed=1)
    result = soak.run()
    assert result["epochs_with_every_image_once"] == result["epochs"]
    assert same_parameters(soak.workdir, soak.undisturbed())
