#!/usr/bin/env bash
# `except Exception` does not catch what torch.distributed.checkpoint raises.
#
# Seen: CheckpointException, which wraps every error of dcp.load and dcp.save (a key that is missing, a full disk),
#   derives from BaseException, beside KeyboardInterrupt and SystemExit. `except Exception` lets it through, so does
#   contextlib.suppress(Exception).
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: An Exception, as torch.load raises.
# Why it matters: `try: dcp.load(..) except Exception: start from scratch`, or a save that must never end the run,
#   ends the run.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python=${BASE_PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv venv
    python=$folder/venv/bin/python
    install() { "$python" -m pip install -q --no-compile "$@"; }
    # PyPI's torch brings gigabytes of CUDA: the CPU build from where pip looks anyway, else from its own index
    install numpy==2.4.6 torch==2.13.0+cpu 2>/dev/null ||
        install --extra-index-url https://download.pytorch.org/whl/cpu numpy==2.4.6 torch==2.13.0
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor
cat > finding.py <<'END'
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

dcp.save({"weight": torch.ones(2)}, checkpoint_id="checkpoint", no_dist=True)


def resumed(caught):
    try:
        dcp.load({"bias": torch.zeros(2)}, checkpoint_id="checkpoint", no_dist=True)
    except caught:
        return "caught"


found = {}
for caught in (Exception, BaseException):
    try:
        found[caught.__name__] = resumed(caught)
    except BaseException as error:
        found[caught.__name__] = f"not caught: {type(error).__name__}"
print("a load that misses a key, under `except ..`:", found)
print("bases:", [each.__name__ for each in CheckpointException.__mro__])
assert found == {"Exception": "not caught: CheckpointException", "BaseException": "caught"}, found
END
"$python" finding.py
