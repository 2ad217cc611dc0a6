"""TensorBoard tracker: event files in the workdir.

This module writes TensorBoard's record format itself, because CLU's writers would import TensorFlow
into the training process (see the architecture page).
"""

import json
import os
import socket
import struct
import time
from collections.abc import Mapping

from vit_jax.runs.trackers.tracker import BaseTracker, RunFacts


class Tracker(BaseTracker):
    """Tracker that writes scalars, pictures, and the config as text and as hyperparameters."""

    library = identity = "tensorboard"
    settles_after = 0

    def __init__(self, run: RunFacts, identity: str, last_step: int):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter((run.workdir / name).open("wb"))
        self._write(file_version="brain.Event:2")
        # This event marks the start or the resumption of a run. Because of the event, TensorBoard
        # ignores this step and later steps in the event files that the run has written before.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=last_step + 1, session_log=start)
        if not identity:
            self._write(summary=self._described(run))

    def row(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()
        ]
        self._write(step=step, summary=self._summary(value=values))

    def picture(self, step: int, name: str, png: bytes) -> None:
        # The header of a PNG file contains the width and the height of the image.
        width, height = struct.unpack(">II", png[16:24])
        image = self._summary.Image(
            encoded_image_string=png, width=width, height=height, colorspace=3
        )
        self._write(
            step=step, summary=self._summary(value=[self._summary.Value(tag=name, image=image)])
        )

    def close(self) -> None:
        self._records.close()

    def _described(self, run: RunFacts):
        """Returns a TensorBoard summary with the config, both as text and as hyperparameters."""
        from tensorboard.compat.proto import tensor_pb2, types_pb2
        from tensorboard.plugins.hparams import metadata as hparams
        from tensorboard.plugins.hparams import plugin_data_pb2
        from tensorboard.plugins.text import metadata as text

        start = plugin_data_pb2.SessionStartInfo(group_name=run.name, start_time_secs=time.time())
        for name, value in run.config.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = str(value)
        session = hparams.create_summary_metadata(
            plugin_data_pb2.HParamsPluginData(session_start_info=start)
        )
        words = f"{run.title}\n\n```\n{json.dumps(run.nested, indent=2)}\n```"
        value = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[words.encode()])
        return self._summary(
            value=[
                self._summary.Value(
                    tag=hparams.SESSION_START_INFO_TAG, metadata=session, tensor=hparams.NULL_TENSOR
                ),
                self._summary.Value(
                    tag="config", metadata=text.create_summary_metadata("config", ""), tensor=value
                ),
            ]
        )

    def _write(self, **fields) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()
