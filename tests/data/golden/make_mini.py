"""Writes `mini/`, a TFDS data set in TFRecord files, with TensorFlow: python make_mini.py FOLDER"""

import io
import sys

import tensorflow_datasets as tfds
from PIL import Image


class Mini(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("2.3.1")

    def _info(self):
        features = dict(
            image=tfds.features.Image(shape=(None, None, 3)),
            label=tfds.features.ClassLabel(names=["ant", "cat", "fox"]),
            extra=tfds.features.Text(),
        )
        return tfds.core.DatasetInfo(
            builder=self,
            description="A mini.",
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, _):
        return dict(train=self._generate_examples(12), test=self._generate_examples(4))

    def _generate_examples(self, count):
        for i in range(count):
            file = io.BytesIO()
            Image.new("RGB", (6, 5), (i * 10,) * 3).save(file, "PNG")
            file.seek(0)
            yield i, dict(image=file, label=i % 3, extra=f"e{i}")


config = tfds.download.DownloadConfig(num_shards=2)
Mini(data_dir=sys.argv[1], file_format="tfrecord").download_and_prepare(download_config=config)
