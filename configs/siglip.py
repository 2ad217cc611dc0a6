r"""SigLIP: training on images and captions with a sigmoid loss of each pair (2303.15343).

    python -m vit_jax.main --config=configs/siglip.py --config.data.path=PAIRS --workdir=DIR
    python -m vit_jax.main --config=configs/siglip.py:from=SigLIP2-B/16 \
        --config.data.path=PAIRS --workdir=DIR
    python -m vit_jax.main --config=configs/siglip.py:tune=text,image=DIR --config.data.path=PAIRS \
        --workdir=DIR2

PAIRS is a folder with `train.csv` and `test.csv` (columns `file` and `caption`).

The first command trains from scratch, with the batch size and the optimizer of the authors' runs on
WebLI. The second command continues the training of a SigLIP, SigLIP 2 or CLIP of Transformers,
open_clip or big_vision on your pairs, with the loss and the tokenizer of this model. `from` is the
model's name, hf://owner/name, a file, a folder or a workdir. `tune=image` freezes the text tower,
and `tune=text` the image tower. The third command is locked-image tuning (2111.07991): the image
model of a checkpoint is frozen, and a text tower is trained for it with the values of big_vision's
`siglip_lit_coco.py`.
"""

from vit_jax.config import choose, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import siglip

TUNED = ("both", "image", "text")


def get_config(argument=None):
    given = {"model": "ViT-B/16", "from": "", "image": "", "tune": "both", "steps": ""}
    values, argument = named_values(argument, **given)
    if values["tune"] not in TUNED:
        raise UserError(f"no tune={values['tune']!r}; {nearest(values['tune'], TUNED)}")
    if values["from"] and values["image"]:
        raise UserError("from= has both towers and image= one of them: give one of the two")
    if values["tune"] == "image" and not values["from"]:
        raise UserError("tune=image keeps a trained text tower: give it by from=FOLDER")
    config = siglip(values["model"])
    if values["image"]:
        _lock_image(config, values["image"])
    elif values["from"]:
        _continue(config, values["from"])
    if values["tune"] == "text":
        config.finetune.train = "objective" if values["from"] else "head"
    config.contrastive.text_frozen = values["tune"] == "image"
    config.steps = int(values["steps"]) if values["steps"] else config.steps
    return choose(config, argument)


def _lock_image(config, checkpoint):
    """Sets the values of big_vision's `siglip_lit_coco.py`, which trains only a text tower.

    The image size is the checkpoint's, and so is the evaluation transform, if it has one.
    """
    config.model.update(dict(name="", pooling=None, dtype="float32"))
    config.finetune.checkpoint, config.finetune.objective = checkpoint, "new"
    config.contrastive.update(dict(text_length=16, initial_bias=-2.71))
    config.data.update(_shown_as(checkpoint))
    config.data.flip, config.augment.randaugment = True, (2, 10.0)
    config.batch_size, config.steps = 512, 5000
    config.optimizer.update(dict(name="adam", beta2=0.999))
    config.optimizer.update(dict(weight_decay=0.01 / 1e-3, warmup_steps=150))
    config.evaluate_every = 1000


def _shown_as(checkpoint, kind="square"):
    """Returns config values for a checkpoint's image size and evaluation transform.

    Args:
      checkpoint: the checkpoint.
      kind: the evaluation transform if the checkpoint has none.
    """
    from vit_jax.interop.open import open_checkpoint  # Not at the top, because it imports JAX.

    try:
        opened = open_checkpoint(checkpoint)
    except UserError:  # The run opens the checkpoint again, and then reports the error.
        return {}
    size, seen = min(opened.options.image_size), opened.preprocessing
    if (seen.kind if seen else kind) != "short_side":
        return dict(image_size=size, test_resize=size)
    resize = round(seen.resize(opened.options.image_size)) if seen else size
    values = dict(image_size=size, crop="short_side", crop_resize=resize)
    return values | dict(test_crop="short_side", test_resize=resize)


def _continue(config, source):
    """Sets values to continue the training of both towers for a few epochs on a user's pairs."""
    from vit_jax.image_text import towers_place  # Not at the top, because it imports JAX.
    from vit_jax.interop.image_text import values_of_towers
    from vit_jax.published.towers import towers_of

    folder = str(towers_place(towers_of(source)))
    config.model.update(dict(name="", pooling=None, dtype="float32"))
    config.finetune.checkpoint = folder
    config.contrastive.update(values_of_towers(folder))
    projected = config.contrastive.embedding_dim is not None  # As in CLIP.
    config.finetune.head = "kept" if projected else config.finetune.head
    config.data.update(_shown_as(folder, "short_side" if projected else "square"))
    config.batch_size, config.steps, config.epochs = 64, None, 10.0
    config.optimizer.update(dict(name="adam", learning_rate=1e-5, weight_decay=1e-4 / 1e-3))
    config.optimizer.update(dict(warmup_steps=100))
    config.evaluate_every, config.checkpoint.every = 100, 100
