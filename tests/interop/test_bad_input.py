"""Damaged, wrong or malicious checkpoints cause a one-line error and leave no partial files."""

import dataclasses
import json
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import params_of, random_model, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax.errors import UserError
from vit_jax.interop.adapting import fit
from vit_jax.interop.reading import open_files

GOLDEN = Path(__file__).parent / "golden"
NAME = "ViT-Ti/16"
SMALL = dict(dim=32, depth=2, mlp_dim=48, heads=2, image_size=32, num_classes=3)


@pytest.fixture
def model():
    return random_model(NAME, **SMALL)


@pytest.fixture
def npz(model, tmp_path):
    return write(model, tmp_path / "model.npz", "google", NAME, **SMALL)


@pytest.fixture
def folder(model, tmp_path):
    return write(model, tmp_path / "model", "timm", NAME, **SMALL)


@pytest.fixture(params=["npz", "safetensors"])
def file(request, npz, folder):
    return npz if request.param == "npz" else folder / "model.safetensors"


def refused(source, match, **changes):
    with pytest.raises(UserError, match=match) as caught:
        vit_jax.load_model(source, log=str, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.9, 0.999])
def test_truncated_file_is_reported_as_damaged(file, share):
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    refused(file, "damaged or cut short|is not an npz file")


def test_flipped_bit_in_npz_is_found(npz):
    data = bytearray(npz.read_bytes())
    data[len(data) // 2] ^= 1
    npz.write_bytes(data)
    refused(npz, r"model\.npz is damaged .*fetch it again")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_is_a_user_error_or_harmless(data, tmp_path_factory):
    """A file with changed bytes can be read or causes a UserError, and no other exception."""
    folder = tmp_path_factory.mktemp("damage")
    kind = data.draw(st.sampled_from(["npz", "safetensors"]))
    file = folder / f"x.{kind}"
    if kind == "npz":
        np.savez(
            file,
            **{
                "embedding/kernel": np.ones((2, 2, 3, 4), np.float32),
                "cls": np.ones(3, np.float32),
            },
        )
    else:
        save_file({"cls_token": np.ones((1, 1, 4), np.float32)}, file)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    from vit_jax.interop.tensor_files import open_tensors

    try:
        for tensor in open_tensors(file).values():
            tensor.read()
    except UserError as error:
        assert "\n" not in str(error)


def test_the_error_about_a_shape_names_the_tensor_and_both_shapes(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["blocks.1.mlp.fc1.bias"] = np.zeros(47, np.float32)
    save_file(tensors, folder / "model.safetensors")
    refused(folder, r"blocks\.1\.mlp\.fc1\.bias is \[47\], but the model has \[48\]")


def test_the_error_about_a_wrong_architecture_names_it(npz):
    refused(npz, r"blocks/00/attention/out/kernel is \[2, 16, 32\], but .* \[4, 8, 32\]", heads=4)


def test_the_error_about_a_missing_tensor_names_it(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["blocks.1.norm2.weight"]
    save_file(tensors, folder / "model.safetensors")
    refused(folder, r"lacks blocks\.1\.norm2\.weight")


def test_the_error_about_an_extra_tensor_names_it(npz):
    arrays = dict(np.load(npz))
    np.savez(npz, **arrays, **{"Transformer/encoderblock_0/extra": np.zeros(3, np.float32)})
    refused(npz, "not part of the model: Transformer/encoderblock_0/extra")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_as_float32(dtype, model, file):
    if file.suffix == ".npz":
        np.savez(file, **{name: array.astype(dtype) for name, array in np.load(file).items()})
    else:
        save_file({name: array.astype(dtype) for name, array in load_file(file).items()}, file)
    read = params_of(vit_jax.load_model(file, log=str))
    for path, value in params_of(model).items():
        np.testing.assert_array_equal(
            read[path], np.asarray(value).astype(dtype).astype(np.float32), strict=True
        )


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_other_types_are_refused(dtype, file):
    if file.suffix == ".npz":
        np.savez(file, **{name: array.astype(dtype) for name, array in np.load(file).items()})
    else:
        save_file({name: array.astype(dtype) for name, array in load_file(file).items()}, file)
    refused(file, "is of the unsupported type .*; supported: float32, float16, bfloat16")


class Trap:
    """An object whose unpickling creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "disguise", ["model.npz", "model.safetensors", "pytorch_model.bin", "model.pth"]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pickle_is_never_unpickled(disguise, wrapped, tmp_path):
    sprung, file = tmp_path / "sprung", tmp_path / disguise
    payload = pickle.dumps(Trap(sprung))
    if wrapped:  # The format of PyTorch since 1.6.
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", payload)
    else:
        file.write_bytes(payload)
    refused(
        file,
        "it is a pickle, which can run any code and is never loaded; for a PyTorch file|damaged",
    )
    assert not sprung.exists()


def test_pickled_objects_in_an_npz_are_never_unpickled(tmp_path):
    sprung, file = tmp_path / "sprung", tmp_path / "model.npz"
    np.savez(file, cls=np.array([Trap(sprung)], dtype=object))
    assert not sprung.exists()
    refused(file, "contains Python objects in cls: it is a pickle")
    assert not sprung.exists()


def test_the_error_about_a_folder_with_a_pickle_advises_to_convert_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (tmp_path / "optimizer.pt").write_bytes(pickle.dumps({}))
    refused(
        tmp_path, rf"pickle.*python -m vit_jax.convert {tmp_path}/pytorch_model.bin FOLDER reads"
    )
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    refused(tmp_path, r"in several pickles.*save_pretrained\(NEW\) writes safetensors")


@pytest.mark.parametrize("name", ["m.pth", "m.pt", "m.ckpt", "m.pth.tar", "m.bin", "m.model"])
@pytest.mark.parametrize("start", [b"\x80\x02", b"PK\x03\x04"])
def test_a_file_of_pytorch_is_refused_with_the_command_that_reads_it(name, start, tmp_path):
    (tmp_path / name).write_bytes(start + bytes(100))
    if name == "m.model" and start[:1] == b"P":
        return refused(tmp_path / name, "damaged")
    named = r"m.pth \(so renamed\)" if name == "m.model" else tmp_path / name
    refused(
        tmp_path / name,
        rf"never loaded; .* python -m vit_jax.convert {named} FOLDER reads the tensors",
    )


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_an_index_cannot_point_outside_its_folder(shard, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"cls_token": shard}})
    )
    refused(tmp_path, "points outside its folder")


def test_shards_are_read_together(model, folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for part, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, folder / part)
    index = {"weight_map": {name: part for part, chosen in parts.items() for name in chosen}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    read = params_of(vit_jax.load_model(folder, log=str))
    for path, value in params_of(model).items():
        np.testing.assert_array_equal(read[path], value)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            '{"model_type": "levit"}',
            "type 'levit' is unsupported; supported: beit, .*swin, swinv2, vit",
        ),
        ('{"model_type": "vit"}', "lacks 'hidden_act'"),
        ("{", "not valid JSON"),
        ("[]", "does not describe a model"),
        (
            '{"architecture": "vit_base_patch16_xp_224"}',
            "vit_base_patch16_xp_224 is unsupported",
        ),
    ],
)
def test_errors_about_invalid_configs_name_the_problem(config, match, folder):
    (folder / "config.json").write_text(config)
    refused(folder, match)


def test_errors_about_tensors_of_other_models_name_them(tmp_path):
    save_file({"stem.0.weight": np.zeros((4, 3, 4, 4), np.float32)}, tmp_path / "model.safetensors")
    refused(
        tmp_path, r"not the tensors of a ViT, BiT, ConvNeXt or Swin of timm's: .*'stem\.0\.weight'"
    )


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("missing.npz", "there is no"),
        ("hf://one", "not of the form hf://owner/name"),
        ("vit_base_patch16_224", "timm's name of 'ViT-B/16': load_model.*commands take hf://timm"),
        ("hf://../../etc", "not of the form|cannot fetch"),
    ],
)
def test_errors_about_missing_sources_name_them(source, match, tmp_path):
    refused(source if source.startswith(("hf", "vit_")) else tmp_path / source, match)


def test_positions_that_are_not_square_need_the_image_size(tmp_path):
    arguments = SMALL | dict(image_size=(32, 96))
    model = random_model(NAME, **arguments)
    file = write(model, tmp_path / "model.npz", "google", NAME, **arguments)
    refused(file, "not a square grid: give the size of the images")
    assert vit_jax.load_model(file, image_size=(32, 96), log=str).grid == (2, 6)


@pytest.mark.parametrize(
    ("library", "arguments", "match"),
    [
        ("google", dict(gelu="erf"), "cannot store gelu=erf; .*--gelu=tanh"),
        ("google", dict(qk_norm=True), "no place for blocks/00/attention/key_norm"),
        ("google", dict(position="relative"), "no place for .*relative_embedding"),
        ("google", dict(image_size=(32, 128)), "image_size=32x128"),
        ("google", dict(mlp="swiglu"), "no mlp='swiglu'"),
        ("google", dict(rope="eva02"), "cannot store rope=eva02$"),
        ("timm", dict(pre_logits=True), "no place for pre_logits.*--pre_logits=false"),
        ("timm", dict(norm_epsilon=1e-12), "has no .*norm_epsilon=1e-12"),
        ("timm", dict(distillation="token"), "has two heads"),
        ("timm", dict(position="2d"), "no position=.2d"),
        ("timm", dict(rope="eva02"), "Eva has no gelu=.tanh"),
        ("transformers", dict(pooling="gap"), "no pooling='gap'"),
        ("transformers", dict(registers=2), "ViT has no registers=2"),
        ("transformers", dict(pre_logits=True), "no place for pre_logits.*--pre_logits=false"),
        ("transformers", dict(position="sincos2d"), "no position='sincos2d'"),
    ],
)
def test_models_that_a_format_cannot_store_are_refused_and_nothing_is_written(
    library, arguments, match, tmp_path
):
    model = random_model(NAME, **(SMALL | arguments))
    with pytest.raises(UserError, match=match):
        write(model, tmp_path / "out.npz", library, NAME, **(SMALL | arguments))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(model, npz):
    before = npz.read_bytes()
    with pytest.raises(UserError, match="exists already"):
        write(model, npz, "google", NAME, **SMALL)
    assert npz.read_bytes() == before


def test_a_failed_write_leaves_no_files(model, tmp_path):
    params = params_of(model)
    values = {
        path: np.full(x.shape, np.nan) if path == "norm/scale" else x for path, x in params.items()
    }
    values["norm/bias"] = np.zeros(7, np.float32)  # Another shape than the model's.
    from helpers import described

    from vit_jax.interop.writing import save

    with pytest.raises(UserError):
        save(tmp_path / "out", "timm", described(NAME, **SMALL), values.get)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(image_size=0), "image_size is .* must be pixels above 0"),
        (dict(image_size="96"), "image_size is '96'"),
        (dict(image_size=(64,)), "image_size is"),
        (dict(num_classes=-1), "num_classes is -1 and must be a whole number from 0"),
        (dict(num_classes="10"), "num_classes is '10'"),
        (dict(heads=0), "heads is 0"),
        (dict(dtype="x"), "dtype is 'x'"),
        (dict(dropuot=0.1), "has no argument 'dropuot'"),
    ],
)
def test_errors_about_invalid_arguments_name_them(changes, match, npz):
    refused(npz, match, **changes)


@pytest.mark.parametrize(
    "config",
    [
        dict(architecture=5),
        dict(model_args=[1]),
        dict(model_args=dict(img_size="x")),
        dict(model_args=dict(num_heads="3")),
        dict(pretrained_cfg=dict(input_size=7)),
    ],
)
def test_config_with_values_of_wrong_types_is_refused(config, folder):
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "")


def test_a_config_cannot_ask_for_more_layers_than_there_are_tensors(tmp_path):
    save_file({"bit.norm.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    claim = dict(model_type="bit", depths=[1000], embedding_size=64)
    (tmp_path / "config.json").write_text(json.dumps(claim))
    refused(tmp_path, "describes 1,000 layers, but has 1 tensors")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_errors_about_parameters_that_are_not_finite_name_them(value, model, file):
    load, save = (np.load, lambda x: np.savez(file, **x))
    if file.suffix == ".safetensors":
        load, save = load_file, lambda x: save_file(x, file)
    arrays = {name: np.array(x) for name, x in load(file).items()}
    (name,) = [name for name in arrays if name in ("Transformer/encoder_norm/bias", "norm.bias")]
    arrays[name][-1] = value
    save(arrays)
    refused(file, r"norm/bias contains values that are not finite \(NaN or infinity\)")


def test_parameters_whose_squares_overflow_are_read(npz):
    arrays = dict(np.load(npz))
    arrays["Transformer/encoder_norm/bias"][:] = 3e38
    np.savez(npz, **arrays)
    assert (
        np.asarray(params_of(vit_jax.load_model(npz, log=str))["norm/bias"]) == np.float32(3e38)
    ).all()


JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-2, 40), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
TIMM_CONFIG = json.loads((GOLDEN / "timm_vit" / "config.json").read_text())
TRANSFORMERS_CONFIG = json.loads((GOLDEN / "transformers_deit" / "config.json").read_text())


def read(source) -> tuple[dict, dict, str]:
    """Returns the arguments of the model in a file, its parameters, and logged assumptions."""
    checkpoint = open_files(source, 32)
    options, sources, _ = fit(checkpoint, {})
    return (
        dataclasses.asdict(options),
        {path: np.asarray(source()) for path, source in sources.items()},
        checkpoint.assumed,
    )


RIGHT = {
    name: read(GOLDEN / name)
    for name in (
        "timm_vit",
        "transformers_deit",
        "google_vit/model.npz",
        "big_vision_map/model.npz",
        "big_vision_training/model.npz",
    )
}


def assert_right_or_refused(source, name):
    """Asserts that a source is refused in one line, or has the arguments and parameters of `name`.

    test_golden.py and test_big_vision.py compare the logits of these models.
    """
    try:
        values, params, assumed = read(source)
    except UserError as error:
        assert "\n" not in str(error)
        return
    right_values, right_params, _ = RIGHT[name]
    if values["position"] != right_values["position"]:  # The file has no table of positions.
        assert f"position={values['position']}, as there is no table of positions" in assumed
        values["position"] = right_values["position"]
    assert values == right_values
    for path, x in params.items():
        np.testing.assert_array_equal(right_params[path], x)


@pytest.mark.one_variant
@settings(max_examples=100, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["timm_vit", "transformers_deit"])
def test_any_config_json_is_refused_or_gives_the_right_logits(name, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    (folder / "model.safetensors").symlink_to(GOLDEN / name / "model.safetensors")
    config = json.loads(json.dumps(TIMM_CONFIG if name == "timm_vit" else TRANSFORMERS_CONFIG))
    inner = data.draw(
        st.sampled_from([config, *(x for x in config.values() if isinstance(x, dict))])
    )
    key = data.draw(st.sampled_from(sorted(inner)) if inner else st.just("x"))
    if data.draw(st.booleans()):
        inner[key] = data.draw(JSON)
    else:
        inner.pop(key, None)
    # Changes of these values describe another model with the same tensors.
    other = ("num_heads", "num_attention_heads", "layer_norm_eps", "hidden_act", "act_layer")
    if key in (*other, "mean", "std", "pretrained_cfg"):
        return
    (folder / "config.json").write_text(json.dumps(config))
    assert_right_or_refused(folder, name)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", [name for name in RIGHT if name.endswith(".npz")])
def test_any_names_in_an_npz_are_refused_or_give_the_right_logits(name, data, tmp_path_factory):
    arrays = dict(np.load(GOLDEN / name))
    old = data.draw(st.sampled_from(sorted(arrays)))
    parts = old.split("/")
    place = data.draw(st.integers(0, len(parts) - 1))
    other = data.draw(
        st.sampled_from(sorted({part for key in arrays for part in key.split("/")} | {"", "x"}))
    )
    new = "/".join([*parts[:place], other, *parts[place + 1 :]])
    moved = arrays.pop(old)
    if new and data.draw(st.booleans()):
        arrays[new] = moved
    file = tmp_path_factory.mktemp("names") / "model.npz"
    np.savez(file, **arrays)
    assert_right_or_refused(file, name)
