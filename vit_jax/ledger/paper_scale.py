"""The paper's own scale: its pre-training sets and models as configs, its data sets by the tables' rows."""

SETS = {"ImageNet": "i1k", "ImageNet-21k": "i21k", "JFT-300M": "jft"}
MODELS = {"ViT-B/16": "b16", "ViT-B/32": "b32", "ViT-L/16": "l16", "ViT-L/32": "l32", "ViT-H/14": "h14"}
# Rows of tables 2, 5, 6 and 7, and the recipes that fine-tune on them.
TASKS = {
    "ImageNet": "imagenet2012",
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "Pets": "oxford_iiit_pet",
    "Flowers": "oxford_flowers102",
}
# Columns of table 5, each the config of its pre-training; there is no H/14 of ImageNet.
BY_SET = {
    f"{model}, {name}": (f"vit_{short}_{suffix}",)
    for name, suffix in SETS.items()
    for model, short in MODELS.items()
    if (name, model) != ("ImageNet", "ViT-H/14")
}
# Columns of tables 2 and 9.
LARGEST = {
    name: BY_SET[name] for name in ("ViT-H/14, JFT-300M", "ViT-L/16, JFT-300M", "ViT-L/16, ImageNet-21k")
}
# Values that evaluate a pre-training run as figures 4, 8, 9 and 13 do: ImageNet by five images of each class.
FIVE_SHOT = {
    "fewshot__sets": ("tfds:imagenet2012@train,validation",),
    "fewshot__shots": (5,),
    "fewshot__every": 25_000,
}
FIVE_SHOT_FIGURE = "fewshot/imagenet2012/5"
