"""Writes reports of runs: python -m vit_jax.report WORKDIR ...

For one workdir, the command writes report.html from the current files, also during training. For
several workdirs it writes a page that compares the runs, comparison.html or --out=FILE. With
--serve, a browser on this machine can show the page, which is updated during training.
"""

import asyncio
import errno
import socket
from collections.abc import Callable

from absl import flags

from vit_jax import command
from vit_jax.errors import UserError

OUT = flags.DEFINE_string(
    "out",
    None,
    "The file to write; without, of one run report.html in its workdir, of several "
    "comparison.html here.",
)
SERVE = flags.DEFINE_bool(
    "serve", False, "Show the page at http://localhost:PORT, and write no file."
)
COMPARISON = "comparison.html"
PORT = flags.DEFINE_integer("port", 8000, "The port of --serve.", lower_bound=0, upper_bound=65535)


def main(arguments: list[str]) -> None:
    if not arguments:
        raise UserError(
            "give a workdir, or several to compare them: python -m vit_jax.report WORKDIR ..."
        )
    if SERVE.value and OUT.value:
        raise UserError("give --serve or --out, not both: --serve writes no file")
    from vit_jax.paths import absolute, is_url
    from vit_jax.runs.bucket import shown
    from vit_jax.runs.comparison_page import comparison_page
    from vit_jax.runs.run_page import read_run, run_page
    from vit_jax.runs.workdir import workdir_at

    places = list(
        dict.fromkeys(place if is_url(place) else str(absolute(place)) for place in arguments)
    )

    def make(live: bool = False) -> str:
        runs = [read_run(workdir_at(place)) for place in places]
        return comparison_page(runs, live) if len(runs) > 1 else run_page(runs[0], live)

    for run in (read_run(workdir_at(place)) for place in places):
        if not run.figures:
            print(
                f"note: {shown(run.workdir)} has no evaluation yet: the page shows its curves and "
                "its config"
            )
    if SERVE.value:
        serve(lambda: make(live=True), PORT.value)
    else:
        write_page(make, places)


def write_page(make: Callable[[], str], places: list[str]) -> None:
    """Writes the page of the workdirs at `places` to `--out`.

    By default, the page of one workdir is written into this workdir, and the page of several
    workdirs into the current folder.

    Raises:
      UserError: the file cannot be written, or was not written by vit_jax.
    """
    from vit_jax.inspection.html_page import is_page, write_text
    from vit_jax.paths import absolute, is_url
    from vit_jax.runs.bucket import Bucket
    from vit_jax.runs.workdir import REPORT

    several = len(places) > 1
    if not OUT.value and not several and is_url(places[0]):
        bucket = Bucket(places[0].rstrip("/"))
        bucket.write(REPORT, make().encode())
        print(f"{bucket.url}/{REPORT}")
        return
    out = absolute(OUT.value or (COMPARISON if several else f"{places[0]}/{REPORT}"))
    try:
        if several and not OUT.value and out.exists() and not is_page(out):
            raise UserError(f"{out} is not a page of vit_jax; give --out=FILE")
        print(write_text(out, make()))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; give another --out") from error


def serve(make: Callable[[], str], port: int) -> None:
    """Serves the page, anew for each request, until Ctrl-C; raises UserError for a used port."""
    from vit_jax.serving.page_server import page_server

    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise UserError(
            f"port {port} cannot be had ({error.strerror}): give another --port"
        ) from error

    async def run() -> None:
        async with await page_server(make, listening) as server:
            print(f"http://localhost:{listening.getsockname()[1]} (Ctrl-C ends it)", flush=True)
            await server.serve_forever()

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    command.run(main)
