"""Summary of a run at its start: model, data, decoding and devices."""

import math

import jax
from clu import parameter_overview

from vit_jax.data.class_names import shortened
from vit_jax.data.decode import is_fast
from vit_jax.data.pipeline import decoders
from vit_jax.data.sources.folder_rules import in_words
from vit_jax.runs.assemble import Parts, learned_classes
from vit_jax.runs.splits import SPOKEN, Splits
from vit_jax.training.lora import objective_weights
from vit_jax.training.objectives import objective_of


def describe(parts: Parts, manifest: dict) -> str:
    """Returns the summary of a run's model, data and devices, in lines."""
    config, program, origin = parts.config, parts.program, parts.origin
    parameters = parameter_overview.count_parameters(program.state["params"])
    objective_count = sum(
        math.prod(x.shape) for x in jax.tree.leaves(objective_weights(program.state))
    )
    of_objective = [config.objective.name, objective_of(config.objective.name).summary(config)]
    if objective_count:
        of_objective.append(f"{objective_count:,} parameters of its own")
    workers, threads = decoders(
        config.data.workers, config.data.threads, manifest["images"]["train"]
    )
    return "\n".join(
        [
            f"model    {origin.name}, {config.data.image_size} pixels, {config.model.dtype}, "
            f"{parameters:,} parameters",
            *(f"from     {line}" for line in origin.notes),
            *_of_data(parts, manifest),
            f"decodes  {f'{workers} processes of' if workers else 'this process,'} "
            f"{threads} thread(s), {_decoder(config.data.decode)}",
            f"trains   {', '.join(filter(None, of_objective))}",
            *(f"frozen   {line}" for line in (parts.frozen.notes if parts.frozen else ())),
            f"devices  {manifest['devices']}, {manifest['processes']} process(es), "
            f"batch {config.batch_size} ({config.batch_size / jax.device_count():g} a device)"
            + "".join(f", {axis} {size}" for axis, size in program.mesh.shape.items() if size > 1),
            f"run      {manifest['steps']:,} steps, seed {config.seed}",
        ]
    )


def _decoder(mode: str) -> str:
    """Returns the decoder of JPEGs for a value of `data.decode`; Pillow decodes other formats."""
    if mode == "exact":
        return "JPEGs by Pillow"
    if is_fast():
        return "JPEGs by libjpeg-turbo"
    return "JPEGs by Pillow, at under half the speed: the fast JPEG decoder was not built"


def _of_data(parts: Parts, manifest: dict) -> list[str]:
    """Returns lines that describe a run's images, the layout of their files and their classes."""
    images, source, data = manifest["images"], parts.splits.train, parts.config.data
    names = learned_classes(parts.config, source)
    to_choose = f"{images['dev']:,} to choose by, " if "dev" in images else ""
    classes = f", {manifest['num_classes'] or len(names):,} classes" if names else ""
    return [
        f"data     {data.source} {data.path}: {images['train']:,} images to train, {to_choose}"
        f"{images['test']:,} to test{classes}",
        *([f"layout   {source.recognized}"] if source.recognized else ()),
        *([f"classes  {shortened(names)}"] if names else ()),
        *(f"unused   {line}" for line in unused(parts.splits)),
    ]


def unused(splits: Splits) -> list[str]:
    """Describes the skipped files of each split. Slices of the same folder share a line."""
    names: dict[str, list[str]] = {}
    for name, source in splits.named.items():
        if source.left_out:
            names.setdefault(in_words(source.left_out), []).append(SPOKEN[name])
    return [f"{' and '.join(spoken)}: {counts}" for counts, spoken in names.items()]
