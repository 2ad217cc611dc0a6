"""The files that a run keeps beside its checkpoints, and a model from nothing but its workdir.

config.json     the config, as given
manifest.json   what followed from config and data: model, classes, steps, versions, commit, devices
checkpoints/    by step
metrics.jsonl, log.txt, events.out.tfevents.*, report.html
predictions.npz what the model said of each image of the last evaluation, and some of the images
seen/           what it sees of test images, at the end
.lock-N         which process writes into it, if one does
reconstructions/  of a self-supervised run: pictures by step
"""

import contextlib
import functools
import importlib.metadata
import json
import operator
import os
import platform
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from vit_jax import config as configs
from vit_jax.data.decode import INTERPOLATIONS
from vit_jax.data.preprocess import TEST_CROPS, TestCrop, sides
from vit_jax.errors import UserError, as_text
from vit_jax.formats import FORMAT, saved_config, settled
from vit_jax.interop.beside import ObjectiveParams, check_shapes
from vit_jax.interop.checkpoint import (
    Checkpoint,
    all_names,
    complete,
    open_checkpoint,
    skeleton,
)
from vit_jax.interop.hub import download
from vit_jax.interop.preprocessing import UNSAID, Preprocessing
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models import FAMILIES
from vit_jax.parallel.peers import Peers
from vit_jax.published.unheld import refuse_unheld
from vit_jax.published.weights import all_weights
from vit_jax.runs import data_identity
from vit_jax.runs.bucket import Bucket, checkpoints_of, fetched, is_url, shown, url_of
from vit_jax.runs.bucket_lock import BucketLock
from vit_jax.runs.checkpoints import item_shapes, load_items
from vit_jax.runs.workdir_lock import PREFIX, Lock
from vit_jax.small_files import read_small
from vit_jax.training.lora import effective, init_extra
from vit_jax.training.objectives import objective_of
from vit_jax.training.objectives.classification import probabilities_of
from vit_jax.training.schedule import sees_length

CONFIG, MANIFEST = "config.json", "manifest.json"
METRICS, RECONSTRUCTIONS = "metrics.jsonl", "reconstructions"
REPORT, SEEN_FOLDER = "report.html", "seen"
LENGTH = {"steps", "epochs"}
FULL_IDENTITY = 5  # The format since which a run's model is compared, wherever it comes from.
SHARED = ".shared"
SEEN_SECONDS = 10  # After which a file that one host wrote is there for another, over NFS too.


class SavedRun(NamedTuple):
    """The run that a workdir describes."""

    text: str  # Of `config.json`.
    config: ConfigDict  # In today's values.
    manifest: dict
    format: int


@contextlib.contextmanager
def claim(
    workdir: Path, config: ConfigDict, manifest: dict, say: Callable[[str], None] = print
) -> Iterator[Lock | BucketLock]:
    """The context in which `workdir` is this config's, made so if it is new, and no other run's.

    A run in which nothing depends on its length is made longer where the config is. Data that have changed
    are taken where the config accepts them.

    Raises:
      UserError: it belongs to another config or other data, holds other files, is in use, or cannot be
        written.
    """
    check_name(workdir)
    with contextlib.ExitStack() as held:
        try:
            _belongs(workdir, config, manifest)  # Before anything is made.
            workdir.mkdir(parents=True, exist_ok=True)
            url = url_of(workdir)
            lock = held.enter_context(BucketLock(Bucket(url), say) if url else Lock(workdir, say))
            if url:
                fetched(url)
            saved = _belongs(workdir, config, manifest)  # Again: whoever had it may have made it another's.
            if not saved:
                _write(workdir, manifest, configs.to_json(config))
            elif changed := data_identity.differences(saved.manifest, _as_saved(manifest)):
                say(f"note: this run continues with other data than it began with: {'; '.join(changed)}")
                identity = {key: manifest[key] for key in data_identity.KEYS if key in manifest}
                saved = saved._replace(manifest=saved.manifest | identity)
                _write(workdir, saved.manifest, saved.text.rstrip())
            if saved and configs.differences(configs.to_json(saved.config), config):
                before, after = saved.manifest["steps"], manifest["steps"]
                say(f"note: this run is made longer: {after:,} steps in place of {before:,}")
                # The rest as it was written, in the values of its format.
                text = json.loads(saved.text) | {name: config[name] for name in LENGTH}
                _write(workdir, saved.manifest | {"steps": after}, json.dumps(text, indent=2))
        except OSError as error:
            raise UserError(f"cannot write to the workdir {shown(workdir)}: {error.strerror}") from error
        yield lock


def _write(workdir: Path, manifest: dict, config: str) -> None:
    """Writes both files, the config last: a workdir with one is a workdir of a run."""
    for name, text in ((MANIFEST, json.dumps(manifest, indent=2)), (CONFIG, config)):
        temporary = workdir / (name + ".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(workdir / name)


def _belongs(workdir: Path, config: ConfigDict, manifest: dict) -> SavedRun | None:
    """The run of this config that `workdir` holds, which may be longer now; None where there is none yet.

    Raises:
      UserError: it is of another config or of something else that was handed in, or holds other files.
    """
    saved = saved_run(workdir)
    if saved and not steps_made(workdir):
        return None  # It may begin with other values.
    if saved:
        if differing := configs.differences(configs.to_json(saved.config), config):
            of_length = {line.partition(":")[0] for line in differing} <= LENGTH
            if not of_length or manifest["steps"] < saved.manifest["steps"] or _sees_length(config):
                hint = "; only where nothing depends on its length may it be made longer" if of_length else ""
                raise UserError(
                    f"{shown(workdir)} belongs to a run with another config ({'; '.join(differing)}); "
                    f"give another --workdir, or the config it was started with{hint}"
                )
        given = _as_saved(manifest)
        if changed := data_identity.differences(saved.manifest, given):
            known = f"{shown(workdir)} belongs to a run of other data ({'; '.join(changed)}); "
            if not data_identity.fits_head(saved.manifest, given):
                raise UserError(
                    f"{known}give the data that it began with, or another --workdir, where "
                    f"config.finetune.checkpoint={shown(workdir)} starts from this run"
                )
            if config.data.changed == "refused":
                raise UserError(
                    f"{known}give the data that it began with, or another --workdir; "
                    "config.data.changed='accepted' continues with these"
                )
        _check_same(workdir, _identity(saved.manifest), _identity(given))
        return saved
    # What an earlier start left that was killed while it made the workdir.
    begun = (MANIFEST, CONFIG + ".tmp", PREFIX)
    url = url_of(workdir)
    names = Bucket(url).top() if url else os.listdir(workdir) if workdir.exists() else ()
    if any(not name.startswith(begun) for name in names):
        raise UserError(f"{shown(workdir)} holds files but no run; give a new or empty --workdir")
    return None


def _sees_length(config: ConfigDict) -> bool:
    """True where what training does depends on the length of the run."""
    ends_with_best = config.checkpoint.final == "best"  # Whose optimizer state is that of the last step.
    return ends_with_best or sees_length(config.optimizer) or objective_of(config).sees_length(config)


def _identity(manifest: dict) -> dict[str, dict]:
    """The values that identify each thing but the data that the config does not, by its name in words."""
    given = {}
    if "parameters" in manifest or manifest.get("format", 1) >= FULL_IDENTITY:
        model = {key: x for key, x in manifest["model"].items() if f"model.{key}" not in configs.OPERATIONAL}
        given["model"] = {key: manifest[key] for key in ("parameters",) if key in manifest} | model
    if "frozen" in manifest:
        given["frozen model"] = manifest["frozen"]
    return given


def _as_saved(manifest: dict) -> dict:
    """The manifest as it is read back: lists in the place of tuples."""
    return json.loads(json.dumps(manifest))


def steps_of(workdir: Path, config: ConfigDict) -> int | None:
    """The number of steps that a run keeps where its data have changed; None: as config and data make it."""
    saved = saved_run(workdir) if config.data.changed == "accepted" else None
    if saved is None or any(saved.config[name] != config[name] for name in LENGTH):
        return None
    return saved.manifest["steps"]


def steps_made(workdir: Path) -> bool:
    """Returns True if the run in a workdir has a checkpoint."""
    folder = checkpoints_of(workdir)
    return folder.is_dir() and any(entry.name.isdecimal() for entry in folder.iterdir())


def ends_run(row: dict[str, float], steps: int) -> bool:
    """Returns True for the last row of metrics of a finished run, which may have stopped early."""
    return "test/loss" in row and (row["step"] >= steps or "kept/step" in row)


def _check_same(workdir: Path, saved: dict, given: dict) -> None:
    """Raises UserError where something else is given than the run began with."""
    for name, known in saved.items():
        if differing := [key for key, value in known.items() if given.get(name, {}).get(key) != value]:
            raise UserError(
                f"{shown(workdir)} belongs to a run of other {name} (other {', '.join(differing)}); give "
                "what it was started with, or another workdir"
            )


def check_name(workdir: Path) -> None:
    """Raises UserError where a workdir's path is not UTF-8, which the library of checkpoints cannot open."""
    path = str(workdir.absolute())
    if as_text(path) != path:
        raise UserError(
            f"the path {as_text(path)} is not UTF-8, and checkpoints can only be written to and read from "
            "paths that are: rename the folder"
        )


def saved_run(workdir: Path) -> SavedRun | None:
    """The run that a workdir is of; None where there is none.

    Raises:
      UserError: one of its files is damaged or cannot be read.
    """
    if not (workdir / CONFIG).exists():
        return None
    for name in (CONFIG, MANIFEST):
        try:
            text = read_small(workdir / name)
            if not isinstance(json.loads(text), dict):
                raise ValueError("it is not an object")
            if name == CONFIG:
                written = text
                configs.from_json(text)  # Its values are of the types that they should be.
        except OSError as error:
            raise UserError(f"cannot read {shown(workdir)}/{name}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{shown(workdir)}/{name} is damaged ({' '.join(str(error).split())[:200]}); put back a copy "
                "of it: the checkpoints beside it are not concerned"
            ) from error
    manifest = json.loads(text)
    format = manifest.get("format", 1)
    if not isinstance(format, int) or not isinstance(manifest.get("model"), dict):
        raise UserError(
            f"{shown(workdir)}/{MANIFEST} is damaged: it does not say the model; put back a copy of it"
        )
    return SavedRun(written, saved_config(written, format, manifest["model"]), manifest, format)


def settled_config(workdir: Path, config: ConfigDict) -> tuple[ConfigDict, list[str]]:
    """The config with which the run in a workdir goes on, if one is there, and what differs from `config`."""
    saved = saved_run(workdir)
    if saved is None:
        return config, []
    return settled(config, saved.text, saved.format, saved.manifest["model"])


def check_shared(workdir: Path, peers: Peers) -> None:
    """Raises UserError on a process whose `workdir` is not the leader's."""
    if peers.count == 1:
        return
    url, file = url_of(workdir), workdir / SHARED
    bucket = Bucket(url) if url else None

    def found() -> bytes | None:
        if bucket:
            return bucket.read(SHARED)
        return file.read_bytes() if file.exists() else None

    token = secrets.token_hex(8) if peers.index == 0 else ""
    if bucket and token:
        bucket.write(SHARED, token.encode())
    elif token:
        file.write_text(token)
    token = peers.share("the workdir", token or None)
    until = time.monotonic() + SEEN_SECONDS
    while found() != token.encode():
        if time.monotonic() > until:
            raise UserError(
                f"the workdir {shown(workdir)} is not that of {peers.name(0)}: give a folder that all hosts "
                "share"
            )
        time.sleep(0.1)
    peers.barrier("the workdir is shared")
    if peers.index == 0 and bucket:
        bucket.remove(SHARED)
    elif peers.index == 0:
        file.unlink()


def make_manifest(
    steps: int,
    class_names: tuple[str, ...],
    images: dict[str, int],
    model: type,
    arguments: dict,
    interpolation: str,
    metrics: dict[str, str],
    flops: float,
) -> dict:
    """The manifest: all that a reader of the run needs besides its config.

    Args:
      arguments: of the model, all of them.
      interpolation: of images, which the checkpoint that the run starts from may have said.
      metrics: formats of the objective's.
      flops: of training, for each image.
    """
    return {
        "format": FORMAT,
        "steps": steps,
        "model": {"class": model.__name__} | arguments,
        "num_classes": arguments["num_classes"],
        "class_names": class_names,
        "images": images,
        "interpolation": interpolation,
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "cores": os.cpu_count(),
        "metrics": metrics,
        "flops": flops,
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": commit_of_package(),
        "versions": versions_here(),
    }


def versions_here() -> dict[str, str]:
    """The versions of Python and of the packages that a run depends on."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow")
    return {"python": platform.python_version()} | {
        package: importlib.metadata.version(package) for package in packages
    }


def commit_of_package() -> str:
    """The commit of the checkout that this package lies in: `1e41b65...`, with `, changed` where files
    differ from it; empty where it is not known."""
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    if not (root / ".git").exists():
        return ""
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout
        code = ("vit_jax", "configs", "experiments/*.py")  # Not the records.
        changes = [*git, "status", "--porcelain", "--untracked-files=no", "--", *code]
        changed = subprocess.run(changes, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.strip() + (", changed" if changed else "")


def open_workdir(workdir: Path, which: str = "") -> Checkpoint:
    """A checkpoint of a run, the newest by default; the workdir is all it needs.

    Args:
      which: a step, or `best` (by test accuracy, else test loss).

    Raises:
      UserError: there is no run or no such checkpoint, or it is damaged.
    """
    saved = saved_run(workdir)
    if saved is None:
        raise UserError(f"no run in {shown(workdir)}: it has no {CONFIG}")
    check_name(workdir)
    config, manifest = saved.config, saved.manifest
    arguments = dict(manifest["model"])
    kind = arguments.pop("class", None)
    model = next((family.model for family in FAMILIES if family.name == kind), None)
    if model is None:
        raise UserError(
            f"{shown(workdir)}/{MANIFEST} is damaged: it names no kind of model; put back a copy of it"
        )
    if isinstance(rope := arguments.get("rope"), bool):  # Of an earlier version, which had one kind.
        arguments["rope"] = "eva02" if rope else "none"
    values = complete(model, arguments)
    _, shapes = skeleton(model, values)
    params = _abstract(shapes)
    known = manifest.get("objective")  # Where a program handed it in, it is not of the table.
    if memory := known["judged"] if known else objective_of(config).judged(config):
        items = load_items(checkpoints_of(workdir), {memory: params}, which)
        params = items[memory]
    else:
        extra = jax.eval_shape(functools.partial(init_extra, config), params)
        weights = {"params": params} | ({"extra": extra} if extra else {})
        items = load_items(checkpoints_of(workdir), weights, which)
        params = effective({"extra": {}} | items)
    objective = None if known else _objective_params(workdir, config, items["step"])

    def read(path):
        return _at(params, path)

    return Checkpoint(
        f"{shown(workdir)}{which and '@' + which}",
        "a run",
        model,
        values,
        shapes,
        read,
        preprocessing=_preprocessing(config, manifest),
        class_names=all_names(manifest["class_names"], values["num_classes"]),
        objective=objective,
        step=items["step"],
        probabilities=probabilities_of(config),
    )


def _abstract(shapes: dict[str, tuple[int, ...]]) -> dict:
    """Nested arrays of these shapes by path on the first device, with nothing in them."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = {
        tuple(path.split("/")): jax.ShapeDtypeStruct(shape, "float32", sharding=device)
        for path, shape in shapes.items()
    }
    return nnx.traversals.unflatten_mapping(like)


def _at(params: dict, path: str) -> jax.Array:
    return functools.reduce(operator.getitem, path.split("/"), params)


def _objective_params(workdir: Path, config: ConfigDict, step: int) -> ObjectiveParams | None:
    """The parameters of a run's objective at a step, read when they are wanted; None: it has none to go on
    from."""
    kind, objective = objective_of(config), config.objective
    if not kind.made_by:
        return None
    remembered = kind.own_memory(config)
    said = {
        name: value
        for name, value in objective.items()
        if name in kind.made_by
        or (value is not None and name != "name" and f"objective.{name}" not in configs.OPERATIONAL)
    }

    folder = checkpoints_of(workdir)
    saved = functools.cache(lambda: item_shapes(folder, step))

    def load(item, like):
        return load_items(folder, {item: like}, str(step))[item]

    def own():
        if remembered:
            return saved().get(remembered, {})
        start = "objective/"
        extra = saved().get("extra", {}).items()
        return {path.removeprefix(start): shape for path, shape in extra if path.startswith(start)}

    def sources(shapes):
        check_shapes(shown(workdir), objective.name, own(), shapes)
        if remembered:
            params = load(remembered, _abstract(own()))
        else:
            params = load("extra", {"objective": _abstract(own())})["objective"]
        return {path: functools.partial(_at, params, path) for path in shapes}

    def load_array(name, shape):
        return np.asarray(load(name, _abstract({name: shape})[name]))

    carried = {name: saved()[name][""] for name in kind.carried if name in saved()}
    memory = {
        name: Tensor(shape, "float32", functools.partial(load_array, name, shape))
        for name, shape in carried.items()
    }
    return ObjectiveParams(objective.name, said, sources, own, memory)


def _preprocessing(config: ConfigDict, manifest: dict) -> Preprocessing:
    """The preprocessing of a run's test images."""
    data = config.data
    share = Fraction(data.image_size, data.test_resize)
    own = data.test_interpolation or data.interpolation
    interpolation = own or manifest.get("interpolation", "bilinear")
    return Preprocessing(data.test_crop, share, interpolation, background=data.background, mode=data.decode)


def checkpoint_crop(
    checkpoint: Checkpoint,
    size: int | tuple[int, int],
    mode: str | None = None,
    default: Preprocessing = UNSAID,
) -> TestCrop:
    """The crop that a checkpoint's model should see of an image, at any size: the share of the image stays.

    Args:
      size: pixels, or height and width.
      mode: as of `TestCrop`; None: the run's own, else fast.
      default: of a checkpoint that does not say it.

    Raises:
      UserError: what the checkpoint says is not done here.
    """
    seen, size = checkpoint.preprocessing or default, sides(size)
    for said, known in ((seen.kind, TEST_CROPS), (seen.interpolation, INTERPOLATIONS)):
        if said not in known:
            raise UserError(
                f"the preprocessing of {checkpoint.place} says {said}, which is not done here; there are: "
                f"{', '.join(known)}"
            )
    mode = mode or seen.mode
    return TestCrop(size, seen.kind, seen.resize(size), mode, seen.interpolation, seen.background, seen.half)


def absolute(path: str | Path) -> Path:
    """The path from the root on, `~` as the home folder: in --flag=~/x a shell leaves it as it is.

    Raises:
      UserError: it is the URL of a bucket.
    """
    if is_url(path):
        raise UserError(f"{path} is in a bucket, where this is not written: give a folder, and copy it there")
    return Path(os.path.expanduser(path)).absolute()


def workdir_at(place: str | Path) -> Path:
    """The folder of a workdir: its own, or where its files were just fetched to from a bucket.

    Raises:
      UserError: the bucket cannot be used.
    """
    return fetched(str(place)) if is_url(place) else absolute(place)


def place_of(source: str | Path) -> tuple[Path, str]:
    """The folder of a source, and which checkpoint of a run is meant: `WORKDIR@best`, `WORKDIR@3000`."""
    if is_url(source):
        name, _, which = str(source).rpartition("@") if "@" in str(source) else (str(source), "", "")
        return fetched(name), which
    path = absolute(source)
    if "@" not in path.name or path.exists():
        return path, ""
    name, _, which = str(path).rpartition("@")
    return Path(name), which


def open_any(source: str | Path, image_size=None) -> Checkpoint:
    """The checkpoint at any source that `vit_jax.load_model` takes."""
    if str(source).startswith("hf://"):
        return open_checkpoint(download(str(source)), image_size)
    path, which = place_of(source)
    if (path / CONFIG).is_file() and (path / MANIFEST).is_file():
        return open_workdir(path, which)
    if is_url(source):
        raise UserError(
            f"no run in {shown(path)}: it has no {CONFIG}; in a bucket only workdirs are read, other "
            "checkpoints in a folder"
        )
    if which or not path.exists():
        refuse_unheld(str(source))
        if any(weights.model == str(source) for weights in all_weights()):
            raise UserError(
                f"there is no {path}; {source} is a model's name: load_model('{source}', pretrained=TAG) "
                f"takes published weights, of which list_models('{source}', pretrained=True) has the tags; "
                "commands take their hf://owner/name"
            )
        raise UserError(
            f"there is no {path}{which and '@' + which}; a checkpoint of the Hub is hf://owner/name"
        )
    return open_checkpoint(path, image_size)
