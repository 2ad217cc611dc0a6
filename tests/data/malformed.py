"""A fixed set of images that are damaged, unusual, mislabelled or malicious.

`python -m tests.data.malformed FOLDER` writes them as files.
"""

import functools
import io
import random
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

UNREADABLE, EITHER = "unreadable", "either"


class Case(NamedTuple):
    """A file and its expected pixels.

    Attributes:
      expected: uint8 `[height, width, 3]`, or UNREADABLE; EITHER accepts pixels and errors.
    """

    name: str
    data: bytes
    expected: np.ndarray | str


def picture(height: int = 60, width: int = 80) -> np.ndarray:
    """Returns a test image.

    It is smooth, so that all resizing methods give similar results, and it looks different after
    each rotation or mirroring.
    """
    y, x = np.mgrid[:height, :width] + 0.5
    y, x = y / height, x / width
    planes = (x * 0.8 + y * 0.2, y * y, (np.sin(3 * x + 1) * np.cos(2 * y) + 1) / 2)
    return (np.stack(planes, -1) * 220 + 15).astype(np.uint8)


def encode(
    pixels: np.ndarray | Image.Image, form: str = "JPEG", mode: str = "RGB", **options
) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    (image if image.mode == mode else image.convert(mode)).save(file, form, **options)
    return file.getvalue()


def shown(data: bytes) -> np.ndarray:
    """Decodes an image with Pillow only, with transparent pixels on white."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode.startswith("I"):
        return np.repeat((np.asarray(image) / 257).round().astype(np.uint8)[..., None], 3, axis=-1)
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    rgba = np.asarray(image.convert("RGBA")) / 255
    color, alpha = rgba[..., :3], rgba[..., 3:]
    return ((color * alpha + 1 - alpha) * 255).round().astype(np.uint8)


def exif(orientation) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def segments(jpeg: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields marker, start and end of each segment.

    The end of the start-of-scan segment (SOS) is the end of its entropy-coded data.
    """
    at = 2
    while jpeg[at + 1] != 0xD9:
        end = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if jpeg[at + 1] == 0xDA:
            while jpeg[end] != 0xFF or jpeg[end + 1] == 0 or 0xD0 <= jpeg[end + 1] <= 0xD7:
                end += 1
        yield jpeg[at + 1], at, end
        at = end


def segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


def resized(jpeg: bytes, height: int, width: int) -> bytes:
    """Returns the JPEG with another size in its header."""
    for marker, start, _ in segments(jpeg):
        if marker in (0xC0, 0xC1, 0xC2):
            return jpeg[: start + 5] + struct.pack(">HH", height, width) + jpeg[start + 9 :]
    raise ValueError("no frame header")


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png(height: int, width: int, depth: int, colour: int, *chunks: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


def chunks(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Yields type, start and end of each chunk of a PNG."""
    at = 8
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        yield data[at + 4 : at + 8].decode(), at, end
        at = end


@functools.cache
def corpus() -> tuple[Case, ...]:
    cases = (*_odd(), *_cut(), *_damaged(), *_mislabelled(), *_bombs())
    assert len({case.name for case in cases}) == len(cases)
    return cases


def _odd() -> Iterator[Case]:
    """Yields valid files with unusual encodings."""

    def whole(name: str, data: bytes) -> Case:
        return Case(name, data, shown(data))

    base = picture()
    for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
        for progressive in (False, True):
            for quality in (1, 75, 100):
                name = f"jpeg-{subsampling.replace(':', '')}-{'progressive' if progressive else 'baseline'}"
                options = dict(subsampling=subsampling, progressive=progressive, quality=quality)
                yield whole(f"{name}-q{quality}.jpg", encode(base, **options))
    yield whole("jpeg-rgb.jpg", encode(base, keep_rgb=True, quality=95))
    yield whole("jpeg-restart.jpg", encode(base, restart_marker_blocks=3))
    yield whole("jpeg-restart-rows.jpg", encode(base, restart_marker_rows=1, progressive=True))
    yield whole("jpeg-optimized.jpg", encode(base, optimize=True))
    for mode in ("L", "CMYK"):
        for progressive in (False, True):
            yield whole(
                f"jpeg-{mode}-{progressive:d}.jpg", encode(base, mode=mode, progressive=progressive)
            )
    cmyk = encode(base, mode="CMYK")
    adobe = cmyk.index(b"Adobe") + 11
    yield whole("jpeg-YCCK.jpg", cmyk[:adobe] + b"\x02" + cmyk[adobe + 1 :])
    grey = encode(base, mode="L")
    factors = next(start for marker, start, _ in segments(grey) if marker == 0xC0) + 11
    yield whole("jpeg-L-sampled-2x2.jpg", grey[:factors] + b"\x22" + grey[factors + 1 :])

    for height, width in (
        (1, 1),
        (1, 300),
        (300, 1),
        (2, 3),
        (7, 9),
        (3, 20_000),
        (20_000, 3),
        (1, 65_000),
    ):
        for form, suffix in (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")):
            if form != "WEBP" or max(height, width) < 16_384:
                options = dict(lossless=True) if form == "WEBP" else {}
                yield whole(
                    f"{height}x{width}.{suffix}", encode(picture(height, width), form, **options)
                )

    for orientation in (*range(10), 65_535):
        yield whole(f"turned-{orientation}.jpg", encode(base, exif=exif(orientation)))
    for orientation in (6, 7):
        yield whole(f"turned-{orientation}.png", encode(base, "PNG", exif=exif(orientation)))
        yield whole(f"turned-{orientation}.webp", encode(base, "WEBP", exif=exif(orientation)))
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
    yield whole("turned-by-xmp.jpg", encode(base, xmp=xmp))
    plain = encode(base)
    for name, content in {
        "empty": b"",
        "short": b"Exif\0\0MM",
        "text": b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\2\0\0\0\4left\0\0\0\0",
        "noise": b"Exif\0\0" + random.Random(1).randbytes(200),
        "loop": b"Exif\0\0MM\0*\0\0\0\x08\0\1\x87\x69\0\4\0\0\0\1\0\0\0\x08\0\0\0\x08",
        "far": b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\1\x12\0\3\xff\xff\xff\xff\xff\xff\xff\xff",
    }.items():
        data = plain[:2] + segment(0xE1, content) + plain[2:]
        yield Case(f"exif-{name}.jpg", data, shown(plain))

    bits = Image.fromarray(base).convert("1", dither=Image.Dither.NONE)
    yield whole("png-1.png", encode(bits, "PNG", "1"))
    for mode in ("L", "LA", "P", "RGBA"):
        yield whole(f"png-{mode}.png", encode(base, "PNG", mode))
    yield whole("png-transparent-index.png", encode(base, "PNG", "P", transparency=3))
    yield whole(
        "png-transparent-indices.png", encode(base, "PNG", "P", transparency=bytes(range(256)))
    )
    yield whole("png-transparent-colour.png", encode(base, "PNG", transparency=(0, 0, 0)))
    sixteen = picture()[..., 0].astype(np.uint16) * 257 + 20
    yield whole("png-16.png", encode(Image.fromarray(sixteen), "PNG", "I;16"))
    yield whole("png-16-turned.png", encode(Image.fromarray(sixteen), "PNG", "I;16", exif=exif(6)))
    rows = b"".join(b"\0" + row.tobytes() for row in base.astype(">u2") * 257)
    yield whole("png-16-rgb.png", png(60, 80, 16, 2, chunk(b"IDAT", zlib.compress(rows))))
    yield whole("png-transparent.webp", encode(base, "WEBP", "RGBA"))
    frames = [Image.fromarray(base), Image.fromarray(255 - base), Image.fromarray(base[::-1])]
    for form in ("GIF", "WEBP", "PNG"):
        data = encode(frames[0], form, save_all=True, append_images=frames[1:])
        yield whole(f"animated-{form}.{'webp' if form == 'WEBP' else 'png'}", data)
    yield whole(
        "several-pictures.jpg", encode(frames[0], "MPO", save_all=True, append_images=frames[1:])
    )

    for name, tail in {
        "zero": b"\0",
        "line": b"\n",
        "zeros": bytes(5000),
        "noise": random.Random(2).randbytes(5000),
        "picture": encode(255 - base),
        "ends": b"\xff\xd9" * 3,
    }.items():
        yield Case(f"tail-{name}.jpg", plain + tail, shown(plain))
        whole_png = encode(base, "PNG")
        yield Case(f"tail-{name}.png", whole_png + tail, base)
    for name, head in {
        "zero": b"\0",
        "line": b"\n",
        "mark": b"\xef\xbb\xbf",
        "noise": bytes(range(99)),
    }.items():
        yield Case(f"head-{name}.jpg", head + plain, UNREADABLE)
        yield Case(f"head-{name}.png", head + encode(base, "PNG"), UNREADABLE)
    yield Case("filled-markers.jpg", plain[:2] + b"\xff" * 500 + plain[2:], shown(plain))


def _cut() -> Iterator[Case]:
    """Yields files that end early: inside of each part and after each part."""
    base = picture()
    profile = dict(icc_profile=bytes(600), comment=b"a comment", exif=exif(6))
    for kind, progressive in (("baseline", False), ("progressive", True)):
        data = encode(base, quality=90, progressive=progressive, **profile)
        places = {0, 1, 2, len(data) - 40}
        for marker, start, end in segments(data):
            places |= {start + 1, start + 3, (start + end) // 2}
            if marker == 0xDA:
                places |= {start + (end - start) * part // 8 for part in range(1, 7)}
        for place in sorted(places):
            yield Case(f"cut-{kind}-{place}.jpg", data[:place], UNREADABLE)
        yield Case(f"cut-{kind}-end.jpg", data[:-2], EITHER)
        yield Case(f"cut-{kind}-half-end.jpg", data[:-1], EITHER)
        for part in range(1, 8):  # Some tools add the end marker to truncated files.
            yield Case(
                f"cut-{kind}-closed-{part}.jpg", data[: len(data) * part // 8] + b"\xff\xd9", EITHER
            )
    data = encode(base, "PNG", icc_profile=bytes(600), exif=exif(6), dpi=(72, 72))
    for kind, start, end in chunks(data):
        if kind != "IEND":
            for name, place in {
                "length": start + 2,
                "kind": start + 6,
                "half": (start + end) // 2,
            }.items():
                yield Case(f"cut-{kind}-{name}.png", data[:place], UNREADABLE)
            yield Case(f"cut-{kind}-crc.png", data[: end - 2], EITHER)
            yield Case(
                f"cut-{kind}-after.png", data[:end], EITHER if kind == "IDAT" else UNREADABLE
            )
    for lossless in (False, True):
        data = encode(base, "WEBP", lossless=lossless, exif=exif(6))
        for part in range(9):
            place = len(data) * part // 10 + 5 * bool(part)
            yield Case(f"cut-{lossless:d}-{place}.webp", data[:place], UNREADABLE)


def _damaged() -> Iterator[Case]:
    """Yields files with random bit errors."""
    base = picture()
    draw = random.Random(0)
    for name, data in {
        "baseline.jpg": encode(base),
        "progressive.jpg": encode(base, progressive=True),
        "plain.png": encode(base, "PNG"),
        "lossy.webp": encode(base, "WEBP"),
        "lossless.webp": encode(base, "WEBP", lossless=True),
    }.items():
        for number in range(16):
            damaged = bytearray(data)
            for _ in range(1 + number % 4):
                damaged[draw.randrange(2, len(data))] ^= 1 << draw.randrange(8)
            yield Case(f"flipped-{number}-{name}", bytes(damaged), EITHER)
    data = encode(base, "PNG")
    for kind, start, end in chunks(data):
        wrong = data[: end - 1] + bytes((data[end - 1] ^ 1,)) + data[end:]
        yield Case(f"crc-{kind}.png", wrong, EITHER)
        if kind != "IEND":
            yield Case(f"without-{kind}.png", data[:start] + data[end:], UNREADABLE)
    data = encode(base)
    for number, (marker, start, end) in enumerate(segments(data)):
        expected = EITHER if 0xE0 <= marker <= 0xEF or marker in (0xDB, 0xC4) else UNREADABLE
        yield Case(f"without-{marker:02x}-{number}.jpg", data[:start] + data[end:], expected)
        length = data[: start + 2] + b"\0\0" + data[start + 4 :]
        yield Case(f"no-length-{marker:02x}-{number}.jpg", length, EITHER)


def _mislabelled() -> Iterator[Case]:
    """Yields files whose suffix does not match their content."""
    base = picture()
    forms = {"PNG": "jpg", "WEBP": "png", "GIF": "jpg", "BMP": "png", "JPEG": "png"}
    for form, suffix in forms.items():
        data = encode(base, form)
        yield Case(f"a-{form.lower()}.{suffix}", data, shown(data))
    for name, data in {
        "nothing.jpg": b"",
        "nothing.png": b"",
        "one-byte.jpg": b"\xff",
        "one-byte.webp": b"R",
        "zeros.jpg": bytes(4096),
        "noise.png": random.Random(3).randbytes(4096),
        "text.png": b"This is not an image.\n" * 20,
        "page.jpg": b"<!DOCTYPE html><html><body><h1>404 Not Found</h1></body></html>",
        "drawing.png": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><rect/></svg>',
        "pointer.jpg": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n",
        "program.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 80 60\n%%EndComments\nshowpage\n%%EOF\n",
        "document.png": b"%PDF-1.4\n1 0 obj<<>>endobj\ntrailer<<>>\n%%EOF\n",
        "archive.jpg": b"PK\3\4" + bytes(200),
        "apple-double.jpg": b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(100),
        "only-start.jpg": b"\xff\xd8",
        "only-ends.jpg": b"\xff\xd8\xff\xd9",
        "only-marks.jpg": b"\xff\xd8" + b"\xff" * 4000,
        "only-signature.png": b"\x89PNG\r\n\x1a\n",
        "only-header.webp": b"RIFF\x10\0\0\0WEBPVP8 ",
        "a-tiff.jpg": encode(base, "TIFF"),
        "a-ppm.png": encode(base, "PPM"),
        "cut.gif.jpg": encode(base, "GIF")[:300],
        "cut.bmp.jpg": encode(base, "BMP")[:300],
    }.items():
        yield Case(name, data, UNREADABLE)


def _bombs() -> Iterator[Case]:
    """Yields small files that would take much memory or time to decode."""
    base = picture()
    plain, progressive = encode(base), encode(base, progressive=True)
    whole = encode(base, "PNG")
    empty = chunk(b"IDAT", zlib.compress(bytes(1_000_000)))
    for side in (50_000, 2**31 - 1):
        yield Case(f"bomb-{side}.png", png(side, side, 1, 0, empty), UNREADABLE)
    yield Case("bomb-4x1000000000.png", png(4, 10**9, 8, 2, empty), UNREADABLE)
    for kind, data in (("baseline", plain), ("progressive", progressive)):
        yield Case(f"bomb-65500-{kind}.jpg", resized(data, 65_500, 65_500), UNREADABLE)
        yield Case(f"bomb-3000-{kind}.jpg", resized(data, 3000, 3000), EITHER)
        yield Case(f"bomb-0-{kind}.jpg", resized(data, 0, 80), UNREADABLE)
    marker, start, end = list(segments(progressive))[-1]
    yield Case(
        "bomb-scans.jpg", progressive[:-2] + progressive[start:end] * 5000 + b"\xff\xd9", UNREADABLE
    )
    marker, start, end = list(segments(plain))[-1]
    yield Case("bomb-frames.jpg", plain[:-2] + plain[start:end] * 1000 + b"\xff\xd9", EITHER)
    yield Case(
        "bomb-stubs.jpg", plain[:-2] + plain[start : start + 14] * 5000 + b"\xff\xd9", EITHER
    )
    for marker in (0xE1, 0xE2, 0xED, 0xFE):
        data = plain[:2] + segment(marker, b"") * 50_000 + plain[2:]
        yield Case(
            f"bomb-segments-{marker:02x}.jpg", data, EITHER if marker == 0xFE else shown(plain)
        )
    marker, start, end = next(found for found in segments(plain) if found[0] == 0xC4)
    yield Case(
        "bomb-tables.jpg", plain[:start] + plain[start:end] * 20_000 + plain[end:], shown(plain)
    )
    yield Case("bomb-starts.jpg", b"\xff\xd8" * 5000 + plain, UNREADABLE)

    packed = zlib.compress(bytes(50_000_000), 9)
    after_header = next(end for _, _, end in chunks(whole))
    for name, inserted in {
        "iCCP": chunk(b"iCCP", b"p\0\0" + packed),
        "zTXt": chunk(b"zTXt", b"t\0\0" + packed),
        "iTXt": chunk(b"iTXt", b"t\0\1\0\0\0" + packed),
        "many-zTXt": chunk(b"zTXt", b"t\0\0" + zlib.compress(bytes(1_000_000), 9)) * 200,
        "many-tEXt": chunk(b"tEXt", b"t\0v") * 20_000,
        "eXIf": chunk(b"eXIf", b"MM\0*\0\0\0\x08" + b"\xff" * 100_000),
        "fdAT": chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)),
    }.items():
        data = whole[:after_header] + inserted + whole[after_header:]
        yield Case(f"bomb-{name}.png", data, EITHER)
    yield Case("bomb-IDAT.png", png(8, 8, 8, 2, chunk(b"IDAT", packed)), EITHER)
    yield Case("bomb-IDATs.png", png(8, 8, 8, 2, chunk(b"IDAT", b"") * 50_000), UNREADABLE)
    gif = encode(base, "GIF")
    yield Case("bomb-gif.jpg", gif[:6] + b"\xff\xff\xff\xff" + gif[10:], UNREADABLE)
    bmp = encode(base, "BMP")
    yield Case("bomb-bmp.png", bmp[:18] + struct.pack("<ii", 60_000, 60_000) + bmp[26:], UNREADABLE)
    webp = b"VP8X\x0a\0\0\0\0\0\0\0" + (16_382).to_bytes(3, "little") * 2
    yield Case(
        "bomb-webp.webp", b"RIFF" + struct.pack("<I", len(webp) + 4) + b"WEBP" + webp, UNREADABLE
    )


if __name__ == "__main__":
    for case in corpus():
        Path(sys.argv[1], case.name).write_bytes(case.data)
