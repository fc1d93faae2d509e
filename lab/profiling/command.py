"""The command lines of the tools about simulated ranks, which take main.py's flags beside their own. Imports no torch.

parser = tool("lab.profiling.peak", __doc__)
parser.add_argument("--kernels", type=int)
own, config = parse_tool(parser)
"""

import argparse

from trainer.config import Config, parse, resolve
from trainer.terminal.output import Parser, fail


def tool(name: str, doc: str) -> argparse.ArgumentParser:
    """The parser of a command that takes main.py's flags beside its own: `python -m NAME`, about simulated ranks."""
    parser = Parser(
        f"python -m {name}",
        description=doc,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags are main.py's: python main.py --help lists them.",
    )
    parser.add_argument(
        "--world", type=int, default=8, metavar="INT", help="number of ranks (default: 8)"
    )
    return parser


def parse_tool(
    parser: argparse.ArgumentParser, gpu: bool = False
) -> tuple[argparse.Namespace, Config]:
    """The flags of such a command, its own and main.py's. Ends the process with exit code 2 for bad ones; gpu: also for
    those that do not fit together on a GPU, unless --device cpu is among them."""
    arguments, others = parser.parse_known_args()
    if arguments.world < 1:
        parser.error(f"--world {arguments.world}: must be at least 1")
    config = parse(others)
    try:
        if gpu and config.device != "cpu":
            resolve(config, "cuda", arguments.world)
    except ValueError as e:
        fail(str(e), 0)
    return arguments, config
