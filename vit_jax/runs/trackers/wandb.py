"""Weights & Biases: online, or with `WANDB_MODE=offline` files in the workdir, which `wandb sync`
sends.

`WANDB_PROJECT` names the project (else `vit_jax`), `WANDB_ENTITY` the team, `WANDB_API_KEY` who
  logs in.
"""

import io
import os
import secrets
from collections.abc import Mapping

from vit_jax.errors import UserError
from vit_jax.runs.trackers.tracker import BaseTracker, RunFacts

STEP = "step"


class Tracker(BaseTracker):
    """Logs rows over their own `step`, so that a continued run need not keep W&B's count of
    calls.
    """

    settles_after = 15  # Its own process keeps rows back for some seconds.

    def __init__(self, run: RunFacts, identity: str, last_step: int):
        try:
            import wandb
        except ImportError as error:
            raise UserError("config.log.to: wandb is not installed: pip install wandb") from error
        self._wandb = wandb
        self.identity = identity or secrets.token_hex(4)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "vit_jax"),
                id=self.identity,
                resume="allow",
                dir=run.workdir,
                name=run.name,
                notes=run.title,
                config=run.nested,
                allow_val_change=True,
                # The terminal is the run's own, which log.txt keeps.
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.Error, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"config.log.to: wandb does not start: {reason} (`wandb login`, or "
                "WANDB_MODE=offline)"
            ) from error
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def row(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **scalars})

    def picture(self, step: int, name: str, png: bytes) -> None:
        from PIL import Image

        self._run.log({STEP: step, name: self._wandb.Image(Image.open(io.BytesIO(png)))})

    def close(self) -> None:
        self._run.finish()
