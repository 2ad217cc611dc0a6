"""What a run keeps beside its checkpoints, and a model from nothing but its workdir.

config.json     the config, as given
manifest.json   what followed from config and data: classes, steps, versions, devices
checkpoints/    by step
metrics.jsonl, log.txt, events.out.tfevents.*, report.html
"""

import importlib.metadata
import json
import platform
from pathlib import Path

import jax
from flax import nnx
from ml_collections import ConfigDict

from vit_jax import config as configs
from vit_jax.errors import UserError
from vit_jax.models import abstract, model_factory
from vit_jax.training.checkpoint import load_params

CONFIG, MANIFEST, CHECKPOINTS = "config.json", "manifest.json", "checkpoints"


def claim(workdir: Path, config: ConfigDict, manifest: dict) -> None:
    """Makes `workdir` this config's, or sees that it is.

    Raises:
      UserError: it belongs to another config, holds other files, or cannot be written.
    """
    saved = workdir / CONFIG
    try:
        if saved.exists():
            if differing := configs.differences(saved.read_text(), config):
                raise UserError(
                    f"{workdir} belongs to a run with another config ({'; '.join(differing)}); "
                    "give another --workdir, or the config it was started with"
                )
            return
        if workdir.exists() and any(workdir.iterdir()):
            raise UserError(f"{workdir} holds files but no run; give a new or empty --workdir")
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        # Last and whole: a workdir with a config is a workdir of a run.
        temporary = workdir / (CONFIG + ".tmp")
        temporary.write_text(configs.to_json(config) + "\n")
        temporary.replace(saved)
    except OSError as error:
        raise UserError(f"cannot write to the workdir {workdir}: {error.strerror}") from error


def make_manifest(steps: int, class_names: tuple[str, ...], num_classes: int, images: dict[str, int]) -> dict:
    """What a reader of the run needs besides its config."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow")
    return {
        "steps": steps,
        "num_classes": num_classes,
        "class_names": class_names,
        "images": images,
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages},
    }


def model_arguments(config: ConfigDict) -> dict:
    """Arguments of `model_factory` from a config; sizes left open are the name's."""
    chosen = {key: value for key, value in config.model.items() if value is not None}
    return chosen | {"image_size": config.data.image_size}


def load_model(workdir: str | Path) -> nnx.Module:
    """The model of a run with the parameters of its newest checkpoint.

    Args:
      workdir: the `--workdir` of a training run; nothing else is needed.

    Raises:
      UserError: there is no run or no checkpoint.
    """
    workdir = Path(workdir)
    try:
        config = configs.from_json((workdir / CONFIG).read_text())
        num_classes = json.loads((workdir / MANIFEST).read_text())["num_classes"]
    except OSError as error:
        raise UserError(f"no run in {workdir}: cannot read {error.filename}") from error
    build = model_factory(num_classes=num_classes, **model_arguments(config))
    graphdef, shapes = nnx.split(abstract(build))
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), nnx.to_pure_dict(shapes)
    )
    return nnx.merge(graphdef, load_params(workdir / CHECKPOINTS, like))
