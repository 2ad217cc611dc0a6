"""MLflow tracker: logs to the server or database in `MLFLOW_TRACKING_URI`, else MLflow's default.

`MLFLOW_EXPERIMENT_NAME` is the experiment's name. The default is `vit_jax`.
"""

import io
import os
import time
from collections.abc import Mapping

from vit_jax.errors import UserError
from vit_jax.runs.trackers.tracker import BaseTracker, RunFacts

MOST_PARAMS, MOST_CHARACTERS = 100, 6000  # Maximum parameters per call, and characters per value.


class Tracker(BaseTracker):
    """Tracker that logs rows as metrics, the config as parameters, and pictures as images."""

    library = "mlflow"
    settles_after = 0

    def __init__(self, run: RunFacts, identity: str, last_step: int):
        try:
            import mlflow
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise UserError("config.log.to: mlflow is not installed: pip install mlflow") from error
        self._metric = Metric
        try:
            self._client = mlflow.MlflowClient()
            self.identity = identity or self._new(run)
            if not identity:
                params = [Param(name, str(x)[:MOST_CHARACTERS]) for name, x in run.config.items()]
                for first in range(0, len(params), MOST_PARAMS):
                    self._client.log_batch(
                        self.identity, params=params[first : first + MOST_PARAMS]
                    )
            self._client.update_run(self.identity, status="RUNNING")
            self._reopened = bool(identity)
        except mlflow.exceptions.MlflowException as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"config.log.to: mlflow does not start: {reason} (its server is named by "
                "MLFLOW_TRACKING_URI)"
            ) from error

    def row(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._reopened:
            # The process may have been killed after it sent this row, but before it recorded the
            # row as sent. Metrics that the server already has are not sent again.
            scalars = {name: value for name, value in scalars.items() if not self._has(step, name)}
            self._reopened = False
        now = int(1000 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self.identity, metrics=metrics)

    def picture(self, step: int, name: str, png: bytes) -> None:
        from PIL import Image

        self._client.log_image(self.identity, Image.open(io.BytesIO(png)), key=name, step=step)

    def close(self) -> None:
        self._client.set_terminated(self.identity)

    def _has(self, step: int, name: str) -> bool:
        """Returns True if the server already has the metric `name` of a step."""
        return any(
            metric.step == step for metric in self._client.get_metric_history(self.identity, name)
        )

    def _new(self, run: RunFacts) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vit_jax")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        tags = {"mlflow.note.content": run.title, "workdir": run.place}
        return self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
