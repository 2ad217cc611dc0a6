"""Tests that a run's rows reach a tracker that works, fails for a while, or never answers."""

import json

import pytest

from vit_jax.errors import UserError
from vit_jax.runs.trackers import delivery
from vit_jax.runs.trackers.delivery import Delivery
from vit_jax.runs.trackers.tracker import RunFacts


class Service:
    """A tracker's server, which stores the rows that it receives and can be down."""

    def __init__(self, settles_after=0):
        self.settles_after = settles_after
        self.up, self.rows, self.pictures, self.opened, self.closed = True, [], [], [], 0

    def tracker(self, run, identity, last_step):
        service = self
        if not service.up:
            raise UserError("config.log.to: the service does not answer")

        class Tracker:
            settles_after = service.settles_after

            def __init__(self):
                self.identity = identity or "run-1"
                service.opened.append((identity, last_step))

            def row(self, step, scalars):
                if not service.up:
                    raise ConnectionError("nobody\nanswers")
                service.rows.append((step, dict(scalars)))

            def picture(self, step, name, png):
                service.pictures.append((step, name))

            def close(self):
                service.closed += 1

        return Tracker()


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(delivery, "RETRY_SECONDS", 0.01)
    return Service()


def open_(service, workdir, rows=(), log=print) -> Delivery:
    return Delivery("it", service.tracker, RunFacts(workdir, str(workdir), "", {}, {}), rows, log)


def test_repeated_rows_are_sent_once(service, tmp_path):
    first = open_(service, tmp_path)
    for step in (10, 20, 30):
        first.row(step, {"loss": step / 10})
    first.close()
    second = open_(service, tmp_path, rows=[{"step": 10, "loss": 1.0}])
    for step in (20, 30, 40):
        second.row(step, {"loss": step / 10})
    second.close()
    assert service.rows == [(step, {"loss": step / 10}) for step in (10, 20, 30, 40)]
    assert service.opened == [("", 0), ("run-1", 30)]


def test_rows_that_a_killed_process_may_have_lost_are_sent_again(tmp_path):
    service = Service(settles_after=3600)
    killed = open_(service, tmp_path)
    killed.row(10, {"loss": 1.0})
    while not service.rows:
        pass
    open_(service, tmp_path, rows=[{"step": 10, "loss": 1.0}]).close()
    assert service.rows == [(10, {"loss": 1.0})] * 2
    open_(
        service, tmp_path, rows=[{"step": 10, "loss": 1.0}]
    ).close()  # The last process closed its delivery, so nothing was lost.
    assert len(service.rows) == 2


def test_new_metrics_of_an_old_step_are_sent_after_a_restart(service, tmp_path):
    first = open_(service, tmp_path)
    first.row(20, {"train/loss": 1.0})
    first.close()
    second = open_(service, tmp_path, rows=[{"step": 20, "train/loss": 1.0}])
    second.row(20, {"test/loss": 2.0})
    second.close()
    assert service.rows == [(20, {"train/loss": 1.0}), (20, {"test/loss": 2.0})]


def test_a_tracker_that_is_added_later_gets_all_rows(service, tmp_path):
    later = open_(service, tmp_path, rows=[{"step": 10, "loss": 1.0}, {"step": 20, "loss": None}])
    later.row(30, {"loss": 3.0})
    later.close()
    assert service.rows == [(10, {"loss": 1.0}), (30, {"loss": 3.0})]


def test_a_service_that_recovers_gets_all_rows(service, tmp_path):
    said = []
    held = open_(service, tmp_path, log=said.append)
    service.up = False
    held.row(10, {"loss": 1.0})
    held.row(20, {"loss": 2.0})
    while not said:
        pass
    service.up = True
    held.close()
    assert service.rows == [(10, {"loss": 1.0}), (20, {"loss": 2.0})]
    assert said == ["warning: it: nobody answers; training continues, with retries"]


def test_a_service_that_stays_down_is_logged_and_gets_its_rows_at_the_next_start(service, tmp_path):
    said = []
    held = open_(service, tmp_path, log=said.append)
    held.row(10, {"loss": 1.0})
    while not service.rows:
        pass
    service.up = False
    held.row(20, {"loss": 2.0})
    held.close()
    assert said[-1].startswith("warning: it lacks the figures after step 10")
    # The service is still down when the run is resumed; the run continues.
    away = open_(service, tmp_path, rows=[{"step": 20, "loss": 2.0}], log=said.append)
    away.close()
    service.up = True
    open_(service, tmp_path, rows=[{"step": 10, "loss": 1.0}, {"step": 20, "loss": 2.0}]).close()
    assert service.rows == [(10, {"loss": 1.0}), (20, {"loss": 2.0})]


def test_a_service_that_is_down_at_the_first_start_is_an_error(service, tmp_path):
    service.up = False
    with pytest.raises(UserError, match="the service does not answer"):
        open_(service, tmp_path)


def test_an_image_is_sent_once(service, tmp_path):
    for _ in range(2):
        held = open_(service, tmp_path)
        held.picture(40, "seen/rollout", b"png")
        held.close()
    assert service.pictures == [(40, "seen/rollout")]
    assert json.loads((tmp_path / "trackers" / "it.json").read_text())["pictures"] == {
        "seen/rollout": 40
    }


def test_a_run_in_a_bucket_is_named_after_its_url(tmp_path):
    assert RunFacts(tmp_path, "gs://bucket/runs/pets/", "", {}, {}).name == "pets"
