"""The same study has the same figures in another folder."""

import json

import pytest

from vit_jax import experiment

FILE = """
from vit_jax.ledger.laptop import short_run
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment

EXPERIMENT = Experiment(
    claim="Figures do not depend on the folder.",
    stages=(grid("trained", {}, lambda study, seed: short_run(4, model__dropout=0.1)),),
    read=lambda study: study.points("trained", "accuracy", "loss", "fewshot/digits/10"),
    table=str,
)
"""


@pytest.mark.slow
def test_the_same_command_in_another_folder_gives_the_same_figures(tmp_path):
    (tmp_path / "it.py").write_text(FILE)
    for folder in ("one", "other"):
        experiment.main([str(tmp_path / "it.py"), "--steps=4", f"--out={tmp_path / folder}"])
    one, other = (
        json.loads((tmp_path / folder / "it.json").read_text()) for folder in ("one", "other")
    )
    assert one and one == other
