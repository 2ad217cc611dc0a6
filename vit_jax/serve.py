"""Serves a model by HTTP: python -m vit_jax.serve CHECKPOINT.

CHECKPOINT is a source as in load_model: a workdir, a file, or hf://owner/name. The page at
http://localhost:8000 shows classes, attention rollout and nearest images (--neighbours=FOLDER) of a
photograph that is dropped on it. Programs can use

  curl --data-binary @photo.jpg http://localhost:8000/predict
  curl --json '{"images": ["BASE64", ...]}' http://localhost:8000/predict

  curl --data-binary @photo.jpg 'http://localhost:8000/predict?names=cat,dog'

The last command is for CLIP, SigLIP and runs of configs/siglip.py, which need --names="cat,dog".
For runs of other objectives (config.objective.name), the server returns a mask ('segmentation'), a
depth map ('depth') or boxes ('detection').
Other addresses are /health and /metrics (Prometheus). By default, only this machine can reach the
server; --host changes this. Ctrl-C or SIGTERM ends the server after it has answered the requests in
progress. Exit codes: 0, a signal ended the server; 2, a user error.
"""

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags

from vit_jax import command
from vit_jax.errors import UserError

if TYPE_CHECKING:
    from vit_jax.serving.engine import Engine
    from vit_jax.serving.neighbours import Neighbours

PORT = flags.DEFINE_integer(
    "port", 8000, "Port to listen on; 0: any that is free.", lower_bound=0, upper_bound=65535
)
HOST = flags.DEFINE_string(
    "host",
    "127.0.0.1",
    "Address to listen on; 0.0.0.0: all of this machine's, for everybody who reaches it.",
)
HOSTS = flags.DEFINE_list(
    "hosts",
    [],
    "Further names by which clients address it, in addition to localhost, addresses and "
    "this machine's; "
    "*: any.",
)
NEIGHBOURS = flags.DEFINE_string("neighbours", None, "A folder whose nearest images are shown.")
TOP = flags.DEFINE_integer(
    "top",
    None,
    "Maximum number of classes per image; by default 5, or all with --threshold.",
    lower_bound=1,
)
THRESHOLD = flags.DEFINE_float(
    "threshold",
    None,
    "Lowest probability of these classes, above 0, up to 1; of a detection run, lowest score of an "
    "object, by default 0.3.",
)
CLASSES = flags.DEFINE_string(
    "classes", None, "File with the classes' names, one a line, if not the checkpoint's."
)
NAMES = flags.DEFINE_string(
    "names",
    None,
    "Class names for zero-shot classification by CLIP or SigLIP: 'cat,dog,a red car', or a file "
    "with a name in each line; a request may have its own names.",
)
TEMPLATE = flags.DEFINE_multi_string(
    "template",
    [],
    "With --names: text with {} for the name; several are averaged. By default 'a photo of a {}.'",
)
IMAGE_SIZE = flags.DEFINE_string(
    "image_size", None, "Pixels, 384 or HEIGHTxWIDTH, if not the checkpoint's."
)
RESIZE = flags.DEFINE_integer(
    "resize",
    None,
    "Short side before the central crop; by default the checkpoint's, or 8/7 of the crop.",
)
DECODE = flags.DEFINE_enum(
    "decode",
    None,
    ["fast", "exact"],
    "JPEGs in part, or whole by Pillow; by default as the run, or fast.",
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 16, "Images computed at once, at most.", lower_bound=1
)
THREADS = flags.DEFINE_integer("threads", 2, "That decode images.", lower_bound=1)
QUEUE = flags.DEFINE_integer(
    "queue", 64, "Images that may wait; more are refused (503).", lower_bound=1
)
MAX_MB = flags.DEFINE_float("max_mb", 20, "Millions of bytes of a request.", lower_bound=1e-3)
MAX_MEGAPIXELS = flags.DEFINE_float(
    "max_megapixels", 64, "Millions of pixels of a request's images.", lower_bound=1e-3
)
TIMEOUT = flags.DEFINE_float(
    "timeout", 30, "Seconds from a request to its answer.", lower_bound=0.1
)
CONNECTIONS = flags.DEFINE_integer(
    "connections", 256, "Connections that may be open.", lower_bound=1
)
HEAD_SECONDS = 10  # Timeout for a request's headers.
NEEDED = "starlette", "uvicorn", "prometheus_client"
BACKLOG = 1024  # Maximum number of connections that wait for the server, also during its start.


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UserError("give one checkpoint: python -m vit_jax.serve CHECKPOINT")
    if QUEUE.value < BATCH_SIZE.value:
        raise UserError(
            f"--queue={QUEUE.value} is less than a batch: give {BATCH_SIZE.value} or more"
        )
    if NEIGHBOURS.value is not None and not os.path.isdir(NEIGHBOURS.value):
        raise UserError(f"--neighbours={NEIGHBOURS.value} is not a folder; give one with images")
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install {' '.join(NEEDED)}") from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # This handler works during the start.
    with listen(HOST.value, PORT.value) as listening:
        command.use_compilation_cache()
        from vit_jax.serving.connections import ConnectionLimits, limited

        service, metrics = make_service(arguments[0])
        limits = ConnectionLimits(
            CONNECTIONS.value,
            min(HEAD_SECONDS, TIMEOUT.value),
            TIMEOUT.value + 1,
            metrics.connections.inc,
        )
        config = uvicorn.Config(
            service.app(),
            http=limited(limits),
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(TIMEOUT.value) + 1,
        )
        # When a signal ends uvicorn, uvicorn raises the signal again. These handlers ignore it.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        print(f"serving on {address(listening)} (Ctrl-C ends it)", flush=True)
        uvicorn.Server(config).run([listening])
    print("ended: all that was under way is answered", flush=True)


class Served(NamedTuple):
    """A model to serve: its engine with compiled programs, and its description."""

    engine: "Engine"  # The engine, which runs the compiled programs.
    about: dict[str, Any]  # Information about the model for /health.
    page: str  # HTML of the start page.
    neighbours: "Neighbours | None" = None  # The images of --neighbours; None: the flag is not set.


def make_service(checkpoint: str):
    """Returns the HTTP service of a checkpoint, and the Prometheus metrics of the service."""
    from vit_jax.dense import objective_at
    from vit_jax.parallel.process_settings import keep_freed_memory
    from vit_jax.serving.metrics import Metrics
    from vit_jax.serving.service import Limits, Service

    keep_freed_memory()
    task = objective_at(checkpoint)
    dense = task in ("segmentation", "detection", "depth")
    served = serve_dense(checkpoint, task) if dense else serve_classifier(checkpoint)
    metrics = Metrics(served.engine.sizes)
    service = Service(
        served.engine,
        served.neighbours,
        metrics,
        Limits(int(MAX_MB.value * 1e6), int(MAX_MEGAPIXELS.value * 1e6), TIMEOUT.value),
        served.about,
        served.page,
        most=QUEUE.value,
        threads=THREADS.value,
        hosts=[HOST.value, *HOSTS.value],
    )
    return service, metrics


def print_compiling() -> None:
    """Prints a message: the programs are being compiled."""
    print(
        f"compiling for batches of up to {BATCH_SIZE.value} images; nothing is compiled later",
        flush=True,
    )


def serve_dense(checkpoint: str, task: str) -> Served:
    """Compiles a dense run's programs; raises UserError for flags of classifiers."""
    unsupported = (NEIGHBOURS, TOP, CLASSES, NAMES, TEMPLATE, RESIZE)
    for flag in unsupported if task == "detection" else (*unsupported, THRESHOLD):
        if flag.present:
            raise UserError(f"--{flag.name} is unsupported with a {task} run: remove it")
    from vit_jax.dense import load_depth, load_detector, load_segmenter
    from vit_jax.models.dense.detector import least_score
    from vit_jax.models.dense.palette import voc_palette
    from vit_jax.serving.dense_engines import DepthEngine, DetectorEngine, SegmenterEngine
    from vit_jax.serving.drop_page import drop_page

    threshold = least_score(THRESHOLD.value)
    load = {"segmentation": load_segmenter, "detection": load_detector, "depth": load_depth}[task]
    loaded = load(
        checkpoint, image_size=command.parse_image_size(IMAGE_SIZE.value), decode=DECODE.value
    )
    print_compiling()
    crop, names = loaded.predictor.crop, loaded.class_names
    if task == "detection":
        engine = DetectorEngine(loaded, crop, BATCH_SIZE.value, threshold)
        what, palette = f"Objects with a score of {threshold:g} or more", voc_palette()[1:]
    elif task == "segmentation":
        engine = SegmenterEngine(loaded, crop, BATCH_SIZE.value)
        what, palette = "The class of each pixel", voc_palette()
    else:
        engine = DepthEngine(loaded, crop, BATCH_SIZE.value)
        what, palette = "The depth of each pixel; the nearest is the lightest", ()
    model = loaded.model
    name = model.about.name if model.about else type(model).__name__
    about = {"model": name, "task": task, "image_size": [*model.image_size]}
    if names:
        about["classes"], what = len(names), f"{len(names):,} classes: {what[0].lower()}{what[1:]}"
    page = drop_page(
        f"What {name} sees",
        f"{what}. Photographs are not stored.",
        "overlay",
        colours={
            name: "#" + colour.tobytes().hex() for name, colour in zip(names, palette, strict=False)
        },
    )
    return Served(engine, about, page)


def serve_classifier(checkpoint: str) -> Served:
    """Compiles the programs that serve a model's classes; raises UserError if it has no head."""
    from vit_jax.classifier import open_classifier

    classifier = open_classifier(
        checkpoint,
        image_size=command.parse_image_size(IMAGE_SIZE.value),
        resize=RESIZE.value,
        decode=DECODE.value,
        classes=CLASSES.value,
        names=NAMES.value,
        templates=TEMPLATE.value,
    )
    if not classifier.class_names:
        raise UserError(
            f"{checkpoint} has no head, and predicts no classes; fine-tune it, which makes one, or "
            "with a text tower give --names=cat,dog"
        )

    from vit_jax.data.class_names import shortened
    from vit_jax.models.image_text import TEMPLATES
    from vit_jax.serving.drop_page import drop_page
    from vit_jax.serving.engine import make_engine
    from vit_jax.serving.names import MOST_NAMES
    from vit_jax.serving.neighbours import Neighbours

    print_compiling()
    engine = make_engine(
        classifier, BATCH_SIZE.value, TOP.value, THRESHOLD.value, TEMPLATE.value or TEMPLATES
    )
    by_name = engine.names is not None
    if engine.no_heat is not None:
        print(f"no heat map: {engine.no_heat}", flush=True)
    neighbours = None
    if NEIGHBOURS.value is not None:
        neighbours = Neighbours(NEIGHBOURS.value, engine, THREADS.value, print)
        print(f"neighbours: {len(neighbours):,} images of {NEIGHBOURS.value}", flush=True)
    model, names = classifier.model, classifier.class_names
    name = model.about.name if model.about else type(model).__name__
    about = {"model": name, "classes": len(names), "image_size": [*model.image_size]}
    about["probabilities"] = classifier.probabilities
    if by_name:
        about["names"] = f"up to {MOST_NAMES} in a request"
    page = drop_page(
        f"What {name} sees",
        f"{len(names):,} classes. Preprocessing of each photograph: {classifier.crop}. "
        "Photographs are not stored.",
        "heat" if engine.no_heat is None else "",
        neighbours.folder.name if neighbours else "",
        shortened(names) if by_name else None,
    )
    return Served(engine, about, page, neighbours)


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket, whose connections wait; raises UserError for a used port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol number IPPROTO_TCP, asyncio recognizes a TCP socket and sets TCP_NODELAY, so
    # that responses are sent without delay.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # With SO_REUSEADDR, the port can be used again immediately after a server has ended.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        return listening
    except OSError as error:
        listening.close()
        raise UserError(
            f"cannot listen on {host}, port {port} ({error.strerror}): give another --port, or "
            "--host"
        ) from error


def address(listening: socket.socket) -> str:
    """Returns the server's URL for a browser, and a note on who can reach it."""
    host, port = listening.getsockname()[:2]
    if host in ("127.0.0.1", "::1"):
        return f"http://localhost:{port}, for this machine alone"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}, for everybody who reaches it"


if __name__ == "__main__":
    command.run(main)
