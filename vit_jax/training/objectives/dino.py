"""Self-distillation without labels: DINO (2104.14294), iBOT (2111.07832), DINOv2 (2304.07193).

A student predicts the teacher's output for another view of an image. The teacher is an EMA of the
student and reads only unmasked large views. The student also reads local crops (smaller parts of
the image), and large views with masked patches. For a masked patch the student predicts the
teacher's output for the same patch.

With `objective.teacher` the teacher is a frozen model with its own heads, for example a larger
model (DINOv2, section 5; DINOv3, section 5.2). The losses are the same, but no patches are masked.
The run's result is an EMA of the student.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.data.colour_distortion import distortions
from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models.image_model import ImageModel, TokenModel
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.models.position import interpolation
from vit_jax.options.objective import DINOOptions
from vit_jax.options.run import RunOptions
from vit_jax.training.averages import Momentum, cosine_share, with_weights
from vit_jax.training.objectives.block_masks import block_masks
from vit_jax.training.objectives.frozen import TeacherSpec, WithHeads, teacher_of
from vit_jax.training.objectives.masking import pick, split_keys
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    Loss,
    Objective,
    StepContext,
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

STUDENT_TEMPERATURE = 0.1
NEWEST = 0.1  # Weight of the newest batch in the centres and the other running means.
# Thresholds of the warning about collapse. There is no warning in the first 1/20 of the run.
SMALLEST_SPREAD, FEWEST_USED, NEAR_EVEN = 0.01, 4.0, 0.995
# In the first update the running mean of the teacher's outputs is 0, so that all images may have
# the same prototype.
SETTLED = 5


class TeacherHeads(nnx.Module):
    """Prototype heads of a frozen teacher.

    Args:
      values: options of the section `dino` with which the teacher was trained.
      shapes: shapes of all parameters of the teacher's objective, by path.

    Raises:
      UserError: the shapes contain no head of `dino`.
    """

    def __init__(
        self, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, rngs: nnx.Rngs
    ):
        def head_of(name):
            start = f"{name}/"
            head_shapes = {
                path.removeprefix(start): shape
                for path, shape in shapes.items()
                if path.startswith(start)
            }
            if not head_shapes:
                return None
            try:
                return PrototypeHead.of_shapes(head_shapes, values["prototype_lengths"], rngs=rngs)
            except (LookupError, TypeError, ValueError) as error:
                raise UserError(
                    f"its {name} is not a head of dino ({type(error).__name__}: {error})"
                ) from error

        self.head, self.patch_head = head_of("head"), head_of("patch_head")
        if self.head is None:
            raise UserError("it has no head of dino's")


class DINO(Objective):
    """Prediction of the teacher's distribution over prototypes for one view from the other views.

    The teacher is a moving average of the student, and this average is also the evaluated model.
    With a frozen teacher, the moving average is computed only for evaluation.

    Collapse means that the teacher has the same output for all images. One of two methods prevents
    it: the running mean is subtracted from the teacher's logits, or Sinkhorn-Knopp balances the
    outputs over the batch. A low temperature sharpens the outputs.

    The objective's parameters are the prototype heads and the mask token.

    Args:
      model: the model to train. Only its shapes are used, so it may be abstract.
      steps: number of steps of the run, for the schedule of the teacher's momentum.
    """

    section: ClassVar = "dino"
    made_by: ClassVar = (
        *("head_hidden", "bottleneck", "prototypes", "prototype_lengths"),
        *("patch_prototypes", "patch_bottleneck"),
    )
    optional: ClassVar = ("mask", "patch_head")
    carried: ClassVar = ("centre", "patch_centre")
    stem: ClassVar = ("mask",)

    def __init__(self, options: DINOOptions, model: ImageModel, steps: int, *, rngs: nnx.Rngs):
        self.features = _width(model, model.image_size)
        self.steps = steps
        self.head = _head(options, self.features, options.prototypes, options.bottleneck, rngs)
        self.patch_weight, self.centring = options.patch_weight, options.centring
        self.koleo_weight, self.koleo_group = options.koleo, options.koleo_group
        masks = bool(self.patch_weight)
        if masks:
            self.mask_ratios, self.grid = tuple(options.patch_mask_ratios), model.grid
            self.most_masked = max(1, int(math.prod(model.grid) * self.mask_ratios[1]))
        own_head = masks and options.patch_prototypes is not None
        width = options.patch_bottleneck or options.bottleneck
        self.patch_head = (
            _head(options, model.dim, options.patch_prototypes, width, rngs) if own_head else None
        )
        # The mask token starts at zero, as in the code of iBOT and DINOv2.
        self.mask = nnx.Param(jnp.zeros((1, 1, model.dim))) if masks else None
        first, warmup = options.teacher_temperature, options.teacher_temperature_steps
        last = first if options.teacher_temperature_end is None else options.teacher_temperature_end
        self.temperatures = first, last, warmup
        self.teacher = Momentum(
            cosine_share(options.teacher_momentum, steps, options.teacher_momentum_end)
        )
        self.global_crops = options.global_crops
        self.local_crops, self.local_size = options.local_crops, options.local_size
        self.frozen_steps = options.frozen_prototype_steps
        self.gram_weight, self.gram_size = options.gram, options.gram_size
        self.gram_updates = options.gram_from, options.gram_every, options.gram_times

    @staticmethod
    def teacher_spec(config: RunOptions) -> TeacherSpec | None:
        if config.objective.teacher is None:
            return None
        spec = teacher_of(config, image_size=config.data.image_size)
        return spec._replace(objective="dino", make_heads=TeacherHeads)

    @classmethod
    def make(
        cls,
        config: RunOptions,
        model: nnx.Module,
        steps: int,
        rngs: nnx.Rngs,
        *,
        frozen: WithHeads | None = None,
    ) -> "DINO":
        check_self_supervised(config)
        _check_schedules(config.dino, steps)
        options = config.dino
        if config.model.pre_logits:
            raise UserError(
                "config.objective.name='dino' trains no layer of the model's head: "
                "model.pre_logits=False"
            )
        if options.local_crops:
            _check_size(model, "local_size", options.local_size)
        if options.gram_size:
            _check_size(model, "gram_size", options.gram_size)
        if options.patch_weight:
            _check_patches(options, model)
        if (options.koleo or options.centring == "sinkhorn") and config.batch_size < 2:
            raise UserError(
                "config.batch_size must be 2 or more: KoLeo and Sinkhorn-Knopp compare images"
            )
        if frozen is not None:
            _check_teacher(config, model, frozen)
        return cls(options, model, steps, rngs=rngs)

    @property
    def metrics(self) -> dict[str, str]:
        """A dict with the format of each metric, `share` or `number`."""
        names = ("spread", "teacher_entropy", "student_entropy", "kl", "prototypes_used")
        parts = {
            "patch_loss": self.patch_weight,
            "koleo": self.koleo_weight,
            "gram": self.gram_weight,
        }
        names += tuple(name for name, weight in parts.items() if weight)
        matched = {"views_matched": "share"} if self.global_crops > 1 else {}
        return dict.fromkeys(names, "number") | matched

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return config.dino.teacher_momentum != config.dino.teacher_momentum_end

    @staticmethod
    def views(config: RunOptions) -> tuple[View, ...]:
        options, (*large, small) = config.dino, distortions(config)
        crops = options.global_crops
        views = [View(count=crops, distort=tuple(large[:crops]))]
        if options.local_crops:
            area, count = tuple(options.local_area), options.local_crops
            size, small_views = options.local_size, (small,) * count
            views.append(View("local", count, size, crop={"area": area}, distort=small_views))
        # The Gram teacher's views have no colour distortions.
        if options.gram and options.gram_size:
            views.append(
                View("gram", crops, options.gram_size, same_rectangle_as="image", augment=None)
            )
        return tuple(views)

    @staticmethod
    def eval_params(config: RunOptions) -> str | None:
        return "teacher"

    @staticmethod
    def own_eval_params(config: RunOptions) -> str | None:
        return "teacher_head"

    def frozen_prefixes(self) -> Mapping[str, int]:
        heads = {"head": self.head} | ({"patch_head": self.patch_head} if self.patch_head else {})
        parts = [f"{name}/prototypes" for name in heads]
        parts += [f"{name}/gains" for name, head in heads.items() if head.gains is not None]
        return dict.fromkeys(parts, self.frozen_steps) if self.frozen_steps else {}

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """Adds random masks to the batch, if the objective masks patches.

        In each image one large view is chosen at random, and some of its patches are masked. The
        share of masked patches is between two bounds. In training this range is divided into as
        many intervals as the batch has images, and each image gets a share from its own interval.
        In evaluation each image's share is drawn independently.

        Returns:
          The batch with these additional entries:

          - `masked`, bool `[batch, views, patches]`: True for masked patches.
          - `masked_view`, int32 `[batch]`: index of the view with masked patches.
          - `positions`, int32 `[batch, most]`: indices of the masked patches in this view.
          - `chosen`, bool `[batch, most]`: False for padding in `positions`.
        """
        if not self.patch_weight:
            return batch
        share_keys, view_keys, block_keys = split_keys(keys, 3)
        share = jax.vmap(jax.random.uniform)(share_keys)
        if "valid" not in batch:
            share = (jnp.arange(len(keys)) + share) / len(keys)
        low, high = self.mask_ratios
        patches = math.prod(self.grid)
        counts = jnp.floor(patches * (low + share * (high - low))).astype(jnp.int32)
        counts = jnp.clip(counts, 1, self.most_masked)
        masks = block_masks(block_keys, counts, self.grid)
        view = jax.vmap(lambda key: jax.random.randint(key, (), 0, self.global_crops))(view_keys)
        return batch | {
            "masked": masks[:, None]
            & (view[:, None, None] == jnp.arange(self.global_crops)[:, None]),
            "masked_view": view,
            "positions": jnp.argsort(~masks, axis=1)[:, : self.most_masked].astype(jnp.int32),
            "chosen": jnp.arange(self.most_masked) < counts[:, None],
        }

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss and the metrics of each image.

        The loss is a sum:

        - Cross-entropy between the teacher's and the student's distributions. It is averaged over
          all pairs of a large view (teacher) and another view (student). With one large view the
          student reads only the local crops.
        - Plus `patch_weight` times half the mean cross-entropy over masked patches. The half is as
          in DINOv2, where the unmasked half of the large views counts as 0. With a frozen teacher
          no patches are masked, and the mean is over all patches.
        - Plus `gram` times the Gram loss (`of_similarities`), from `gram_from` on.
        - Plus `koleo` times the sum of the KoLeo losses of the student's large views.

        These metrics indicate collapse:

        - `spread` is the variance of the teacher's normalized features around their running mean.
          The spread goes to 0 if all images have the same features. With a frozen teacher the
          student's features are used.
        - `teacher_entropy` and `student_entropy` are the mean entropies of the distributions.
        - `kl` is the KL divergence of the student from the teacher.
        - `prototypes_used` is the perplexity of the teacher's mean distribution. The perplexity
          goes to 1 if all images have the same prototype.
        - `views_matched` is the share of images whose two large views match: the second view of the
          same image is the nearest among the second views of the batch. The share rises as the
          model improves.

        Args:
          batch: `image` uint8 `[batch, views, height, width, channels]`, `local` if there are local
            crops, and the masks from `prepare`.
        """
        patches, views = bool(self.patch_weight), self.global_crops
        if self.frozen is None:
            teacher, masked = with_weights(model, context.state["teacher"]), batch.get("masked")
            heads = with_weights(self, context.state["teacher_head"])
        else:
            teacher, heads, masked = self.frozen.model, self.frozen.heads, None
        features, tokens = self.see(model, batch["image"], context.rngs, patches, masked)
        teacher_features, teacher_tokens = self.see(teacher, batch["image"], patches=patches)
        teacher_logits = heads.head(teacher_features)
        targets = self.targets(teacher_logits, context, "centre", self._weights(batch, views))
        log_probs = jax.nn.log_softmax(self.head(features) / STUDENT_TEMPERATURE)
        of_pairs = -(targets * log_probs[:, ::-1]).sum(-1).mean(axis=1)
        losses, of_pairs = self.with_local(model, targets, of_pairs, batch, context.rngs)
        # `spread` and `views_matched` are computed from the teacher's features. A frozen teacher
        # cannot collapse, so the student's features are then used.
        embedded = unit(teacher_features if self.frozen is None else features)
        teacher_entropy = entropy(targets).mean(axis=1)
        used = context.state["used"]
        metrics = {
            "spread": jnp.square(embedded - context.state["mean"]).sum(-1).mean(axis=1),
            "teacher_entropy": teacher_entropy,
            "student_entropy": entropy(jnp.exp(log_probs)).mean(axis=1),
            "kl": of_pairs - teacher_entropy,
            "prototypes_used": jnp.full(
                len(losses), jnp.exp(entropy(used / jnp.maximum(used.sum(), 1e-9)))
            ),
        }
        if views > 1:
            metrics["views_matched"] = views_matched(embedded, batch.get("valid"))
        aux = {
            "centre": teacher_logits.mean(axis=1),
            "mean": embedded.mean(axis=1),
            "used": targets.mean(axis=1),
        }
        if self.patch_weight:
            metrics["patch_loss"], aux["patch_centre"] = self.of_patches(
                heads, tokens, teacher_tokens, batch, context
            )
            losses = losses + self.patch_weight * metrics["patch_loss"] / views
        if self.gram_weight:
            metrics["gram"] = self.of_similarities(model, tokens, batch, context)
            started = context.update > self.gram_updates[0]
            losses = losses + self.gram_weight * started * metrics["gram"]
        if self.koleo_weight:
            # In evaluation KoLeo compares all images of the batch with each other, because the
            # batch size need not be a multiple of `koleo_group`.
            group = None if context.rngs is None else self.koleo_group
            near = [koleo(features[:, view], group, batch.get("valid")) for view in range(views)]
            metrics["koleo"] = sum(near) / views
            losses = losses + self.koleo_weight * views * metrics["koleo"]
        return Loss(losses, metrics, {name: x for name, x in aux.items() if name in context.state})

    def see(
        self,
        model: nnx.Module,
        images: jax.Array,
        rngs: nnx.Rngs | None = None,
        patches: bool = False,
        masked: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns a model's image features and normalized patch tokens of each view.

        Args:
          images: `[batch, views, height, width, channels]`.
          patches: True: return patch tokens. False: return None in place of patch tokens.
          masked: bool `[batch, views, patches]`. The mask token replaces the embeddings of patches
            that are True.

        Returns:
          Image features, float32 `[batch, views, features]`, and patch tokens,
          `[batch, views, patches, dim]`.
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

    def with_local(
        self,
        model: nnx.Module,
        targets: jax.Array,
        of_pairs: jax.Array,
        batch: Batch,
        rngs: nnx.Rngs | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Adds the cross-entropy of the local crops to the cross-entropy of the large views.

        Args:
          targets: the teacher's distributions for large views, `[batch, views, prototypes]`.
          of_pairs: mean cross-entropy over pairs of large views, `[batch]`. If there is only one
            large view, this argument is ignored.

        Returns:
          For the loss: the mean cross-entropy over all pairs of a large view (teacher) and another
          view (student), `[batch]`. For the metrics: the mean over pairs of large views only,
          `[batch]`. With one large view both are the mean over the local crops.
        """
        views = self.global_crops
        if not self.local_crops:
            return of_pairs, of_pairs
        small, _ = self.see(model.resized(self.local_size), batch["local"], rngs)
        small = jax.nn.log_softmax(self.head(small) / STUDENT_TEMPERATURE)
        of_small = -jnp.einsum("btp,blp->b", targets, small)
        if views == 1:
            return of_small / self.local_crops, of_small / self.local_crops
        return (views * of_pairs + of_small) / (views + views * self.local_crops), of_pairs

    def targets(
        self, logits: jax.Array, context: StepContext, centre: str, weights: jax.Array
    ) -> jax.Array:
        """Converts the teacher's logits to distributions over prototypes, `[..., prototypes]`.

        Args:
          logits: the teacher's logits, `[..., prototypes]`.
          centre: key of the logits' running mean in the state. Only used if the logits are centred
            with the `mean`.
          weights: 1 for valid entries, 0 for padding, `[...]`. Only used by `sinkhorn`.
        """
        if self.centring != "sinkhorn":
            logits = logits - context.state[centre] if self.centring == "mean" else logits
            return jax.nn.softmax(logits / self.temperature(context.update))
        rows = (logits / self.temperature(context.update)).reshape(-1, logits.shape[-1])
        return sinkhorn(rows, weights.reshape(-1)).reshape(logits.shape)

    def of_patches(
        self,
        heads: "DINO | TeacherHeads",
        tokens: jax.Array,
        teacher_tokens: jax.Array,
        batch: Batch,
        context: StepContext,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the loss of each image's masked patches, and the teacher's logits for centring.

        Args:
          tokens: the student's normalized patch tokens, `[batch, views, patches, dim]`.
          teacher_tokens: the teacher's normalized patch tokens, of the same shape.

        Returns:
          The mean cross-entropy over an image's masked patches, `[batch]`, and the teacher's logits
          of each image, `[batch, prototypes]`. An image's logits are weighted by its number of
          masked patches, so that the mean over the batch is the mean logits of all masked patches.
        """
        view, chosen = batch["masked_view"][:, None, None, None], batch["chosen"]

        def of_masked(head, x):
            return head(pick(jnp.take_along_axis(x, view, axis=1)[:, 0], batch["positions"]))

        teacher_logits = of_masked(heads.patch_head or heads.head, teacher_tokens)
        log_probs = jax.nn.log_softmax(
            of_masked(self.patch_head or self.head, tokens) / STUDENT_TEMPERATURE
        )
        real = chosen * self._weights(batch, self.most_masked)
        targets = self.targets(teacher_logits, context, "patch_centre", real)
        losses = -(targets * log_probs).sum(-1)
        mean = (losses * chosen).sum(1) / chosen.sum(1)
        centre = (teacher_logits * chosen[..., None]).sum(1) * len(chosen) / chosen.sum()
        return mean, centre

    def of_similarities(
        self, model: nnx.Module, tokens: jax.Array, batch: Batch, context: StepContext
    ) -> jax.Array:
        """Returns the Gram loss of each image, `[batch]` (DINOv3, 2508.10104, section 4.1).

        The Gram teacher is an earlier copy of the teacher (`context.state["gram"]`). The cosine
        similarities of all pairs of patch tokens of an image form a matrix. One matrix is computed
        from the student's tokens, and one from the Gram teacher's tokens. The loss is the mean
        squared difference of the two matrices.

        Args:
          tokens: the student's normalized patch tokens, `[batch, views, patches, dim]`.
        """
        images = batch.get("gram", batch["image"])
        gram_teacher = with_weights(model, context.state["gram"]).resized(images.shape[-3:-1])
        _, teacher_tokens = self.see(gram_teacher, images, patches=True)
        if gram_teacher.grid != self.grid:
            rows, columns = (
                interpolation(old, new, "bicubic")
                for old, new in zip(gram_teacher.grid, self.grid, strict=True)
            )
            teacher_tokens = teacher_tokens.reshape(
                *teacher_tokens.shape[:2], *gram_teacher.grid, -1
            )
            teacher_tokens = jnp.einsum(
                "ri,cj,bvijd->bvrcd", rows, columns, teacher_tokens
            ).reshape(tokens.shape)
        vectors = (unit(x.astype(jnp.float32)) for x in (tokens, teacher_tokens))
        gram, teacher_gram = (jnp.einsum("bvid,bvjd->bvij", x, x) for x in vectors)
        return jnp.square(gram - teacher_gram).mean(axis=(1, 2, 3))

    def temperature(self, update: jax.Array | int) -> jax.Array:
        """Returns the teacher's temperature at update 1, 2, ...

        The temperature changes linearly over the warm-up. The last update of the warm-up has the
        final temperature.
        """
        first, last, warmup = self.temperatures
        if not warmup:
            return jnp.float32(last)
        return first + (last - first) * jnp.clip((update - 1) / max(warmup - 1, 1), 0, 1)

    def _weights(self, batch: Batch, count: int) -> jax.Array:
        """Returns `[batch, count]`: ones for valid images, zeros for padding images."""
        real = batch.get("valid", jnp.ones(len(batch["image"]), bool))
        return jnp.broadcast_to(real[:, None], (len(real), count)).astype(jnp.float32)

    def initial_state(self, params: dict) -> dict[str, Any]:
        state = {"teacher": params, "teacher_head": self.own_weights()}
        state |= {"mean": np.zeros(self.features, np.float32)}
        state |= {"used": np.zeros(self.head.count, np.float32)}
        if self.gram_weight:
            state["gram"] = params
        if self.centring == "mean":
            state["centre"] = np.zeros(self.head.count, np.float32)
            if self.patch_weight:
                state["patch_centre"] = np.zeros((self.patch_head or self.head).count, np.float32)
        return state

    def update_state(self, state: dict, params: dict, aux: dict, update: jax.Array) -> dict:
        new = {
            name: state[name] + NEWEST * (x.mean(axis=0) - state[name]) for name, x in aux.items()
        }
        new["teacher"] = self.teacher.after(state["teacher"], params, update)
        new["teacher_head"] = self.teacher.after(state["teacher_head"], self.own_weights(), update)
        if self.gram_weight:
            first, every, times = self.gram_updates
            since = update - jnp.maximum(first, 1)  # There is no teacher before the first update.
            updates_gram = (since >= 0) & (since % every == 0) & (since <= every * times)
            new["gram"] = jax.tree.map(
                lambda x, old: jnp.where(updates_gram, x, old), new["teacher"], state["gram"]
            )
        return new

    def warning(self, means: dict[str, float], update: int) -> str | None:
        if update < max(self.steps / 20, SETTLED):
            return None
        even = math.log(self.head.count) * NEAR_EVEN
        sign = None
        if means["spread"] < SMALLEST_SPREAD:
            sign = f"the features are nearly the same for all images (spread {means['spread']:.2g})"
        elif means["prototypes_used"] < FEWEST_USED:
            sign = "all images are given the same prototype"
        elif means["teacher_entropy"] > even:
            sign = (
                f"the teacher's outputs are uniform: entropy {means['teacher_entropy']:.2f} of at "
                "most "
            )
            sign += f"{math.log(self.head.count):.2f}"
        return sign and (
            f"this run has collapsed: {sign}. Try a larger batch, a teacher_momentum nearer to 1 "
            "(0.9995 for 256 images), a lower learning rate, fewer prototypes, or "
            "dino.koleo=0.1"
        )

    def multiply_adds(
        self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None
    ) -> float:
        graphdef, weights = nnx.split((model, self))

        def of(count: int, size: tuple[int, int], patches: bool, frozen: bool = False) -> int:
            def compared(weights, images):
                model, objective = nnx.merge(graphdef, weights)
                seeing, heads = (
                    (objective.frozen.model, objective.frozen.heads)
                    if frozen
                    else (model, objective)
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
        learnt, taught = (
            of(self.global_crops, large, patches, frozen)
            for frozen in (False, self.frozen is not None)
        )
        small = of(self.local_crops, 2 * (self.local_size,), False) if self.local_crops else 0
        size = 2 * (self.gram_size,) if self.gram_size else large
        kept = of(self.global_crops, size, True) / 3 if self.gram_weight else 0
        return learnt + taught / 3 + small + kept


def _head(
    options: DINOOptions, features: int, prototypes: int, bottleneck: int, rngs: nnx.Rngs
) -> PrototypeHead:
    """Creates a head with the options of the section `dino`."""
    hidden, lengths = options.head_hidden, options.prototype_lengths
    return PrototypeHead(features, hidden, bottleneck, prototypes, lengths, rngs=rngs)


def _check_schedules(options: DINOOptions, steps: int) -> None:
    keys = ["teacher_temperature_steps", "frozen_prototype_steps"] + ["gram_from"] * bool(
        options.gram
    )
    values = {key: getattr(options, key) for key in keys}
    longer = [f"dino.{key}={value}" for key, value in values.items() if value >= steps]
    if longer:
        raise UserError(
            f"config.{', '.join(longer)} must be below the run's {steps} steps: use fewer, such as "
            f"{steps // 10}, or train longer"
        )


def _check_patches(options: DINOOptions, model: nnx.Module) -> None:
    """Raises UserError if patches cannot be masked, or cannot share a head with image features."""
    if not isinstance(model, TokenModel) or not model.embeds_pixels:
        raise UserError(
            f"config.dino.patch_weight = {options.patch_weight} masks patches of "
            "pixels; the model must be a ViT, not a hybrid or a ConvNet: patch_weight=0"
        )
    if options.patch_prototypes is not None:
        return
    width = _width(model, model.image_size)
    if width != model.dim:
        raise UserError(
            "config.dino.patch_prototypes must be given: one head for both takes "
            f"features as wide as a token, {model.dim}, and the model's are {width}"
        )


def _check_teacher(config: RunOptions, model: nnx.Module, frozen: WithHeads) -> None:
    """Raises UserError if the frozen teacher's heads or patches do not match the student's."""
    options, heads = config.dino, frozen.heads
    start = f"config.objective.teacher={config.objective.teacher!r}"
    expected = {"prototypes": (heads.head.count, options.prototypes)}
    if options.patch_weight:
        patches = heads.patch_head and heads.patch_head.count
        expected["patch_prototypes"] = (patches, options.patch_prototypes)
    for key, (count, student_count) in expected.items():
        if count != student_count:
            raise UserError(
                f"{start} has {_count(count)}, and config.dino.{key}={student_count}: "
                f"set {key}={count}"
            )
    widths = {"head": _width(frozen.model, frozen.model.image_size)}
    if options.patch_weight:
        _check_grid(start, model, frozen.model)
        widths["patch_head" if heads.patch_head else "head"] = frozen.model.dim
    for name, width in widths.items():
        if (features := getattr(heads, name).features) != width:
            raise UserError(
                f"{start} has a {name} for features of {features}, and its model's are of {width}"
            )


def _check_grid(start: str, model: nnx.Module, teacher: nnx.Module) -> None:
    """Raises UserError if patch i of the teacher and of the student cover different pixels."""
    grid, student_grid = getattr(teacher, "grid", None), model.grid
    pixels = isinstance(teacher, TokenModel) and teacher.embeds_pixels
    if grid != student_grid or not pixels:
        raise UserError(
            f"{start} has patches {grid and 'x'.join(map(str, grid))}, and the student "
            f"{'x'.join(map(str, student_grid))}: both need the same patches, or patch_weight=0"
        )


def _count(prototypes: int | None) -> str:
    return (
        "no prototypes for patches of their own"
        if prototypes is None
        else f"{prototypes:,} prototypes"
    )


def _check_size(model: nnx.Module, key: str, size: int) -> None:
    """Raises UserError if the model cannot be resized to the image size of the option `key`."""
    try:
        _width(model, (size, size))
    except UserError as error:
        raise UserError(f"config.dino.{key} = {size}: {error}") from error


def _width(model: nnx.Module, size: tuple[int, int]) -> int:
    """Returns the width of the model's features for images of `size`.

    Raises:
      UserError: the model cannot be resized to `size`.
    """
    graphdef, weights = nnx.split(model)
    image = jax.ShapeDtypeStruct((1, *size, model.channels), jnp.uint8)
    features = jax.eval_shape(
        lambda w, x: nnx.merge(graphdef, w).resized(size).features(x), weights, image
    )
    return features.shape[-1]


OBJECTIVE = DINO
