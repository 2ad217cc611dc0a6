"""What a start waits for, and what it does not."""

import io
import os
import subprocess
import sys

import tensorflow_datasets as tfds
from PIL import Image

from tests.system.conftest import SMALL

CREATE = """
import sys
import jax
import vit_jax

compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
vit_jax.create_model("ViT-Ti/16")
print(compiled.count("/jax/core/compile/backend_compile_duration"))
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_a_model_is_made_with_few_small_compilations_and_without_what_trains_it():
    process = subprocess.run(
        [sys.executable, "-c", CREATE],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    compiled, imported = process.stdout.splitlines()
    assert 0 < int(compiled) <= 16
    others = {"clu", "grain", "ml_collections", "orbax", "tensorflow", "tensorflow_datasets", "tensorstore"}
    assert not others & set(imported.split())


class Shades(tfds.core.GeneratorBasedBuilder):
    """Images of one colour each."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = dict(
            image=tfds.features.Image(shape=(None, None, 3)), label=tfds.features.ClassLabel(num_classes=2)
        )
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, _):
        return dict(train=self._generate_examples(64), test=self._generate_examples(8))

    def _generate_examples(self, count):
        for i in range(count):
            file = io.BytesIO()
            Image.new("RGB", (9, 8), (i,) * 3).save(file, "JPEG")
            yield i, dict(image=io.BytesIO(file.getvalue()), label=i % 2)


def test_training_from_array_record_and_tfds_imports_no_tensorflow(run, tmp_path, no_tensorflow):
    Shades(data_dir=tmp_path / "data", file_format="array_record").download_and_prepare()
    folder = tmp_path / "data" / "shades" / "1.0.0"
    parts = f"tfds:{folder}", f"array_record:{folder}/*-train.array_record*"
    result = run(
        *SMALL,
        f"--workdir={tmp_path / 'run'}",
        "--config.steps=8",
        "--config.data.source=mixture",
        f"--config.data.parts={parts}",
        "--config.data.num_classes=2",
        "--config.data.workers=1",
        PYTHONPATH=no_tensorflow.python_path,
    )
    no_tensorflow.check()
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
