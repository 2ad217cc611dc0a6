"""Benchmarks that compare vit_jax with other implementations."""

import importlib.util
import json
import textwrap

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.conftest import name_missing_operators
from vit_jax.benchmarks import (
    bench_crops,
    bench_depth,
    bench_inference,
    bench_input,
    bench_tpu,
    bench_train,
    other_projects,
)
from vit_jax.benchmarks.bench_train import program_memory
from vit_jax.errors import UserError
from vit_jax.models import transformer, vit
from vit_jax.parallel.chips import GIB

TINY = dict(models=["ViT-mu/16"], images=2, image_size=32, turns=1, seconds=0)
# A file with the interface of big_vision's models/vit.py, and a minimal model.
MODEL = """
    import flax.linen as nn
    from big_vision import utils
    from big_vision.models import common

    class Tiny(nn.Module):
        classes: int
        scan: bool = False

        @nn.compact
        def __call__(self, image, *, train=False):
            return nn.Dense(self.classes)(image.mean((1, 2))), {}

    def Model(num_classes, *, variant, pool_type, dtype_mm, scan=False, remat_policy=""):
        assert (variant, pool_type) == ("mu/16", "tok") and dtype_mm in ("float32", "bfloat16")
        return Tiny(num_classes, scan)
"""


@pytest.fixture
def checkouts(tmp_path):
    path = tmp_path / "big_vision" / "big_vision" / "models" / "vit.py"
    path.parent.mkdir(parents=True)
    path.write_text(textwrap.dedent(MODEL))
    return tmp_path


def rows(printed: str) -> dict[str, list[str]]:
    """Returns the cells of a printed table's rows by the cell in the first column."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: others for first, *others in cells}


@pytest.mark.slow
def test_a_checkout_is_timed_and_an_absent_one_is_a_row_with_the_remedy(checkouts, capsys):
    bench_train.measure(
        **TINY, against=["vision_transformer", "big_vision"], checkouts=str(checkouts)
    )
    table = rows(capsys.readouterr().out)
    ours, theirs = (
        float(table[name][2].replace(",", "")) for name in ("ViT-mu/16 32", "big_vision, unrolled")
    )
    assert float(table["big_vision, unrolled"][5]) == pytest.approx(
        ours / theirs, rel=0.02, abs=0.01
    )
    assert (
        "git clone https://github.com/google-research/vision_transformer"
        in (table["vision_transformer: skipped"][0])
    )


@pytest.mark.slow
def test_a_step_that_excludes_images_computes_less(capsys):
    bench_depth.measure(**TINY | dict(images=8))
    table = rows(capsys.readouterr().out)
    ratios = [float(cells[1]) for name, cells in table.items() if name.startswith("ViT")]
    by_chance, six_of_eight, again, five_of_eight = ratios
    assert by_chance == again == 1 and five_of_eight < six_of_eight < 1


@pytest.mark.slow
def test_packed_crops_have_the_tokens_of_passes_for_each_size():
    model = vit_jax.create_model(
        "ViT-Ti/16", num_classes=0, image_size=64, dim=32, depth=2, mlp_dim=48, heads=2
    )
    random = np.random.default_rng(0)
    crops = [
        random.integers(256, size=(2 * size // 16, size, size, 3), dtype=np.uint8)
        for size in (64, 32)
    ]
    for one, other in zip(
        bench_crops.pass_by_pass(model, crops), bench_crops.packed(model, crops), strict=True
    ):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("part", [part for part in bench_tpu.PARTS if "." in part])
def test_parts_of_a_step_are_existing_functions(part):
    owner, method = part.split(".")
    module = vit if hasattr(vit, owner) else transformer
    assert callable(getattr(getattr(module, owner), method))


def test_a_method_belongs_to_the_part_of_its_class():
    assert bench_tpu.name_of_part("Mlp._first") == bench_tpu.name_of_part("Mlp") == "MLP"
    assert bench_tpu.name_of_part("ViT._embed") == "patch embedding"
    assert bench_tpu.name_of_part("Sampler.draw") == "other"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs pip install -e ".[plan]"'
)
def test_a_checkout_is_compiled_for_tpus(run, checkouts):
    result = run(
        "tpu",
        "--models=ViT-mu/16",
        "--images=1",
        "--image_size=32",
        "--slices=v5e:1x1",
        "--against=big_vision",
        "--operations=3",
        f"--checkouts={checkouts}",
        module="vit_jax.benchmark",
    )
    assert result.returncode == 0, result.stderr
    estimates, schedules, operations, *_ = result.stdout.split("\n\n")
    # This fake has only one dense layer, so vit_jax takes longer.
    for option in other_projects.PEERS["big_vision"].options:
        assert float(rows(estimates)[f"big_vision, {option}, 1 TPU v5e (1x1)"][5]) > 1
    ours = rows(schedules)["ViT-mu/16 32, 1 images, 1 TPU v5e (1x1)"]
    computed, moved, larger = map(float, ours[:3])
    assert 0 < float(ours[3].removesuffix("%")) < 100
    # The table has one decimal.
    assert max(computed, moved) <= larger + 0.1 and larger <= computed + moved + 0.2
    assert len(operations.splitlines()) == 2 + 3
    assert all("jit(train_step)" in line for line in operations.splitlines()[2:])


@pytest.mark.slow
def test_figures_of_a_gpu_are_stored_as_printed(run, tmp_path):
    """The test uses a CPU; the first row contains the device."""
    sizes = ("--images=2", "--image_size=32")
    result = run(
        "gpu",
        "--models=ViT-mu/16",
        *sizes,
        f"--out={tmp_path / 'figures'}",
        module="vit_jax.benchmark",
    )
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "figures" / "gpu.json").read_text())
    assert record["complete"] and record["platform"] == "cpu"
    kept = record["figures"]
    printed = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    # On a CPU the two measurements of attention have the same shape and so the same name.
    assert [*dict.fromkeys(row["name"] for row in printed)] == [*kept]
    assert [name.split()[0] for name in kept] == [
        "machine",
        "train",
        *["parity"] * 6,
        "attention",
    ]
    machine, trained, reference, sixteen_bits, *_ = kept.values()
    assert machine["device"] == "cpu" and not any("error" in row for row in kept.values())
    for name, speed in trained["images_per_second"].items():
        assert speed == pytest.approx(2000 / np.median(trained["milliseconds"][name]), rel=0.01)
    # If torchvision cannot be imported, the row of timm contains the error.
    assert ("timm" in trained["images_per_second"]) != ("error" in trained["facts"]["timm"])
    assert set(reference["relative_errors"].values()) == {0}
    assert 1e-4 < sixteen_bits["relative_errors"]["logits"] < 0.05


def test_an_unknown_part_is_named(run):
    result = run("gpu", "--parts=machin", module="vit_jax.benchmark")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(
        "error: unknown part 'machin' (--parts); did you mean "
    )


def test_a_folder_that_is_not_the_checkout_is_named(tmp_path):
    (tmp_path / "big_vision").mkdir()
    with pytest.raises(UserError, match="vit.py does not exist: --checkouts"):
        other_projects.PEERS["big_vision"].make(tmp_path / "big_vision", "ViT-mu/16", "float32")


def test_unknown_peer_is_one_line(run):
    result = run("train", "--against=nobody", module="vit_jax.benchmark")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(
        "error: unknown 'nobody' (--against); there are: "
    )


def test_inference_is_a_row_for_each_image_size_and_a_plot(tmp_path, capsys):
    out = tmp_path / "figures" / "inference.png"
    values = dict(models=["ViT-mu/16"], images=1, image_sizes=[32, 64], turns=1, seconds=0)
    bench_inference.measure(**values, against=[], out=str(out))
    table = rows(capsys.readouterr().out)
    assert all(float(table[f"ViT-mu/16 {size}"][2].replace(",", "")) > 0 for size in (32, 64))
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_largest_batch_is_the_last_whose_compiled_program_fits(capsys):
    limit = program_memory(bench_inference.compile_ours("ViT-mu/16", 3, 64, "float32"))
    values = dict(models=["ViT-mu/16"], images=1, image_sizes=[64], turns=1, seconds=0)
    bench_inference.measure(**values, against=[], largest=True, memory_gib=limit / GIB)
    assert rows(capsys.readouterr().out)["ViT-mu/16 64"] == ["3"]  # The row of the second table.


@pytest.mark.parametrize("most", [0, 1, 5, 64, 1000])
def test_the_largest_batch_is_found_to_one_part_in_32_even_if_the_compiler_fails(most):
    def memory(images):
        if images > 2 * most:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return images * 10

    found = bench_inference.largest_batch(memory, 10 * most)
    assert most * 31 / 32 <= found <= most


def test_inference_without_onnxruntime_is_a_row_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    values = dict(models=["ViT-mu/16"], images=1, image_sizes=[32], turns=1, seconds=0)
    bench_inference.measure(**values, against=["onnxruntime", "timm"])
    table = rows(capsys.readouterr().out)
    assert "pip install onnxruntime onnxscript timm torch" in table["onnxruntime: skipped"][0]
    assert "pip install timm torch" in table["timm: skipped"][0]


@pytest.mark.slow
def test_onnxruntime_also_runs_timms_model(capsys):
    name_missing_operators(pytest.importorskip("torch"))
    for name in ("timm", "onnxruntime", "onnxscript"):
        pytest.importorskip(name)
    values = dict(models=["ViT-Ti/16"], images=2, image_sizes=[32], turns=1, seconds=0)
    bench_inference.measure(**values, against=["onnxruntime", "timm"])
    others = [
        name for name in rows(capsys.readouterr().out) if name.endswith("vit_tiny_patch16_224")
    ]
    assert [name.split()[0] for name in others] == ["onnxruntime", "timm"]


@pytest.mark.parametrize(
    "name",
    [
        *("ViT-Ti/16", "ConvNeXt-Atto", "ConvNeXt-XXL", "ConvNeXtV2-T"),
        *("Swin-T", "Swin-B/w12", "SwinV2-S/w8", "SwinV2-B/w12to24"),
    ],
)
def test_timms_model_of_our_name_has_as_many_parameters(name, timm, torch):
    with torch.device("meta"):
        theirs = timm.create_model(bench_train.timm_name(name))
    size = theirs.default_cfg["input_size"][-1]
    ours = vit_jax.model_card(name, num_classes=1000, image_size=size).parameters
    assert sum(x.numel() for x in theirs.parameters()) == ours


def test_an_image_size_that_patches_do_not_divide_is_refused_before_anything_is_measured(capsys):
    with pytest.raises(UserError, match="patch size 16 does not divide"):
        bench_inference.measure(models=["ViT-mu/16"], images=1, image_sizes=[32, 40], against=[])
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_time_of_the_main_process_is_measured_for_each_batch_size(monkeypatch, capsys):
    def make_images(folder, images=8):
        for i in range(images):
            (folder / "train" / "a").mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (i, 0, 0)).save(folder / "train" / "a" / f"{i}.jpg")

    monkeypatch.setattr(bench_input, "make_photographs", make_images)
    bench_input.measure_host(20_000, batch_sizes=(2, 4), images=8, workers=0)
    table = rows(capsys.readouterr().out)
    assert [*table] == ["batch size", "2", "4"]
    for received, copied, cores, _ in (table["2"], table["4"]):
        assert float(received) > 0 and float(copied) > 0
        assert float(cores) == pytest.approx(float(received) * 20_000 / 1e6, abs=0.06)
