"""Checkpoints on torch.distributed.checkpoint (DCP): committed as a whole, verified before use, resumed exactly.

    checkpoint = find_checkpoint(config, batches, group, model.identity)    # newest usable step, or None: start fresh
    load(checkpoint, step, group)                                      # in place, into any number of ranks and any mode

A step is a directory of DCP's files, train_state.json and manifest.json (size and CRC-32 of the others). Checksums find
accidents, not forgery, but no file can run code: `.metadata` is unpickled through an allow-list. Random state is not
saved, because no step draws random numbers. Both calls are collectives over `group` (None: the default one).
"""

import hashlib
import json
import os
import pickle
import re
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from trainer.attention_kernel import DTYPES
from trainer.checkpoint.lock import acquire, content, release
from trainer.checkpoint.manifest import CheckpointError, Damaged, Refused, discard, verify
from trainer.config import Config
from trainer.data import Batches, DataError
from trainer.distributed.control import Group
from trainer.step import Step
from trainer.terminal.command_line import flag
from trainer.terminal.output import tell
from trainer.terminal.text import did_you_mean, one_line

KINDS = ("m", "v", "m_scale", "v_scale")  # of moments, as optimizers name them
FORMAT = 1  # of train_state.json; a newer one is refused
STEP = re.compile(r"step-[0-9]{8}")
TEMPORARY = re.compile(r"tmp-step-[0-9]{8}-[0-9a-f]{8}")
ASIDE = re.compile(r"damaged-step-[0-9]{8}-[0-9a-f]{8}")
# Entries that each train_state.json has, and their types.
ENTRIES = dict(format=int, step=int, samples=int, tensors=dict)
# Those that each has but for the ones of --prepared.
OF_RUNS = dict(global_batch=int, world=int, torch=str, training=dict, model=dict, data=dict)
# Those that it may have.
LATER = dict(origin=str, best=(int, float), trackers=dict, run=str, best_step=int)
HELD = "held-out data"
# What a resumed run must keep beside the model's identity, by the names that `_check` uses, and hints for the error.
FIXED = {
    "--seqlen": "",
    "--seed": "",
    "--optimizer": "",
    "--adam-dtype": "--cast converts to another --adam-dtype",
    HELD: "--eval-every above 0 holds out a part of --data, 0 trains on all",
    "--effective-batch": "--grad-accum follows from it and the number of ranks",
}
# All that `.metadata` may name.
ALLOWED = {("torch", name) for name in ("Size", "float32", "bfloat16", "uint8")} | {
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


@dataclass
class TrainState:  # how far a run is
    step: int = 0  # optimizer steps done
    samples: int = 0  # consumed by all ranks together
    origin: str | None = None  # fingerprint of the checkpoint elsewhere at which the run began
    best: float | None = None  # the lowest evaluation loss so far
    trackers: dict[str, str] = field(default_factory=dict)  # id of the run in each
    run: str | None = None  # the name of the run that saved it, as its row has it
    best_step: int | None = None  # the step of `best`

    def as_dict(self) -> dict:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, about: dict) -> "TrainState":
        """From a whole train_state.json, of this program or of an older one. KeyError without step or samples."""
        return cls(
            about["step"],
            about["samples"],
            about.get("origin"),
            about.get("best"),
            {kind: run for kind, run in about.get("trackers", {}).items() if type(run) is str},
            about.get("run"),
            about.get("best_step"),
        )


class Checkpoint(NamedTuple):  # a verified checkpoint, its tensors not yet read
    path: str
    about: dict  # train_state.json
    state: TrainState
    metadata: Metadata  # DCP's


def on_all(work: Callable[[], Any], group: Group = None, what: str = "") -> list:
    """A list of what `work` returns on each rank. If it fails on any rank, all ranks raise the first failure: Refused
    and CheckpointError as they are, others as a CheckpointError that begins with `what`."""
    error = None
    value = None
    try:
        value = work()
    except (Exception, CheckpointException) as e:
        # DCP's is a BaseException, around {rank: (exception, stack)}.
        error = next(iter(e.failures.values()))[0] if isinstance(e, CheckpointException) else e
        if not isinstance(error, CheckpointError | Refused):
            error = CheckpointError(what + one_line(error))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (error, value), group)
    for error, _ in everyone:
        if error is not None:
            raise error
    return [value for _, value in everyone]


def on_rank_0(work: Callable[[], Any], group: Group = None, what: str = "") -> Any:
    """What `work` returns on rank 0, where alone it runs, on all ranks. Raises as `on_all` does."""
    return on_all(lambda: work() if dist.get_rank() == 0 else None, group, what)[0]


def say(text: str) -> None:
    if dist.get_rank() == 0:
        tell(f"checkpoint: {text}")


def steps_in(folder: str) -> list[str]:
    """Names of the committed steps, newest first."""
    return sorted(filter(STEP.fullmatch, os.listdir(folder)), reverse=True)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(
                f"names {module}.{name}, which no checkpoint needs; it was not run"
            )
        return super().find_class(module, name)


def _check_entries(about: dict) -> None:
    """ValueError, naming the entry, for a train_state.json that lacks one or has an odd value."""
    later = {name: kind for name, kind in LATER.items() if name in about}
    for name, kind in (ENTRIES | (OF_RUNS if "source" not in about else {}) | later).items():
        value = about.get(name)
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not fits or isinstance(value, int | float) and not 0 <= value < 2**63:
            raise ValueError(f"{name} is {str(value)[:50]}")
    if "data" in about and not {"description", "fingerprint"} <= about["data"].keys():
        raise ValueError("data lacks its description or fingerprint")
    if (expected := about["step"] * about.get("global_batch", 0)) != about["samples"]:
        raise ValueError(f"samples is {about['samples']}, expected {expected} after so many steps")


def _is_covered(t: TensorStorageMetadata) -> bool:
    """Whether the chunks of a tensor are all of it, each element once: slices along one dimension, as ranks save."""
    size = [*t.size, 1]  # a scalar has a dimension, too
    chunks = sorted(
        ([*chunk.offsets, 0], [*chunk.sizes, 1]) for chunk in t.chunks if 0 not in chunk.sizes
    )
    if not chunks:
        return 0 in size
    along = next((d for d, n in enumerate(size) if chunks[0][1][d] != n), 0)
    start = [0] * len(size)
    slice_size = [*size]
    reached = 0
    for offsets, sizes in chunks:
        start[along] = reached
        slice_size[along] = sizes[along]
        if offsets != start or sizes != slice_size or sizes[along] < 0:
            return False
        reached += sizes[along]
    return reached == size[along]


def _check_chunks(metadata: Metadata, files: dict) -> None:
    """ValueError, naming the tensor, where chunks do not cover it, or files do not hold them."""
    tensors = metadata.state_dict_metadata
    stored = metadata.storage_data
    if bare := [name for name, t in tensors.items() if not _is_covered(t)]:
        raise ValueError(f"the saved chunks do not cover {bare[0]} exactly once")
    chunks = {
        MetadataIndex(name, chunk.offsets) for name, t in tensors.items() for chunk in t.chunks
    }
    if lost := chunks - stored.keys():
        raise ValueError(f"names no file for a chunk of {min(lost, key=str).fqn}")
    if foreign := {info.relative_path for info in stored.values()} - files.keys():
        raise ValueError(f"reads {sorted(foreign)[0]!r}, which is not in the manifest")


def _open(path: str, files: dict) -> Checkpoint:
    """A step whose `files`, those of its manifest, are verified. Raises Damaged; CheckpointError for a newer format."""
    where = os.path.join(path, "train_state.json")
    try:
        about = json.loads(Path(where).read_bytes())
        if about["format"] > FORMAT:
            raise CheckpointError(
                f"{where}: format {about['format']} is newer than {FORMAT}; use a newer program"
            )
        _check_entries(about)
        state = TrainState.from_dict(about)
        if os.path.basename(path) != f"step-{state.step:08d}":
            raise ValueError(f"holds step {state.step}, unlike the name of its folder")
        where = os.path.join(path, ".metadata")
        with open(where, "rb") as file:
            metadata = _Unpickler(file).load()
        if not all(
            isinstance(each, TensorStorageMetadata)
            for each in metadata.state_dict_metadata.values()
        ):
            raise ValueError("holds more than tensors")
        table = {
            name: [list(t.size), str(t.properties.dtype)]
            for name, t in metadata.state_dict_metadata.items()
        }
        if table != about["tensors"]:
            raise ValueError("lists other tensors than train_state.json")
        _check_chunks(metadata, files)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror}") from error
    except Exception as error:  # whatever a strange pickle leads to
        raise Damaged(f"{where}: {one_line(error)}") from error
    return Checkpoint(path, about, state, metadata)


def find_checkpoint(
    config: Config, batches: Batches, group: Group, identity: dict[str, Any]
) -> Checkpoint | None:
    """The step that --resume and --save mean, verified and fit for these flags; None: start fresh. Locks --save until
    `release`, and removes what killed runs left in it. identity: of the LanguageModel that will be loaded.
    Raises CheckpointError, also where --save holds steps later than the one to start from, DataError for other data
    than the checkpoint's, and Refused where another run writes to --save or ranks see different directories."""
    with ExitStack() as undo:
        if config.save is not None:
            undo.callback(release, config.save)
            _claim(config.save, group)
        checkpoint = _find_checkpoint(config, batches, group, identity)
        if checkpoint is None or checkpoint.state.step < config.steps:
            undo.pop_all()  # the run will write: it keeps the lock
    return checkpoint


def _claim(folder: str, group: Group) -> None:
    """Locks --save on rank 0, and checks that all ranks see this lock, whose content no other has. Raises Refused."""
    if said := on_rank_0(partial(acquire, folder), group):
        say(said)
    locks = on_all(partial(content, folder), group)
    if blind := [str(rank) for rank, lock in enumerate(locks) if lock != locks[0]]:
        raise Refused(
            f"--save {folder}: what rank 0 wrote there is not seen by rank {', '.join(blind)}; name a "
            "directory that all nodes share"
        )


def _find_checkpoint(
    config: Config, batches: Batches, group: Group, identity: dict
) -> Checkpoint | None:
    folder = dict(auto=config.save, never=None).get(config.resume, config.resume)
    present, paths, continued = on_rank_0(
        partial(_clean_and_list_steps, config.save, folder), group
    )
    checkpoint = newest(paths, group)
    if checkpoint is not None:
        _check(checkpoint, config, batches, identity)
        if config.keep_best and f"step-{checkpoint.state.best_step or 0:08d}" not in present:
            # It was not kept, or is not in --save.
            checkpoint.state.best = checkpoint.state.best_step = None
        state = checkpoint.state
        if not state.step >= config.steps > 0:  # else the run says that it is done
            say(f"{checkpoint.path}: resuming after step {state.step}, sample {state.samples}")
        if config.save is None or not on_rank_0(
            partial(_within, checkpoint.path, config.save), group
        ):
            checkpoint.state.origin = on_rank_0(partial(_mark, checkpoint.path), group)
            # Several runs may begin here, each of its own in trackers and files.
            checkpoint.state.trackers = {}
            checkpoint.state.run = None
    elif config.resume not in ("auto", "never"):
        raise CheckpointError(
            f"--resume {folder}: holds no checkpoint (step-<8 digits>); name the --save folder of a run"
        )
    elif config.save is not None and not present:
        say(f"none in {config.save}: starting fresh")
    first = f"step-{checkpoint.state.step if checkpoint else 0:08d}"
    later = [name for name in present if name > first]
    if later and not (config.resume == "auto" or continued):
        raise CheckpointError(
            f"--save {config.save}: already holds {later[0]}, a step that this run would write; resume from it "
            "(--resume auto), move it away, or name another folder"
        )
    if later:  # damaged ones: the run will write these steps again, and --keep must not count them
        on_rank_0(partial(_set_aside, config.save, later), group)
    return checkpoint


def _within(path: str, folder: str) -> bool:
    return os.path.samefile(os.path.dirname(path) or ".", folder)


def _mark(path: str) -> str:
    """A fingerprint of a step, from the checksums of its files: the same wherever the step is copied to."""
    return hashlib.blake2b(Path(path, "manifest.json").read_bytes(), digest_size=16).hexdigest()


def _clean_and_list_steps(
    save: str | None, folder: str | None
) -> tuple[list[str], list[str], bool]:
    """Removes unfinished steps from `save`; returns the names of the committed ones, the paths of the steps to resume
    from, and whether these are those of `save` because its run began at a step of `folder`, by the same command."""
    left = sorted(filter(TEMPORARY.fullmatch, os.listdir(save))) if save is not None else []
    if left := [name for name in left if discard(os.path.join(save, name))]:
        say(f"removed {', '.join(left)}, which a run that was stopped left unfinished")
    present = steps_in(save) if save is not None else []
    paths = _offered(folder, "--resume ") if folder is not None else []
    if present and paths and not _within(paths[0], save):  # --keep would remove these
        saved_paths = [os.path.join(save, name) for name in present]
        marks = {_mark(path) for path in paths}
        for path in saved_paths:
            with suppress(Exception):  # a damaged one
                if json.loads(Path(path, "train_state.json").read_bytes()).get("origin") in marks:
                    say(
                        f"the run in {save} began at --resume {folder}; resuming from its own newest step"
                    )
                    return present, saved_paths, True
        raise CheckpointError(
            f"--save {save}: already holds {present[0]}, but --resume names another folder, {folder}; resume from "
            "--save (--resume auto), move its steps away, or save to another folder"
        )
    return present, paths, False


def _set_aside(folder: str, names: list[str]) -> None:
    """Renames damaged steps. Removes those that an earlier start set aside, which would fill the disk in time."""
    for old in filter(ASIDE.fullmatch, os.listdir(folder)):
        discard(os.path.join(folder, old))
    aside = [f"damaged-{name}-{secrets.token_hex(4)}" for name in names]
    for name, new in zip(names, aside, strict=True):
        os.rename(os.path.join(folder, name), os.path.join(folder, new))
    say(f"{folder}: damaged steps renamed to {', '.join(aside)}; the next damage deletes them")


def _offered(folder: str, flag: str = "") -> list[str]:
    """Paths of the steps in `folder`, newest first, or of `folder` itself if that is a step or a link to one."""
    if not os.path.isdir(folder):
        like = did_you_mean(folder, ("auto", "never")) if flag else ""
        raise CheckpointError(f"{flag}{folder}: no such directory{like}")
    for itself in (os.path.normpath(folder), os.path.realpath(folder)):  # "latest", "."
        if STEP.fullmatch(os.path.basename(itself)):
            return [itself]
    return [os.path.join(os.path.normpath(folder), name) for name in steps_in(folder)]


def find(folder: str) -> Checkpoint:
    """The newest good step in a directory of steps, or that step itself, verified. Raises CheckpointError."""
    checkpoint = newest(on_rank_0(partial(_offered, folder)), None)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: holds no checkpoint (step-<8 digits>)")
    return checkpoint


def newest(paths: list[str], group: Group = None) -> Checkpoint | None:
    """The first of these steps whose files are as they were saved; None without paths. Raises Damaged if all are."""
    damaged = []
    for path in paths:
        try:
            checkpoint = _verified(path, group)
        except Damaged as problem:
            damaged.append(problem)
        else:
            for problem in damaged:
                say(f"{problem}; going back to {path}")
            return checkpoint
    if damaged:
        raise damaged[0]


def _verified(path: str, group: Group) -> Checkpoint:
    """Opens a step after checking each of its files on one rank, or on every rank if the nodes have copies of their
    own. Raises Damaged, or CheckpointError where these are not copies of one step."""

    def share() -> tuple[dict, tuple[int, int]]:
        files = verify(path, dist.get_rank(), dist.get_world_size())
        manifest = os.stat(f"{path}/manifest.json")
        # Of one file: the same on all nodes that share it.
        return files, (manifest.st_ino, manifest.st_ctime_ns)

    (files, first), *others = on_all(share, group)
    for rank, (theirs, _) in enumerate(others, 1):
        if theirs != files:
            raise CheckpointError(
                f"{path}: differs between rank 0 and rank {rank}; name a directory that all nodes share, or copy the "
                "same step to each"
            )
    if any(each != first for _, each in others):
        say(f"{path}: ranks see several copies of it; each rank verifies its own")
        on_all(partial(verify, path), group)
    opened = []
    on_all(lambda: opened.append(_open(path, files)), group)
    return opened[0]


def _check(
    checkpoint: Checkpoint, config: Config, batches: Batches, identity: dict[str, Any]
) -> None:
    """Raises CheckpointError or DataError where these flags cannot go on from it; else says which have changed."""
    about = checkpoint.about
    flags = json.loads(json.dumps(asdict(config.training)))
    identity = json.loads(json.dumps(identity))  # as train_state.json gives it back
    before = about["training"]
    saved = about["model"]
    same = {
        flag(k) if k in flags else k: (saved.get(k), identity.get(k))
        for k in sorted(identity.keys() | saved.keys())
    }
    both = {flag(k): (before.get(k), v) for k, v in flags.items() if k != "init"} | same
    both |= {
        "--effective-batch": (about["global_batch"], batches.global_batch),
        HELD: tuple(
            "yes" if every else "no" for every in (before.get("eval_every"), config.eval_every)
        ),
        "torch": (about["torch"], torch.__version__),
        "ranks": (about["world"], dist.get_world_size()),
    }
    changed = {name: f"{name} {old} (now {new})" for name, (old, new) in both.items() if old != new}
    cast = config.cast and "--adam-dtype" in changed
    if fixed := [
        name
        for name in changed
        if name in (*same, *FIXED) and not (cast and name == "--adam-dtype")
    ]:
        differences = ", ".join(changed[name] for name in fixed)
        hints = "; ".join(filter(None, map(FIXED.get, fixed)))
        where = (
            "name another directory in --save" if config.resume == "auto" else "leave out --resume"
        )
        raise CheckpointError(
            f"{checkpoint.path}: was saved with {differences}, which a resumed run must keep"
            + f" ({hints})" * (hints != "")
            + f"; to begin afresh, {where}"
        )
    if about["data"]["fingerprint"] != batches.fingerprint:
        source = config.data if isinstance(config.data, str) else " ".join(config.data)
        raise DataError(
            f"--data {source}: expected the data of {checkpoint.path} ({about['data']['description']}), found "
            f"{batches.description}; give the same files"
        )
    if changed:
        say(f"was saved with {', '.join(changed.values())}; the command line wins")
    if cast:
        say(
            f"--cast: Adam's moments are converted from {about['training']['adam_dtype']} to {config.adam_dtype}"
        )
        for name, entry in about["tensors"].items():
            if name[:2] in ("m.", "v."):
                # What `load` expects; DCP converts what it copies.
                entry[1] = str(DTYPES[config.adam_dtype])


def tensors(step: Step) -> dict[str, Tensor]:
    """What is saved of a step, by name: the model's state dict, moments as "m.<parameter>" and "v.<parameter>",
    and the number of updates as "t". Nothing is copied: filling the tensors fills the model and the optimizer. Moments
    of a sharded parameter are DTensors with its placements, so that DCP reshards them alike."""
    optimizer = step.optimizer
    names = {id(p): name for name, p in step.model.named_parameters()}
    state = dict(step.model.state_dict()) | dict(t=optimizer.t)
    for kind, p, moment in optimizer.moments():
        if isinstance(p, DTensor):
            how = dict(run_check=False, shape=p.shape, stride=p.stride())
            if kind.endswith("_scale"):  # of moments in 8 bits: it has the parameter's rows
                how |= dict(shape=(len(p), *moment.shape[1:]), stride=(moment.shape[1], 1))
            moment = DTensor.from_local(moment, p.device_mesh, p.placements, **how)
        state[f"{kind}.{names[id(p)]}"] = moment
    return state


def table_of(state: dict[str, Tensor]) -> dict[str, list]:
    """{name: [shape, dtype]}, as train_state.json holds it."""
    return {name: [[*t.shape], str(t.dtype)] for name, t in state.items()}


def load(checkpoint: Checkpoint, step: Step, group: Group = None) -> None:
    """Fills parameters, moments and step count of `step` in place. A collective. Raises CheckpointError."""
    state = tensors(step)
    saved = checkpoint.about["tensors"]
    now = table_of(state)
    if differ := sorted(
        name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name)
    ):
        differences = ", ".join(
            f"{name} {saved.get(name)} (now {now.get(name)})" for name in differ[:5]
        )
        raise CheckpointError(
            f"{checkpoint.path}: {len(differ)} tensors differ from what was saved: {differences}"
        )
    on_all(
        partial(dcp.load, state, storage_reader=reader(checkpoint), process_group=group),
        group,
        f"{checkpoint.path}: ",
    )


def reader(checkpoint: Checkpoint) -> dcp.FileSystemReader:
    file_reader = dcp.FileSystemReader(checkpoint.path)
    # Its own would unpickle the file again, without a check.
    file_reader.read_metadata = lambda *_, **__: checkpoint.metadata
    return file_reader


def parameters(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """What the checkpoint holds of the model, without the optimizer's tensors, on the meta device."""
    saved = checkpoint.metadata.state_dict_metadata
    names = [
        name
        for name in saved
        if name != "t" and not (name.partition(".")[0] in KINDS and name.partition(".")[2] in saved)
    ]
    return {
        name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype, device="meta")
        for name in names
    }


def read(checkpoint: Checkpoint, name: str) -> Tensor:
    """A saved tensor, whole, on the CPU. Its largest saved shard is in memory beside it meanwhile."""
    t = checkpoint.metadata.state_dict_metadata[name]
    state = {name: torch.empty(t.size, dtype=t.properties.dtype)}
    on_all(partial(dcp.load, state, storage_reader=reader(checkpoint)), what=f"{checkpoint.path}: ")
    return state[name]
