"""Weights of a checkpoint, without moments, as one file that other programs read; main.py --init reads it back.

    python -m trainer.checkpoint.export runs/a out.safetensors   # the newest good step; or runs/a/step-00000500
    python -m trainer.checkpoint.export runs/a out.pt            # torch.load("out.pt", weights_only=True)
    python main.py --init out.safetensors                        # step 0 with these weights; --depth etc. as saved

Above --shard-gb, out.safetensors becomes several files and an index, as Hugging Face names them; --init still takes
out.safetensors. Exit codes: 0 done, 2 bad command line or output, 4 a checkpoint that cannot be used or an output that
cannot be written, 130 (143) stopped by Ctrl-C (SIGTERM), OUT as it was. The next export removes what kill -9 leaves.
"""

import argparse
import json
import os
import signal
import sys
from typing import NoReturn

from trainer.checkpoint.manifest import CheckpointError
from trainer.terminal.output import Parser, fail, put


def export(args: argparse.Namespace) -> str:
    """Writes the file or files; returns the line to print. Raises ValueError for a bad output, and CheckpointError."""
    import torch  # not at the top, so that --help is instant
    import torch.distributed as dist

    from gloo import one_worker_thread
    from trainer.checkpoint import load as checkpoint
    from trainer.checkpoint import weights
    from trainer.distributed.control import Signals

    def read(name: str) -> torch.Tensor:
        if signals.got:
            stopped(args.out, signals.got)
        try:
            return checkpoint.read(found, name)
        except CheckpointError as error:
            gone = f"{found.path}: was deleted meanwhile, as --keep of a running job does; export again"
            raise error if os.path.exists(found.path) else CheckpointError(gone) from None

    weights.check_output(args.out, args.overwrite)
    one_worker_thread()
    # Verifying is a collective.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = checkpoint.find(args.checkpoint)
        tensors = checkpoint.parameters(found)
        if args.dtype == "bf16":
            tensors = {name: t.bfloat16() for name, t in tensors.items()}
        # Paths, perhaps.
        training = {k: v for k, v in found.about["training"].items() if k not in ("data", "init")}
        about = {name: str(found.about[name]) for name in ("step", "samples", "torch")}
        about |= dict(format="pt", training=json.dumps(training))
        limit = float("inf") if args.out.endswith(".pt") else args.shard_gb * 1e9
        # Signals wait, so that all files get their names or none does.
        with Signals(speak=False) as signals:
            made = weights.write(args.out, tensors, read, about, limit)
    finally:
        dist.destroy_process_group()
    mib = sum(t.nbytes for t in tensors.values()) / 2**20
    files = f", {len(made) - 1} files and {made[-1]}" if len(made) > 1 else ""
    return f"{args.out}: {len(tensors)} tensors of {found.path}, {mib:.1f} MiB{files}"


def stopped(out: str, signum: int) -> NoReturn:
    fail(f"stopped by {signal.Signals(signum).name}; {out} was not written", 0, 128 + signum)


def main(argv: list[str] | None = None) -> int:
    """Exports as the command line says; returns 0, or ends the process with a line and another exit code."""
    parser = Parser(prog="export", allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument(
        "checkpoint",
        metavar="DIR",
        help="directory of a step, or a directory of steps, of which the newest undamaged one is exported",
    )
    parser.add_argument(
        "out", metavar="OUT", help="file to write; its name ends in .safetensors or .pt"
    )
    parser.add_argument(
        "--shard-gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="largest .safetensors file, in 10^9 bytes; a larger export becomes several files and an index "
        "(default: 5)",
    )
    parser.add_argument(
        "--dtype",
        choices=["saved", "bf16"],
        default="saved",
        help="bf16: round the weights; main.py --init then needs --cast (default: saved)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    args = parser.parse_args(argv)
    if not args.shard_gb > 0:
        parser.error(f"--shard-gb {args.shard_gb}: must be a positive number")
    try:
        put(export(args))
    except (ValueError, CheckpointError) as error:
        fail(str(error), 0, 4 if isinstance(error, CheckpointError) else 2)
    except KeyboardInterrupt:
        stopped(args.out, signal.SIGINT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
