"""Weights & Biases tracker: online, or offline files in the workdir (`WANDB_MODE=offline`).

`wandb sync` sends offline files to the server. `WANDB_PROJECT` is the name of the project (default
`vit_jax`), `WANDB_ENTITY` is the name of the team, and `WANDB_API_KEY` is the user's key.
"""

import io
import os
import secrets
from collections.abc import Mapping

from vit_jax.errors import UserError
from vit_jax.runs.trackers.tracker import BaseTracker, RunFacts

STEP = "step"


class Tracker(BaseTracker):
    """Tracker that logs the training step as a metric named `step`.

    W&B's internal step counter is not used. It must never decrease, but a resumed run may send rows
    of earlier steps again.
    """

    library = "wandb"
    settles_after = 15  # W&B's own process buffers rows for some seconds.

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
                # W&B need not record the terminal's output. The run writes it into log.txt.
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
