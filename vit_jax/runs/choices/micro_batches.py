"""Micro-batches and rematerialisation, chosen so that a training step fits into memory."""

from collections.abc import Collection
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.errors import UserError, bytes_asked
from vit_jax.models.image_model import TokenModel
from vit_jax.parallel.chips import GIB, memory_of
from vit_jax.runs.assemble import assemble
from vit_jax.runs.choices.choice import Choice
from vit_jax.runs.memory_check import changed, groups_within, needs_of, program_memory
from vit_jax.training.program import Program, abstract_batch

FREE = 0.8  # The share of the free memory that a step may take.
TAKEN = 4  # Times the activations at best: what no compiler takes.


def choose_micro_batches(config: ConfigDict, given: Collection[str], least: int) -> list[Choice]:
    """Chooses micro-batches and rematerialisation, so that the batch and the result stay the same.

    Steps that may or may not fit by the estimate are compiled to find out.

    Args:
      config: with all other values.
      given: keys whose values are the user's.
      least: images of a micro-batch.

    Raises:
      UserError: not even the smallest micro-batch fits.
    """
    limit, free = memory_of(jax.local_devices()[0])
    if limit is None:
        return []
    parts = assemble(config.copy_and_resolve_references().lock())
    there = FREE * min(limit, free)
    remats = ("none", "full") if issubclass(parts.origin.model, TokenModel) else ("none",)
    first = None
    for remat, micro in ((remat, 2**power) for remat in remats for power in range(8)):
        size = config.batch_size // micro
        if config.batch_size % micro or size < least:
            continue
        changes: dict[str, Any] = {}
        if micro > 1:
            changes = {"micro_batches": micro} | groups_within(config, micro)
        if remat != "none":
            changes["model.remat"] = remat
        if changes.keys() & {*given}:
            continue
        other = changed(config, changes)
        program, labels = parts.program_of(other), parts.splits.train.max_labels
        needs = needs_of(program, other, labels)
        bytes_needed = needs.certain + TAKEN * needs.activations
        if sum(needs) <= there < bytes_needed:
            bytes_needed = compiled_bytes(program, other, labels)
        first = first or bytes_needed
        if bytes_needed <= there:
            reason = f"a step at once needs {first / GIB:.1f} GiB, and {there / GIB:.1f} are free"
            return [Choice(key, value, reason) for key, value in changes.items()]
    images = f"{least} images" if least > 1 else "1 image"
    patch = parts.origin.arguments.get("patch_size") or 32
    patch = max(patch) if isinstance(patch, tuple) else patch
    smaller = config.data.image_size // 2 // patch * patch
    size = f", or --config.data.image_size={smaller}" if smaller else ""
    raise UserError(
        f"not even {images} of {config.data.image_size} pixels fit into the {there / GIB:.1f} GiB that are "
        f"free: give a smaller model with --from{size}"
    )


def compiled_bytes(program: Program, config: ConfigDict, max_labels: int) -> float:
    """Returns the bytes on a device of a compiled step; infinity where none is made for lack of memory."""
    batch = abstract_batch(config, program.mesh, max_labels)
    try:
        compiled = program.train_step.lower(program.state, program.metrics, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if bytes_asked(error) is None:
            raise
        return float("inf")
    return program_memory(compiled)
