"""Checkpoints on torch.distributed.checkpoint (DCP): committed as a whole, verified before use, resumed exactly.

    found = choose(config, batches)            # newest usable step, or None: start fresh
    load(found, step)                          # in place, into any number of ranks and any mode
    save(config, k, step, batches)             # after k steps: DIR/step-00000012

A step's directory holds DCP's files (tensors only: parameters, Adam's moments and step count), train_state.json (what
the run was) and manifest.json (size and CRC-32 of every other file). All of it is written and synced in a temporary
directory, the manifest last, and becomes a checkpoint by one rename; a directory of that name is never written to.
Checksums find accidents, not forgery; but no file here can run code: `.metadata` is unpickled through an allow-list,
tensors by torch's weights_only loader. There is no random state to save: no step draws numbers.

`choose`, `load` and `save` are collectives: what fails on one rank raises on all.
"""

import json
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from trainer.config import Config, flag
from trainer.data import Batches, DataError
from trainer.manifest import CheckpointError, Damaged, digest, sync, verify, write_json, write_manifest
from trainer.sinks import tell

FORMAT = 1  # of train_state.json; a newer one is refused
STEP = re.compile(r"step-[0-9]{8}")
TEMPORARY = re.compile(r"tmp-step-[0-9]{8}-[0-9a-f]{8}")
# What a resumed run must keep, as `_check` calls it; other flags may change, and the line that says so names them.
FIXED = "--depth --width --head-dim --grouping --grow --vocab --seqlen --seed --adam-dtype global-batch".split()
ALLOWED = {("torch", name) for name in ("Size", "float32", "bfloat16")} | {  # all that `.metadata` may name
    ("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata",
      "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
}  # fmt: skip


class Found(NamedTuple):
    path: str
    about: dict  # train_state.json
    metadata: Metadata


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _all(work: Callable[[], Any]) -> list:
    """What `work` returns, of every rank; if it fails on any rank, the first failure as CheckpointError on all."""
    error = value = None
    try:
        value = work()
    except (Exception, CheckpointException) as e:  # DCP's is a BaseException, around {rank: (exception, stack)}
        error = next(iter(e.failures.values()))[0] if isinstance(e, CheckpointException) else e
        error = error if isinstance(error, CheckpointError) else CheckpointError(_line(error))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (error, value))
    for error, _ in everyone:
        if error is not None:
            raise error
    return [value for _, value in everyone]


def _on_rank_0(work: Callable[[], Any]) -> Any:
    return _all(lambda: work() if dist.get_rank() == 0 else None)[0]


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        tell(f"checkpoint: {text}")


def _steps(folder: str) -> list[str]:
    """Names of the committed steps, newest first."""
    return sorted(filter(STEP.fullmatch, os.listdir(folder)), reverse=True)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint needs; it was not run")
        return super().find_class(module, name)


def _open(path: str, files: dict) -> Found:
    """A verified step, its tensors not yet read. Raises Damaged, or CheckpointError for a newer format."""
    where = os.path.join(path, "train_state.json")
    try:
        about = json.loads(Path(where).read_bytes())
        if about["format"] > FORMAT:
            raise CheckpointError(f"{where}: format {about['format']} is newer than {FORMAT}; use a newer program")
        if os.path.basename(path) != f"step-{about['step']:08d}":
            raise ValueError(f"is of step {about['step']}")
        where = os.path.join(path, ".metadata")
        with open(where, "rb") as file:
            metadata = _Unpickler(file).load()
        if not all(isinstance(each, TensorStorageMetadata) for each in metadata.state_dict_metadata.values()):
            raise ValueError("holds more than tensors")
        table = {name: [list(t.size), str(t.properties.dtype)] for name, t in metadata.state_dict_metadata.items()}
        if table != about["tensors"]:
            raise ValueError("differs from the tensors in train_state.json")
        if foreign := {info.relative_path for info in metadata.storage_data.values()} - files.keys():
            raise ValueError(f"reads {sorted(foreign)[0]!r}, which is not in the manifest")
    except CheckpointError:
        raise
    except Exception as error:  # whatever a strange pickle leads to
        raise Damaged(f"{where}: {_line(error)}") from error
    return Found(path, about, metadata)


def choose(c: Config, batches: Batches) -> Found | None:
    """The step that --resume and --save mean, verified and fit for these flags; None: start fresh. Tidies --save.

    Raises CheckpointError, also where --save holds steps later than the start, and DataError for other data."""
    folder = dict(auto=c.save, never=None).get(c.resume, c.resume)
    left, present, paths = _on_rank_0(partial(_look, c.save, folder))
    if left:
        _say(f"removed {', '.join(left)}, which a run that was stopped left unfinished")
    found = _newest(paths)
    if found is not None:
        _check(found, c, batches)
        _say(f"{found.path}: resuming after step {found.about['step']}, sample {found.about['samples']}")
    elif c.resume not in ("auto", "never"):
        raise CheckpointError(f"--resume {folder}: holds no checkpoint (step-<8 digits>)")
    elif c.save is not None:
        _say(f"none in {c.save}: starting fresh")
    first = f"step-{found.about['step'] if found else 0:08d}"
    later = [name for name in present if name > first]
    if later and c.resume != "auto":
        raise CheckpointError(f"--save {c.save}: holds {later[0]}, which this run would come to; continue that one "
                              "(--resume auto), move it away, or save elsewhere")  # fmt: skip
    for name in later:  # damaged ones: the run will write these steps again, and --keep must not count them
        aside = os.path.join(c.save, f"damaged-{name}-{secrets.token_hex(4)}")
        _on_rank_0(partial(os.rename, os.path.join(c.save, name), aside))
    return found


def _look(save: str | None, folder: str | None) -> tuple[list[str], list[str], list[str]]:
    """Unfinished steps in `save`, now removed; the committed ones; the paths of those that `folder` offers."""
    left = sorted(filter(TEMPORARY.fullmatch, os.listdir(save))) if save is not None else []
    for name in left:
        shutil.rmtree(os.path.join(save, name))
    present = _steps(save) if save is not None else []
    if folder is None:
        return left, present, []
    if not os.path.isdir(folder):
        raise CheckpointError(f"--resume {folder}: no such directory")
    folder = os.path.normpath(folder)
    itself = STEP.fullmatch(os.path.basename(folder))
    return left, present, [folder] if itself else [os.path.join(folder, name) for name in _steps(folder)]


def _newest(paths: list[str]) -> Found | None:
    """The first that is as it was saved; None of no paths. If there are some and none is good, raises what is wrong
    with the first: to begin again is not for this program to decide."""
    damaged, opened = [], []
    for path in paths:
        try:
            files = _all(partial(verify, path, dist.get_rank(), dist.get_world_size()))[0]
            _all(lambda path=path, files=files: opened.append(_open(path, files)))
            for problem in damaged:
                _say(f"{problem}; going back to {path}")
            return opened[0]
        except Damaged as problem:
            damaged.append(problem)
    if damaged:
        raise damaged[0]
    return None


def _check(found: Found, c: Config, batches: Batches) -> None:
    """Whether the run of these flags can go on from there; says what changed."""
    about = found.about
    both = {flag(k): (about["training"].get(k), v) for k, v in asdict(c.training).items()}
    both |= {"global-batch": (about["global_batch"], batches.global_batch)}
    both |= {"torch": (about["torch"], torch.__version__), "ranks": (about["world"], dist.get_world_size())}
    changed = {name: f"{name} {old} (now {new})" for name, (old, new) in both.items() if old != new}
    if fixed := [text for name, text in changed.items() if name in FIXED]:
        raise CheckpointError(f"{found.path}: was saved with {', '.join(fixed)}, which a resumed run must keep "
                              "(global-batch: ranks x --batch x --grad-accum)")  # fmt: skip
    if about["data"]["fingerprint"] != batches.fingerprint:
        raise DataError(f"--data {c.data}: expected the data of {found.path} ({about['data']['description']}), found "
                        f"{batches.description}; give the same files")  # fmt: skip
    if changed:
        _say(f"was saved with {', '.join(changed.values())}; what is asked now holds")


def load(found: Found, step) -> None:
    """Fills parameters, moments and step count of a `trainer.step.Step` in place."""
    state = tensors(step)
    saved, now = found.about["tensors"], _table(state)
    differ = sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))
    if differ:
        told = ", ".join(f"{name} {saved.get(name)} (now {now.get(name)})" for name in differ[:5])
        raise CheckpointError(f"{found.path}: {len(differ)} tensors differ from what was saved: {told}")
    reader = dcp.FileSystemReader(found.path)
    reader.read_metadata = lambda *_, **__: found.metadata  # its own would unpickle the file again, without a check
    _all(partial(dcp.load, state, storage_reader=reader))


def tensors(step) -> dict[str, Tensor]:
    """What is saved, by name: the model's state dict, "m.<parameter>", "v.<parameter>" and "t". Nothing is copied:
    moments of a sharded parameter are DTensors of its placements, so that DCP reshards them alike."""
    optimizer = step.optimizer
    names = {id(p): name for name, p in step.bare_model.named_parameters()}
    state = dict(step.bare_model.state_dict()) | dict(t=optimizer.t)
    for p, *moments in zip(optimizer.params, optimizer.m, optimizer.v, strict=True):
        for kind, moment in zip("mv", moments, strict=True):
            if isinstance(p, DTensor):
                how = dict(run_check=False, shape=p.shape, stride=p.stride())
                moment = DTensor.from_local(moment, p.device_mesh, p.placements, **how)
            state[f"{kind}.{names[id(p)]}"] = moment
    return state


def _table(state: dict[str, Tensor]) -> dict[str, list]:
    return {name: [[*t.shape], str(t.dtype)] for name, t in state.items()}


def save(c: Config, k: int, step, batches: Batches) -> None:
    """Writes and commits step k under --save, then removes all but the newest --keep. Raises CheckpointError."""
    state, name = tensors(step), f"step-{k:08d}"
    about = dict(format=FORMAT, step=k, samples=batches.sample, global_batch=batches.global_batch)
    about |= dict(training=asdict(c.training), torch=torch.__version__, world=dist.get_world_size())
    about |= dict(data=dict(description=batches.description, fingerprint=batches.fingerprint), tensors=_table(state))
    temporary = _on_rank_0(partial(_begin, c.save, name, sum(t.numel() * t.element_size() for t in state.values())))
    try:
        files = {}
        for written in _all(partial(_write, temporary, state)):
            files |= written
        _on_rank_0(partial(_commit, c, name, temporary, files, about))
    except CheckpointError:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _begin(folder: str, name: str, needs: int) -> str:
    """A new temporary directory for `needs` bytes."""
    final, has = os.path.join(folder, name), shutil.disk_usage(folder).free
    if os.path.lexists(final):
        raise CheckpointError(f"{final}: is there already and is not written over; save elsewhere")
    if needs > has:
        raise CheckpointError(f"{final}: disk full: needs {needs / 2**20:.1f} MiB, has {has / 2**20:.1f} MiB")
    temporary = os.path.join(folder, f"tmp-{name}-{secrets.token_hex(4)}")
    os.mkdir(temporary)
    return temporary


def _write(temporary: str, state: dict[str, Tensor]) -> dict[str, list[int]]:
    """{file: [bytes, CRC-32]} of the files of this rank, written and synced."""
    writer = dcp.FileSystemWriter(temporary, sync_files=True)
    writer.storage_meta = lambda: None  # its own would put the directory's whole path into `.metadata`
    dcp.save(state, storage_writer=writer)
    own = f"__{dist.get_rank()}_"
    return {name: digest(os.path.join(temporary, name)) for name in os.listdir(temporary) if name.startswith(own)}


def _commit(c: Config, name: str, temporary: str, files: dict[str, list[int]], about: dict) -> None:
    write_json(os.path.join(temporary, "train_state.json"), about)
    for own in (".metadata", "train_state.json"):
        files[own] = digest(os.path.join(temporary, own))
    for file, (size, _) in files.items():
        if os.stat(os.path.join(temporary, file)).st_size != size:
            raise CheckpointError(f"{temporary}/{file}: another rank sees it otherwise; ranks must share --save")
    write_manifest(temporary, files)
    os.rename(temporary, os.path.join(c.save, name))
    sync(c.save)
    for old in _steps(c.save)[c.keep :]:  # under another name first: half of a step must not look like one
        gone = os.path.join(c.save, f"tmp-{old}-{secrets.token_hex(4)}")
        os.rename(os.path.join(c.save, old), gone)
        shutil.rmtree(gone)
