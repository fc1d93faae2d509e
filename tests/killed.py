"""main.py killed by SIGKILL at a moment of a save: python tests/killed.py FOLDER MOMENT... prints how each run ended.

Each run is a fork of this process and saves to FOLDER/MOMENT. Under torchrun rank 1 alone is killed.
"""

import os
import re
import shutil
import signal
import sys

import torch
from running import TINY
from torch.distributed.checkpoint import filesystem

import main
from trainer import config as flags
from trainer.checkpoint import save as saver
from trainer.distributed.environment import ranks

MOMENTS = {  # what is about to be called, for which time with a last argument that ends like this; flags
    "first item": (filesystem, "_write_item", 1, "", ""), "an item": (filesystem, "_write_item", 17, "", ""),
    "an item in the background": (filesystem, "_write_item", 17, "", "--save-every=2 --save-async"),
    "train state": (saver, "write_json", 1, "", ""), "manifest": (saver, "write_manifest", 1, "", ""),
    "rename": (os, "rename", 1, r"/step-\d{8}", ""), "after rename": (saver, "sync", 1, "/after rename", ""),
    "second save": (saver, "write_manifest", 2, "", ""),
    "removal": (os, "rename", 1, r"/tmp-step-\d{8}-\w{8}", "--keep 1"),
    "half a removal": (shutil, "rmtree", 1, "", "--keep 1"),
}  # fmt: skip


def plant(where, name: str, nth: int, ending: str) -> None:
    real = getattr(where, name)
    calls = []

    def call(*args, **kwargs):
        calls.extend(re.findall(f"{ending}$", str(args[-1])))
        if len(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(where, name, call)


def run(folder: str, moment: str, kill: bool) -> None:
    *what, more = MOMENTS[moment]
    if kill:
        plant(*what)
    argv = [*TINY, "--save", f"{folder}/{moment}", "--save-every", "2", "--results", f"{folder}/{moment}.jsonl"]
    sys.exit(main.main(flags.parse([*argv, *more.split()]), *ranks()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        run(sys.argv[1], sys.argv[2], kill=os.environ["RANK"] == "1")
    for moment in sys.argv[2:]:
        if (child := os.fork()) == 0:
            run(sys.argv[1], moment, kill=True)
        print(moment, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=": ", flush=True)
