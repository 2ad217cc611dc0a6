"""Registry of the evaluation suites."""

from vit_jax.evaluation import (
    suite_depth,
    suite_detection,
    suite_fewshot,
    suite_imagenet,
    suite_knn,
    suite_probe,
    suite_retrieval,
    suite_segmentation,
    suite_sgd_probe,
    suite_vtab,
    suite_zero_shot,
)

MODULES = (
    suite_imagenet,
    suite_vtab,
    suite_fewshot,
    suite_knn,
    suite_probe,
    suite_sgd_probe,
    suite_zero_shot,
    suite_retrieval,
    suite_segmentation,
    suite_detection,
    suite_depth,
)
SUITES = {module.SUITE.name: module.SUITE for module in MODULES}
