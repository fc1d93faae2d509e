"""A trained model as a folder that from_pretrained() opens: --export of finetune.py, or of a checkpoint afterwards.

    python -m trainer.finetuning.export runs/a OUT --model DIR     # the newest good step of runs/a, as a new folder OUT
    export(config, model, group, between)                          # of a run, all ranks; one tensor at a time on rank 0

Names and dtypes are those of the files in --model, beside which its config, tokenizer and other small files are copied
as they are. safetensors alone, an index if there are several. OUT gets its name when all is in it. Exit codes as
trainer.checkpoint.export.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from gloo import one_worker_thread
from trainer.checkpoint import load as checkpoint
from trainer.checkpoint import weights
from trainer.checkpoint.export import stopped
from trainer.checkpoint.lock import drop, take
from trainer.checkpoint.manifest import CheckpointError, sync
from trainer.data import DataError
from trainer.distributed.control import Signals
from trainer.distributed.terminal import fail
from trainer.finetuning.checks import check_folder, copied, weights_in
from trainer.finetuning.config import Config
from trainer.finetuning.load import own_tensors
from trainer.finetuning.model import HuggingFaceModel, blank_model


def files_of(inner: nn.Module, folder: str) -> dict[str, tuple[str, str, Tensor]]:
    """{name in the files: (name in the model, name by transformers, tensor on the meta device)} of all that is saved of
    `inner`. Dtypes are those of `folder`'s files, without any those of its config; names, too, where old files lack the
    prefix of the model's base. CheckpointError: transformers cannot tell the names."""
    path, usual = weights_in(folder), inner.config.dtype or torch.float32
    stored = {name: region.like.dtype for name, region in weights.table(path).items()} if path else {}
    state = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in own_tensors(inner).items()}
    found, prefix = {}, f"{inner.base_model_prefix}."
    for name, t in state.items():
        for own, made in revert_weight_conversion(inner, {name: t}).items():
            file = own.removeprefix(prefix) if own not in stored and own.removeprefix(prefix) in stored else own
            dtype = stored.get(file, usual) if made.is_floating_point() else made.dtype
            found[file] = name, own, made.to(dtype)
    if {own for _, own, _ in found.values()} != (whole := revert_weight_conversion(inner, state)).keys():
        wrong = sorted({own for _, own, _ in found.values()} ^ whole.keys())
        raise CheckpointError(f"{type(inner).__name__}: {wrong[0]} is made of several tensors, which cannot be written")
    return found


def write_folder(out: str, inner: nn.Module, source: str, whole: Callable[[str], Tensor], shard_gb: float) -> str:
    """Writes the new folder `out`; returns the line to print. whole: gives a tensor of the model, by its name; asked
    for each once, in the order of `files_of`. Raises CheckpointError and DataError; then `out` is not there."""
    out = os.path.normpath(out)  # not OUT/, beside which there would be no temporary folder
    temporary, made = f"{out}.tmp-{secrets.token_hex(4)}", {}
    tensors = files_of(inner, source)

    def read(name: str) -> Tensor:
        model_name, own, _ = tensors[name]
        if own not in made:
            made.clear()
            made.update(revert_weight_conversion(inner, {model_name: whole(model_name)}))
        return made[own].contiguous()

    try:
        if os.path.lexists(out):
            raise CheckpointError(f"{out}: is there already; name a new folder")
        weights.tidy(out)
        os.mkdir(temporary)
        take(temporary)
        for name in copied(source):
            target = os.path.join(temporary, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(os.path.join(source, name), target)
        if json.loads(Path(source, "config.json").read_bytes())["model_type"] != (config := inner.config).model_type:
            config.architectures = [type(inner).__name__]  # a text model, of the folder of one with images
            config.save_pretrained(temporary)
        like = {name: t for name, (*_, t) in tensors.items()}
        files = weights.write(f"{temporary}/model.safetensors", like, read, dict(format="pt"), shard_gb * 1e9)
        drop(temporary)
        os.rename(temporary, out)
        sync(os.path.dirname(os.path.abspath(out)))
    except OSError as error:
        raise CheckpointError(f"{out}: {error.strerror}; it was not written") from error
    finally:
        drop(temporary)
        shutil.rmtree(temporary, ignore_errors=True)
    gib = sum(t.nbytes for t in like.values()) / 2**30
    return f"{out}: {len(like)} tensors, {gib:.2f} GiB in {len(files)} file{'s' * (len(files) > 1)}"


def export(c: Config, model: HuggingFaceModel, group: dist.ProcessGroup | None,
           between: Callable[[], Any] = lambda: None) -> str:  # fmt: skip
    """Writes --export of a run; returns the line to print. A collective: the ranks gather one tensor at a time, which
    rank 0 writes. between: called before each on all ranks. Raises CheckpointError on all ranks."""
    state = own_tensors(model.model)

    def gathered() -> Iterator[Tensor]:
        for t in state.values():
            between()
            yield (t.full_tensor() if isinstance(t, DTensor) else t).cpu()

    tensors = gathered()

    def work() -> str:
        if dist.get_rank() == 0:
            return write_folder(c.export, model.model, c.model, lambda name: next(tensors), c.max_shard_gb)

    try:
        return checkpoint.on_all(lambda: _drained(work, tensors), group, f"{c.export}: ")[0]
    finally:
        tensors.close()


def _drained(work: Callable[[], Any], tensors: Iterator[Tensor]) -> Any:
    """What `work` returns or raises; either way this rank takes part in every gathering."""
    try:
        return work()
    finally:
        for _ in tensors:
            pass


def of_checkpoint(args: argparse.Namespace) -> str:
    """As the command line says; returns the line to print. Raises CheckpointError or DataError."""
    check_folder(args.model, weights=False)
    model = blank_model(args.model)
    one_worker_thread()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # verifying is a collective
    try:
        found = checkpoint.find(args.checkpoint)
        identity, trained = json.loads(json.dumps(model.identity)), found.about.get("model", {})
        if differ := [n for n in sorted(identity.keys() | trained.keys()) if identity.get(n) != trained.get(n)]:
            told = ", ".join(f"{n} {trained.get(n)} ({args.model}: {identity.get(n)})" for n in differ[:3])
            raise CheckpointError(f"{found.path}: is of a model with {told}; name that one's folder")
        saved = {name.removeprefix("model."): [*t.shape] for name, t in checkpoint.parameters(found).items()}
        if differ := [n for n, t in own_tensors(model.model).items() if saved.get(n) != [*t.shape]]:
            raise CheckpointError(f"{found.path}: {differ[0]} is not there as {args.model} has it; name its model")
        with Signals(speak=False) as signals:

            def read(name: str) -> Tensor:
                if signals.got:
                    stopped(args.out, signals.got)
                return checkpoint.read(found, f"model.{name}")

            return write_folder(args.out, model.model, args.model, read, args.max_shard_gb)
    finally:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Exports as the command line says; returns 0, or ends the process with a line and another exit code."""
    parser = argparse.ArgumentParser("python -m trainer.finetuning.export", allow_abbrev=False,
                                     description=__doc__.split("\n")[0])  # fmt: skip
    parser.add_argument("checkpoint", metavar="DIR", help="a step's directory, or one of steps: its newest good one")
    parser.add_argument("out", metavar="OUT", help="a new folder")
    parser.add_argument("--model", required=True, metavar="DIR", help="the folder that finetune.py began with")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB", help="largest size of a file, in 10^9 "
                        "bytes (default: 5)")  # fmt: skip
    args = parser.parse_args(argv)
    if not args.max_shard_gb > 0:
        parser.error(f"--max-shard-gb {args.max_shard_gb}: must be a positive number")
    if not os.path.isdir(args.model):
        parser.error(f"--model {args.model}: is no folder; name the one that finetune.py began with")
    try:
        print(of_checkpoint(args))
    except (DataError, CheckpointError) as error:
        fail(str(error), 0, 3 if isinstance(error, DataError) else 4)
    except KeyboardInterrupt:
        stopped(args.out, signal.SIGINT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
