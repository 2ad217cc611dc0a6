"""Training from Python: in a notebook, or any other program."""

import ast
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.command import as_in_file, read_config
from vit_jax.config import VALUES, check, given_keys, unknown_key, with_values
from vit_jax.errors import UserError, mistake
from vit_jax.paths import check_path

if TYPE_CHECKING:
    from vit_jax.config_types import TypedConfig
    from vit_jax.models.image_model import ImageModel
    from vit_jax.training.objectives.objective import Objective

# Pattern of a flag of `vit-jax finetune` or `pretrain` in an error message, with its value.
FLAG = re.compile(
    r"""--(config\.[\w.]+(?==)|from|workdir|group|balance|minutes)"""
    r"""(?:=(".*?"|'.*?'|\(.*?\)|[^\s;,]*[^\s;,:.)]))?"""
)


def train(
    config: ConfigDict | str | Path,
    workdir: str | Path,
    *,
    train: Any = None,
    test: Any = None,
    groups: Sequence[Any] | None = None,
    model: "ImageModel | None" = None,
    objective: "type[Objective] | None" = None,
    on_log: Callable[[int, dict[str, float]], None] | None = None,
) -> dict[str, float]:
    """Trains a model and stores the run in `workdir`. The same call again continues the run.

    No setting of JAX or Python is changed. If training runs in the main thread, Ctrl-C (the stop
    button of a notebook) saves a checkpoint, and the function returns.

    Args:
      config: a config, or the path of its file, such as `configs/quickstart.py`, or with an
        argument `FILE.py:ARGUMENT`.
      workdir: a new or empty folder, or the folder of an earlier call with the same config and
        data.
      train: the training data, in place of the config's: `(images, labels)` as NumPy arrays, a
        `datasets.Dataset` of Hugging Face, a torch `Dataset`, or any object with `__len__` and
        `__getitem__` (see `vit_jax.data.sources.handed_in` for its items). An example must return
        the same image each time: the config determines crops and augmentation.
      test: the test data. If None, the test images are a slice of `train`, for example with
        `config.data.train_split = "train[:90%]"` and `config.data.test_split = "train[90%:]"`.
      groups: the group of each example of `train`, such as a patient or a video. A slice contains
        either all examples of a group or none.
      model: a model of `load_model` or `create_model`, in place of the config's model and
        `finetune.checkpoint`. Training starts from the model's parameters, including its head. The
        passed model itself is not changed. Images have the size `config.data.image_size`. From
        `config.model`, only `dtype`, `remat` and `scan` are used.
      objective: an objective class, in place of the objective `config.objective.name`. The config's
        value becomes the name of the class.
      on_log: function that is called with the step and its metrics by name, as written to
        `metrics.jsonl`.

    Returns:
      The metrics on the test images by name, such as `accuracy`, `loss` and `images`; empty if the
      run was stopped early.

    Raises:
      UserError: the config, the arguments and the workdir are inconsistent; or the loss is no
        longer finite; or the disk or the memory is full. The message is a single line.
    """
    check_path(workdir, "workdir")
    _check_callback(on_log)
    config = config if isinstance(config, ConfigDict) else read_config(str(config))
    file, user_keys = as_in_file(config), given_keys(config)
    config = config.copy_and_resolve_references()
    data = {name: value for name, value in (("train", train), ("test", test)) if value is not None}
    changes = _changes(with_data=bool(data), with_model=model is not None)
    with config.unlocked():
        config.update_from_flattened_dict(changes)
    if "data.path" in user_keys:
        from vit_jax.runs.choices.recognised import recognise

        recognise(config, user_keys)
    options = check(config, handed_in=objective is not None, file=file)
    if groups is not None:
        _check_groups(options.data.train_split, train)

    from vit_jax.runs.api_overrides import ApiOverrides
    from vit_jax.runs.choices import settle
    from vit_jax.runs.loop import train as run
    from vit_jax.runs.workdir import workdir_at
    from vit_jax.training.objectives import handing_in

    try:
        with handing_in(objective):
            # The config's check accepts only names of built-in objectives. The name of the passed
            # class is therefore set after the check.
            if objective is not None:
                options = with_values(options, {"objective.name": objective.__name__})
            folder = workdir_at(workdir)
            options = settle(options, user_keys | changes.keys(), folder)
            return run(options, folder, overrides=ApiOverrides(data or None, model, on_log, groups))
    except UserError:
        raise
    except Exception as error:
        if message := mistake(error):
            raise UserError(message) from error
        raise


def _check_callback(on_log: Any) -> None:
    """Raises UserError if the callback is neither a function nor None."""
    if on_log is not None and not callable(on_log):
        raise UserError(
            f"on_log is of type {type(on_log).__name__}, and must be a function of a step and its "
            "figures"
        )


def _check_groups(train_split: str, train: Any) -> None:
    """Raises UserError if groups are passed, but the training split is not a slice of `train`."""
    if train is None or "[" not in train_split:
        raise UserError(
            "groups=... is for slices of train=...: give config.data.train_split = 'train[:90%]' "
            "and config.data.test_split = 'train[90%:]'"
        )


def _changes(with_data: bool, with_model: bool) -> dict[str, Any]:
    """Returns the config values to set if the caller of `train` passes data or a model."""
    changes = {}
    if with_data:
        changes |= {
            "data.source": "handed_in",
            "data.path": "",
            "data.parts": None,
            "data.weights": None,
        }
    if with_model:
        changes |= {key: None for key in VALUES if _describes_model(key)}
        changes |= {"model.name": "", "finetune.checkpoint": "handed_in", "finetune.head": "kept"}
    return changes


class FineTuned(NamedTuple):
    """A fine-tuned model.

    Attributes:
      workdir: the run's folder. `load_model` can load it.
      figures: metrics on the test images by name, such as `accuracy`, `loss` and `images`; empty if
        the run was stopped early.
    """

    workdir: Path
    figures: dict[str, float]


def finetune(
    images: str | Path,
    checkpoint: str | Path | None = None,
    workdir: str | Path | None = None,
    *,
    group: str | None = None,
    balance: str | None = None,
    minutes: float | None = None,
    values: Mapping[str, Any] | None = None,
    on_log: Callable[[int, dict[str, float]], None] | None = None,
) -> FineTuned:
    """Fine-tunes a model on your own images, as `vit-jax finetune` does.

    Splits, image size, batch size, number of steps, learning rate and other values are chosen
    according to the data, the checkpoint and the device. They are printed with the reasons.

    Args:
      images: a folder with a folder of images for each class, or with folders train, val and test
        that contain such folders; a CSV with the columns file and label; a prepared TFDS data set;
        or `tfds:NAME`.
      checkpoint: a source as in `load_model`, or the name of a published model; None: DINOv2 from
        the Hub.
      workdir: folder of the run. If it contains a run, that run is continued. None: `runs/NAME-1`,
        `runs/NAME-2` and so on.
      group: a regular expression of the image's path, or a column of a CSV, which determines the
        group of an image. All images of a group are in the same split.
      balance: `sqrt` or `full`: images of rare classes are sampled more often.
      minutes: approximate time limit in minutes; None: 10 on CPUs, no limit on accelerators.
      values: config values by their dotted keys, in place of the chosen values.
      on_log: as in `train`.

    Raises:
      UserError: the data set or the checkpoint does not exist, there are too few images, or a value
        is invalid.
    """
    _check_paths(images, checkpoint, workdir)

    from vit_jax.published.weights import checkpoint_of
    from vit_jax.runs.choices import next_workdir

    short = {"data.path": str(images), "data.groups": group, "minutes": minutes}
    short["data.balance"] = balance
    short["finetune.checkpoint"] = None if checkpoint is None else checkpoint_of(str(checkpoint))
    with _advice_in_python():
        config = _changed(read_config("my_images"), short, values)
        folder = Path(workdir or next_workdir(str(images)))
        return FineTuned(folder, train(config, folder, on_log=on_log))


class Pretrained(NamedTuple):
    """A model that was trained without labels.

    Attributes:
      workdir: the run's folder. `load_model` can load it, and `finetune` can start from it.
      figures: metrics on held-out images by name, such as `views_matched` and `loss`, and `knn` if
        there are labels; empty if the run was stopped early.
    """

    workdir: Path
    figures: dict[str, float]


def pretrain(
    images: str | Path,
    checkpoint: str | Path | None = None,
    workdir: str | Path | None = None,
    *,
    minutes: float | None = None,
    values: Mapping[str, Any] | None = None,
    on_log: Callable[[int, dict[str, float]], None] | None = None,
) -> Pretrained:
    """Trains a model without labels on your own images, as `vit-jax pretrain` does.

    Args:
      images: a folder of images, which may be in inner folders of any depth.
      checkpoint: a source as in `load_model`, or the name of a published model; `scratch`: random
        parameters; None: DINOv2 from the Hub.
      workdir: folder of the run. If it contains a run, that run is continued. None: `runs/NAME-1`,
        `runs/NAME-2` and so on.
      minutes: approximate time limit in minutes; None: 10 on CPUs, no limit on accelerators.
      values: config values by their dotted keys, in place of the chosen values.
      on_log: as in `train`.

    Raises:
      UserError: images or checkpoint do not exist, a value is invalid, or a step does not fit into
        memory.
    """
    _check_paths(images, checkpoint, workdir)

    from vit_jax.runs.choices import next_workdir
    from vit_jax.runs.choices.pretraining import start_values

    short = {"data.path": str(images), "minutes": minutes}
    with _advice_in_python():
        config = _changed(read_config("my_images_unlabelled"), short, values)
        start = None if checkpoint is None else str(checkpoint)
        config.update_from_flattened_dict(start_values(start, config.model.name))
        folder = Path(workdir or next_workdir(str(images)))
        return Pretrained(folder, train(config, folder, on_log=on_log))


def _check_paths(images: Any, checkpoint: Any, workdir: Any) -> None:
    """Raises UserError if an argument of `finetune` or `pretrain` is not a path."""
    check_path(
        images, "images", "a data set; vit_jax.train(config, workdir, train=...) takes arrays"
    )
    if checkpoint is not None:
        check_path(
            checkpoint, "checkpoint", "one; vit_jax.train(config, workdir, model=...) takes a model"
        )
    if workdir is not None:
        check_path(workdir, "workdir")


@contextlib.contextmanager
def _advice_in_python() -> Iterator[None]:
    """Context that rewrites flags in error messages as arguments of `finetune` and `pretrain`."""
    try:
        yield
    except UserError as error:
        raise UserError(re.sub(FLAG, _argument, str(error))) from error


def _argument(flag: re.Match) -> str:
    """Converts a flag to an argument: `--config.KEY=VALUE` to `values={'KEY': VALUE}`."""
    name, text = flag[1].replace("from", "checkpoint"), flag[2] and flag[2].strip('"')
    if text is None:
        return name
    try:
        value = repr(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        value = repr(text)
    key = name.removeprefix("config.")
    return f"{name}={value}" if key == name else f"values={{{key!r}: {value}}}"


def _changed(
    config: "TypedConfig", short: Mapping[str, Any], values: Mapping[str, Any] | None
) -> "TypedConfig":
    """Returns the config with changed values.

    Args:
      short: values of the calling function's arguments, such as `minutes`, by dotted key. Values
        that are None are ignored.
      values: the user's other values, by dotted key; None: no other values.

    Raises:
      UserError: a key is unknown, or a value has the wrong type.
    """
    if not isinstance(values, Mapping | None):
        raise UserError(
            f"values is of type {type(values).__name__}, and must be a dict such as {{'steps': "
            f"100}}"
        )
    changes = {key: value for key, value in short.items() if value is not None} | dict(values or {})
    for key in changes.keys() - VALUES.keys():
        raise UserError(unknown_key(key))
    try:
        config.update_from_flattened_dict(changes)
    except (TypeError, ValueError) as error:
        raise UserError(" ".join(str(error).split())) from error
    return config


def _describes_model(key: str) -> bool:
    """Returns True for a key that defines the model (`model.dim`), not how it is computed."""
    return key.startswith("model.") and VALUES[key].default is None and not VALUES[key].operational
