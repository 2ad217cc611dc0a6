"""Files of named tensors: npz and safetensors. Nothing is ever unpickled."""

import contextlib
import json
import math
import shutil
import struct
import tempfile
import threading
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

# Every one of them fits into float32 without loss.
_FLOATS = ("float32", "float16", "bfloat16")
_PICKLE = (
    "it is a pickle, which can run any code and is never read; "
    "convert it to safetensors where it comes from (safetensors.torch.save_file)"
)
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    SafetensorError,
    EOFError,
    NotImplementedError,
    ValueError,
    KeyError,
    OSError,
)


class Tensor(NamedTuple):
    """A tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]  # Float32, of that shape. May be called from any thread.


def open_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; their values stay on disk.

    Raises:
      UserError: the file is missing, damaged, or of a kind that is not read, such as a pickle.
    """
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if path.suffix == ".npz" or (start[:4] == b"PK\x03\x04" and path.suffix not in (".pt", ".pth", ".bin")):
        if start[:4] != b"PK\x03\x04":
            raise UserError(f"{path} is not an npz file: {_what(start)}")
        return _open_npz(path)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return _open_safetensors(path)
    raise UserError(f"{path} is neither npz nor safetensors: {_what(start)}")


def _what(start: bytes) -> str:
    if start[:1] == b"\x80" or start[:4] == b"PK\x03\x04":
        return _PICKLE
    return "it starts with " + repr(start[:8])


def _open_npz(path: Path) -> dict[str, Tensor]:
    local = threading.local()  # A zip file handle for each thread.

    def archive():
        if not hasattr(local, "archive"):
            local.archive = zipfile.ZipFile(path)
        return local.archive

    def reader(member, shape, dtype, fortran):
        def read():
            with _damaged(path, member), archive().open(member) as file:
                _npy_header(file)
                array = np.empty(math.prod(shape), dtype)
                buffer, done = memoryview(array.view(np.uint8)), 0
                while done < len(buffer):
                    count = file.readinto(buffer[done:])
                    if not count:
                        raise EOFError
                    done += count
                file.read()  # To the end, where the checksum is compared.
            array = array.reshape(shape, order="F" if fortran else "C")
            return np.asarray(_from_void(array), np.float32)

        return read

    tensors = {}
    with _damaged(path, "its list of arrays"):
        for member in archive().namelist():
            if not member.endswith(".npy"):
                what = _PICKLE if member.endswith(".pkl") else f"it holds {member!r}"
                raise UserError(f"{path} is not an npz file of arrays: {what}")
            with archive().open(member) as file:
                shape, fortran, dtype = _npy_header(file)
            name = member.removesuffix(".npy")
            if dtype.hasobject:
                raise UserError(f"{path} holds Python objects in {name}: {_PICKLE}")
            kind = "bfloat16" if dtype == np.dtype("V2") else dtype.name
            _check_float(path, name, kind)
            tensors[name] = Tensor(shape, kind, reader(member, shape, dtype, fortran))
    return tensors


def _npy_header(file) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _from_void(array: np.ndarray) -> np.ndarray:
    """NumPy writes bfloat16 as two bytes without a meaning."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    tensors = {}
    with _damaged(path, "its header"):
        file = safe_open(path, "np")
        for name in file.keys():  # noqa: SIM118
            view = file.get_slice(name)
            kind = names.get(view.get_dtype(), view.get_dtype())
            _check_float(path, name, kind)

            def read(name=name):
                with _damaged(path, name):
                    return np.asarray(file.get_tensor(name), np.float32)

            tensors[name] = Tensor(tuple(view.get_shape()), kind, read)
    return tensors


def open_sharded(index: Path) -> dict[str, Tensor]:
    """The tensors of all files that a `model.safetensors.index.json` names, which lie beside it."""
    try:
        shards = json.loads(index.read_text())["weight_map"]
        files = set(shards.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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


def _check_float(path: Path, name: str, kind: str) -> None:
    if kind not in _FLOATS:
        raise UserError(
            f"{path}: {name} is of type {kind}; read are {', '.join(_FLOATS)}, which float32 holds exactly"
        )


@contextlib.contextmanager
def _damaged(path: Path, part: str) -> Iterator[None]:
    """Turns what the readers raise on damaged files into one line."""
    try:
        yield
    except UserError:
        raise
    except _DAMAGE as error:
        detail = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"{path} is damaged or cut short ({part}: {detail}); fetch it again") from error


def write_npz(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """An uncompressed npz file, as NumPy writes it."""
    with path.open("wb") as file:
        np.savez(file, **tensors)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file that PyTorch libraries take as theirs."""
    straight = {
        name: transposed(x.T) if x.ndim == 2 and x.flags.f_contiguous else np.ascontiguousarray(x)
        for name, x in tensors.items()
    }
    save_file(straight, path, metadata={"format": "pt"})


def transposed(x: np.ndarray) -> np.ndarray:
    """`x.T` in memory, strip by strip, which a cache likes five times better than all at once."""
    out = np.empty(x.shape[::-1], x.dtype)
    for start in range(0, len(x), 16):
        out[:, start : start + 16] = x[start : start + 16].T
    return out


@contextlib.contextmanager
def whole(destination: Path) -> Iterator[Path]:
    """A path to write to, which becomes `destination` at the end, or leaves nothing behind.

    Raises:
      UserError: the destination exists, or its folder does not.
    """
    if destination.exists() or destination.is_symlink():
        raise UserError(f"{destination} exists already; give another destination, or remove it first")
    if not destination.parent.is_dir():
        raise UserError(f"there is no folder {destination.parent} to write {destination.name} into")
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        yield temporary / destination.name
        (temporary / destination.name).rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
