"""A minimal HTTP server with timm's model in ONNX Runtime, for comparison with `vit_jax.serve`."""

import http.server
import io
import json
import signal
import sys

from vit_jax.benchmarks.bench_inference import export_to_onnxruntime
from vit_jax.benchmarks.bench_predict import pillow_crop
from vit_jax.errors import UserError


def main(model: str, image_size: str) -> None:
    """Serves a model: each request contains an image, and is computed on its own."""
    size = int(image_size)
    _, run = export_to_onnxruntime(model, 1, size)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # Headers and content are sent together.

        def do_POST(self) -> None:
            image = io.BytesIO(self.rfile.read(int(self.headers["Content-Length"])))
            logits = run(pillow_crop(image, size)[None])[0]
            answer = json.dumps({"predictions": logits.argsort()[-5:].tolist()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # Otherwise JAX prints a stack trace.
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(f"serving on http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
