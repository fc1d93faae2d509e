"""Saves the steps of a run, in the foreground or, with --save-async, in a thread, and keeps the newest of them.

    with Saver(config, step, batches) as saver:     # at the end: waits, raises what a save met, gives the lock back
        saver.save(k)                               # after k steps: DIR/step-00000012, see trainer/checkpoint/load.py
        saver.failed()                              # whether the save in flight has ended with an error

The thread has a copy of this rank's shards in host memory, and a process group of its own. All methods but `failed` are
collectives: what fails on one rank raises on all.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from trainer.checkpoint.load import (
    FORMAT,
    TrainState,
    on_all,
    on_rank_0,
    steps_in,
    table_of,
    tensors,
)
from trainer.checkpoint.lock import release, renew
from trainer.checkpoint.manifest import (
    CheckpointError,
    digest,
    discard,
    sync,
    write_json,
    write_manifest,
)
from trainer.config import Config
from trainer.data import Batches
from trainer.distributed.control import Group, control_group
from trainer.optimizer import local
from trainer.step import Step
from trainer.terminal.output import tell


class Saver(AbstractContextManager):
    """group: for collectives of foreground saves. state: the run's, for its origin. beat: called after each save."""

    def __init__(
        self,
        config: Config,
        step: Step,
        batches: Batches,
        group: Group = None,
        state: TrainState | None = None,
        beat: Callable[[], Any] = lambda: None,
    ):
        self.config = config
        self.step = step
        self.batches = batches
        self.group = group
        self.state = state or TrainState()
        self.beat = beat
        self.thread: ThreadPoolExecutor | None = None
        self.pending: tuple[int, Future] | None = None  # the step in flight
        self.ending = False  # the next save is the last
        self.staged: dict[str, Tensor] = {}
        if config.save is not None and config.save_async:
            self.group = control_group()
            self.thread = ThreadPoolExecutor(1, "save")
            # Not from_local, which would move a DTensor's host memory back to the device of its mesh.
            self.staged = {
                name: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)
                for name, t in tensors(step).items()
            }

    def save(self, k: int) -> None:
        """Saves the state after k steps; returns when it is committed, with --save-async when it is copied. Raises
        CheckpointError; with --save-errors warn only if k is the last step or the run is `ending`."""
        self.wait()
        state = tensors(self.step)
        batches = self.batches
        about = replace(self.state, step=k, samples=batches.sample).as_dict() | dict(
            format=FORMAT,
            global_batch=batches.global_batch,
            training=asdict(self.config.training),
            model=self.step.model.identity,
            torch=torch.__version__,
            world=dist.get_world_size(),
            data=dict(
                description=batches.description,
                fingerprint=batches.fingerprint,
                ends=batches.learned_ends,
            ),
            tensors=table_of(state),
        )
        write = partial(save_step, self.config, f"step-{k:08d}", about, self.group)
        if self.thread is None:
            self._settle(k, partial(write, state))
        else:
            self._stage(state)
            self.pending = k, self.thread.submit(write, self.staged)

    @torch.no_grad()
    def _stage(self, state: dict[str, Tensor]) -> None:
        for name, t in state.items():
            local(self.staged[name]).copy_(local(t), non_blocking=True)
        if any(t.is_cuda for t in state.values()):
            torch.cuda.current_stream().synchronize()

    def _settle(self, k: int, result: Callable[[], Any]) -> None:
        try:
            result()
        except CheckpointError as error:
            if self.config.save_errors == "stop" or k >= self.config.steps or self.ending:
                raise
            if dist.get_rank() == 0:
                tell(f"warning: step {k} was not saved: {error}", sys.stderr)
        finally:
            self.beat()

    def failed(self) -> bool:
        """Whether the save in flight has ended with an error, as far as this rank knows; does not wait."""
        return (
            self.pending is not None
            and self.pending[1].done()
            and self.pending[1].exception() is not None
        )

    def wait(self) -> None:
        """Ends the save in flight; raises as `save` does."""
        if self.pending is not None:
            k, future = self.pending
            wait([future])
            self.pending = None  # not before the wait, which Ctrl-C may interrupt
            self._settle(k, future.result)

    def close(self) -> None:
        """Ends the save in flight, raising what it met, and the thread; gives the lock back. May be called twice."""
        try:
            self.wait()
        finally:
            if self.thread is not None:
                self.thread.shutdown()
                dist.destroy_process_group(self.group)
                self.thread = None
                self.staged = {}
            if self.config.save is not None:
                release(self.config.save)

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        try:
            self.close()
        except CheckpointError as lost:
            if error is None:
                raise
            if dist.get_rank() == 0:  # `error` is what ends the run
                tell(f"warning: {lost}", sys.stderr)


def save_step(
    config: Config, name: str, about: dict, group: Group, state: dict[str, Tensor]
) -> None:
    """Writes and commits a step under --save, then removes older ones (`_commit`). Raises CheckpointError."""
    needs = sum(t.numel() * t.element_size() for t in state.values())
    where = f"{os.path.join(config.save, name)}: "
    temporary = on_rank_0(partial(_begin, config.save, name, needs), group, where)
    try:
        files = {}
        for written in on_all(partial(_write, temporary, state, group), group, where):
            files |= written
        on_rank_0(partial(_commit, config, name, temporary, files, about), group, where)
    except CheckpointError as error:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if "unexpected pos" in str(
            error
        ):  # torch's words for a file that has taken less than it was given
            why = "disk full, or a limit of the size of a file (ulimit -f)"
            raise CheckpointError(f"{where}{why}: {str(error).removeprefix(where)}") from error
        raise


def _begin(folder: str, name: str, needs: int) -> str:
    """A new temporary directory in `folder` for a step of `needs` bytes. CheckpointError: no space, or it exists."""
    renew(folder)
    final = os.path.join(folder, name)
    has = shutil.disk_usage(folder).free
    if os.path.lexists(final):
        raise CheckpointError(
            f"{final}: already exists and is not overwritten; name another --save"
        )
    if needs > has:
        raise CheckpointError(
            f"{final}: disk full: needs {needs / 2**20:.1f} MiB, has {has / 2**20:.1f} MiB"
        )
    temporary = os.path.join(folder, f"tmp-{name}-{secrets.token_hex(4)}")
    os.mkdir(temporary)
    return temporary


def write_tensors(temporary: str, state: dict[str, Tensor], group: Group) -> None:
    """Writes and syncs the files of this rank, on rank 0 `.metadata` as well. A collective over `group`."""
    # Without copying ahead there is no stream to wait for: a thread must not disturb the capture of a CUDA graph.
    writer = dcp.FileSystemWriter(temporary, sync_files=True, per_thread_copy_ahead=0)
    # Its own would put the directory's whole path into `.metadata`.
    writer.storage_meta = lambda: None
    dcp.save(state, storage_writer=writer, process_group=group)
    if dist.get_rank() == 0:
        # Torch syncs it before Python's buffer is flushed.
        sync(os.path.join(temporary, ".metadata"))


def _write(temporary: str, state: dict[str, Tensor], group: Group) -> dict[str, list[int]]:
    """Writes this rank's files and reads them back; returns their {file: [bytes, CRC-32]}."""
    write_tensors(temporary, state, group)
    own = f"__{dist.get_rank()}_"
    return {
        name: digest(os.path.join(temporary, name))
        for name in os.listdir(temporary)
        if name.startswith(own)
    }


def _commit(
    config: Config, name: str, temporary: str, files: dict[str, list[int]], about: dict
) -> None:
    """Completes a step, gives it its name, and removes all but the newest --keep and, with --keep-best the best one.
    files: what all ranks wrote."""
    write_json(os.path.join(temporary, "train_state.json"), about)
    for file in (".metadata", "train_state.json"):
        files[file] = digest(os.path.join(temporary, file))
    for file, (size, _) in files.items():
        if os.stat(os.path.join(temporary, file)).st_size != size:
            raise CheckpointError(
                f"{temporary}/{file}: has another size on the rank that wrote it; name a --save that all ranks share"
            )
    write_manifest(temporary, files)
    renew(config.save)  # a process that was stopped meanwhile may have lost the lock
    os.rename(temporary, os.path.join(config.save, name))
    sync(config.save)
    best = f"step-{about.get('best_step', 0):08d}" if config.keep_best else None
    for old in (each for each in steps_in(config.save)[config.keep :] if each != best):
        # Renamed first: a removal that is killed leaves no half of a step.
        discard(
            os.path.join(config.save, old),
            os.path.join(config.save, f"tmp-{old}-{secrets.token_hex(4)}"),
        )
