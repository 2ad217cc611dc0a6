"""A user's mistake ends a command with exit code 2 and one line with the cause and the remedy."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import HANG
from tests.system.conftest import ROOT, SMALL
from vit_jax.command import read_config
from vit_jax.errors import UserError

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.


def fails(run, *arguments, **environment) -> str:
    """Returns the error line of a command that must fail because of a user's mistake."""
    result = run(*arguments, **environment)
    assert result.returncode == 2, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.stderr
    assert len(lines) == 1
    return lines[0]


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("argument", "names"),
    [
        ("--config.optimzer.learning_rate=1", "did you mean 'optimizer.learning_rate'?"),
        ("--config.optimizer.learning_rat=1", "in config.optimizer: did you mean 'learning_rate'?"),
        ("--config.optimizer.lr=1", "in config.optimizer: there are: average, "),
        ("--wrokdir=x", "there is no flag --wrokdir; did you mean --workdir?"),
        ("--config.batch_size=many", "--config.batch_size=many"),
        ("--config.model.name=ViT-X/16", "'ViT-X/16'"),
        ("--config.model.patch_size=3", "patch size 3 does not divide the image of 16x16"),
        ("--config.model.heads=3", "3 heads do not divide the width 16"),
        ("--config.data.source=cifar", "'cifar'"),
        ("--config.data.train_split=training", "no split 'training'; there are: test, train"),
        ("--config.data.num_classes=3", "data.num_classes is 3, but the data set has 10"),
        ("--config.optimizer.warmup_steps=40", "not below the run's 40 steps"),
        (f"--config.finetune.checkpoint={5000 * 'x'}", "File name too long"),
    ],
)
def test_wrong_value_is_named_and_nothing_is_made(run, tmp_path, argument, names):
    assert names in fails(run, *SMALL, f"--workdir={tmp_path / 'run'}", argument)
    assert not (tmp_path / "run").exists()


def test_step_that_cannot_fit_is_refused_before_it_is_compiled(run, tmp_path):
    large = ("--config.batch_size=10000000", "--config.model.dim=256", "--config.model.depth=8")
    line = fails(run, *SMALL, *large, f"--workdir={tmp_path / 'run'}")
    assert re.match(
        r"error: a step needs [\d,.]+ GiB .* at least, and each of 1 device\(s\) .* has ", line
    )
    assert re.search(r"this should fit: --config\.batch_size=\d+$", line)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_out_of_memory_in_a_run_is_one_line_with_a_batch_that_fits(run, tmp_path):
    process = run.start(
        *SMALL,
        "--config.batch_size=1024",
        "--config.steps=16",
        f"--workdir={tmp_path / 'run'}",
        module="tests.system.disturbed",
        DISTURBANCE="memory",
    )
    _, err = process.communicate(timeout=HANG)
    assert process.returncode == 2 and "Traceback" not in err
    assert re.search(
        r"^error: out of memory \(cpu, .* GiB\): 3,725\.3 GiB were requested; this should "
        r"fit: --config",
        err,
    )


def test_out_of_memory_in_any_command_is_one_line():
    code = (
        "import jax; from vit_jax import command; command.run(lambda _: jax.numpy.zeros((10**6, "
        "10**6)))"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert line.startswith(
        "error: out of memory: 3,725.3 GiB were requested; a smaller batch needs less (--bat"
    )


def test_bucket_is_refused_where_a_command_writes_to_a_folder(run):
    arguments = "--checkpoint=run", "--suite=knn", "--out=gs://bucket/results"
    result = run(*arguments, module="vit_jax.evaluate")
    assert result.returncode == 2
    assert "error: --out=gs://bucket/results: this is written to a folder" in result.stderr


def test_a_flag_of_other_suites_only_is_an_error(run, tmp_path):
    arguments = "--checkpoint=run", "--suite=knn,probe", f"--out={tmp_path}", "--shots=3"
    result = run(*arguments, module="vit_jax.evaluate")
    assert result.returncode == 2
    assert "error: --shots does not apply to --suite=knn,probe: leave it out" in result.stderr
    assert "add a suite that has it: fewshot" in result.stderr


def test_missing_config_file_is_named(run, tmp_path):
    assert "configs/nope.py" in fails(
        run, "--config=configs/nope.py", f"--workdir={tmp_path / 'run'}"
    )


BASE = "from vit_jax.config import base_config\n"


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def get_config(argument=None)\n    pass", "config.py, line 1: expected ':'"),
        (
            "import colleagues\n",
            "config.py, line 1: ModuleNotFoundError: No module named 'colleagues'",
        ),
        ("config = 1", "config.py has no function get_config, which returns the config"),
        (
            "def get_config():\n    return None",
            "config.py: get_config returns NoneType, not a config",
        ),
        (
            "def get_config():\n    return 1 / 0",
            "config.py, line 2: ZeroDivisionError: division by zero",
        ),
        (
            f"{BASE}def get_config():\n    config = base_config()\n    config.optimizer.rate = 3\n",
            "config.py, line 4: unknown config key 'optimizer.rate'; in config.optimizer: did "
            "you mean ",
        ),
        (
            f"{BASE}def get_config():\n"
            "    config = base_config()\n"
            "    config.batch_size = 'many'\n",
            "config.py, line 4: config.batch_size is 'many' and must be a whole number from 1 to",
        ),
    ],
)
def test_mistake_in_a_config_file_is_named_with_its_line(run, tmp_path, text, line):
    file = tmp_path / "config.py"
    file.write_text(text)
    assert line in fails(run, f"--config={file}", f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


def test_unknown_config_argument_is_named(run, tmp_path):
    line = fails(run, "--config=configs/quickstart.py:tiny", f"--workdir={tmp_path / 'run'}")
    assert line == "error: unknown config argument 'tiny'; supported: smoke"


@pytest.mark.parametrize(
    "words", ["segment.py:steps=two", "detect.py:size=1e3", "detect.py:window=-1"]
)
def test_config_argument_that_is_no_whole_number_is_named(words):
    with pytest.raises(UserError, match=f"{words.partition(':')[2]} must be a whole number"):
        read_config(str(ROOT / "configs" / words))


def test_batch_that_does_not_divide_by_the_devices_is_named(run, tmp_path):
    line = fails(
        run,
        *SMALL,
        "--config.batch_size=12",
        f"--workdir={tmp_path / 'run'}",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    assert "batch size 12 does not divide by 8 device(s)" in line
    assert "multiple of 8" in line


def test_error_of_an_unprepared_data_set_contains_the_command(run, tmp_path):
    line = fails(
        run,
        *SMALL,
        "--config.data.source=tfds",
        f"--config.data.path=imagenet2012:{tmp_path}",
        f"--workdir={tmp_path / 'run'}",
    )
    assert f"tfds build imagenet2012 --file_format=array_record --data_dir={tmp_path}" in line


@pytest.mark.slow
def test_workdir_of_another_config_is_left_alone(run, finished):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    line = fails(run, *SMALL, "--config.seed=1", f"--workdir={finished}")
    assert "seed: 0 -> 1" in line
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_folder_with_other_files_is_left_alone(run, tmp_path):
    (tmp_path / "thesis.tex").write_text("important")
    assert "contains files but no run" in fails(run, *SMALL, f"--workdir={tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def make_folder(root: Path, splits: dict[str, list[str]], images: int = 40) -> Path:
    rng = np.random.default_rng(0)
    for split, classes in splits.items():
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for index in range(images // len(classes)):
                pixels = rng.integers(256, size=(12, 10, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{index}.png")
    return root


def folder_arguments(root: Path, workdir: Path) -> tuple[str, ...]:
    return (
        *SMALL,
        "--config.data.source=folder",
        f"--config.data.path={root}",
        "--config.steps=8",
        f"--workdir={workdir}",
    )


def test_empty_folder_is_named(run, tmp_path):
    (tmp_path / "data" / "train" / "cat").mkdir(parents=True)
    line = fails(run, *folder_arguments(tmp_path / "data", tmp_path / "run"))
    assert "no images in" in line and "data/train" in line


def test_folder_without_permission_is_named(tmp_path):
    data = make_folder(tmp_path / "data", {"train": ["cat", "dog"], "test": ["cat", "dog"]})
    # Root may read all files, so the process changes its user after the imports.
    code = (
        "import os; from vit_jax.data.sources.folder import Folder, UserError\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        f"try: Folder.scan({str(data)!r}, 'train')\n"
        "except UserError as error: print(error)"
    )
    (data / "train").chmod(0)
    for folder in (data, *data.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    (data / "train").chmod(0o755)
    assert out.stdout == f"no permission to read {data}/train\n", out.stderr


def test_class_that_only_the_test_split_has_is_named(run, tmp_path):
    data = make_folder(tmp_path / "data", {"train": ["cat", "dog"], "test": ["cat", "fox"]})
    assert "classes that training lacks: fox" in fails(
        run, *folder_arguments(data, tmp_path / "run")
    )


def test_unreadable_images_are_named_counted_and_skipped(run, tmp_path):
    data = make_folder(tmp_path / "data", {"train": ["cat", "dog"], "test": ["cat", "dog"]})
    cut = data / "train" / "cat" / "3.png"
    cut.write_bytes(cut.read_bytes()[:200])
    (data / "test" / "dog" / "5.png").write_bytes(b"not an image")
    result = run(*folder_arguments(data, tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    assert f"unreadable image skipped (1): {cut}" in result.stdout
    assert f"unreadable image skipped (1): {data / 'test' / 'dog' / '5.png'}" in result.stdout
    assert "(39 images)" in result.stdout


@pytest.mark.slow
def test_more_unreadable_images_than_the_limit_stop_the_run(run, tmp_path):
    data = make_folder(tmp_path / "data", {"train": ["cat", "dog"], "test": ["cat", "dog"]})
    for index in range(3):
        (data / "train" / "cat" / f"{index}.png").write_bytes(b"")
    line = fails(run, *folder_arguments(data, tmp_path / "run"), "--config.data.max_unreadable=2")
    assert "more than 2 unreadable images (data.max_unreadable)" in line


@pytest.mark.slow
def test_full_disk_is_named_and_the_last_checkpoint_stays(run, small_disk):
    workdir = small_disk.path / "run"
    arguments = (*SMALL, "--config.model.dim=64", "--config.steps=80", f"--workdir={workdir}")
    line = fails(run, *arguments, "--config.checkpoint.keep_last=100")
    assert "no space left for a checkpoint" in line
    assert "the last good checkpoint is" in line
    kept = Path(line.split("the last good checkpoint is ")[1].split(";")[0])
    assert kept.is_dir()
    small_disk.resize(64)
    result = run(*arguments, "--config.checkpoint.keep_last=2")
    assert f"continuing from {kept}" in result.stdout
    assert result.returncode == 0, result.stderr
