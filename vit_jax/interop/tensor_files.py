"""Reads and writes files of named tensors, npz and safetensors, without unpickling anything."""

import contextlib
import functools
import json
import math
import mmap
import os
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vit_jax.errors import UserError
from vit_jax.small_files import check_small, read_small

# Dtypes that float32 represents exactly.
_FLOATS = ("float32", "float16", "bfloat16")
# Suffixes of PyTorch files, which only `vit_jax.convert` reads.
TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
TORCH_MODEL = "pytorch_model.bin"
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, SafetensorError, EOFError)
_DAMAGE += (RuntimeError, TypeError, ValueError, KeyError, OSError)


class Tensor(NamedTuple):
    """A tensor that is read on demand.

    Attributes:
      shape: shape of the tensor.
      dtype: name of the dtype in the file.
      read: returns the values as float32, possibly as a view of the memory-mapped file. Raises
        UserError if the values cannot be read.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]

    def reshaped(self, shape: tuple[int, ...]) -> "Tensor":
        """Returns the tensor in another shape of the same size."""
        return self._replace(shape=shape, read=lambda: self.read().reshape(shape))


def open_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name, without reading their values.

    Raises:
      UserError: the file is missing or damaged, or has an unsupported format, such as pickle.
    """
    try:
        check_small(path, most=None)
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if path.suffix == ".npz" or (start[:4] == b"PK\x03\x04" and path.suffix not in TORCH_SUFFIXES):
        if start[:4] != b"PK\x03\x04":
            raise UserError(f"{path} is not an npz file: {_what(path, start)}")
        return _open_npz(path)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return _open_safetensors(path)
    raise UserError(f"{path} is neither npz nor safetensors: {_what(path, start)}")


def _what(path: Path, start: bytes) -> str:
    if start[:1] == b"\x80" or start[:4] == b"PK\x03\x04":
        return _pickled(path)
    return "it starts with " + repr(start[:8])


def _pickled(path: Path) -> str:
    """Returns the error message for a pickle, with the command to convert a PyTorch file."""
    named = (
        path if path.suffix in TORCH_SUFFIXES else f"{path.with_suffix('.pth').name} (so renamed)"
    )
    return (
        "it is a pickle, which can run any code and is never loaded; for a PyTorch file, "
        f"python -m vit_jax.convert {named} FOLDER reads the tensors, and load_model takes FOLDER"
    )


def _open_npz(path: Path) -> dict[str, Tensor]:
    tensors = {}
    with _damaged(path, "its list of arrays"), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                problem = (
                    _pickled(path)
                    if info.filename.endswith(".pkl")
                    else f"it contains {info.filename!r}"
                )
                raise UserError(f"{path} is not an npz file of arrays: {problem}")
            with archive.open(info) as file:
                shape, fortran, dtype = _npy_header(file)
                skip = file.tell()
            name = info.filename.removesuffix(".npy")
            if dtype.hasobject:
                raise UserError(f"{path} contains Python objects in {name}: {_pickled(path)}")
            kind = "bfloat16" if dtype == np.dtype("V2") else dtype.name
            if skip + math.prod(shape) * dtype.itemsize != info.file_size:
                raise ValueError(f"{name} has another length than its shape")

            check = functools.partial(check_float, path, name, kind)
            read = functools.partial(_read_npy, path, check, info, skip, shape, dtype, fortran)
            tensors[name] = Tensor(shape, kind, read)
    return tensors


def _read_npy(path, check, info, skip, shape, dtype, fortran) -> np.ndarray:
    """Reads an array of an npz file as float32; for the arguments see `_open_npz`."""
    check()
    array = aligned_empty(shape, dtype)
    with _damaged(path, info.filename):
        _read_member(path, info, skip, array.reshape(-1).view(np.uint8))
    if fortran:
        array = array.reshape(shape[::-1]).T
    # NumPy stores bfloat16 as two bytes with the void dtype V2.
    if dtype == np.dtype("V2"):
        array = array.view(ml_dtypes.bfloat16)
    return np.asarray(array, np.float32)


def _npy_header(file) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _read_member(path: Path, info: zipfile.ZipInfo, skip: int, out: np.ndarray) -> None:
    """Reads a zip member without its first `skip` bytes into `out`, and verifies its checksum.

    Uncompressed members are read directly into `out`, which is twice as fast as reading by zipfile.
    """
    with path.open("rb") as file:
        if info.compress_type == zipfile.ZIP_STORED:
            file.seek(info.header_offset)
            name_length, extra_length = struct.unpack("<26x2H", file.read(30))
            file.seek(name_length + extra_length, os.SEEK_CUR)
            checksum = zlib.crc32(file.read(skip))
            if file.readinto(out) != len(out):
                raise EOFError("the file ends too early")
        else:
            with zipfile.ZipFile(file) as archive, archive.open(info) as member:
                content = member.read()
            checksum = zlib.crc32(content[:skip])
            out[:] = np.frombuffer(content, np.uint8, offset=skip)
    if zlib.crc32(out, checksum) != info.CRC:
        raise zipfile.BadZipFile("its checksum is wrong")


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    tensors = {}
    with _damaged(path, "its header"):
        # Opening the file by safetensors validates the header.
        with safe_open(path, "np"):
            content = np.memmap(path, np.uint8, "r")
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            kind, shape = names.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"])
            begin, end = (start + offset for offset in entry["data_offsets"])

            def read(name=name, kind=kind, shape=shape, part=content[begin:end]):
                check_float(path, name, kind)
                # The array is a view of the memory-mapped file. The file is read when the values
                # are used.
                return np.asarray(part.view(np.dtype(kind)).reshape(shape), np.float32)

            tensors[name] = Tensor(shape, kind, read)
    return tensors


def open_sharded(index: Path) -> dict[str, Tensor]:
    """Returns the tensors of all files that a `model.safetensors.index.json` lists."""
    try:
        shards = json.loads(read_small(index))["weight_map"]
        files = set(shards.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is not an index of safetensors files") from error
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(
                f"{index} points outside its folder: {name!r}; this checkpoint is not to be trusted"
            )
    tensors = {}
    for name in sorted(files):
        tensors |= open_tensors(index.parent / name)
    return tensors


def without_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names start with `prefix`; their names lose this prefix."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def check_float(path: Path, name: str, kind: str) -> None:
    """Raises UserError if float32 cannot represent all values of the dtype `kind`."""
    if kind not in _FLOATS:
        raise UserError(
            f"{path}: {name} is of the unsupported type {kind}; supported: {', '.join(_FLOATS)}, "
            "which float32 represents exactly"
        )


@contextlib.contextmanager
def _damaged(path: Path, part: str) -> Iterator[None]:
    """Converts errors within the context, caused by a damaged file, to UserErrors of one line."""
    try:
        yield
    except UserError:
        raise
    except _DAMAGE as error:
        # An error of the operating system, such as a missing permission, does not mean that the
        # file is damaged. Therefore it has its own error message.
        if isinstance(error, OSError) and error.errno:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        detail = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"{path} is damaged or cut short ({part}: {detail}); fetch it again"
        ) from error


def write_npz(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes an uncompressed npz file, as NumPy does."""
    with path.open("wb") as file:
        np.savez(file, **tensors)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes one safetensors file that PyTorch libraries can load."""
    straight = {}
    for name, x in tensors.items():
        straight[name] = np.empty(x.shape, np.float32)
        if x.ndim == 2 and x.flags.f_contiguous:
            transpose_into(straight[name], x.T)
        else:
            straight[name][...] = x
    save_safetensors(path, straight, {"format": "pt"})


def save_safetensors(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes tensors by safetensors' `save_file`, with file permissions that follow the umask."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


def aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Returns an array aligned to 64 bytes, which JAX on a CPU uses without a copy.

    The memory is mapped directly. NumPy would request huge pages, which can take long if the system
    must compact memory.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype, count=math.prod(shape)).reshape(shape)


def transpose_into(out: np.ndarray, x: np.ndarray) -> None:
    """Computes `out[...] = x.T` in strips that fit in the CPU cache, which is five times faster."""
    for start in range(0, len(x), 16):
        out[:, start : start + 16] = x[start : start + 16].T


@contextlib.contextmanager
def whole(destination: Path) -> Iterator[Path]:
    """Yields a temporary path for a file or folder, and renames it to `destination` on exit.

    If an error is raised within the context, the temporary file or folder is removed.

    Raises:
      UserError: the destination exists already, or its parent folder does not exist.
    """
    if destination.exists() or destination.is_symlink():
        raise UserError(
            f"{destination} exists already; give another destination, or remove it first"
        )
    if not destination.parent.is_dir():
        raise UserError(f"there is no folder {destination.parent} to write {destination.name} into")
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        yield temporary / destination.name
        (temporary / destination.name).rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
