"""Files of weights alone: safetensors (one file, or several with an index) and torch's .pt, one tensor at a time.

    write("out.safetensors", tensors, read, about)      # python -m trainer.checkpoint.export writes a checkpoint so
    load_weights("out.safetensors", model)              # main.py --init: in place, into any layout of the model

Neither holds a whole model: `write` holds one tensor, `load_weights` this rank's rows of one parameter. The safetensors
library and torch's weights_only loader check the headers and give the offsets at which bytes are then read and written
here, as a little-endian machine has them. No file can run code.
"""

import json
import math
import os
import pickle
import re
import secrets
import shutil
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from trainer.checkpoint.load import Found, on_all, say
from trainer.checkpoint.lock import drop, take
from trainer.checkpoint.manifest import CheckpointError, Refused, sync, write_json
from trainer.config import Config
from trainer.distributed.control import Group, agree
from trainer.distributed.terminal import counted, one_line

DTYPES = {  # by safetensors' names
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
INDEX = ".index.json"
GLIMPSE = 1024  # bytes at each of four places in each tensor by which ranks compare their files


class Region(NamedTuple):  # a contiguous tensor in a file
    file: str
    offset: int  # of its first byte
    like: Tensor  # on the meta device: shape and dtype

    def read(self, first: int, shape: tuple[int, ...]) -> Tensor:
        """[*shape] on the CPU: the rows of the tensor from the row `first` on. Reads nothing else of the file."""
        part = torch.empty(shape, dtype=self.like.dtype)
        with open(self.file, "rb") as file:
            file.seek(self.offset + (first and first * self.like[0].nbytes))  # a scalar has no rows
            if file.readinto(_bytes_of(part)) != part.nbytes:
                raise CheckpointError(f"{self.file}: is cut short")
        return part


def _bytes_of(t: Tensor):
    return t.reshape(-1).view(torch.uint8).numpy()


def table(path: str) -> dict[str, Region]:
    """Where each tensor of a .safetensors, its .index.json or a .pt is. Raises CheckpointError, naming the file."""
    if not os.path.exists(path) and os.path.exists(path + INDEX):
        path += INDEX
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path}: is no file, but a folder, pipe or device")
    try:
        return (
            _indexed
            if path.endswith(INDEX)
            else _pt
            if path.endswith((".pt", ".bin"))
            else _safetensors
        )(path)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: is damaged, cut short or no safetensors file ({error})"
        ) from error
    except pickle.UnpicklingError as error:
        # Torch's own text would tell the user how to run the code in it.
        raise CheckpointError(
            f"{path}: holds more than tensors, and nothing of it was run"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {one_line(error, kind=False)}") from error
    except Exception as error:  # whatever strange bytes lead to
        raise CheckpointError(f"{path}: is no file of weights ({one_line(error, 200)})") from error


def _safetensors(path: str) -> dict[str, Region]:
    regions = {}
    # Which raises SafetensorError unless the header fits.
    with open(path, "rb") as file, safe_open(path, "pt"):
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{name} is of dtype {entry['dtype']}; expected one of {', '.join(DTYPES)}"
            )
        like = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")
        regions[name] = Region(path, 8 + size + entry["data_offsets"][0], like)
    return regions


def _indexed(path: str) -> dict[str, Region]:
    told = json.loads(Path(path).read_bytes())["weight_map"]
    regions = {}
    for file in sorted(set(told.values())):
        if os.path.basename(file) != file or not file.endswith((".safetensors", ".bin")):
            raise ValueError(f"names {file!r}, which is no .safetensors beside it")
        regions |= table(os.path.join(os.path.dirname(path), file))
    there = {name: os.path.basename(region.file) for name, region in regions.items()}
    if wrong := sorted(
        name for name in told.keys() | there.keys() if told.get(name) != there.get(name)
    ):
        raise ValueError(
            f"has {wrong[0]} in {told.get(wrong[0])}, but it is in {there.get(wrong[0])}"
        )
    return regions


def _pt(path: str) -> dict[str, Region]:
    with warnings.catch_warnings(action="ignore"):  # of a strange pickle's protocol
        state = torch.load(path, map_location="meta", weights_only=True)
        regions = {}
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError("holds more than tensors by name; save model.state_dict() alone")
    for name, t in state.items():
        offset = t.untyped_storage()._checkpoint_offset
        if offset is None or not t.is_contiguous():
            what = (
                f"{name} is not contiguous"
                if offset is not None
                else "is in a format older than torch 1.6"
            )
            raise ValueError(f"{what}; save it again")
        regions[name] = Region(path, offset + t.storage_offset() * t.itemsize, t)
    return regions


def initialise(c: Config, model: nn.Module, found: Found | None, group: Group = None) -> None:
    """Loads the weights of --init into `model` in place, unless the run goes on from the checkpoint `found`. Raises, on
    all ranks, CheckpointError for a file that is bad or does not fit, and Desync where ranks see different files."""
    if found is not None:
        say(f"--init {c.init}: not read, since {found.path} goes on")
        return
    agree({f"--init {c.init}": glimpse(c.init)}, group)
    number = on_all(partial(load_weights, c.init, model, c.cast), group)[0]
    say(f"--init {c.init}: {listed(number)}; fresh moments")


def listed(number: Counter) -> str:
    """Of how many tensors of each dtype, for people."""
    return ", ".join(f"{counted(n, 'tensor')} of {dtype}" for dtype, n in number.items())


def glimpse(path: str) -> str:
    """What this rank sees at `path`, from the table and some bytes of each tensor; or why it sees nothing."""
    try:
        there = table(path)
        crc = 0
        for name, (path, offset, like) in there.items():
            crc = zlib.crc32(f"{name} {like.shape} {like.dtype}".encode(), crc)
            with open(path, "rb") as file:
                for part in range(4):  # from the first bytes to the last
                    file.seek(offset + max(0, like.nbytes - GLIMPSE) * part // 3)
                    crc = zlib.crc32(file.read(min(GLIMPSE, like.nbytes)), crc)
    except (CheckpointError, OSError) as error:
        return f"nothing ({error})"
    return f"{counted(len(there), 'tensor')} of {sum(r.like.nbytes for r in there.values())} bytes, CRC-32 {crc:08x}"


def load_weights(path: str, model: nn.Module, cast: bool = False) -> Counter:
    """Fills parameters and persistent buffers of `model` in place, each rank reading its own rows; returns how many
    tensors of each dtype the file holds. No collective. The file needs the model's names (one of each parameter),
    shapes and dtypes (with `cast`, any floating ones). Raises CheckpointError, also for what is not finite in them."""
    return fill(path, table(path), model.state_dict(keep_vars=True), cast)


def fill(
    path: str, there: dict[str, Region], state: dict[str, Tensor], cast: bool = False
) -> Counter:
    """`load_weights` of a table of what `path` holds, by the names of `state`, the tensors themselves of a state dict.
    Values of the table have `file`, `like`, `read`."""
    owners = {}  # {id of a tensor: (the tensor, all its names)}
    for name, t in state.items():
        owners.setdefault(id(t), (t.detach(), []))[1].append(name)
    _check(path, there, [*owners.values()], cast)
    for t, names in owners.values():
        _fill(t, {name: there[name] for name in names if name in there})
    return Counter(_name(region.like) for region in there.values())


def _check(
    path: str, there: dict[str, Region], owners: list[tuple[Tensor, list[str]]], cast: bool
) -> None:
    here = {name: t for t, names in owners for name in names}
    both = [(name, there[name].like, t) for name, t in here.items() if name in there]
    told = {
        "missing": [names[0] for _, names in owners if not there.keys() & set(names)],
        "unexpected": sorted(there.keys() - here.keys()),
        "of another shape": [
            f"{n} {[*r.shape]} (the model: {[*t.shape]})" for n, r, t in both if r.shape != t.shape
        ],
        "of another dtype": [
            f"{n} {_name(r)} (the model: {_name(t)}{'; --cast converts' * _floats(r, t)})"
            for n, r, t in both
            if r.dtype != t.dtype and not (cast and _floats(r, t))
        ],
    }
    if problems := [
        f"{counted(len(n), 'tensor')} {how}: {', '.join(map(str, n[:5]))}"
        for how, n in told.items()
        if n
    ]:
        raise CheckpointError(f"{path}: does not fit the model: {'; '.join(problems)}")


def _floats(a: Tensor, b: Tensor) -> bool:
    """Whether --cast converts them: integers, as of a quantised model, stand for other values than their own."""
    return a.is_floating_point() and b.is_floating_point()


def _name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _fill(t: Tensor, regions: dict[str, Region]) -> None:
    local = t
    first = 0
    before = None
    if isinstance(t, DTensor):
        (chunk,) = t.__create_chunk_list__()
        local = t.to_local()
        if chunk.sizes[1:] != t.shape[1:]:
            raise ValueError(f"{next(iter(regions))}: is sharded as {t.placements}; expected rows")
        first = chunk.offsets[0] if t.ndim else 0
    for name, region in regions.items():
        part = region.read(first, tuple(local.shape))
        if (
            part.numel()
            and part.is_floating_point()
            and not all(end.to(t.dtype).isfinite() for end in part.aminmax())
        ):
            raise CheckpointError(f"{region.file}: {name} is not finite in {_name(t)}")
        if before is not None and not torch.equal(part, before):
            other = next(iter(regions))
            raise CheckpointError(
                f"{region.file}: {name} and {other} differ, but are one parameter of the model"
            )
        before = part
    local.copy_(before)


def check_output(path: str, overwrite: bool) -> None:
    """Raises ValueError, in one line, where `write` could not begin or would replace files without `overwrite`."""
    folder = os.path.dirname(path) or "."
    if not path.endswith((".safetensors", ".pt")):
        raise ValueError(f"{path}: must end in .safetensors or .pt")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: {folder} is no directory that can be written")
    if os.path.isdir(path):
        raise ValueError(f"{path}: is a directory; name a file")
    if (there := _outputs(path)) and not overwrite:
        raise ValueError(
            f"{os.path.join(folder, there[0])}: is there already; add --overwrite, or name another"
        )


def _outputs(path: str) -> list[str]:
    """Names of the files that earlier exports to `path` made, an index first."""
    stem, dot, kind = os.path.basename(path).rpartition(".")
    several = "(-[0-9]{5}-of-[0-9]{5})?" if kind == "safetensors" else ""
    pattern = re.compile(f"{re.escape(stem)}{several}{re.escape(dot + kind)}({re.escape(INDEX)})?")
    there = filter(pattern.fullmatch, os.listdir(os.path.dirname(path) or "."))
    return sorted(there, key=lambda name: (not name.endswith(INDEX), name))


def write(
    path: str,
    tensors: dict[str, Tensor],
    read: Callable[[str], Tensor],
    about: dict[str, str],
    shard_bytes: float = math.inf,
) -> list[str]:
    """Writes what `read` returns for each name, replacing what is at `path`; returns the names of the files. tensors:
    their shapes and dtypes, on the meta device. about: the metadata of a .safetensors. Above `shard_bytes` this becomes
    several and an index. All are complete in a temporary directory before they are renamed. Raises CheckpointError."""
    files = _plan(path, tensors, shard_bytes)
    folder = os.path.dirname(path) or "."
    temporary = f"{path}.tmp-{secrets.token_hex(4)}"
    total = sum(t.nbytes for t in tensors.values())
    try:
        tidy(path)
        if total > (has := shutil.disk_usage(folder).free):
            raise CheckpointError(
                f"{path}: disk full: needs {total / 2**20:.1f} MiB, has {has / 2**20:.1f} MiB"
            )
        os.mkdir(temporary)
        take(temporary)
        for file, names in files.items():
            _write_file(
                os.path.join(temporary, file), {name: tensors[name] for name in names}, read, about
            )
        made = list(files)
        if len(made) > 1:
            made.append(os.path.basename(path) + INDEX)
            index = dict(weight_map={name: file for file, names in files.items() for name in names})
            write_json(
                os.path.join(temporary, made[-1]), index | dict(metadata=dict(total_size=total))
            )
        for old in _outputs(path):
            # An index must never name files of two exports.
            if old not in made or old.endswith(INDEX):
                os.remove(os.path.join(folder, old))
        for file in made:
            os.replace(os.path.join(temporary, file), os.path.join(folder, file))
        sync(folder)
    except (OSError, RuntimeError) as error:
        # torch.save raises RuntimeError on a full disk, without the reason.
        text = (
            getattr(error, "strerror", None)
            or f"torch.save failed, as on a full disk ({str(error)[:200]})"
        )
        raise CheckpointError(f"{path}: {text}; it was not written") from error
    finally:
        drop(temporary)
        shutil.rmtree(temporary, ignore_errors=True)
    return made


def tidy(path: str) -> None:
    """Removes the directories of exports to `path` that were killed. One that is being written is locked and stays."""
    folder = os.path.dirname(path) or "."
    left = re.compile(re.escape(os.path.basename(path)) + r"\.tmp-[0-9a-f]{8}")
    for name in filter(left.fullmatch, os.listdir(folder)):
        with suppress(Refused, CheckpointError):
            take(os.path.join(folder, name), patient=False)
            shutil.rmtree(os.path.join(folder, name))
            drop(os.path.join(folder, name))
            say(f"removed {name}, which an export that was killed left unfinished")


def _plan(path: str, tensors: dict[str, Tensor], shard_bytes: float) -> dict[str, list[str]]:
    """{file: names of its tensors}, in order, each file filled until the next tensor would exceed `shard_bytes`."""
    groups = [[]]
    size = 0
    for name, t in tensors.items():
        size += t.nbytes
        if groups[-1] and size > shard_bytes:
            groups.append([])
            size = t.nbytes
        groups[-1].append(name)
    base = os.path.basename(path)
    if len(groups) == 1:
        return {base: groups[0]}
    stem = base.removesuffix(".safetensors")
    return {
        f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": names
        for i, names in enumerate(groups, 1)
    }


def _write_file(
    path: str, tensors: dict[str, Tensor], read: Callable[[str], Tensor], about: dict[str, str]
) -> None:
    """First the file without the tensors' bytes, then those, one tensor at a time, each at its offset."""
    if path.endswith(".pt"):
        with FakeTensorMode():
            state = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, path)
    else:
        names = {dtype: name for name, dtype in DTYPES.items()}
        header = {"__metadata__": about}
        end = 0
        for name, t in tensors.items():
            begin = end
            end = end + t.nbytes
            header[name] = dict(dtype=names[t.dtype], shape=t.shape, data_offsets=[begin, end])
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        Path(path).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + end)
    regions = table(path)
    with open(path, "r+b") as file:
        for name, t in tensors.items():
            file.seek(regions[name].offset)
            file.write(_bytes_of(read(name).to(t.dtype)))
    sync(path)
