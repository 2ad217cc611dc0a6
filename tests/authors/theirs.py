"""The authors' schedules, parameter groups, initial values and losses, from their own code."""

import argparse
import ast
import contextlib
import importlib
import math
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml

from tests.authors import ours
from tests.authors.ours import (
    DEPTH,
    DIM,
    EPOCH,
    HEADS,
    LENGTHS,
    PATCH,
    PROTOTYPES,
    SIZE,
    Cases,
    sampled,
)
from tests.conftest import name_missing_operators

# Patterns of the authors' parameter names, and our names.
NAMES = (
    (r"cls_token", "params/cls"),
    (r"pos_embed", "params/position_embedding/table"),
    (r"mask_token", "extra/objective/mask"),
    (r"patch_embed\.proj\.(\w+)", r"params/patch_embedding/\1"),
    (r"rel_pos_bias\.relative_position_bias_table", "params/bias_table"),
    (r"blocks\.(\d+)\.norm(\d)\.(\w+)", r"params/blocks/0\1/norm\2/norm.\3"),
    (r"blocks\.(\d+)\.attn\.qkv\.(\w+)", r"params/blocks/0\1/attention/qkv/\2"),
    (r"blocks\.(\d+)\.attn\.[qv]_bias", r"params/blocks/0\1/attention/qkv/bias"),
    (r"blocks\.(\d+)\.attn\.proj\.(\w+)", r"params/blocks/0\1/attention/out/\2"),
    (
        r"blocks\.(\d+)\.attn\.relative_position_bias_table",
        r"params/blocks/0\1/attention/bias_table",
    ),
    (r"blocks\.(\d+)\.mlp\.fc(\d)\.(\w+)", r"params/blocks/0\1/mlp/fc\2/\3"),
    (r"blocks\.(\d+)\.(?:ls|gamma_)(\d)(?:\.gamma)?", r"params/blocks/0\1/scale\2"),
    (r"norm\.(\w+)", r"params/norm/norm.\1"),
    (r"lm_head\.(\w+)", r"extra/objective/head/\1"),
    (
        r"mlp\.([024])\.(\w+)",
        lambda found: f"extra/objective/head/layers/{int(found[1]) // 2}/{found[2]}",
    ),
    (r"last_layer\.weight_g", "extra/objective/head/gains"),
    (r"last_layer\.weight(_v)?", "extra/objective/head/prototypes"),
)


def our_name(name: str) -> str:
    """Returns our path of a parameter, from its name in an authors' ViT or head."""
    for pattern, path in NAMES:
        if found := re.fullmatch(pattern, name):
            path = found.expand(path) if isinstance(path, str) else path(found)
            path = path.replace("norm.weight", "scale").replace("norm.bias", "bias")
            return re.sub(r"/weight$", "/kernel", path)
    raise KeyError(name)


@contextlib.contextmanager
def modules_of(folder: Path, **stubs: Any) -> Iterator[None]:
    """Makes the modules in a folder importable while the context is open.

    Afterwards they are removed, because several repositories have modules of the same names.
    """
    before = set(sys.modules)
    sys.modules |= {name.replace("__", "."): module for name, module in stubs.items()}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if name.replace(".", "__") in stubs or (file and Path(file).is_relative_to(folder)):
                del sys.modules[name]


def definition(file: Path, name: str, **around: Any) -> Any:
    """Returns a function or class of a file without running the file's imports.

    Args:
      around: the names to which the definition refers.
    """
    tree = ast.parse(file.read_text())
    owner, _, own = name.rpartition(".")
    body = tree.body
    if owner:
        (parent,) = [
            node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner
        ]
        body = parent.body
    (found,) = [node for node in body if getattr(node, "name", None) == own]
    exec(compile(ast.Module([found], []), str(file), "exec"), around)
    return around[own]


MATHS = dict(np=np, math=math, torch=torch, nn=torch.nn, F=F)


class Authors:
    """The checkouts, and numbers that their code computes.

    Args:
      folders: a checkout of each repository, by its name without the owner.
    """

    def __init__(self, folders: dict[str, Path]):
        self.folders = folders
        name_missing_operators(torch)

    def cases(self) -> Cases:
        """Returns all numbers, in the format of `ours.cases`."""
        found: Cases = {}
        for name in LENGTHS:
            found[f"{name} schedules"] = self.schedules(name)
        for name in ours.GROUPS:
            model = self.model(name)
            found[f"{name} groups"] = self.groups(name, model)
            if name in ours.MODELS:
                found[f"{name} first_values"] = self.first_values(model)
        return found | {"all losses": self.losses()}

    # Schedules

    def schedules(self, name: str) -> dict[str, list[float]]:
        """Returns the schedules' values at the updates of `sampled`."""
        epochs, warmup, temperature = LENGTHS[name]
        kind = name.partition(":")[0]
        if kind in ("dinov2", "dinov3"):
            found = self.of_yaml(kind, epochs, warmup, temperature)
        elif kind == "dino":
            found = self.of_dino(epochs, warmup)
        elif kind == "beit":
            found = self.of_beit(name, epochs, warmup)
        else:
            found = self.of_mae(epochs, warmup)
        first, after = sampled(epochs * EPOCH, warmup * EPOCH)
        found = {key: np.asarray(x) for key, x in found.items()}
        kept = {key: x[np.concatenate([first, after]) - 1] for key, x in found.items()}
        kept |= {"warm_up": found["learning_rate"][first - 1]}
        kept |= {"learning_rate": found["learning_rate"][after - 1]}
        return {key: x.tolist() for key, x in kept.items()}

    def of_dino(self, epochs: int, warmup: int) -> dict[str, Any]:
        """Returns the schedules of `main_dino.py` with its defaults, on 8 GPUs."""
        folder = self.folders["dino"]
        utils = SimpleNamespace(bool_flag=bool)
        names = dict(argparse=argparse, utils=utils, torch=_NO_HUB, torchvision_archs=[])
        values = definition(folder / "main_dino.py", "get_args_parser", **names)().parse_args([])
        cosine = definition(folder / "utils.py", "cosine_scheduler", **MATHS)
        rate = values.lr * values.batch_size_per_gpu * 8 / 256
        return {
            "learning_rate": cosine(rate, values.min_lr, epochs, EPOCH, warmup_epochs=warmup),
            "weight_decay": cosine(values.weight_decay, values.weight_decay_end, epochs, EPOCH),
            "teacher_momentum": cosine(values.momentum_teacher, 1, epochs, EPOCH),
        }

    def of_yaml(self, kind: str, epochs: int, warmup: int, temperature: int) -> dict[str, Any]:
        """Returns the schedules of `build_schedulers` for a batch size of 2,048.

        The run is DINOv2's short one, or DINOv3's small one.
        """
        folder = self.folders[kind] / kind
        run = dict(dinov2="vitl16_short", dinov3="vitl_im1k_lin834")[kind]
        config = yaml.safe_load((folder / "configs/ssl_default_config.yaml").read_text())
        for part, values in yaml.safe_load(
            (folder / f"configs/train/{run}.yaml").read_text()
        ).items():
            config[part] = config.get(part, {}) | values
        assert (config["optim"]["epochs"], config["optim"]["warmup_epochs"]) == (epochs, warmup)
        assert config["teacher"]["warmup_teacher_temp_epochs"] == temperature
        config["train"]["OFFICIAL_EPOCH_LENGTH"] = EPOCH
        config = _Section({name: _Section(values) for name, values in config.items()})
        gpus = 2048 // config.train.batch_size_per_gpu
        world = SimpleNamespace(
            is_enabled=lambda: True, get_world_size=lambda: gpus, get_global_size=lambda: gpus
        )
        silent = SimpleNamespace(info=lambda *_: None)
        scaling = folder / ("utils/config.py" if kind == "dinov2" else "configs/config.py")
        names = dict(math=math, distributed=world, logger=silent)
        config = definition(scaling, "apply_scaling_rules_to_cfg", **names)(config)
        scheduler = folder / (
            "utils/utils.py" if kind == "dinov2" else "train/cosine_lr_scheduler.py"
        )
        names = dict(
            logger=silent, CosineScheduler=definition(scheduler, "CosineScheduler", **MATHS)
        )
        build = definition(folder / "train/train.py", "build_schedulers", **names)
        *made, _ = build(config)
        keys = ("learning_rate", "weight_decay", "teacher_momentum", "teacher_temperature")
        steps = epochs * EPOCH
        return {key: [x[step] for step in range(steps)] for key, x in zip(keys, made, strict=True)}

    def of_beit(self, name: str, epochs: int, warmup: int) -> dict[str, Any]:
        """Returns the schedules of `cosine_scheduler`, called as in BEiT's two commands."""
        cosine = definition(
            self.folders["unilm"] / "beit/utils.py", "cosine_scheduler", print=str, **MATHS
        )
        rate, last = (1.5e-3, 1e-5) if "pretrain" in name else (4e-3, 1e-6)
        return {
            "learning_rate": cosine(
                rate, last, epochs, EPOCH, warmup_epochs=warmup, warmup_steps=-1
            )
        }

    def of_mae(self, epochs: int, warmup: int) -> dict[str, Any]:
        """Returns the learning rates of `adjust_learning_rate`, called before each update."""
        adjust = definition(
            self.folders["mae"] / "util/lr_sched.py", "adjust_learning_rate", **MATHS
        )
        values = SimpleNamespace(
            lr=1.5e-4 * 4096 / 256, min_lr=0.0, epochs=epochs, warmup_epochs=warmup
        )
        nothing = SimpleNamespace(param_groups=[])
        return {
            "learning_rate": [
                adjust(nothing, step / EPOCH, values) for step in range(epochs * EPOCH)
            ]
        }

    # Models

    def model(self, name: str) -> torch.nn.ModuleDict:
        """Returns the authors' small model as `backbone`, and for DINO models also the head."""
        torch.manual_seed(0)
        kind = name.partition(":")[0]
        shape = dict(patch_size=PATCH, embed_dim=DIM, depth=DEPTH, num_heads=HEADS)
        if kind == "mae_finetune":  # MAE's ViT is timm's; its parameters have the names of DINO's.
            return torch.nn.ModuleDict({"backbone": self.self_distilled("dino", shape)["backbone"]})
        if kind.startswith("dino"):
            return self.self_distilled(kind, shape)
        folder = dict(beit="unilm/beit", eva="EVA/EVA-01/eva", eva02="EVA/EVA-02/asuka")[kind]
        repository, _, inside = folder.partition("/")
        apex = types.ModuleType("apex.normalization")
        apex.FusedLayerNorm = torch.nn.LayerNorm
        xformers = types.ModuleType("xformers.ops")
        stubs = dict(apex=types.ModuleType("apex"), apex__normalization=apex)
        stubs |= dict(xformers=types.ModuleType("xformers"), xformers__ops=xformers)
        stubs["xformers"].ops = xformers
        with modules_of(self.folders[repository] / inside, **stubs):
            made = importlib.import_module(
                "modeling_pretrain"
            ).VisionTransformerForMaskedImageModeling
            own = dict(
                beit=dict(use_abs_pos_emb=False, init_values=0.1, vocab_size=64),
                eva=dict(init_std=0.015, predict_feature_dim=64),
                eva02=dict(xavier_normal_init=True, predict_feature_dim=64),
            )[kind]
            if kind == "beit":
                own["use_rel_pos_bias" if "finetune" in name else "use_shared_rel_pos_bias"] = True
            norm = torch.nn.LayerNorm
            model = made(img_size=SIZE, mlp_ratio=4, qkv_bias=True, norm_layer=norm, **shape, **own)
        return torch.nn.ModuleDict({"backbone": model})

    def self_distilled(self, kind: str, shape: dict[str, int]) -> torch.nn.ModuleDict:
        """Returns a model of DINO, DINOv2 or DINOv3, and its head."""
        sizes = dict(hidden_dim=DIM, bottleneck_dim=64)
        if kind == "dino":
            with modules_of(self.folders["dino"]):
                module = importlib.import_module("vision_transformer")
                model = module.VisionTransformer(img_size=[SIZE], qkv_bias=True, **shape)
                return torch.nn.ModuleDict(
                    {"backbone": model, "head": module.DINOHead(DIM, PROTOTYPES, **sizes)}
                )
        with modules_of(self.folders[kind]):
            module = importlib.import_module(f"{kind}.models.vision_transformer")
            scale = dict(init_values=1e-5) if kind == "dinov2" else dict(layerscale_init=1e-5)
            blocks = dict(block_chunks=0) if kind == "dinov2" else {}
            model = module.DinoVisionTransformer(img_size=SIZE, **shape, **scale, **blocks)
            head = importlib.import_module(f"{kind}.layers.dino_head").DINOHead(
                DIM, PROTOTYPES, **sizes
            )
            for part in (model, head):
                if kind == "dinov3":
                    part.init_weights()
        return torch.nn.ModuleDict({"backbone": model, "head": head})

    def first_values(self, made: torch.nn.ModuleDict) -> dict[str, list[float]]:
        """Returns the same as `ours.first_values`.

        Mask tokens and heads of patches are compared in tests/models/test_first_values.py.
        """
        found = {}
        for module in made.values():
            for name, x in module.named_parameters():
                if x.max() > x.min() and not name.endswith(("mask_token", "lm_head.weight")):
                    path = our_name(name).removeprefix("params/").removeprefix("extra/objective/")
                    found[path] = ours.spread(x.detach().numpy())
        return found

    # Parameter groups

    def groups(self, name: str, made: torch.nn.ModuleDict) -> dict[str, list[float]]:
        """Returns the factor on each parameter's learning rate, and 1 if it decays."""
        kind = name.partition(":")[0]
        if kind in ("dinov2", "dinov3"):
            return self.of_param_groups(kind, made)
        found = {}
        if kind == "dino":
            group = definition(self.folders["dino"] / "utils.py", "get_params_groups")
            groups = [group(module) for module in made.values()]
        elif kind == "mae_finetune":
            file = self.folders["mae"] / "util/lr_decay.py"
            layer_of = definition(file, "get_layer_id_for_vit")
            group = definition(file, "param_groups_lrd", get_layer_id_for_vit=layer_of)
            # FINETUNE.md: `--weight_decay 0.05 --layer_decay 0.65`; timm's ViT exempts these names
            # from decay.
            groups = [group(made["backbone"], 0.05, {"pos_embed", "cls_token", "dist_token"}, 0.65)]
        else:
            file = self.folders["unilm"] / "beit/optim_factory.py"
            if kind != "beit":
                inside = "EVA-01/eva" if kind == "eva" else "EVA-02/asuka"
                file = self.folders["EVA"] / inside / "optim_factory.py"
            (model,) = made.values()
            json = SimpleNamespace(dumps=lambda *_, **__: "")
            group = definition(file, "get_parameter_groups", json=json, print=str)
            by_layer = {}
            if "finetune" in name:
                # As in run_class_finetuning.py, with the README's `--layer_decay 0.65`.
                layer_of = definition(file, "get_num_layer_for_vit")
                factors = [0.65 ** (DEPTH + 1 - layer) for layer in range(DEPTH + 2)]
                by_layer["get_num_layer"] = lambda name: layer_of(name, DEPTH + 2)
                by_layer["get_layer_scale"] = factors.__getitem__
            groups = [group(model, 0.05, model.no_weight_decay(), **by_layer)]
        for module, of_module in zip(made.values(), groups, strict=True):
            names = {x: our_name(name) for name, x in module.named_parameters()}
            for of in of_module:
                for x in of["params"]:
                    found[names[x]] = [
                        of.get("lr_scale", 1.0),
                        float(of.get("weight_decay", 1.0) > 0),
                    ]
        return found

    def of_param_groups(self, kind: str, made: torch.nn.ModuleDict) -> dict[str, list[float]]:
        """Returns the result of `get_params_groups_with_decay` with the default config's values.

        The function and the config are those of DINOv2 or DINOv3.
        """
        folder = self.folders[kind] / kind
        file = folder / ("utils/param_groups.py" if kind == "dinov2" else "train/param_groups.py")
        values = yaml.safe_load((folder / "configs/ssl_default_config.yaml").read_text())["optim"]
        silent = SimpleNamespace(info=lambda *_: None)
        names = dict(logger=silent, remove_fsdp_compile_names=lambda name: name)
        names["get_vit_lr_decay_rate"] = definition(file, "get_vit_lr_decay_rate")
        group = definition(file, "get_params_groups_with_decay", **names)
        found = {}
        for module in made.values():
            for of in group(module, values["layerwise_decay"], values["patch_embed_lr_mult"]):
                found[our_name(of["name"])] = [of["lr_multiplier"], float(of["wd_multiplier"] > 0)]
        return found

    # Losses

    def losses(self) -> dict[str, list[float]]:
        """Returns the same losses as `ours.losses`."""
        alone = SimpleNamespace(
            all_reduce=lambda *_: None, get_world_size=lambda: 1, is_initialized=lambda: False
        )
        one, two, three = (self.folders[name] for name in ("dino", "dinov2", "dinov3"))
        student, teacher = torch.tensor(ours.STUDENT), torch.tensor(ours.TEACHER)
        large, local = torch.tensor(ours.IMAGES), torch.tensor(ours.LOCAL)
        views = torch.cat(
            [*(large[:, view, 0] for view in range(2)), *(local[:, view, 0] for view in range(3))]
        )
        names = MATHS | dict(dist=alone)
        dino = definition(one / "main_dino.py", "DINOLoss", **names)(
            ours.WIDTH, 5, 0.07, 0.07, 0, 1
        )
        dino.center[:] = torch.tensor(ours.CENTRE)
        wanted = torch.cat([large[:, view, 0] for view in range(2)]) @ teacher
        found = {"dino": [float(dino(views @ student, wanted, 0))]}

        file = two / "dinov2/loss/ibot_patch_loss.py"
        (lossfunc,) = [
            node
            for part in ast.parse(file.read_text()).body
            if isinstance(part, ast.Try)
            for node in part.handlers[0].body
        ]
        exec(compile(ast.Module([lossfunc], []), str(file), "exec"), names)
        ibot = definition(file, "iBOTPatchLoss", **names)(ours.WIDTH)
        ibot.center[:] = torch.tensor(ours.CENTRE)
        masks = torch.zeros(2 * ours.BATCH, 9, dtype=torch.bool)
        for image, (places, count, view) in enumerate(
            zip(ours.MASKED, ours.COUNTS, ours.VIEW, strict=True)
        ):
            masks[2 * image + view, places[:count]] = True
        patches = large[:, :, 1:].reshape(2 * ours.BATCH, 9, -1)[masks]
        taught = ibot.softmax_center_teacher((patches @ teacher)[None], 0.07)[0]
        found["ibot"] = [
            float(ibot.forward_masked(patches @ student, taught, student_masks_flat=masks))
        ]

        gram = definition(three / "dinov3/loss/gram_loss.py", "GramLoss", **names)(remove_neg=False)
        flat = large[:, :, 1:].reshape(2 * ours.BATCH, 9, -1)
        found["gram"] = [float(gram(flat @ student, flat @ teacher))]
        koleo = definition(three / "dinov3/loss/koleo_loss.py", "KoLeoLoss", **names)()
        found["koleo"] = [float(koleo(large[:, 0, 0]))]
        sinkhorn = definition(two / "dinov2/loss/dino_clstoken_loss.py", "DINOLoss", **names)(
            ours.WIDTH
        )
        found["sinkhorn"] = sinkhorn.sinkhorn_knopp_teacher(large[:, 0, 0], 0.07).ravel().tolist()

        file = self.folders["mae"] / "models_mae.py"
        patchify = definition(file, "MaskedAutoencoderViT.patchify", **names)
        embed = SimpleNamespace(patch_size=(4, 4))
        of = SimpleNamespace(norm_pix_loss=True, patch_embed=embed)
        of.patchify = lambda images: patchify(of, images)
        hidden = torch.zeros(2, 16)
        hidden.scatter_(1, torch.tensor(ours.HIDDEN), 1.0)
        images = torch.tensor(ours.PIXELS).permute(0, 3, 1, 2)
        loss = definition(file, "MaskedAutoencoderViT.forward_loss", **names)
        return found | {"mae": [float(loss(of, images, torch.tensor(ours.PREDICTED), hidden))]}


_NO_HUB = SimpleNamespace(
    hub=SimpleNamespace(list=lambda _: [])
)  # The list of the hub's models would need the network.


class _Section(dict):
    """A dict whose items are also attributes, like the authors' configs."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__
