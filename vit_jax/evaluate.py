"""Evaluates a checkpoint: python -m vit_jax.evaluate --checkpoint=WORKDIR --suite=fewshot --out=DIR

Suites, one or several with commas, or all:

  imagenet  top-1 and top-5 on ImageNet's validation images, ReaL's labels (--real), ImageNet-v2, ObjectNet
            (--objectnet): for a model with ImageNet's 1,000 classes
  vtab      fine-tuning on the 19 tasks of VTAB-1k as configs/finetune.py does (--value changes it)
  fewshot   least squares on the frozen network's features, 1 to 25 images of each class
  probe     k-NN and a linear probe on the same features of all training images

It writes results.json, results.md (with the paper's figures beside ours) and results.png. The same command
again goes on where it was; a data set that is missing is a row that says how to get it.
"""

import ast
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path

from absl import flags

from vit_jax import command
from vit_jax.config import OPERATIONAL, base_config, check, leaves
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources import DataSet, data_set
from vit_jax.errors import UserError, nearest
from vit_jax.evaluation.results import SUITES, Results, Row, draw, name_of_shots

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "What load_model takes: a workdir, a file, hf://owner/name."
)
SUITE = flags.DEFINE_list("suite", [], f"Of {', '.join(SUITES)}, or all.")
OUT = flags.DEFINE_string("out", None, "Folder for the results; again to go on.")
DATA_DIR = flags.DEFINE_string("data_dir", "", "Where TFDS's data sets are, if not in ~/tensorflow_datasets.")
IMAGE_SIZE = flags.DEFINE_integer(
    "image_size", None, "Pixels, if not the checkpoint's (VTAB's are 384).", lower_bound=1
)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Images at once, of all devices.", lower_bound=1)
WORKERS = flags.DEFINE_integer(
    "workers", None, "Processes that decode images, if not chosen by cores and images.", lower_bound=0
)
IMAGENET = flags.DEFINE_string("imagenet", "", "A folder of validation images by synset, instead of TFDS's.")
REAL = flags.DEFINE_string("real", "", "ReaL's real.json.")
OBJECTNET = flags.DEFINE_string("objectnet", "", "The unpacked objectnet-1.0.")
TEST_RESIZE = flags.DEFINE_integer(
    "test_resize",
    None,
    "ImageNet's short side before the central crop; by default the checkpoint's crop, or the whole image.",
)
SETS = flags.DEFINE_multi_string(
    "set",
    [],
    "Of fewshot and probe: tfds:cifar100, folder:/data/pets, digits:; by default big_vision's nine.",
)
SHOTS = flags.DEFINE_list("shots", ["1", "5", "10", "25"], "Training images of each class.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Of the choice of few-shot images.")
VALUES = flags.DEFINE_multi_string("value", [], "Of the config of VTAB's runs, such as batch_size=128.")


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}")
    if not CHECKPOINT.value or not OUT.value or not SUITE.value:
        raise UserError("give --checkpoint=WORKDIR, --suite=fewshot and --out=DIR")
    for suite in SUITE.value:
        if suite not in (*SUITES, "all"):
            raise UserError(f"unknown suite {suite!r}; {nearest(suite, [*SUITES, 'all'])}")
    for value in VALUES.value:
        set_value(base_config(), value)
    shots, seeds = whole_numbers("shots", SHOTS.value, 1), whole_numbers("seeds", SEEDS.value, 0)
    data_sets = [data_set(text) for text in SETS.value]
    if len({described.name for described in data_sets}) < len(data_sets):
        names = ", ".join(described.name for described in data_sets)
        raise UserError(f"--set: rows are by the sets' names, which must differ: {names}")
    command.use_compilation_cache()

    described = opened().describe()
    print(described)
    results = Results(Path(OUT.value), checkpoint_name(), described.split(": ")[0])
    run = {
        "imagenet": lambda: imagenet(results),
        "vtab": lambda: vtab(results),
        "fewshot": lambda: frozen(data_sets, lambda one: few_shot(results, one, shots, seeds)),
        "probe": lambda: frozen(data_sets, lambda one: probe(results, one)),
    }
    # What figures depend on, besides the data.
    values = sorted(value for value in VALUES.value if value.partition("=")[0] not in OPERATIONAL)
    settings = {
        "imagenet": lambda: {"test_resize": TEST_RESIZE.value, "crop": str(imagenet_crop())},
        "vtab": lambda: {"value": values},
        "fewshot": lambda: {"seeds": seeds, "crop": str(frozen_crop())},
        "probe": lambda: {"crop": str(frozen_crop())},
    }
    chosen = [suite for suite in SUITES if suite in SUITE.value or "all" in SUITE.value]
    for suite in chosen:
        results.begin(suite, {"image_size": IMAGE_SIZE.value} | settings[suite]())
    for suite in chosen:
        run[suite]()
    text = results.markdown()
    (results.folder / "results.md").write_text(text)
    files = ["results.md", "results.json"]
    if draw(results.folder / "results.png", results.rows):
        files.append("results.png")
    print(f"\n{text}\n{results.folder}: {', '.join(files)}")


def checkpoint_name() -> str:
    """The checkpoint as results are kept by it: a relative path means another one in another folder."""
    from vit_jax.runs.workdir import absolute

    hub = CHECKPOINT.value.startswith("hf://")
    return CHECKPOINT.value if hub else str(absolute(CHECKPOINT.value))


def attempt(results: Results, suite: str, names: list[str], figures: Callable[[], list[Row]]) -> None:
    """Puts rows of these names, unless they are there; what cannot be had is a row that says why."""
    if results.has(suite, *names):
        return
    print(f"== {suite}: {names[0]}", flush=True)
    try:
        rows = figures()
    except UserError as error:
        rows = [Row(suite, name, note=str(error)) for name in names]
    results.put(*rows)
    for row in rows:
        print(f"{row.name}: {row.note if row.accuracy is None else f'{row.accuracy:.2%}'}", flush=True)


@functools.cache
def opened():
    """The checkpoint."""
    from vit_jax.runs.workdir import open_any

    return open_any(CHECKPOINT.value, IMAGE_SIZE.value)


@functools.cache
def load():
    """The model."""
    from vit_jax.load import build_model

    changes = {"image_size": IMAGE_SIZE.value} if IMAGE_SIZE.value else {}
    return build_model(opened(), say=str, **changes)


def square_size() -> int:
    """Pixels of the images that the suites show the model.

    Raises:
      UserError: it takes no square ones.
    """
    from vit_jax.evaluation.features import transfer_crop

    return transfer_crop(IMAGE_SIZE.value or opened().arguments["image_size"]).size


def imagenet_crop() -> TestCrop:
    """What the model sees of an image of ImageNet: what --test_resize says, else what the checkpoint does."""
    from vit_jax.interop.preprocessing import Preprocessing
    from vit_jax.runs.workdir import checkpoint_crop

    whole = Preprocessing("square", 1, "bilinear")
    crop = checkpoint_crop(opened(), square_size(), default=whole)
    if not TEST_RESIZE.value:
        return crop
    return dataclasses.replace(crop, kind="short_side", resize=TEST_RESIZE.value)


def frozen_crop() -> TestCrop:
    """What the frozen network sees: what its library's files say. Of a run, and of a file that says nothing,
    it is the few-shot protocol's crop, which is that of evaluations in training."""
    from vit_jax.evaluation.features import transfer_crop
    from vit_jax.runs.workdir import checkpoint_crop

    checkpoint, size = opened(), square_size()
    own = checkpoint_crop(checkpoint, size)
    if checkpoint.mapped and checkpoint.preprocessing:
        return own
    return transfer_crop(size, mode=own.mode, interpolation=own.interpolation, background=own.background)


@functools.cache
def mesh():
    """Of all devices."""
    from vit_jax.parallel.mesh import make_mesh

    return make_mesh(dict(data=None, fsdp=1, tensor=1))


@functools.cache
def frozen_network():
    """What makes features of images, and its parameters."""
    from vit_jax.evaluation.features import extractor_of

    options = dict(batch_size=BATCH_SIZE.value, workers=WORKERS.value)
    return extractor_of(load(), mesh(), frozen_crop(), **options)


def frozen(data_sets: list[DataSet], find: Callable[[DataSet], None]) -> None:
    """On each data set, one of the evaluations of the frozen network."""
    from vit_jax.evaluation.fewshot import DATA_SETS, cut_in_two

    for described in data_sets or DATA_SETS:
        is_tfds = described.kind == "tfds"
        find(described._replace(path=in_data_dir(described.path)) if is_tfds else cut_in_two(described))


def few_shot(results: Results, described: DataSet, shots: list[int], seeds: list[int]) -> None:
    """Those numbers of shots that are not there yet."""
    from vit_jax.evaluation.fewshot import Task, TooFewImages, open_data_set

    def name(count: int) -> str:
        return name_of_shots(described.name, count)

    shots = [count for count in shots if not results.has("fewshot", name(count))]

    def figures() -> list[Row]:
        sources = open_data_set(described)
        possible, rows = shots, []
        try:
            task = Task(described.name, *sources, shots, seeds)
        except TooFewImages as error:
            possible = [count for count in shots if count <= error.most]
            note = f"class {error.class_name!r} has {error.most} training images"
            rows = [Row("fewshot", name(count), note=note) for count in shots if count > error.most]
            if not possible:
                return rows
            task = Task(described.name, *sources, possible, seeds)
        found = task.accuracies(*frozen_network())
        note = f"seeds {', '.join(map(str, seeds))}; penalty {found[0].penalty:g}{split_note(described)}"
        return [
            Row(
                "fewshot",
                name(one.shots),
                one.mean,
                one.deviation if len(seeds) > 1 else None,
                len(task.test),
                note,
            )
            for one in found
        ] + rows

    attempt(results, "fewshot", [name(count) for count in shots], figures)


def split_note(described: DataSet) -> str:
    """Which images train and test, where these are not splits of their own."""
    train, test = described.train_split, described.test_split
    return f"; {train} to train, {test} to test" if train.startswith("all") else ""


def probe(results: Results, described: DataSet) -> None:
    from vit_jax.evaluation.fewshot import open_data_set
    from vit_jax.evaluation.knn import knn_accuracy
    from vit_jax.evaluation.probe import linear_probe

    names = [f"{described.name}, {kind}" for kind in ("20-NN", "linear probe")]

    def figures() -> list[Row]:
        train, test = open_data_set(described)
        extractor, params = frozen_network()
        features = extractor(params, train), extractor(params, test)
        near = knn_accuracy(*features, len(train.class_names), mesh())
        found = linear_probe(*features, len(train.class_names), mesh())
        notes = split_note(described).lstrip("; "), f"penalty {found.penalty:g}{split_note(described)}"
        return [
            Row("probe", name, accuracy, None, len(features[1].values), note)
            for name, accuracy, note in zip(names, (near, found.accuracy), notes, strict=True)
        ]

    attempt(results, "probe", names, figures)


def imagenet(results: Results) -> None:
    """All of ImageNet's test sets."""
    from vit_jax.data.sources import open_source
    from vit_jax.data.sources.base import Source
    from vit_jax.evaluation import imagenet as sets
    from vit_jax.evaluation.features import Features, extractor_of, first_five

    def predict(open_set: Callable[[], Source], crop: TestCrop) -> Features:
        """The five likeliest classes of each image."""
        model = load()
        sets.check_head(model.num_classes, CHECKPOINT.value)
        options = dict(batch_size=BATCH_SIZE.value, workers=WORKERS.value, compute=first_five)
        source = open_set()
        extractor, params = extractor_of(model, mesh(), crop, **options)
        return extractor(params, source)

    def rows(names: list[str], predictions, labels, crop: TestCrop) -> list[Row]:
        """Top-1, and top-5 if there are two names."""
        found = sets.accuracy(predictions, labels)
        return [
            Row("imagenet", name, found[kind], None, found["images"], str(crop))
            for name, kind in zip(names, ("top1", "top5"), strict=False)
        ]

    def validation(names: list[str], real: list | None) -> list[Row]:
        kind, path, split = (
            ("folder", IMAGENET.value, "all")
            if IMAGENET.value
            else ("tfds", in_data_dir("imagenet2012"), "validation")
        )
        found = predict(lambda: sets.open_imagenet(kind, path, split, real), seen)
        reals = rows(["ReaL"], found.values, found.labels[:, 1:], seen) if real else []
        return rows(names, found.values, found.labels[:, :1], seen) + reals

    def v2() -> Source:
        source = open_source("tfds", "test", path=in_data_dir(sets.IMAGENET_V2))
        sets.check_classes(source.class_names, sets.IMAGENET_V2)
        return source

    def objectnet() -> Source:
        if not OBJECTNET.value:
            raise UserError(f"give --objectnet=objectnet-1.0, from {sets.OBJECTNET_URL}")
        return sets.open_objectnet(OBJECTNET.value)

    def other(names: list[str], open_set: Callable[[], Source], crop: TestCrop) -> None:
        def figures() -> list[Row]:
            found = predict(open_set, crop)
            return rows(names, found.values, found.labels, crop)

        attempt(results, "imagenet", names, figures)

    def read_real() -> list:
        if not REAL.value:
            raise UserError(f"give --real=real.json, from {sets.REAL_URL}")
        return sets.read_real(REAL.value)

    own, seen = ["ImageNet", "ImageNet, top-5"], imagenet_crop()
    try:
        real = read_real()
    except UserError as error:
        attempt(results, "imagenet", own, lambda: validation(own, None))
        if not results.has("imagenet", "ReaL"):
            results.put(Row("imagenet", "ReaL", note=str(error)))
    else:
        attempt(results, "imagenet", [*own, "ReaL"], lambda: validation(own, real))
    other(["ImageNet-v2", "ImageNet-v2, top-5"], v2, seen)
    central = sets.objectnet_crop(square_size())
    central = dataclasses.replace(seen, kind=central.kind, resize=central.resize)
    other(["ObjectNet", "ObjectNet, top-5"], objectnet, central)


def vtab(results: Results) -> None:
    """A fine-tuning run on each task, in this process: it has the devices."""
    from vit_jax.data.sources.vtab import TASKS
    from vit_jax.recipes import finetune
    from vit_jax.runs.loop import train

    def figures(key: str, name: str) -> list[Row]:
        config = finetune(f"vtab/{key}", size=IMAGE_SIZE.value or 384)
        config.finetune.checkpoint = CHECKPOINT.value
        config.data.path = f"{key}:{DATA_DIR.value}" if DATA_DIR.value else key
        for value in VALUES.value:
            set_value(config, value)
        check(config)
        found = train(config, (results.folder / "vtab" / key).absolute())
        if not found:  # A signal stopped it, and it was saved.
            raise SystemExit
        return [Row("vtab", name, found["accuracy"], None, int(found["images"]))]

    for key, task in TASKS.items():
        attempt(results, "vtab", [task.name], functools.partial(figures, key, task.name))


def set_value(config, text: str) -> None:
    """Sets `batch_size=128` in a config."""
    key, _, value = text.partition("=")
    with contextlib.suppress(ValueError, SyntaxError):  # A word, such as float32.
        value = ast.literal_eval(value)
    try:
        config.update_from_flattened_dict({key: value})
    except KeyError as error:
        known = dict(leaves(config))
        raise UserError(f"--value={text}: unknown config key {key!r}; {nearest(key, known)}") from error
    except TypeError as error:
        raise UserError(f"--value={text}: {error}") from error


def in_data_dir(path: str) -> str:
    """The name of a TFDS data set, with --data_dir unless it says itself where it is."""
    named_only = re.fullmatch(r"[\w/-]+(:[\d.*]+)?", path) and not path.startswith("/")
    return f"{path}:{DATA_DIR.value}" if DATA_DIR.value and named_only else path


def whole_numbers(flag: str, values: list[str], least: int) -> list[int]:
    """Of a flag, each once."""
    if not values or not all(re.fullmatch("[0-9]+", value) and int(value) >= least for value in values):
        raise UserError(f"--{flag}={','.join(values)}: give whole numbers, {least} or above, with commas")
    return list(dict.fromkeys(map(int, values)))


if __name__ == "__main__":
    command.run(main)
