"""Evaluates a checkpoint: python -m vit_jax.evaluate --checkpoint=WORKDIR --suite=fewshot --out=DIR

Suites, one or several with commas, or all:

  imagenet  top-1 and top-5 on ImageNet's validation images, ReaL's labels (--real), ImageNet-v2, ObjectNet
            (--objectnet): for a model with ImageNet's 1,000 classes
  vtab      fine-tuning on the 19 tasks of VTAB-1k with configs/finetune.py (--value changes it)
  fewshot   least squares on the frozen network's features, 1 to 25 images of each class
  probe     k-NN and a linear probe on the same features of all training images

It writes results.json, results.md (with the paper's figures beside ours) and results.png. The same command
again goes on where it was; a data set that is missing is a row that says how to get it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from absl import flags

from vit_jax import command
from vit_jax.config import DataSet, data_set
from vit_jax.errors import UserError, nearest
from vit_jax.evaluation.results import SUITES, Results, Row, draw, names_of_shots

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "What load_model takes: a workdir, a file, hf://owner/name."
)
SUITE = flags.DEFINE_list("suite", [], f"Of {', '.join(SUITES)}, or all.")
OUT = flags.DEFINE_string("out", None, "Folder for the results; again to go on.")
DATA_DIR = flags.DEFINE_string("data_dir", "", "Where TFDS's data sets are, if not in ~/tensorflow_datasets.")
IMAGE_SIZE = flags.DEFINE_integer("image_size", None, "Pixels, if not the checkpoint's.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Images at once, of all devices.", lower_bound=1)
WORKERS = flags.DEFINE_integer("workers", 0, "Processes that decode images.", lower_bound=0)
IMAGENET = flags.DEFINE_string("imagenet", "", "A folder of validation images by synset, instead of TFDS's.")
REAL = flags.DEFINE_string("real", "", "ReaL's real.json.")
OBJECTNET = flags.DEFINE_string("objectnet", "", "The unpacked objectnet-1.0.")
TEST_RESIZE = flags.DEFINE_integer(
    "test_resize", None, "ImageNet's short side before the central crop; by default an image is seen whole."
)
SETS = flags.DEFINE_multi_string(
    "set",
    [],
    "Of fewshot and probe: tfds:cifar100, folder:/data/pets, digits:; by default big_vision's nine.",
)
SHOTS = flags.DEFINE_list("shots", ["1", "5", "10", "25"], "Training images of each class.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Of the choice of few-shot images.")
VALUES = flags.DEFINE_multi_string("value", [], "Of VTAB's runs, such as batch_size=128.")

ROOT = Path(__file__).parents[1]
EXPECTED = ROOT / "experiments" / "expected"


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}")
    if not CHECKPOINT.value or not OUT.value or not SUITE.value:
        raise UserError("give --checkpoint=WORKDIR, --suite=fewshot and --out=DIR")
    suites = list(SUITES) if SUITE.value == ["all"] else SUITE.value
    for suite in suites:
        if suite not in SUITES:
            raise UserError(f"unknown suite {suite!r}; {nearest(suite, SUITES)}")
    command.use_compilation_cache()

    from vit_jax.training.workdir import open_any

    described = open_any(CHECKPOINT.value, IMAGE_SIZE.value).describe()
    print(described)
    results = Results(Path(OUT.value), CHECKPOINT.value, described.split(":")[0])
    for suite in suites:
        {"imagenet": imagenet, "vtab": vtab, "fewshot": frozen, "probe": frozen}[suite](suite, results)
    text = results.markdown(EXPECTED)
    (results.folder / "results.md").write_text(text)
    draw(results.folder / "results.png", results.rows, EXPECTED)
    print(f"\n{text}\n{results.folder / 'results.md'}, results.json, results.png")


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


def load(**changes):
    """The model, on all devices."""
    import vit_jax

    if IMAGE_SIZE.value:
        changes["image_size"] = IMAGE_SIZE.value
    return vit_jax.load_model(CHECKPOINT.value, say=str, **changes)


def frozen(suite: str, results: Results) -> None:
    """Few-shot evaluation, or k-NN and linear probe, on each data set."""
    from vit_jax.evaluation.features import extractor_of
    from vit_jax.evaluation.fewshot import DATA_SETS
    from vit_jax.parallel.mesh import make_mesh

    mesh = make_mesh(dict(data=None, fsdp=1, tensor=1))
    extractor, params = extractor_of(load(), mesh, batch_size=BATCH_SIZE.value, workers=WORKERS.value)
    find = few_shot if suite == "fewshot" else probe
    for described in map(data_set, SETS.value) if SETS.value else DATA_SETS:
        find(results, in_data_dir(described), extractor, params)


def few_shot(results: Results, described: DataSet, extractor, params) -> None:
    from vit_jax.evaluation.fewshot import Task, open_data_set

    shots, seeds = whole_numbers("shots", SHOTS.value, 1), whole_numbers("seeds", SEEDS.value, 0)
    names = names_of_shots(described.name, shots)

    def figures() -> list[Row]:
        task = Task(described.name, *open_data_set(described), shots, seeds)
        found = task.accuracies(extractor, params)
        note = f"seeds {', '.join(map(str, seeds))}; penalty {found[0].penalty:g}"
        return [
            Row("fewshot", name, one.mean, one.deviation, len(task.test), note)
            for name, one in zip(names, found, strict=True)
        ]

    attempt(results, "fewshot", names, figures)


def probe(results: Results, described: DataSet, extractor, params) -> None:
    from vit_jax.evaluation.fewshot import open_data_set
    from vit_jax.evaluation.knn import knn_accuracy
    from vit_jax.evaluation.probe import linear_probe

    names = [f"{described.name}, {kind}" for kind in ("20-NN", "linear probe")]

    def figures() -> list[Row]:
        train, test = open_data_set(described)
        features = extractor(params, train), extractor(params, test)
        near = knn_accuracy(*features, len(train.class_names), extractor.mesh)
        found = linear_probe(*features, len(train.class_names), extractor.mesh)
        notes = "", f"penalty {found.penalty:g}"
        return [
            Row("probe", name, accuracy, None, len(test), note)
            for name, accuracy, note in zip(names, (near, found.accuracy), notes, strict=True)
        ]

    attempt(results, "probe", names, figures)


def imagenet(suite: str, results: Results) -> None:
    """All of ImageNet's test sets."""
    from vit_jax.data.preprocess import TestCrop
    from vit_jax.data.sources import open_source
    from vit_jax.evaluation import imagenet as sets
    from vit_jax.evaluation.features import extractor_of, first_five
    from vit_jax.parallel.mesh import make_mesh

    model = load()
    sets.check_head(model.num_classes, CHECKPOINT.value)
    mesh = make_mesh(dict(data=None, fsdp=1, tensor=1))
    size = model.image_size[0]
    whole = (
        TestCrop(size, "short_side", TEST_RESIZE.value)
        if TEST_RESIZE.value
        else TestCrop(size, "square", size)
    )
    options = dict(batch_size=BATCH_SIZE.value, workers=WORKERS.value, compute=first_five)

    def rows(name: str, predictions, labels) -> list[Row]:
        found = sets.accuracy(predictions, labels)
        kinds = {name: "top1", f"{name}, top-5": "top5"}
        return [Row(suite, key, found[kind], None, found["images"]) for key, kind in kinds.items()]

    def score(name: str, source, crop: TestCrop) -> list[Row]:
        extractor, params = extractor_of(model, mesh, crop=crop, **options)
        found = extractor(params, source)
        return rows(name, found.values, found.labels)

    def validation() -> list[Row]:
        real = sets.read_real(REAL.value) if REAL.value else None
        kind, path = ("folder", IMAGENET.value) if IMAGENET.value else ("tfds", tfds("imagenet2012"))
        source = sets.open_imagenet(kind, path, "all" if IMAGENET.value else "validation", real)
        extractor, params = extractor_of(model, mesh, crop=whole, **options)
        found = extractor(params, source)
        own = rows("ImageNet", found.values, found.labels[:, :1])
        if real is None:
            return [*own, Row(suite, "ReaL", note=f"give --real=real.json, from {sets.REAL_URL}")]
        return own + rows("ReaL", found.values, found.labels[:, 1:])[:1]

    def v2() -> list[Row]:
        source = open_source("tfds", "test", path=tfds(sets.IMAGENET_V2))
        sets.check_classes(source.class_names, sets.IMAGENET_V2)
        return score("ImageNet-v2", source, whole)

    def objectnet() -> list[Row]:
        if not OBJECTNET.value:
            raise UserError(f"give --objectnet=objectnet-1.0, from {sets.OBJECTNET_URL}")
        return score("ObjectNet", sets.open_objectnet(OBJECTNET.value), sets.objectnet_crop(size))

    attempt(results, suite, ["ImageNet", "ImageNet, top-5", "ReaL"], validation)
    attempt(results, suite, ["ImageNet-v2", "ImageNet-v2, top-5"], v2)
    attempt(results, suite, ["ObjectNet", "ObjectNet, top-5"], objectnet)


def vtab(suite: str, results: Results) -> None:
    """A fine-tuning run on each task."""
    from vit_jax.data.vtab import TASKS, open_task
    from vit_jax.jobs import Job, outcome, run_jobs

    def figures(key: str, name: str) -> list[Row]:
        path = f"{key}:{DATA_DIR.value}" if DATA_DIR.value else key
        open_task(path, "test")  # Before a run starts for it.
        size = f",size={IMAGE_SIZE.value}" if IMAGE_SIZE.value else ""
        values = (f"finetune.checkpoint={CHECKPOINT.value}", f"data.path={path}", *VALUES.value)
        flags_of_run = (
            f"--config={ROOT / 'configs' / 'finetune.py'}:dataset=vtab/{key}{size}",
            *(f"--config.{value}" for value in values),
        )
        job = Job((results.folder / "vtab" / key).absolute(), flags_of_run)
        run_jobs([job])
        found = outcome(job)
        if found.figures is None:
            raise UserError(found.failure)
        return [Row(suite, name, found.figures["accuracy"], None, int(found.figures["images"]))]

    for key, task in TASKS.items():
        attempt(results, suite, [task.name], partial(figures, key, task.name))


def in_data_dir(described: DataSet) -> DataSet:
    """A data set of TFDS's, in --data_dir."""
    return described._replace(path=tfds(described.path)) if described.kind == "tfds" else described


def tfds(path: str) -> str:
    """The name of a TFDS data set, with --data_dir."""
    is_folder = path.startswith(("/", ".", "~", "gs://"))
    return f"{path}:{DATA_DIR.value}" if DATA_DIR.value and not is_folder else path


def whole_numbers(flag: str, values: list[str], least: int) -> tuple[int, ...]:
    """Of a flag."""
    if not values or not all(value.isdigit() and int(value) >= least for value in values):
        raise UserError(f"--{flag}={','.join(values)}: give whole numbers, {least} or above, with commas")
    return tuple(map(int, values))


if __name__ == "__main__":
    command.run(main)
