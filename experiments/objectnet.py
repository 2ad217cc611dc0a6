"""ObjectNet (appendix D.9): vit-jax experiment objectnet --scale=paper --objectnet=DIR --out=DIR.

ViT-H/14 is pre-trained on JFT-300M and fine-tuned on ImageNet as for table 2. Then it is evaluated
on ObjectNet's images of the 113 classes that are also in ImageNet. The experiment has no laptop
scale, because ObjectNet consists of photographs.
"""

from vit_jax.ledger.stages import grid, pretraining
from vit_jax.ledger.study import Experiment

MODELS = {"ViT-H/14, JFT-300M": ("vit_h14_jft",)}
ROWS = {"ObjectNet": "imagenet/ObjectNet", "ObjectNet, top-5": "imagenet/ObjectNet, top-5"}


def finetuned(study, model, seed):
    """Returns config and overrides of a fine-tuning run that also evaluates ObjectNet at its end.

    It is on ImageNet at 518 pixels, and evaluates averaged parameters.
    """
    start = study.workdir("pretrained", model=model)
    values = dict(
        finetune__checkpoint=start, optimizer__average=0.9999, optimizer__learning_rate=0.01
    )
    values |= dict(evaluate__suites=("imagenet",))
    values |= dict(evaluate__options=(f"objectnet={study.options['objectnet']}",))
    return start and ("finetune:dataset=imagenet2012,size=518", values)


def read(study):
    """Returns top-1 and top-5 accuracy on ObjectNet, in per cent."""
    points = study.points("finetuned", *ROWS.values())
    return {
        row: {p["model"]: 100 * sum(p[key]) / len(p[key]) for p in points}
        for row, key in ROWS.items()
    }


OPTIONS = {"objectnet": dict(default="objectnet-1.0", help="the unpacked objectnet-1.0.zip")}
EXPERIMENT = Experiment(
    claim="The largest model is ahead of BiT on ObjectNet, 82.1 % of it right among five guesses.",
    place="Appendix D.9",
    options=OPTIONS,
    paper=Experiment(
        claim="",
        stages=(
            pretraining(MODELS),
            grid("finetuned", {"model": tuple(MODELS)}, finetuned, (0, 1, 2)),
        ),
        read=read,
        published="objectnet",
    ),
    needs="objectnet-1.0 of https://objectnet.dev/download.html",
)
