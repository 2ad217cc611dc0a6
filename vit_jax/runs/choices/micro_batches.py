"""Micro-batches and rematerialization, chosen so that a training step fits into memory."""

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence

import jax

from vit_jax.config import with_values
from vit_jax.errors import UserError, requested_bytes
from vit_jax.models import family_of
from vit_jax.models.image_model import TokenModel
from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import GIB, memory_of
from vit_jax.runs.assemble import Parts, assemble
from vit_jax.runs.choices.choice import Choice
from vit_jax.runs.memory_check import Changes, groups_within, in_words, needs_of, program_memory
from vit_jax.training.program import Program, abstract_batch

FREE = 0.8  # Share of the free memory that a step may use.
TAKEN = 4  # Maximum of the activations' memory in a compiled step, divided by the minimum memory.


def choose_micro_batches(
    config: RunOptions, user_keys: Collection[str], least: int
) -> list[Choice]:
    """Chooses micro-batches and rematerialization such that a training step fits into memory.

    The batch size is not changed. If the estimated memory is close to the limit, the step is
    compiled to measure its memory.

    Args:
      least: minimum number of images of a micro-batch.

    Raises:
      UserError: a step with the smallest micro-batch does not fit.
    """
    limit, free = memory_of(jax.local_devices()[0])
    if limit is None:
        return []
    parts = assemble(config)
    available = FREE * min(limit, free)
    has_tokens = issubclass(family_of(parts.origin.options).model, TokenModel)
    remats = ("none", "full") if has_tokens else ("none",)
    needed_at_once, smallest = None, {}
    for changes in _candidates(config, user_keys, least, remats):
        smallest = changes
        needed = _bytes_needed(parts, with_values(config, changes), available)
        needed_at_once = needed_at_once or needed
        if needed <= available:
            reason = (
                f"a step at once needs {needed_at_once / GIB:.1f} GiB, and {available / GIB:.1f} "
                "are free"
            )
            return [Choice(key, value, reason) for key, value in changes.items()]
    images = f"{least} images of {{}} pixels fit" if least > 1 else "1 image of {} pixels fits"
    patch = getattr(parts.origin.options, "patch_size", 32)
    remedy = _remedy(config, smallest, patch, available)
    raise UserError(
        f"not even {images.format(config.data.image_size)} into the {available / GIB:.1f} GiB that "
        f"are free: give a smaller model with --from{remedy}"
    )


def _candidates(
    config: RunOptions, user_keys: Collection[str], least: int, remats: Sequence[str]
) -> Iterator[Changes]:
    """Yields changes of the config to try, in the order of decreasing memory."""
    for remat, micro in itertools.product(remats, (2**power for power in range(8))):
        if config.batch_size % micro or config.batch_size // micro < least:
            continue
        changes: Changes = {}
        if micro > 1:
            changes = {"micro_batches": micro} | groups_within(config, micro)
        if remat != "none":
            changes["model.remat"] = remat
        if not changes.keys() & {*user_keys}:
            yield changes


def _bytes_needed(parts: Parts, config: RunOptions, available: float) -> float:
    """Returns a step's memory in bytes: an estimate or, near `available` bytes, a measurement."""
    program, labels = parts.program_of(config), parts.splits.train.max_labels
    needs = needs_of(program, config, labels)
    estimate = needs.certain + TAKEN * needs.activations
    if sum(needs) <= available < estimate:
        return compiled_bytes(program, config, labels)
    return estimate


def _remedy(config: RunOptions, smallest: Changes, patch: int, available: float) -> str:
    """Returns the end of an error message: a flag with which a step should fit into memory.

    Args:
      smallest: the config changes that need the least memory of all changes tried before.
      patch: patch size, by which image sizes must be divisible.
      available: bytes that a step may use.

    Returns:
      For example `, or --config.data.image_size=112`; an empty string if no flag is sufficient.
    """
    size, remedies = config.data.image_size // 2 // patch * patch, []
    while size:
        remedies.append({"data.image_size": size})
        size = size // 2 // patch * patch
    if config.auto == "finetune" and config.finetune.train == "all":
        remedies.append({"finetune.train": "head"})
    for remedy in remedies:
        other = with_values(config, smallest | remedy)
        with contextlib.suppress(UserError):
            parts = assemble(other)
            needs = needs_of(parts.program_of(other), other, parts.splits.train.max_labels)
            if needs.certain + TAKEN * needs.activations <= available:
                return f", or {in_words(remedy)}"
    return ""


def compiled_bytes(program: Program, config: RunOptions, max_labels: int) -> float:
    """Compiles a step; returns its memory on a device in bytes, or infinity if it does not fit."""
    batch = abstract_batch(config, program.mesh, max_labels)
    try:
        compiled = program.train_step.lower(program.state, program.metrics, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if requested_bytes(error) is None:
            raise
        return float("inf")
    return program_memory(compiled)
