"""Evaluations on a mesh of eight devices equal those on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.parallel.test_meshes import EIGHT


@pytest.mark.slow
def test_no_mesh_changes_an_evaluation():
    done = subprocess.run(
        [sys.executable, "-m", "tests.evaluation.meshes", "1,1,1", "2,2,2"],
        cwd=Path(__file__).parents[2],
        env=os.environ | EIGHT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    one, eight = json.loads(done.stdout)
    # At most one image differs.
    np.testing.assert_allclose(eight["accuracies"], one["accuracies"], atol=1.5 / 101)
    np.testing.assert_allclose(eight["features"], one["features"], atol=1e-5)
    np.testing.assert_allclose(eight["texts"], one["texts"], atol=1e-5)
    np.testing.assert_allclose(eight["coefficients"], one["coefficients"], rtol=1e-9, atol=1e-12)
