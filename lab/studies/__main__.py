"""Runs all studies, one after another; what has its row already is not measured again.

    python -m lab.studies --small                 # on a CPU, under a minute each
    python -m lab.studies --only zero1 pipeline -- --repeat 20 --any-commit

What stands behind `--` is given to each of them. Exit codes: 0, 2 bad flags, else that of the last study that
failed; the others run all the same.
"""

import subprocess
import sys

from lab.studies.study import Parser, names
from trainer.terminal.output import put


def main(argv: list[str]) -> int:
    """Each study is a process of its own: a group, a peak or a broken GPU of one is no other's."""
    parser = Parser(prog="studies", allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument(
        "--only", nargs="+", choices=names(), default=names(), metavar="NAME", help="not all"
    )
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of every study")
    args = parser.parse_args(argv)
    status = 0
    for name in args.only:
        put(f"== {name}")
        done = subprocess.run(
            [sys.executable, "-m", f"lab.studies.{name}", *["--small"] * args.small, *args.flags]
        )
        status = done.returncode or status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
