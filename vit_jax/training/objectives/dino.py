"""Self-distillation without labels: DINO (2104.14294), iBOT (2111.07832), DINOv2 (2304.07193).

A student learns what its teacher says of another view of an image; the teacher is an EMA of the student. It
sees the large views whole and alone; the student also local crops, smaller parts of the image, and large
views of which patches are masked, for which it learns what the teacher says of those patches.

With `objective.teacher` the teacher is a frozen model with its heads, which may be larger (DINOv2, section 5;
DINOv3, section 5.2): the same losses, of a student that sees its large views whole. What is left is its EMA.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.data.colour_distortion import distortions
from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models.image_model import ImageModel, TokenModel
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.models.position import interpolation
from vit_jax.options import RATE, SHARE, Option, number, of_objectives, one_of, several, unless, whole
from vit_jax.training.memory import Momentum, cosine_share, with_weights
from vit_jax.training.objectives.block_masks import block_masks
from vit_jax.training.objectives.frozen import Frozen, WithHeads, teacher_of
from vit_jax.training.objectives.masking import pick
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    Loss,
    Now,
    Objective,
    check_self_supervised,
)
from vit_jax.training.objectives.prototypes import (
    PrototypeHead,
    entropy,
    koleo,
    sinkhorn,
    unit,
    views_matched,
)

VIEWS = 2  # Large ones.
STUDENT_TEMPERATURE = 0.1
NEWEST = 0.1  # Share of the newest batch in the centres, and in the other running means.
# What is taken for a collapse, from a twentieth of the run on.
SMALLEST_SPREAD, FEWEST_USED, NEAR_EVEN = 0.01, 4.0, 0.995

OPTIONS = {
    "objective.head_hidden": Option(
        2048, whole(1, 2**20), "Width of the MLP of dino's heads.", smoke=32, needs=of_objectives("dino")
    ),
    "objective.bottleneck": Option(
        256, whole(1, 2**16), "Width of what dino compares with prototypes.", needs=of_objectives("dino")
    ),
    "objective.prototypes": Option(
        65_536,
        whole(2, 2**22),
        "Directions that dino's head tells apart.",
        smoke=64,
        needs=of_objectives("dino"),
    ),
    "objective.prototype_lengths": Option(
        "one",
        one_of("one", "learned", "free"),
        "Lengths of dino's prototypes: 1, each its own factor, or as their parameters are (DINOv3).",
        needs=of_objectives("dino"),
    ),
    "objective.frozen_prototype_steps": Option(
        0,
        whole(0),
        "First steps in which dino's prototypes stay as they are.",
        smoke=1,
        needs=of_objectives("dino"),
    ),
    "objective.teacher_momentum": Option(
        0.996, RATE, "Momentum of dino's teacher at first.", needs=of_objectives("dino")
    ),
    "objective.teacher_momentum_end": Option(
        1.0, SHARE, "And at the end, to which it goes as a cosine.", needs=of_objectives("dino")
    ),
    "objective.teacher_temperature": Option(
        0.04, number(1e-3, 100.0), "Temperature of dino's teacher at first.", needs=of_objectives("dino")
    ),
    "objective.teacher_temperature_end": Option(
        None,
        number(1e-3, 100.0),
        "And after its warm-up, in a straight line; None: the same.",
        needs=of_objectives("dino"),
    ),
    "objective.teacher_temperature_steps": Option(
        0, whole(0), "Steps of the temperature's warm-up.", smoke=1, needs=of_objectives("dino")
    ),
    "objective.centring": Option(
        "mean",
        one_of("mean", "sinkhorn", "none"),
        "What keeps dino's teacher from saying the same of all images: less their mean, or Sinkhorn-Knopp; "
        "none lets it collapse.",
        fits=lambda value, config: unless(
            value != "sinkhorn" or _sees_whole_batch(config),
            "'mean' with micro_batches above 1 or optimizer.sum_gradients='float32_once': "
            "Sinkhorn-Knopp needs the whole batch at once",
        ),
        needs=of_objectives("dino"),
    ),
    "objective.local_crops": Option(
        0,
        whole(0, 64),
        "Small crops of an image, which dino's student sees besides the two large ones.",
        fits=lambda value, config: unless(
            not value or config.data.crop in ("inception", "random_resized"),
            f"0 with data.crop={config.data.crop!r}, which draws no area; 'random_resized' does",
        ),
        needs=of_objectives("dino"),
    ),
    "objective.local_size": Option(
        96,
        whole(1, 2**14),
        "Height and width of a small crop in pixels.",
        needs=of_objectives("dino", also="objective.local_crops"),
    ),
    "objective.local_area": Option(
        (0.05, 0.4),
        several(number(above=0, most=1), count=2, ascending=True),
        "Share of the image's area in a small crop; that of a large one is data.crop_area.",
        needs=of_objectives("dino", also="objective.local_crops"),
    ),
    "objective.patch_weight": Option(
        0.0,
        number(least=0),
        "Weight of iBOT's loss of masked patches in dino's; 0: none are masked.",
        needs=of_objectives("dino"),
    ),
    "objective.patch_prototypes": Option(
        None,
        whole(2, 2**22),
        "Prototypes of a head for patches of their own; None: one head for both.",
        smoke=64,
        needs=of_objectives("dino", also="objective.patch_weight"),
    ),
    "objective.patch_bottleneck": Option(
        None,
        whole(1, 2**16),
        "Width of what its own head for patches compares; None: dino's bottleneck.",
        needs=of_objectives("dino", also="objective.patch_weight"),
    ),
    "objective.patch_mask_ratios": Option(
        (0.1, 0.5),
        several(number(above=0, below=1), count=2, ascending=True),
        "Shares of patches that dino masks, in one large view of each image: even between these in a batch.",
        needs=of_objectives("dino", also="objective.patch_weight"),
    ),
    "objective.koleo": Option(
        0.0,
        number(least=0),
        "Weight of KoLeo in dino's loss, which keeps class tokens of different images apart.",
        fits=lambda value, config: unless(
            not value or _sees_whole_batch(config) or _sees_whole_groups(config),
            "0 with micro_batches above 1 or optimizer.sum_gradients='float32_once': KoLeo compares the "
            "images of a batch; micro_batches may be above 1 with an objective.koleo_group that divides one",
        ),
        needs=of_objectives("dino"),
    ),
    "objective.koleo_group": Option(
        None,
        whole(2),
        "Images among which KoLeo looks for the nearest; None: the whole batch.",
        fits=lambda value, config: unless(
            value is None or config.batch_size % value == 0,
            f"a divisor of batch_size = {config.batch_size}",
        ),
        smoke=8,
        needs=of_objectives("dino", also="objective.koleo"),
    ),
    "objective.gram": Option(
        0.0,
        number(least=0),
        "Weight of DINOv3's Gram anchoring in dino's loss: patches keep an earlier teacher's similarities.",
        fits=lambda value, config: unless(
            not value or (config.objective.patch_weight > 0 and config.objective.teacher is None),
            "0 with objective.patch_weight=0 or objective.teacher",
        ),
        needs=of_objectives("dino"),
    ),
    "objective.gram_from": Option(
        0,
        whole(0),
        "Update after which the teacher is kept for that.",
        needs=of_objectives("dino", also="objective.gram"),
    ),
    "objective.gram_every": Option(
        10_000,
        whole(1),
        "Updates after which it is kept anew.",
        needs=of_objectives("dino", also="objective.gram"),
    ),
    "objective.gram_times": Option(
        3,
        whole(0),
        "How many times, at most, it is kept anew.",
        needs=of_objectives("dino", also="objective.gram"),
    ),
    "objective.gram_size": Option(
        None,
        whole(1, 2**14),
        "Size of the crops that the kept teacher sees; None: that of large ones.",
        needs=of_objectives("dino", also="objective.gram"),
    ),
}


def _sees_whole_batch(config: ConfigDict) -> bool:
    return config.micro_batches == 1 and config.optimizer.sum_gradients == "as_computed"


def _sees_whole_groups(config: ConfigDict) -> bool:
    """True where each group of KoLeo lies in one micro-batch."""
    group = config.objective.koleo_group
    whole = group is not None and config.batch_size % (config.micro_batches * group) == 0
    return whole and config.optimizer.sum_gradients == "as_computed"


class TeacherHeads(nnx.Module):
    """The heads of a frozen teacher.

    Args:
      values: of `config.objective` that they are made by.
      shapes: of all that the teacher's objective has, by path.

    Raises:
      UserError: they have no head.
    """

    def __init__(self, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, rngs: nnx.Rngs):
        def head_of(name):
            start = f"{name}/"
            own = {
                path.removeprefix(start): shape for path, shape in shapes.items() if path.startswith(start)
            }
            try:
                return PrototypeHead.of_shapes(own, values["prototype_lengths"], rngs=rngs) if own else None
            except (LookupError, TypeError, ValueError) as error:
                raise UserError(f"its {name} is none of dino's ({type(error).__name__}: {error})") from error

        self.head, self.patch_head = head_of("head"), head_of("patch_head")
        if self.head is None:
            raise UserError("it has no head of dino's")


class DINO(Objective):
    """Predicts the teacher's distribution over prototypes for one view from the other ones.

    The teacher is a moving average of the student, and is what a run is judged by. With a frozen teacher that
    average is judged all the same, and teaches nobody. What it says is kept from
    being the same for all images: its logits less their running mean, or balanced over the batch by
    Sinkhorn-Knopp; and sharpened by a low temperature. Parameters: the heads behind the features, and the
    token that stands for a masked patch.

    Args:
      values: the config's `objective`.
      model: abstract or not, for its sizes.
      steps: of the run, over which the teacher's momentum goes.
    """

    made_by: ClassVar = (
        *("head_hidden", "bottleneck", "prototypes", "prototype_lengths"),
        *("patch_prototypes", "patch_bottleneck"),
    )
    optional: ClassVar = ("mask", "patch_head")
    carried: ClassVar = ("centre", "patch_centre")
    stem: ClassVar = ("mask",)

    def __init__(self, values: ConfigDict, model: ImageModel, steps: int, *, rngs: nnx.Rngs):
        self.features = _width(model, model.image_size)
        self.steps = steps
        self.head = _head(values, self.features, values.prototypes, values.bottleneck, rngs)
        self.patch_weight, self.centring = values.patch_weight, values.centring
        self.koleo_weight, self.koleo_group = values.koleo, values.koleo_group
        masks = bool(self.patch_weight)
        if masks:
            self.mask_ratios, self.grid = tuple(values.patch_mask_ratios), model.grid
            self.most_masked = max(1, int(math.prod(model.grid) * self.mask_ratios[1]))
        own_head = masks and values.patch_prototypes is not None
        width = values.patch_bottleneck or values.bottleneck
        self.patch_head = _head(values, model.dim, values.patch_prototypes, width, rngs) if own_head else None
        # The token is zero at first, as the authors have it.
        self.mask = nnx.Param(jnp.zeros((1, 1, model.dim))) if masks else None
        first, warmup = values.teacher_temperature, values.teacher_temperature_steps
        last = first if values.teacher_temperature_end is None else values.teacher_temperature_end
        self.temperatures = first, last, warmup
        self.teacher = Momentum(cosine_share(values.teacher_momentum, steps, values.teacher_momentum_end))
        self.local_crops, self.local_size = values.local_crops, values.local_size
        self.frozen_steps = values.frozen_prototype_steps
        self.gram_weight, self.gram_size = values.gram, values.gram_size
        self.gram_updates = values.gram_from, values.gram_every, values.gram_times

    @staticmethod
    def learns_from(config: ConfigDict) -> Frozen | None:
        if config.objective.teacher is None:
            return None
        wanted = teacher_of(config, image_size=config.data.image_size)
        return wanted._replace(objective="dino", beside=TeacherHeads)

    @classmethod
    def make(
        cls,
        config: ConfigDict,
        model: nnx.Module,
        steps: int,
        rngs: nnx.Rngs,
        *,
        frozen: WithHeads | None = None,
    ) -> "DINO":
        check_self_supervised(config)
        _check_schedules(config.objective, steps)
        values = config.objective
        if config.model.pre_logits:
            raise UserError(
                "config.objective.name='dino' trains no layer of the model's head: model.pre_logits=False"
            )
        if values.local_crops:
            _check_size(model, "local_size", values.local_size)
        if values.gram_size:
            _check_size(model, "gram_size", values.gram_size)
        if values.patch_weight:
            if not isinstance(model, TokenModel) or not model.embeds_pixels:
                raise UserError(
                    f"config.objective.patch_weight = {values.patch_weight} masks patches of pixels; the "
                    "model must be a ViT, not a hybrid or a ConvNet: patch_weight=0"
                )
            if values.patch_prototypes is None and _width(model, model.image_size) != model.dim:
                raise UserError(
                    "config.objective.patch_prototypes must be given: one head for both takes features as "
                    f"wide as a token, {model.dim}, and the model's are {_width(model, model.image_size)}"
                )
        if (values.koleo or values.centring == "sinkhorn") and config.batch_size < 2:
            raise UserError("config.batch_size must be 2 or more: KoLeo and Sinkhorn-Knopp compare images")
        if frozen is not None:
            _check_teacher(config, model, frozen)
        return cls(values, model, steps, rngs=rngs)

    @property
    def metrics(self) -> dict[str, str]:
        """Figures that show a collapse, and the parts of the loss."""
        names = ("spread", "teacher_entropy", "student_entropy", "kl", "prototypes_used")
        parts = {"patch_loss": self.patch_weight, "koleo": self.koleo_weight, "gram": self.gram_weight}
        names += tuple(name for name, weight in parts.items() if weight)
        return dict.fromkeys(names, "number") | {"views_matched": "share"}

    @staticmethod
    def sees_length(config: ConfigDict) -> bool:
        return config.objective.teacher_momentum != config.objective.teacher_momentum_end

    @staticmethod
    def views(config: ConfigDict) -> tuple[View, ...]:
        values, (first, second, small) = config.objective, distortions(config)
        views = [View(count=VIEWS, distort=(first, second))]
        if values.local_crops:
            area, count = tuple(values.local_area), values.local_crops
            views.append(
                View("local", count, values.local_size, crop={"area": area}, distort=(small,) * count)
            )
        if values.gram and values.gram_size:  # Without the large views' colours.
            views.append(View("gram", VIEWS, values.gram_size, same_rectangle_as="image", augment=None))
        return tuple(views)

    @staticmethod
    def judged(config: ConfigDict) -> str | None:
        return "teacher"

    @staticmethod
    def own_memory(config: ConfigDict) -> str | None:
        return "teacher_head"

    def held(self) -> Mapping[str, int]:
        heads = {"head": self.head} | ({"patch_head": self.patch_head} if self.patch_head else {})
        parts = [f"{name}/prototypes" for name in heads]
        parts += [f"{name}/gains" for name, head in heads.items() if head.gains is not None]
        return dict.fromkeys(parts, self.frozen_steps) if self.frozen_steps else {}

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """The batch with the masks that are drawn for it, where patches are masked.

        One large view of each image, drawn at random, is masked: so many of its patches that the batch's
        shares are even between the bounds, in the order of the images, which is random. In evaluation an
        image's share is drawn from its key, so that it does not depend on the batch.

        Returns:
          Besides, `masked` bool `[batch, 2, patches]`, and of the masked view: `masked_view` int32 `[batch]`,
          `positions` int32 `[batch, most]`, of which those with `chosen` bool `[batch, most]` are masked.
        """
        if not self.patch_weight:
            return batch
        share_keys, view_keys, block_keys = jax.vmap(lambda key: jax.random.split(key, 3), out_axes=1)(keys)
        share = jax.vmap(jax.random.uniform)(share_keys)
        if "mask" not in batch:
            share = (jnp.arange(len(keys)) + share) / len(keys)
        low, high = self.mask_ratios
        patches = math.prod(self.grid)
        counts = jnp.floor(patches * (low + share * (high - low))).astype(jnp.int32)
        counts = jnp.clip(counts, 1, self.most_masked)
        masks = block_masks(block_keys, counts, self.grid)
        view = jax.vmap(lambda key: jax.random.randint(key, (), 0, VIEWS))(view_keys)
        return batch | {
            "masked": masks[:, None] & (view[:, None, None] == jnp.arange(VIEWS)[:, None]),
            "masked_view": view,
            "positions": jnp.argsort(~masks, axis=1)[:, : self.most_masked].astype(jnp.int32),
            "chosen": jnp.arange(self.most_masked) < counts[:, None],
        }

    def __call__(self, model: nnx.Module, batch: Batch, now: Now = EVALUATION) -> Loss:
        """The loss of each image.

        - Cross-entropy of the student's distributions under the teacher's, the mean over all pairs of a large
          view, which the teacher sees, and another view, which the student sees.
        - Plus `patch_weight` times half the mean over masked patches of theirs (DINOv2's scale: the half of
          the large views that is not masked counts as 0).
          With a frozen teacher nothing is masked, and the loss is of the same patches.
        - Plus `gram` times the squared differences of similarities, from `gram_from` on.
        - Plus `koleo` times the sum of KoLeo of the student's large views.

        Metrics that show a collapse: `spread`, the variance of the teacher's features of length 1 (the
        student's, where the teacher is frozen) about their mean, which goes to 0 where all images look the
        same; the entropies of teacher and student, and the divergence `kl` of the second from the first; and
        `prototypes_used`, the perplexity of the teacher's mean distribution, which goes to 1 where all images
        are given one prototype. And one that rises where it learns: `views_matched`.

        Args:
          batch: `image` uint8 `[batch, 2, height, width, channels]`, `local` where there are such crops, and
            what `prepare` drew.
        """
        patches = bool(self.patch_weight)
        if self.frozen is None:
            teacher, masked = with_weights(model, now.memory["teacher"]), batch.get("masked")
            heads = with_weights(self, now.memory["teacher_head"])
        else:
            teacher, heads, masked = self.frozen.model, self.frozen.heads, None
        features, tokens = self.see(model, batch["image"], now.rngs, patches, masked)
        teacher_features, teacher_tokens = self.see(teacher, batch["image"], patches=patches)
        wanted = heads.head(teacher_features)
        targets = self.targets(wanted, now, "centre", self._weights(batch, VIEWS))
        said = jax.nn.log_softmax(self.head(features) / STUDENT_TEMPERATURE)
        of_pairs = -(targets * said[:, ::-1]).sum(-1).mean(axis=1)
        losses = of_pairs
        if self.local_crops:
            small, _ = self.see(model.resized(self.local_size), batch["local"], now.rngs)
            small = jax.nn.log_softmax(self.head(small) / STUDENT_TEMPERATURE)
            losses = VIEWS * losses - jnp.einsum("btp,blp->b", targets, small)
            losses = losses / (VIEWS + VIEWS * self.local_crops)
        # A frozen teacher does not collapse: of the student it is asked.
        embedded = unit(teacher_features if self.frozen is None else features)
        teacher_entropy = entropy(targets).mean(axis=1)
        used = now.memory["used"]
        metrics = {
            "spread": jnp.square(embedded - now.memory["mean"]).sum(-1).mean(axis=1),
            "teacher_entropy": teacher_entropy,
            "student_entropy": entropy(jnp.exp(said)).mean(axis=1),
            "kl": of_pairs - teacher_entropy,
            "prototypes_used": jnp.full(len(losses), jnp.exp(entropy(used / jnp.maximum(used.sum(), 1e-9)))),
        }
        metrics["views_matched"] = views_matched(embedded, batch.get("mask"))
        seen = {"centre": wanted.mean(axis=1), "mean": embedded.mean(axis=1), "used": targets.mean(axis=1)}
        if self.patch_weight:
            metrics["patch_loss"], seen["patch_centre"] = self.of_patches(
                heads, tokens, teacher_tokens, batch, now
            )
            losses = losses + self.patch_weight * metrics["patch_loss"] / VIEWS
        if self.gram_weight:
            metrics["gram"] = self.of_similarities(model, tokens, batch, now)
            started = now.update > self.gram_updates[0]
            losses = losses + self.gram_weight * started * metrics["gram"]
        if self.koleo_weight:
            group = None if now.rngs is None else self.koleo_group  # An evaluation's batch may be any.
            near = [koleo(features[:, view], group, batch.get("mask")) for view in range(VIEWS)]
            metrics["koleo"] = sum(near) / VIEWS
            losses = losses + self.koleo_weight * VIEWS * metrics["koleo"]
        return Loss(losses, metrics, {name: x for name, x in seen.items() if name in now.memory})

    def see(
        self,
        model: nnx.Module,
        images: jax.Array,
        rngs: nnx.Rngs | None = None,
        patches: bool = False,
        masked: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """A model's features of each view, float32 `[batch, views, features]`, and its normalised patches,
        `[batch, views, patches, dim]`.

        Args:
          patches: these are wanted; else they are None.
          masked: bool `[batch, views, patches]`, in whose place the student sees the mask's token.
        """
        flat, tokens = images.reshape(-1, *images.shape[2:]), None
        if patches:
            x = model.patches(flat)
            if masked is not None:
                x = jnp.where(masked.reshape(*x.shape[:2], 1), self.mask[...].astype(x.dtype), x)
            x = model.encode(model.assemble(x, rngs), rngs)
            x = x if model.norm is None else model.norm(x)
            features = model.pool(x)
            tokens = x[:, model.patch_tokens].reshape(*images.shape[:2], -1, x.shape[-1])
        else:
            features = model.features(flat, rngs)
        return features.astype(jnp.float32).reshape(*images.shape[:2], -1), tokens

    def targets(self, logits: jax.Array, now: Now, centre: str, weights: jax.Array) -> jax.Array:
        """The teacher's distributions, `[..., prototypes]`, of its logits.

        Args:
          centre: name of the memory that holds their running mean, for `mean`.
          weights: 1 where there is something, else 0, `[...]`, for `sinkhorn`.
        """
        if self.centring != "sinkhorn":
            logits = logits - now.memory[centre] if self.centring == "mean" else logits
            return jax.nn.softmax(logits / self.temperature(now.update))
        rows = (logits / self.temperature(now.update)).reshape(-1, logits.shape[-1])
        return sinkhorn(rows, weights.reshape(-1)).reshape(logits.shape)

    def of_patches(
        self,
        heads: "DINO | TeacherHeads",
        tokens: jax.Array,
        teacher_tokens: jax.Array,
        batch: Batch,
        now: Now,
    ) -> tuple[jax.Array, jax.Array]:
        """The loss of each image's masked patches, and the mean of the teacher's logits of all of them.

        Args:
          heads: the teacher's.
          tokens, teacher_tokens: normalised patches, `[batch, 2, patches, dim]`.

        Returns:
          The mean over an image's masked patches, `[batch]`; `[batch, prototypes]`, of which the batch's mean
          is that of all masked patches.
        """
        view, chosen = batch["masked_view"][:, None, None, None], batch["chosen"]

        def of_masked(head, x):
            return head(pick(jnp.take_along_axis(x, view, axis=1)[:, 0], batch["positions"]))

        wanted = of_masked(heads.patch_head or heads.head, teacher_tokens)
        said = jax.nn.log_softmax(of_masked(self.patch_head or self.head, tokens) / STUDENT_TEMPERATURE)
        real = chosen * self._weights(batch, self.most_masked)
        targets = self.targets(wanted, now, "patch_centre", real)
        losses = -(targets * said).sum(-1)
        mean = (losses * chosen).sum(1) / chosen.sum(1)
        centre = (wanted * chosen[..., None]).sum(1) * len(chosen) / chosen.sum()
        return mean, centre

    def of_similarities(self, model: nnx.Module, tokens: jax.Array, batch: Batch, now: Now) -> jax.Array:
        """The mean squared difference of the patches' cosines from those of the kept teacher, `[batch]`
        (DINOv3, 2508.10104, section 4.1).

        Args:
          tokens: the student's normalised patches, `[batch, 2, patches, dim]`.
        """
        kept, images = with_weights(model, now.memory["gram"]), batch.get("gram", batch["image"])
        kept = kept.resized(images.shape[-3:-1])
        _, theirs = self.see(kept, images, patches=True)
        if kept.grid != self.grid:
            rows, columns = (
                interpolation(old, new, "bicubic") for old, new in zip(kept.grid, self.grid, strict=True)
            )
            theirs = theirs.reshape(*theirs.shape[:2], *kept.grid, -1)
            theirs = jnp.einsum("ri,cj,bvijd->bvrcd", rows, columns, theirs).reshape(tokens.shape)
        ours, theirs = (unit(x.astype(jnp.float32)) for x in (tokens, theirs))
        ours, theirs = (jnp.einsum("bvid,bvjd->bvij", x, x) for x in (ours, theirs))
        return jnp.square(ours - theirs).mean(axis=(1, 2, 3))

    def temperature(self, update: jax.Array | int) -> jax.Array:
        """The teacher's temperature at an update, counted from 1; the warm-up's last update has the last."""
        first, last, warmup = self.temperatures
        if not warmup:
            return jnp.float32(last)
        return first + (last - first) * jnp.clip((update - 1) / max(warmup - 1, 1), 0, 1)

    def _weights(self, batch: Batch, count: int) -> jax.Array:
        """1 for each of so many parts of an image, `[batch, count]`; 0 for images that fill a batch up."""
        real = batch.get("mask", jnp.ones(len(batch["image"]), bool))
        return jnp.broadcast_to(real[:, None], (len(real), count)).astype(jnp.float32)

    def first_memory(self, params: dict) -> dict[str, Any]:
        memory = {"teacher": params, "teacher_head": self.own_weights()}
        memory |= {"mean": np.zeros(self.features, np.float32)}
        memory |= {"used": np.zeros(self.head.count, np.float32)}
        if self.gram_weight:
            memory["gram"] = params
        if self.centring == "mean":
            memory["centre"] = np.zeros(self.head.count, np.float32)
            if self.patch_weight:
                memory["patch_centre"] = np.zeros((self.patch_head or self.head).count, np.float32)
        return memory

    def remember(self, memory: dict, params: dict, seen: dict, update: jax.Array) -> dict:
        new = {name: memory[name] + NEWEST * (x.mean(axis=0) - memory[name]) for name, x in seen.items()}
        new["teacher"] = self.teacher.after(memory["teacher"], params, update)
        new["teacher_head"] = self.teacher.after(memory["teacher_head"], self.own_weights(), update)
        if self.gram_weight:
            first, every, times = self.gram_updates
            since = update - jnp.maximum(first, 1)  # The teacher of no update is that of the first.
            kept = (since >= 0) & (since % every == 0) & (since <= every * times)
            new["gram"] = jax.tree.map(lambda x, old: jnp.where(kept, x, old), new["teacher"], memory["gram"])
        return new

    def warning(self, means: dict[str, float], update: int) -> str | None:
        """A line that says that the run has collapsed, and what to change; None where it has not.

        Args:
          means: of the metrics since the last line.
          update: that of the line, of `steps`.
        """
        if update < self.steps / 20:
            return None
        even = math.log(self.head.count) * NEAR_EVEN
        what = None
        if means["spread"] < SMALLEST_SPREAD:
            what = f"the features are nearly the same for all images (spread {means['spread']:.2g})"
        elif means["prototypes_used"] < FEWEST_USED:
            what = "all images are given the same prototype"
        elif means["teacher_entropy"] > even:
            what = f"the teacher says nothing: its entropy is {means['teacher_entropy']:.2f} of at most "
            what += f"{math.log(self.head.count):.2f}"
        return what and (
            f"this run has collapsed: {what}. Try a larger batch, a teacher_momentum nearer to 1 "
            "(0.9995 for 256 images), a lower learning rate, fewer prototypes, or objective.koleo=0.1"
        )

    def multiply_adds(self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None) -> float:
        graphdef, weights = nnx.split((model, self))

        def of(count: int, size: tuple[int, int], patches: bool, frozen: bool = False) -> int:
            def compared(weights, images):
                model, objective = nnx.merge(graphdef, weights)
                seeing, heads = (
                    (objective.frozen.model, objective.frozen.heads) if frozen else (model, objective)
                )
                features, tokens = objective.see(seeing.resized(size), images, patches=patches)
                logits = heads.head(features)
                if not patches:
                    return logits
                tokens = tokens[:, 0, : objective.most_masked]
                return logits, (heads.patch_head or heads.head)(tokens)

            images = jax.ShapeDtypeStruct((1, count, *size, model.channels), jnp.uint8)
            return traced_multiply_adds(compared, weights, images)

        large, patches = model.image_size, bool(self.patch_weight)
        learnt, taught = (of(VIEWS, large, patches, frozen) for frozen in (False, self.frozen is not None))
        small = of(self.local_crops, 2 * (self.local_size,), False) if self.local_crops else 0
        size = 2 * (self.gram_size,) if self.gram_size else large
        kept = of(VIEWS, size, True) / 3 if self.gram_weight else 0
        return learnt + taught / 3 + small + kept


def _head(
    values: ConfigDict, features: int, prototypes: int, bottleneck: int, rngs: nnx.Rngs
) -> PrototypeHead:
    """A head by the config's `objective`."""
    hidden, lengths = values.head_hidden, values.prototype_lengths
    return PrototypeHead(features, hidden, bottleneck, prototypes, lengths, rngs=rngs)


def _check_schedules(values: ConfigDict, steps: int) -> None:
    """Raises UserError where a schedule of a config's `objective` does not end within so many steps."""
    keys = ["teacher_temperature_steps", "frozen_prototype_steps"] + ["gram_from"] * bool(values.gram)
    longer = [f"objective.{key}={values[key]}" for key in keys if values[key] >= steps]
    if longer:
        raise UserError(
            f"config.{', '.join(longer)} must be below the run's {steps} steps: use fewer, such as "
            f"{steps // 10}, or train longer"
        )


def _check_teacher(config: ConfigDict, model: nnx.Module, frozen: WithHeads) -> None:
    """Raises UserError unless a student learns what a frozen teacher with its heads says."""
    values, heads = config.objective, frozen.heads
    start = f"config.objective.teacher={values.teacher!r}"
    asked = {"prototypes": (heads.head.count, values.prototypes)}
    if values.patch_weight:
        patches = heads.patch_head and heads.patch_head.count
        asked["patch_prototypes"] = (patches, values.patch_prototypes)
    for key, (there, wanted) in asked.items():
        if there != wanted:
            raise UserError(
                f"{start} has {_count(there)}, and config.objective.{key}={wanted}: set {key}={there}"
            )
    seen = {"head": _width(frozen.model, frozen.model.image_size)}
    if values.patch_weight:
        theirs, ours = getattr(frozen.model, "grid", None), model.grid
        if theirs != ours or not isinstance(frozen.model, TokenModel) or not frozen.model.embeds_pixels:
            raise UserError(
                f"{start} has patches {theirs and 'x'.join(map(str, theirs))}, and the student "
                f"{'x'.join(map(str, ours))}: both must see the same patches, or patch_weight=0"
            )
        seen["patch_head" if heads.patch_head else "head"] = frozen.model.dim
    for name, width in seen.items():
        if (taken := getattr(heads, name).features) != width:
            raise UserError(f"{start} has a {name} for features of {taken}, and its model's are of {width}")


def _count(prototypes: int | None) -> str:
    return "no prototypes for patches of their own" if prototypes is None else f"{prototypes:,} prototypes"


def _check_size(model: nnx.Module, key: str, size: int) -> None:
    """Raises UserError where the model is not resized to images of this size, a value of the objective."""
    try:
        _width(model, (size, size))
    except UserError as error:
        raise UserError(f"config.objective.{key} = {size}: {error}") from error


def _width(model: nnx.Module, size: tuple[int, int]) -> int:
    """Width of the features of images of this size; raises UserError where the model is not resized to it."""
    graphdef, weights = nnx.split(model)
    image = jax.ShapeDtypeStruct((1, *size, model.channels), jnp.uint8)
    features = jax.eval_shape(lambda w, x: nnx.merge(graphdef, w).resized(size).features(x), weights, image)
    return features.shape[-1]
