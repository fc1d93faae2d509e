"""Fine-tunes a causal language model of Hugging Face under simple_fsdp.data_parallel, from a folder to a folder.

    python finetune.py --model DIR --data chat.jsonl --export OUT                     # one rank, CPU or GPU
    torchrun --nproc-per-node 4 finetune.py --model DIR --data chat.jsonl --export OUT --micro-batch 2 \\
        --effective-batch 64 --remat-ratio 0.5 --loss chunked --save runs/a           # several
    python finetune.py --model DIR --data chat.jsonl --preview                        # what is learned of an example

Flags, rows, checkpoints and exit codes are main.py's; see --help. Each rank reads its rows of each tensor, stores them
in fp32, and no rank ever holds the whole model. Needs the extra `hf`: pip install -e '.[hf]'.
"""

import os
import signal
import sys

from trainer.distributed.terminal import Progress, fail, ranks, tell
from trainer.finetuning import config
from trainer.finetuning.checks import check_at_once

if __name__ == "__main__":  # before torch is imported: --help and bad flags answer at once
    for NAME, VALUE in (("HF_HUB_OFFLINE", "1"), ("USE_HUB_KERNELS", "NO")):  # all is in --model
        os.environ.setdefault(NAME, VALUE)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C has no traceback; Signals takes over
    RANKS = ranks()
    CONFIG = config.parse(sys.argv[1:], RANKS[0], RANKS[2])
    if RANKS[0] == 0:
        check_at_once(CONFIG, RANKS[2])
    PROGRESS = Progress("importing torch and transformers", speak=RANKS[0] == 0)

from trainer import config as flags
from trainer.data import DataError
from trainer.finetuning.model import blank_model
from trainer.finetuning.run import FineTune, open_data
from trainer.run import execute


def show(c: config.Config, world: int) -> None:
    """Prints an example of --data, with what is learned of it marked."""
    try:
        c = flags.resolve(c, "cpu", world)
        vocab = blank_model(c.model).model.get_input_embeddings().num_embeddings
        tell(open_data(c, vocab).preview(0, color=sys.stdout.isatty()))
    except (ValueError, DataError) as error:
        fail(str(error), 0, 3 if isinstance(error, DataError) else 2)


if __name__ == "__main__":
    with PROGRESS:
        if CONFIG.preview:
            status = show(CONFIG, RANKS[2]) if RANKS[0] == 0 else None
        else:
            status = execute(FineTune, CONFIG, *RANKS, PROGRESS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when another rank has left first
    sys.exit(status)
