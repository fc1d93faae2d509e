"""A trained model as a folder that from_pretrained() opens: --export of finetune.py, or of a checkpoint afterwards.

    python -m trainer.finetuning.export runs/a OUT --model DIR     # the newest good step of runs/a, as a new folder OUT
    export(config, model, group, check_for_stop)                   # of a run, all ranks; one file at a time on rank 0

Names and dtypes are those of the files in --model, beside which its config, tokenizer and other small files are copied
as they are; the tokens that end what was learned become stop tokens there. safetensors alone, an index if there are
several. OUT gets its name when all is in it. Exit codes as trainer.checkpoint.export.
"""

import argparse
import json
import math
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from gloo import one_worker_thread
from trainer.checkpoint import load as checkpoint
from trainer.checkpoint import weights
from trainer.checkpoint.export import stopped
from trainer.checkpoint.lock import acquire, release
from trainer.checkpoint.manifest import CheckpointError, sync
from trainer.data import DataError
from trainer.distributed.control import Signals
from trainer.finetuning import end_tokens
from trainer.finetuning.adapter_settings import SETTINGS
from trainer.finetuning.checks import check_folder, copied, weights_in
from trainer.finetuning.config import Config
from trainer.finetuning.load import base_tensors, files_of, own_tensors, renamed
from trainer.finetuning.model import HuggingFaceModel, blank_model
from trainer.terminal.output import Parser, fail, put


def write_folder(
    out: str,
    source: str,
    file: str,
    like: dict[str, Tensor],
    read: Callable[[str], Tensor],
    shard_gb: float,
    small: Iterable[str],
    finish: Callable[[str], Any],
) -> str:
    """Writes the new folder `out`; returns the line to print. file: that of the tensors; small: the names of the files
    of `source` that are copied; finish: called with the folder's path before it has its name. Raises CheckpointError
    and DataError; then `out` is not there."""
    out = os.path.normpath(out)  # not OUT/, beside which there would be no temporary folder
    temporary = f"{out}.tmp-{secrets.token_hex(4)}"
    try:
        if os.path.lexists(out):
            raise CheckpointError(f"{out}: already exists; name a new folder")
        weights.tidy(out)
        os.mkdir(temporary)
        acquire(temporary)
        for name in small:
            target = os.path.join(temporary, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(os.path.join(source, name), target)
        finish(temporary)
        files = weights.write(f"{temporary}/{file}", like, read, dict(format="pt"), shard_gb * 1e9)
        release(temporary)
        os.rename(temporary, out)
        sync(os.path.dirname(os.path.abspath(out)))
    except OSError as error:
        raise CheckpointError(f"{out}: {error.strerror}; it was not written") from error
    finally:
        release(temporary)
        shutil.rmtree(temporary, ignore_errors=True)
    mib = sum(t.nbytes for t in like.values()) / 2**20
    size = f"{mib / 2**10:.2f} GiB" if mib > 100 else f"{mib:.1f} MiB"
    return f"{out}: {len(like)} tensors, {size} in {len(files)} file{'s' * (len(files) > 1)}"


def write_model(
    out: str,
    inner: nn.Module,
    source: str,
    whole: Callable[[str], Tensor],
    shard_gb: float,
    ends: dict[str, int],
) -> str:
    """A new folder with all of a model, as `write_folder`. whole: gives a tensor of the model, by its name without
    adapters; asked for each once, in the order of `own_tensors`. ends: tokens at which generation shall stop, too."""
    tensors = files_of(inner, source)
    made = {}

    def read(name: str) -> Tensor:
        model_name, own, _ = tensors[name]
        if own not in made:
            made.clear()
            made.update(revert_weight_conversion(inner, {model_name: whole(model_name)}))
        return made[own].contiguous()

    def finish(folder: str) -> None:
        if (
            json.loads(Path(source, "config.json").read_bytes())["model_type"]
            != (config := inner.config).model_type
        ):
            # A text model, of the folder of one with images.
            config.architectures = [type(inner).__name__]
            config.save_pretrained(folder)
        if new:
            end_tokens.write(folder, inner.config, stops, new)

    stops = end_tokens.stop_tokens(source, inner.config)
    new = end_tokens.not_stopping(stops, ends)
    like = {name: t for name, (*_, t) in tensors.items()}
    line = write_folder(
        out, source, "model.safetensors", like, read, shard_gb, copied(source), finish
    )
    said = f"; {end_tokens.in_words(new)} ends trained turns and is now a stop token, too"
    return line + said * bool(new)


def write_adapters(
    out: str,
    model: HuggingFaceModel,
    source: str,
    whole: Callable[[str], Tensor],
    ends: dict[str, int],
) -> str:
    """A new folder with the adapters as peft saves them, and the tokenizer's files, as `write_folder`. whole: gives an
    adapter's tensor by its name in the model; asked for each once, in the order of the model. ends: tokens that end
    what was learned; where the model itself does not stop at them, the line says so."""
    from trainer.finetuning.adapters import saved

    made = saved(model, source)
    small = [
        name for name in copied(source) if name not in ("config.json", "generation_config.json")
    ]

    def read(name):
        return whole(made.names[name]).clone()  # a tied weight is in the file under each name

    def finish(folder):
        Path(folder, SETTINGS).write_text(made.settings)

    line = write_folder(
        out, source, "adapter_model.safetensors", made.tensors, read, math.inf, small, finish
    )
    stops = end_tokens.stop_tokens(source, model.model.config)
    new = end_tokens.not_stopping(stops, ends)
    said = f"; answers end with {end_tokens.in_words(new)}, at which the base model does not stop; call "
    return line + (said + end_tokens.call(stops, new)) * bool(new)


def export(
    config: Config,
    model: HuggingFaceModel,
    group: dist.ProcessGroup | None,
    check_for_stop: Callable[[], Any] = lambda: None,
    ends: dict[str, int] | None = None,
) -> str:
    """Writes --export of a run; returns the line to print. A collective: the ranks gather one tensor at a time; rank 0
    holds those of one file. check_for_stop: called before each on all ranks. ends: tokens that end what was learned,
    {text: id}. Raises CheckpointError on all ranks."""
    ends = ends if ends and not config.keep_eos else {}
    inner = model.model
    alone = bool(config.lora and not config.merge)
    adapters = model.saved_with_adapters() if config.lora else {}
    state = adapters if alone else own_tensors(inner)

    def whole(t: Tensor) -> Tensor:
        return t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()

    def gathered() -> Iterator[Tensor]:
        for name, t in state.items():
            check_for_stop()
            tensor = whole(t)
            yield (
                merged(inner, name, tensor, lambda own: whole(adapters[own]))
                if config.merge
                else tensor
            ).cpu()

    if config.merge:
        from trainer.finetuning.adapters import merged

    tensors = gathered()

    def work() -> str:
        if dist.get_rank() > 0:
            return ""
        if alone:
            return write_adapters(
                config.export, model, config.model, lambda name: next(tensors), ends
            )
        size = config.max_shard_gb
        return write_model(
            config.export, inner, config.model, lambda name: next(tensors), size, ends
        )

    try:
        return checkpoint.on_all(lambda: _drained(work, tensors), group, f"{config.export}: ")[0]
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
    check_folder(args.model, weights=args.merge)
    model = blank_model(args.model)
    one_worker_thread()
    # Verifying is a collective.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        saved_step = checkpoint.find(args.checkpoint)
        trained = saved_step.about.get("model", {})
        lora = trained.get("lora")
        if args.merge and not lora:
            raise CheckpointError(
                f"{saved_step.path}: was saved by a run without --lora; leave out --merge"
            )
        if lora:
            from trainer.finetuning import adapters

            if args.merge and trained["frozen"] == adapters.DRAWN:
                raise CheckpointError(
                    f"{saved_step.path}: the frozen weights were random and were not saved; leave out --merge"
                )
            how = {name: value for name, value in trained.items() if name in adapters.FLAGS}
            adapters.attach(model, args.model, random=trained["frozen"] == adapters.DRAWN, **how)
        identity = json.loads(json.dumps(model.identity))
        if differ := [
            n for n in sorted(identity.keys() | trained.keys()) if identity.get(n) != trained.get(n)
        ]:
            differences = ", ".join(
                f"{n} {trained.get(n)} ({args.model}: {identity.get(n)})" for n in differ[:3]
            )
            raise CheckpointError(
                f"{saved_step.path}: comes from a model with {differences}; name its folder by --model"
            )
        saved = {
            name.removeprefix("model."): [*t.shape]
            for name, t in checkpoint.parameters(saved_step).items()
        }
        inner = model.model
        own = model.saved_with_adapters() if lora else own_tensors(inner)
        if differ := [n for n, t in own.items() if saved.get(n) != [*t.shape]]:
            raise CheckpointError(
                f"{saved_step.path}: lacks {differ[0]} in the shape of {args.model}; name its model by --model"
            )
        with Signals(speak=False) as signals:

            def read(name: str) -> Tensor:
                if signals.got:
                    stopped(args.out, signals.got)
                return checkpoint.read(saved_step, f"model.{name}")

            ends = {} if args.keep_eos else saved_step.about.get("data", {}).get("ends", {})
            if not lora:
                return write_model(args.out, inner, args.model, read, args.max_shard_gb, ends)
            if not args.merge:
                return write_adapters(args.out, model, args.model, read, ends)
            path = weights_in(args.model)
            there = renamed(path, weights.table(path), inner)
            tensors = base_tensors(inner)
            # A tied weight has several names.
            regions = {id(tensors[name]): region for name, region in there.items()}

            def whole(name: str) -> Tensor:
                if name in own:  # trained whole
                    return read(name)
                region = regions[id(tensors[name])]
                return adapters.merged(inner, name, region.read(0, tuple(region.like.shape)), read)

            return write_model(args.out, inner, args.model, whole, args.max_shard_gb, ends)
    finally:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Exports as the command line says; returns 0, or ends the process with a line and another exit code."""
    parser = Parser(
        "python -m trainer.finetuning.export",
        allow_abbrev=False,
        description=__doc__.split("\n")[0],
    )
    parser.add_argument(
        "checkpoint",
        metavar="DIR",
        help="directory of a step, or a directory of steps, of which the newest undamaged one is exported",
    )
    parser.add_argument("out", metavar="OUT", help="new folder to write")
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="folder that finetune.py had as --model"
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="after --lora: write the whole model with the adapters merged, instead of the adapters",
    )
    parser.add_argument(
        "--keep-eos",
        action="store_true",
        help="leave the stop tokens (eos_token_id) as in --model; by default the token that ends trained turns "
        "is added",
    )
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="largest file, in 10^9 bytes (default: 5)",
    )
    args = parser.parse_args(argv)
    if not args.max_shard_gb > 0:
        parser.error(f"--max-shard-gb {args.max_shard_gb}: must be a positive number")
    if not os.path.isdir(args.model):
        parser.error(
            f"--model {args.model}: is not a folder; name the one that finetune.py had as --model"
        )
    try:
        put(of_checkpoint(args))
    except (DataError, CheckpointError) as error:
        fail(str(error), 0, 3 if isinstance(error, DataError) else 4)
    except KeyboardInterrupt:
        stopped(args.out, signal.SIGINT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
