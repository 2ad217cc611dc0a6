"""The processes of a run are detected from environment variables."""

import pytest

from vit_jax.errors import UserError
from vit_jax.parallel.distributed import detect, start

SLURM = {
    "SLURM_JOB_ID": "4096007",
    "SLURM_STEP_NODELIST": "node[012-015,020]",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
}


def test_slurm_defines_all_values(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    port = 61440 + 4096007 % 4096
    assert detect(1) == (f"node012:{port}", 5, 3, [0])


def test_all_gpus_of_a_slurm_node_can_be_given_to_its_process(monkeypatch):
    for name, value in (SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1"}).items():
        monkeypatch.setenv(name, value)
    assert detect(1)[3] is None


def test_unknown_environment_raises_an_error_with_the_flags():
    with pytest.raises(
        UserError, match="no Cloud TPU, GKE or SLURM here; give --coordinator=HOST:PORT"
    ):
        detect(1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("localhost:1234", None, 0), "needs --processes and --process"),
        (("localhost:1234", 2, None), "needs --processes and --process"),
        ((None, 2, 0), "need --coordinator=HOST:PORT"),
    ],
)
def test_flag_that_is_missing_is_named(arguments, named):
    with pytest.raises(UserError, match=named):
        start(*arguments).__enter__()


def test_run_of_one_process_needs_nothing():
    with start(None, None, None) as peers:
        assert peers.count == 1
        assert peers.share("value", 3) == 3
        peers.barrier("here")
        peers.agree("the config", {"seed": 0})
