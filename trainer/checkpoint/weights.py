"""Files of weights alone: safetensors (one file, or several with an index) and torch's .pt.

    write("out.safetensors", tensors, read, about)      # python -m trainer.checkpoint.export writes a checkpoint so
    load_weights("out.safetensors", model)              # main.py --init: in place, into any layout of the model

Neither holds a whole model: `write` holds the tensors of one file of several, and of a .pt one tensor; `load_weights`
holds this rank's rows of one parameter. The safetensors library and torch.load read files through a map of them, and
write them; no file can run code.
"""

import json
import math
import os
import pickle
import re
import secrets
import shutil
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from trainer.checkpoint.load import Checkpoint, on_all, say
from trainer.checkpoint.lock import acquire, release
from trainer.checkpoint.manifest import CheckpointError, Refused, sync, write_json
from trainer.config import Config
from trainer.distributed.control import Group, agree
from trainer.terminal.text import counted, one_line

# What a .safetensors may hold; those of 8 bits and fewer stand for other values than their own.
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
INDEX = ".index.json"
MAPPED = 16 * 2**20
GLIMPSE = 1024  # bytes at each of four places in each tensor by which ranks compare their files


class Map:
    """Reads files of weights through a map of one of them at a time. What was read counts as memory of the process as
    long as the map is there, so there is a new one after MAPPED bytes."""

    def __init__(self):
        self.path = ""
        self.tensors: dict[str, Tensor] = {}
        self.bytes = 0

    def tensor(self, path: str, name: str) -> Tensor:
        """A tensor of a file, whose bytes are read when it is used."""
        if path != self.path:
            self.close()
            self.tensors = _mapped(path)
            self.path = path
        return self.tensors[name]

    def close(self) -> None:
        self.path = ""
        self.tensors = {}
        self.bytes = 0

    def read(self, path: str, name: str, first: int, shape: tuple[int, ...]) -> Tensor:
        whole = self.tensor(path, name)
        rows = whole[first : first + shape[0]] if shape else whole
        rows = rows.clone(memory_format=torch.contiguous_format)
        self.bytes += rows.nbytes
        if self.bytes > MAPPED:
            self.close()
        return rows


class Region(NamedTuple):  # a tensor in a file
    file: str
    like: Tensor  # on the meta device: shape and dtype
    name: str  # in the file
    map: Map

    def read(self, first: int, shape: tuple[int, ...]) -> Tensor:
        """[*shape] on the CPU: the rows of the tensor from the row `first` on. Reads nothing else of the file."""
        return self.map.read(self.file, self.name, first, shape)


def table(path: str, through: Map | None = None) -> dict[str, Region]:
    """Where each tensor of a .safetensors, its .index.json or a .pt is, and the map through which it is read, by
    default one of its own. Raises CheckpointError, naming the file."""
    through = through or Map()
    if not os.path.exists(path) and os.path.exists(path + INDEX):
        path += INDEX
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path}: is a folder, pipe or device; name a file")
    try:
        if path.endswith(INDEX):
            return _indexed(path, through)
        return {
            name: Region(path, torch.empty_like(t, device="meta"), name, through)
            for name, t in _mapped(path).items()
        }
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: is damaged, cut short or not a safetensors file ({error})"
        ) from error
    except pickle.UnpicklingError as error:
        # Torch's own text would tell the user how to run the code in it.
        raise CheckpointError(
            f"{path}: holds more than tensors, of which nothing was run; save model.state_dict() alone"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {one_line(error, kind=False)}") from error
    except Exception as error:  # whatever strange bytes lead to
        raise CheckpointError(
            f"{path}: is not a file of weights ({one_line(error, 200)})"
        ) from error


def _mapped(path: str) -> dict[str, Tensor]:
    """The tensors of a .safetensors or .pt, mapped: of the file its table is read."""
    with open(path, "rb") as file:  # safetensors would not say why it cannot be opened
        zipped = zipfile.is_zipfile(file)
    if not path.endswith((".pt", ".bin")):
        state = load_file(path)  # which raises SafetensorError unless the header fits
        if strange := [name for name, t in state.items() if t.dtype not in DTYPES]:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(
                f"{strange[0]} is of dtype {_name(state[strange[0]])}; expected one of {known}"
            )
        return state
    if not zipped:
        raise ValueError(
            "is not a file of weights, or has a format older than torch 1.6; save model.state_dict() again"
        )
    with warnings.catch_warnings(action="ignore"):  # of a strange pickle's protocol
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError("holds more than tensors by name; save model.state_dict() alone")
    if bare := [name for name, t in state.items() if t.is_meta]:
        raise ValueError(
            f"{bare[0]} is on the meta device and has no values; save it from a CPU or GPU"
        )
    if sparse := [name for name, t in state.items() if t.layout is not torch.strided]:
        raise ValueError(f"{sparse[0]} is sparse; save it as a dense tensor")
    return {name: t.detach() for name, t in state.items()}


def _indexed(path: str, through: Map) -> dict[str, Region]:
    told = json.loads(Path(path).read_bytes())["weight_map"]
    regions = {}
    for file in sorted(set(told.values())):
        if os.path.basename(file) != file or not file.endswith((".safetensors", ".bin")):
            raise ValueError(
                f"names {file!r}; expected a .safetensors or .bin file in the same folder"
            )
        regions |= table(os.path.join(os.path.dirname(path), file), through)
    there = {name: os.path.basename(region.file) for name, region in regions.items()}
    if wrong := sorted(
        name for name in told.keys() | there.keys() if told.get(name) != there.get(name)
    ):
        raise ValueError(
            f"says that {wrong[0]} is in {told.get(wrong[0], 'no file')}, but it is in "
            f"{there.get(wrong[0], 'no file')}"
        )
    return regions


def initialise(
    config: Config, model: nn.Module, checkpoint: Checkpoint | None, group: Group = None
) -> None:
    """Loads the weights of --init into `model` in place, unless the run goes on from `checkpoint`. Raises, on all
    ranks, CheckpointError for a file that is bad or does not fit, and Desync where ranks see different files."""
    if checkpoint is not None:
        say(f"--init {config.init}: not read, because the run resumes from {checkpoint.path}")
        return
    agree({f"--init {config.init}": glimpse(config.init)}, group)
    number = on_all(partial(load_weights, config.init, model, config.cast), group)[0]
    say(f"--init {config.init}: {listed(number)}; the optimizer starts at zero")


def listed(number: Counter) -> str:
    """Of how many tensors of each dtype, for people."""
    return ", ".join(f"{counted(n, 'tensor')} of {dtype}" for dtype, n in number.items())


def _bytes_of(t: Tensor):
    return t.contiguous().reshape(-1).view(torch.uint8).numpy()


def glimpse(path: str) -> str:
    """What this rank sees at `path`, from the table and some bytes of each tensor; or why it sees nothing."""
    try:
        there = table(path)
        crc = 0
        for name, (file, like, own, through) in there.items():
            crc = zlib.crc32(f"{name} {like.shape} {like.dtype}".encode(), crc)
            content = _bytes_of(through.tensor(file, own))
            for place in range(4):  # from the first bytes to the last
                first = max(0, like.nbytes - GLIMPSE) * place // 3
                crc = zlib.crc32(content[first : first + GLIMPSE], crc)
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
    mismatches = {
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
        for how, n in mismatches.items()
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
            raise CheckpointError(
                f"{region.file}: {name} has values that are not finite in {_name(t)}"
            )
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
        raise ValueError(f"{path}: {folder} is not a directory that can be written")
    if os.path.isdir(path):
        raise ValueError(f"{path}: is a directory; name a file")
    if (there := _outputs(path)) and not overwrite:
        raise ValueError(
            f"{os.path.join(folder, there[0])}: already exists; add --overwrite, or name another file"
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
    several and an index; the tensors of one are in memory at a time. All are complete in a temporary directory before
    they are renamed. Raises CheckpointError."""
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
        acquire(temporary)
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
    except (OSError, RuntimeError, SafetensorError) as error:
        # On a full disk torch.save raises RuntimeError without the reason, safetensors an error of its own.
        text = (
            getattr(error, "strerror", None)
            or f"saving failed, perhaps because the disk is full ({str(error)[:200]})"
        )
        raise CheckpointError(f"{path}: {text}; it was not written") from error
    finally:
        release(temporary)
        shutil.rmtree(temporary, ignore_errors=True)
    return made


def tidy(path: str) -> None:
    """Removes the directories of exports to `path` that were killed. One that is being written is locked and stays."""
    folder = os.path.dirname(path) or "."
    left = re.compile(re.escape(os.path.basename(path)) + r"\.tmp-[0-9a-f]{8}")
    for name in filter(left.fullmatch, os.listdir(folder)):
        with suppress(Refused, CheckpointError):
            acquire(os.path.join(folder, name), patient=False)
            shutil.rmtree(os.path.join(folder, name))
            release(os.path.join(folder, name))
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
    if path.endswith(".pt"):
        _write_pt(path, tensors, read)
    else:
        state = {name: read(name).to(t.dtype).contiguous() for name, t in tensors.items()}
        save_file(state, path, about)
    sync(path)


def _write_pt(path: str, tensors: dict[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """First the file without the tensors' bytes, then those, one tensor at a time: torch.load says where each goes."""
    with FakeTensorMode():
        state = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, path)
    places = torch.load(path, map_location="meta", weights_only=True)
    with open(path, "r+b") as file:
        for name, t in tensors.items():
            file.seek(places[name].untyped_storage()._checkpoint_offset)
            file.write(_bytes_of(read(name).to(t.dtype)))
