"""A run that began with an earlier vit_jax goes on as it began, or is refused in one line; it always loads.

`golden/format_1` was made at commit acce046 by `vit_jax.main` with the arguments `ARGUMENTS` and two
checkpoints: `run` is its workdir at step 4, `metrics.jsonl` what it had logged in the end.
"""

import json
import shutil
from pathlib import Path

import jax
import pytest

import vit_jax
from tests.system.conftest import SMALL, parameters
from tests.system.test_bad_input import fails
from vit_jax.config import base_config, to_json
from vit_jax.formats import FORMAT, settled

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.

GOLDEN = Path(__file__).parent / "golden" / "format_1"
ARGUMENTS = (
    *SMALL,
    "--config.steps=8",
    "--config.optimizer.warmup_steps=2",
    "--config.log_every=1",
    "--config.checkpoint.every=4",
    "--config.evaluate_every=8",
)


@pytest.fixture
def old_run(tmp_path) -> Path:
    """A copy of the workdir."""
    return Path(shutil.copytree(GOLDEN / "run", tmp_path / "run"))


def losses(file: Path) -> dict[int, float]:
    """By step."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def rewrite(file: Path, part: str, **values) -> None:
    """Sets values in one part of a config."""
    content = json.loads(file.read_text())
    content[part] |= values
    file.write_text(json.dumps(content))


@pytest.mark.slow
def test_run_goes_on_with_the_crops_that_it_began_with(run, old_run):
    result = run(*ARGUMENTS, "--config.data.crop=inception", f"--workdir={old_run}")  # What its config said.
    assert result.returncode == 0, result.stderr
    assert "config.data.crop is 'random_resized'" in result.stdout
    found, wanted = losses(old_run / "metrics.jsonl"), losses(GOLDEN / "metrics.jsonl")
    assert found.keys() == wanted.keys() and len(wanted) == 8
    for step, loss in wanted.items():
        assert found[step] == pytest.approx(loss, rel=1e-5), step  # Another crop makes 1e-2.


@pytest.mark.slow
def test_checkpoint_of_an_old_run_loads_and_starts_a_new_run(run, old_run, tmp_path):
    assert sum(x.size for x in jax.tree.leaves(parameters(old_run))) > 1000
    new = ARGUMENTS, f"--workdir={tmp_path / 'new'}", f"--config.finetune.checkpoint={old_run}"
    assert run(*new[0], *new[1:], "--config.steps=4").returncode == 0


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (
            dict(source="folder", path="/none", train_split="train[:90%]"),
            "config.data.train_split is 'train[:90%]'",
        ),
        (dict(source="folder", path="/none", test_split="all"), "config.data.test_split is 'all'"),
        (dict(source="array_record", path="/none", test_split="x[5:]"), "config.data.test_split is 'x[5:]'"),
        (
            dict(source="mixture", parts=["folder:/none"], train_split="train[5:]"),
            "config.data.train_split is 'train[5:]'",
        ),
    ],
)
def test_run_whose_slices_held_other_images_is_refused(run, old_run, data, named):
    rewrite(old_run / "config.json", "data", **data)
    before = {path: path.read_bytes() for path in old_run.rglob("*") if path.is_file()}
    given = [f"--config.data.{key}={value}" for key, value in data.items() if key != "parts"]
    assert named in fails(run, *ARGUMENTS, *given, f"--workdir={old_run}")
    assert before == {path: path.read_bytes() for path in old_run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("splits", ["all[:80%],all[80%:]", "train,all"])
def test_run_whose_fewshot_sets_held_other_images_is_refused(run, old_run, splits):
    rewrite(old_run / "config.json", "fewshot", every=8, sets=[f"folder:/none@{splits}"])
    given = "--config.fewshot.every=8", f"--config.fewshot.sets=('folder:/none@{splits}',)"
    line = fails(run, *ARGUMENTS, *given, f"--workdir={old_run}")
    assert "config.fewshot.sets is 'all" in line


def test_run_whose_random_erasing_is_gone_is_refused(run, old_run):
    rewrite(old_run / "config.json", "augment", erasing=0.25)
    line = fails(run, *ARGUMENTS, "--config.augment.erasing=0.25", f"--workdir={old_run}")
    assert "config.augment.erasing is 0.25" in line


def test_run_of_a_later_format_is_refused(run, old_run):
    manifest = json.loads((old_run / "manifest.json").read_text())
    (old_run / "manifest.json").write_text(json.dumps(manifest | {"format": 1000}))
    assert "is of format 1000" in fails(run, *ARGUMENTS, f"--workdir={old_run}")


@pytest.mark.parametrize(("objective", "format"), [("mae", 2), ("dino", 3)])
def test_run_whose_decoder_or_heads_started_at_random_goes_on_so(objective, format):
    config = base_config()
    config.objective.name, config.finetune.checkpoint = objective, "/some/encoder"
    text = json.loads(to_json(config))
    goes_on, notes = settled(config, json.dumps(text), format, {})
    assert (goes_on.finetune.objective, notes) == ("new", ["config.finetune.objective is 'new'"])
    del text["finetune"]["objective"]
    assert settled(config, json.dumps(text), format, {})[1] == notes
    assert settled(config, to_json(config), format + 1, {}) == (config, [])


def test_run_that_took_over_the_regularisation_of_its_checkpoint_goes_on_so():
    config = base_config()
    config.finetune.checkpoint, config.model.depth_by = "/some/encoder", "subset"
    model = dict(attention_dropout=0.4, uniform_depth=False, depth_by="subset", rope_rescale=1.0)
    goes_on, notes = settled(config, to_json(config), 4, model)
    assert goes_on.model.attention_dropout == 0.4
    assert notes == ["config.model.attention_dropout is 0.4"]
    assert settled(config, to_json(config), 5, model) == (config, [])


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "layer"), [(12, 9), (24, 18)])
def test_run_that_aggregated_three_quarters_of_the_layers_goes_on_so(depth, layer):
    config = base_config()
    config.steps, config.objective.name = 10, "beitv2"
    goes_on, notes = settled(config, to_json(config), 4, {"depth": depth})
    assert goes_on.objective.aggregate_from == layer
    assert notes == [f"config.objective.aggregate_from is {layer}"]


def test_new_run_goes_on_without_a_note(run, finished):
    assert json.loads((finished / "manifest.json").read_text())["format"] == FORMAT
    result = run(*SMALL, f"--workdir={finished}")
    assert result.returncode == 0 and "goes on as it began" not in result.stdout


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
@pytest.mark.parametrize(
    "damage", [b"", b'{"seed": 1', b"[1, 2]", b"\xff\xfe\x00", b'{"batch_size": "many", "model": 3}']
)
def test_damaged_file_of_a_run_is_named_and_the_run_is_left_alone(old_run, name, damage):
    (old_run / name).write_bytes(damage)
    with pytest.raises(vit_jax.UserError, match=f"{name} is damaged.*put back a copy of it"):
        vit_jax.load_model(old_run)
    assert (old_run / name).read_bytes() == damage and (old_run / "checkpoints" / "4").is_dir()
