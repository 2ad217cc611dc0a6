"""The files that a run keeps in its workdir, next to its checkpoints.

config.json       the config, as the user set it
manifest.json     values from config and data: model, classes, steps, versions, commit, devices,
                  and whether VIT_JAX_KERNELS is 1
checkpoints/      a folder for each step
metrics.jsonl, log.txt, events.out.tfevents.*, report.html
predictions.npz   predictions for the images of the last evaluation, and some of the images
worst_images.json the images with the worst masks, boxes or depths in the last evaluation
retrievals.npz    captions of the last evaluation and their most similar images
zero_shot_*.html, retrieval_*.html  pictures of evaluation suites, a file for each data set
seen/             attention maps of test images, written at the end of the run
.lock-N           the process that uses the workdir, if any
reconstructions/  pictures of test images and predictions, by step
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from vit_jax import config as configs
from vit_jax.errors import UserError, as_text
from vit_jax.models import stored_options
from vit_jax.options.model import ImageOptions
from vit_jax.options.run import RunOptions
from vit_jax.parallel.peers import Peers
from vit_jax.parallel.sharding import KERNELS
from vit_jax.paths import CONFIG, MANIFEST, absolute, is_url, split_checkpoint
from vit_jax.runs import data_identity
from vit_jax.runs.bucket import Bucket, checkpoints_of, fetched, shown, url_of
from vit_jax.runs.bucket_lock import BucketLock
from vit_jax.runs.goodput import read_rows
from vit_jax.runs.workdir_lock import PREFIX, Lock
from vit_jax.small_files import read_small
from vit_jax.training.objectives import objective_of
from vit_jax.training.schedule import depends_on_steps

METRICS, RECONSTRUCTIONS = "metrics.jsonl", "reconstructions"
REPORT, SEEN_FOLDER = "report.html", "seen"
LENGTH = {"steps", "epochs"}
FORMAT = 7  # Version of the workdir format. Versions 1 to 6 are older than the first release.
SHARED = ".shared"
SEEN_SECONDS = 10  # Time until a file written on one host is visible on others, even over NFS.


class SavedRun(NamedTuple):
    """The config and the manifest of the run in a workdir."""

    text: str  # Content of `config.json`.
    config: RunOptions
    manifest: dict


@contextlib.contextmanager
def claim(
    workdir: Path, config: RunOptions, manifest: dict, log: Callable[[str], None] = print
) -> Iterator[Lock | BucketLock]:
    """Creates or resumes a workdir and holds its lock while the context is open.

    If the config has more steps than the saved run, the run is extended. This is only possible if
    no schedule depends on the run's length. Changed data are accepted if the config allows it.

    Raises:
      UserError: the workdir belongs to another config or other data, contains other files, is in
        use, or cannot be written.
    """
    check_name(workdir)
    with contextlib.ExitStack() as held:
        try:
            _belongs(workdir, config, manifest)  # First check, before anything is created.
            workdir.mkdir(parents=True, exist_ok=True)
            url = url_of(workdir)
            lock = held.enter_context(BucketLock(Bucket(url), log) if url else Lock(workdir, log))
            if url:
                fetched(url)
            # Second check, since the lock's previous owner may have changed the workdir meanwhile.
            saved = _belongs(workdir, config, manifest)
            if saved:
                _continue(workdir, saved, config, manifest, log)
            else:
                _write(workdir, manifest, configs.to_json(config))
        except OSError as error:
            raise UserError(
                f"cannot write to the workdir {shown(workdir)}: {error.strerror}"
            ) from error
        yield lock


def _continue(
    workdir: Path, saved: SavedRun, config: RunOptions, manifest: dict, log: Callable[[str], None]
) -> None:
    """Writes changed data and a changed length into a saved run's files, and logs the changes."""
    if line := _changed_kernels(saved.manifest, manifest):
        log(line)
    if changed := data_identity.differences(saved.manifest, _as_saved(manifest)):
        log(f"note: this run continues with other data than it began with: {'; '.join(changed)}")
        identity = {key: manifest[key] for key in data_identity.KEYS if key in manifest}
        saved = saved._replace(manifest=saved.manifest | identity)
        _write(workdir, saved.manifest, saved.text.rstrip())
    if configs.differences(configs.to_json(saved.config), config):
        before, after = saved.manifest["steps"], manifest["steps"]
        log(f"note: this run is made longer: {after:,} steps in place of {before:,}")
        text = json.loads(saved.text) | {name: getattr(config, name) for name in LENGTH}
        _write(workdir, saved.manifest | {"steps": after}, json.dumps(text, indent=2))


def _changed_kernels(saved: dict, manifest: dict) -> str | None:
    """Returns a note if the run began with another value of the variable `KERNELS`."""
    now = manifest.get("kernels")
    if saved.get("kernels", now) == now:
        return None
    began, found, remedy = ("with", "without", "set") if not now else ("without", "with", "unset")
    return (
        f"note: this run began {began} {KERNELS}=1 and continues {found} it: on TPUs its steps "
        f"differ from the earlier ones by rounding; {remedy} the variable to continue bit-exactly"
    )


def _write(workdir: Path, manifest: dict, config: str) -> None:
    """Writes the manifest, then the config. The config marks the workdir as complete."""
    for name, text in ((MANIFEST, json.dumps(manifest, indent=2)), (CONFIG, config)):
        temporary = workdir / (name + ".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(workdir / name)


def _belongs(workdir: Path, config: RunOptions, manifest: dict) -> SavedRun | None:
    """Returns the run in `workdir` that this config continues; None: a new run can start.

    Raises:
      UserError: the run has another config or other data, or `workdir` contains other files.
    """
    saved = saved_run(workdir)
    if saved is None:
        _check_empty(workdir)
        return None
    if not steps_made(workdir):
        return None  # Without a checkpoint, the run may start again with any config.
    current = _as_saved(manifest)
    _check_config(workdir, saved, config, manifest["steps"])
    _check_data(workdir, saved, config, current)
    identity = _identity(current)
    for name, known in _identity(saved.manifest).items():
        of_run = identity.get(name, {})
        if differing := [key for key, value in known.items() if of_run.get(key) != value]:
            raise UserError(
                f"{shown(workdir)} belongs to a run with other {name} (other "
                f"{', '.join(differing)}); give those it was started with, or another workdir"
            )
    return saved


def _check_empty(workdir: Path) -> None:
    """Raises UserError if a folder without a run has files, except those of a killed start."""
    begun = (MANIFEST, CONFIG + ".tmp", PREFIX)  # Files that a killed start leaves.
    url = url_of(workdir)
    names = Bucket(url).top() if url else os.listdir(workdir) if workdir.exists() else ()
    if any(not name.startswith(begun) for name in names):
        raise UserError(
            f"{shown(workdir)} contains files but no run; give a new or empty --workdir"
        )


def _check_config(workdir: Path, saved: SavedRun, config: RunOptions, steps: int) -> None:
    """Raises UserError if a saved run has another config and cannot be extended to this config.

    A run can be extended only if its training does not depend on its length.
    """
    differing = configs.differences(configs.to_json(saved.config), config)
    if not differing:
        return
    of_length = {line.partition(":")[0] for line in differing} <= LENGTH
    # With `checkpoint.final=best`, the last checkpoint contains the parameters of the best step,
    # but the optimizer state of the last step. Training cannot continue from this checkpoint.
    if (of_length and steps >= saved.manifest["steps"]) and not (
        config.checkpoint.final == "best"
        or depends_on_steps(config.optimizer)
        or objective_of(config.objective.name).sees_length(config)
    ):
        return
    if of_length:
        hint = "; a run can be made longer only if nothing depends on its length"
    else:
        # Without this value, a new run of an objective with labels starts with a new head.
        has_head = objective_of(config.objective.name).labels
        hint = (
            "; to train its model with other values, start a new run with "
            f"config.finetune.checkpoint={shown(workdir)}"
            f"{' and config.finetune.head=kept' if has_head else ''}"
        )
    raise UserError(
        f"{shown(workdir)} belongs to a run with another config "
        f"({'; '.join(differing)}); give another --workdir, or the config it was "
        f"started with{hint}"
    )


def _check_data(workdir: Path, saved: SavedRun, config: RunOptions, manifest: dict) -> None:
    """Raises UserError if the data have changed and the run cannot continue with the new data."""
    changed = data_identity.differences(saved.manifest, manifest)
    if not changed:
        return
    known = f"{shown(workdir)} belongs to a run of other data ({'; '.join(changed)}); "
    steps = saved.manifest["steps"]
    ended = any(ends_run(row, steps) for row in read_rows(workdir / METRICS))
    # A larger number of steps or epochs extends the run. With more images, the same number of
    # epochs has more steps, but a run keeps its original number.
    other_length = any(getattr(config, name) != getattr(saved.config, name) for name in LENGTH)
    over = ended and not (other_length and manifest["steps"] > steps)
    if over or not data_identity.fits_head(saved.manifest, manifest):
        reason = "the run has ended and would not train on the other images; " if over else ""
        raise UserError(
            f"{known}{reason}give the data that it began with, or another --workdir, where "
            f"config.finetune.checkpoint={shown(workdir)} starts from this run"
        )
    if config.data.changed == "refused":
        raise UserError(
            f"{known}give the data that it began with, or another --workdir; "
            "config.data.changed='accepted' continues with these"
        )


def _identity(manifest: dict) -> dict[str, dict]:
    """Returns the manifest's values that identify the model and the frozen model."""
    model = {
        key: x for key, x in manifest["model"].items() if f"model.{key}" not in configs.OPERATIONAL
    }
    identity = {"model": {key: manifest[key] for key in ("parameters",) if key in manifest} | model}
    if "frozen" in manifest:
        identity["frozen model"] = manifest["frozen"]
    return identity


def _as_saved(manifest: dict) -> dict:
    """Returns the manifest as it would be read back from JSON, with lists in place of tuples."""
    return json.loads(json.dumps(manifest))


def steps_of(workdir: Path, config: RunOptions) -> int | None:
    """Returns the number of steps of a saved run that may continue with changed data.

    None: the config determines the number. It has another length, it does not accept changed data,
    or there is no saved run.
    """
    saved = saved_run(workdir) if config.data.changed == "accepted" else None
    if saved is None:
        return None
    earlier, now = ((each.steps, each.epochs) for each in (saved.config, config))
    return saved.manifest["steps"] if earlier == now else None


def steps_made(workdir: Path) -> bool:
    """Returns True if the run in a workdir has a checkpoint."""
    folder = checkpoints_of(workdir)
    return folder.is_dir() and any(entry.name.isdecimal() for entry in folder.iterdir())


def ends_run(row: dict[str, float], steps: int) -> bool:
    """Returns True if a row is the final evaluation of a run, which may stop before `steps`."""
    return "test/loss" in row and (row["step"] >= steps or "kept/step" in row)


def check_name(workdir: Path) -> None:
    """Raises UserError if a workdir's path is not UTF-8, which Orbax cannot open."""
    path = str(workdir.absolute())
    if as_text(path) != path:
        raise UserError(
            f"the path {as_text(path)} is not UTF-8, and checkpoints can only be written to and "
            "read from paths that are: rename the folder"
        )


def saved_run(workdir: Path) -> SavedRun | None:
    """Returns a workdir's run; None: there is none. Raises UserError if it is damaged."""
    if not (workdir / CONFIG).exists():
        return None
    _, manifest = _read_json(workdir, MANIFEST, json.loads)
    _check_format(workdir, manifest)
    return SavedRun(*_read_json(workdir, CONFIG, configs.from_json), manifest)


def run_of_checkpoint(source: str) -> SavedRun | None:
    """Returns the run of a checkpoint; None: the checkpoint is not in a workdir."""
    workdir, _ = place_of(source)
    return saved_run(workdir) if (workdir / MANIFEST).is_file() else None


def _read_json(workdir: Path, name: str, parse: Callable[[str], Any]) -> tuple[str, Any]:
    """Returns the text of a JSON file in a workdir, and the result of `parse` for this text."""
    try:
        text = read_small(workdir / name)
        if not isinstance(json.loads(text), dict):
            raise ValueError("it is not an object")
        return text, parse(text)
    except OSError as error:
        raise UserError(f"cannot read {shown(workdir)}/{name}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{shown(workdir)}/{name} is damaged ({' '.join(str(error).split())[:200]}); restore "
            "a copy of it; the checkpoints next to it are not affected"
        ) from error


def _check_format(workdir: Path, manifest: dict) -> None:
    """Raises UserError if a manifest has another format version, or does not describe a model."""
    found = manifest.get("format", 1)
    if not isinstance(found, int) or not isinstance(manifest.get("model"), dict):
        raise UserError(
            f"{shown(workdir)}/{MANIFEST} is damaged: it contains no model; restore a copy of it"
        )
    if found != FORMAT:
        remedy = "use a newer vit_jax" if found > FORMAT else "train again in a new workdir"
        raise UserError(
            f"{shown(workdir)} has format {found}, and this vit_jax reads format {FORMAT}: {remedy}"
        )


def check_shared(workdir: Path, peers: Peers) -> None:
    """Raises UserError unless each process reads the token that process 0 wrote to `workdir`."""
    if peers.count == 1:
        return
    url, file = url_of(workdir), workdir / SHARED
    bucket = Bucket(url) if url else None

    def read() -> bytes | None:
        if bucket:
            return bucket.read(SHARED)
        return file.read_bytes() if file.exists() else None

    token = secrets.token_hex(8) if peers.index == 0 else None
    if token:
        bucket.write(SHARED, token.encode()) if bucket else file.write_text(token)
    token = peers.share("the workdir", token)
    until = time.monotonic() + SEEN_SECONDS
    while read() != token.encode():
        if time.monotonic() > until:
            raise UserError(
                f"the workdir {shown(workdir)} is not that of {peers.name(0)}: give a folder that "
                "all hosts share"
            )
        time.sleep(0.1)
    peers.barrier("the workdir is shared")
    if peers.index == 0:
        bucket.remove(SHARED) if bucket else file.unlink()


def make_manifest(
    steps: int,
    class_names: tuple[str, ...],
    images: dict[str, int],
    options: ImageOptions,
    interpolation: str,
    metrics: dict[str, str],
    flops: float,
) -> dict:
    """Returns the manifest: the values that readers of a run need in addition to its config.

    Args:
      interpolation: interpolation with which images are resized. It may come from the checkpoint
        of a warm start.
      metrics: formats of the objective's metrics.
      flops: training FLOPs per image.
    """
    return {
        "format": FORMAT,
        "steps": steps,
        "model": stored_options(options),
        "num_classes": options.num_classes,
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
        "kernels": os.environ.get(KERNELS) == "1",
    }


def versions_here() -> dict[str, str]:
    """Returns the versions of Python, and of packages that influence the result of a run."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow")
    return {"python": platform.python_version()} | {
        package: importlib.metadata.version(package) for package in packages
    }


def commit_of_package() -> str:
    """Returns the checkout's commit, with `, changed` for changed files; empty: unknown."""
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    if not (root / ".git").exists():
        return ""
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout
        code = ("vit_jax", "configs", "experiments/*.py")  # Records of experiments are ignored.
        changes = [*git, "status", "--porcelain", "--untracked-files=no", "--", *code]
        changed = subprocess.run(changes, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.strip() + (", changed" if changed else "")


def workdir_at(place: str | Path) -> Path:
    """Returns the folder of a workdir. For a URL, it is a local folder with copies of the files.

    Raises:
      UserError: the bucket cannot be used.
    """
    return fetched(str(place)) if is_url(place) else absolute(place)


def place_of(source: str | Path) -> tuple[Path, str]:
    """Splits `WORKDIR@best` or `WORKDIR@3000` into the workdir's folder and the checkpoint's name.

    Raises:
      UserError: the bucket cannot be used.
    """
    workdir, which = split_checkpoint(source)
    return fetched(workdir) if is_url(source) else Path(workdir), which
