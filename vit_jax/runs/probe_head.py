"""Initialization of a run's head by a linear probe (LP-FT: Kumar et al., 2022, 2202.10054)."""

from collections.abc import Callable

import jax
import numpy as np

from vit_jax.data.sources.base import Subset, before_selection
from vit_jax.errors import UserError
from vit_jax.evaluation.features import Extractor
from vit_jax.evaluation.probe import linear_head
from vit_jax.parallel.mesh import place
from vit_jax.runs.assemble import Parts
from vit_jax.runs.evaluator import test_crop


def with_probe_head(parts: Parts, params: dict, log: Callable[[str], None]) -> dict:
    """Returns the initial parameters, nested, with the head replaced by a linear probe.

    Raises:
      UserError: the model does not have exactly one head, or an image does not have exactly one
        label.
    """
    config, program = parts.config, parts.program
    if "kernel" not in params.get("head", {}):
        raise UserError(
            "config.finetune.head='probe' needs a model with one linear head, and "
            f"{parts.origin.name} has none; use head='new'"
        )
    shardings = jax.tree.map(lambda x: x.sharding, program.state["params"])
    features = Extractor(
        program.graphdef,
        shardings,
        program.mesh,
        test_crop(config),
        batch_size=config.batch_size // config.micro_batches,
        workers=config.data.workers,
        threads=config.data.threads,
        max_unreadable=config.data.max_unreadable,
        log=log,
    )
    train = features(jax.tree.map(place, params, shardings), parts.splits.train)
    groups = _groups(parts)
    head = linear_head(train, parts.num_classes, program.mesh, groups=groups, seed=config.seed)
    log(
        f"linear probe: fitted on {len(train.values):,} training images, penalty {head.penalty:g}, "
        f"cross-validated accuracy {head.accuracy:.2%}"
    )
    return params | {"head": params["head"] | {"kernel": head.kernel, "bias": head.bias}}


def _groups(parts: Parts) -> np.ndarray | None:
    """Returns the group of each training image, `[images]`, for cross-validation of the probe.

    None: the config has no groups, or the training split is not a slice.
    """
    (source, chosen), given = before_selection(parts.splits.train), parts.overrides.groups
    named = parts.config.data.groups if given is None else given
    if named is None or not isinstance(source, Subset):
        return None
    groups = source.source.groups(named) if isinstance(named, str) else named
    return np.asarray(groups, str)[np.asarray(source.indices)[chosen]]
