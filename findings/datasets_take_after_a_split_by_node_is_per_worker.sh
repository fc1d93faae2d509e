#!/usr/bin/env bash
# take(n) of a stream that was split by node gives n rows per worker of the loader, and n rows in all where it was not split.
#
# Seen: A stream of 4 shards, split_dataset_by_node(.., rank, 2).take(4): 4 rows with no or one worker, 6 (all that
#   the node has) with two. The same stream, not split, gives take(4) = 4 rows with two workers, as it should, but
#   with two workers other rows. take(4) before the split gives other rows with workers than without, too.
# Versions: torch 2.13.0, datasets 5.2.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: 4 rows whatever the number of workers.
# Why it matters: take() makes a validation set: its size and content change with num_workers, so that losses of two
#   runs are not comparable, and rows taken for validation are trained on.
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
    install datasets==5.2.0 numpy==2.4.6 torch==2.13.0+cpu 2>/dev/null ||
        install --extra-index-url https://download.pytorch.org/whl/cpu datasets==5.2.0 numpy==2.4.6 torch==2.13.0
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor
cat > finding.py <<'END'
import datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader


def stream():
    return datasets.Dataset.from_dict({"a": list(range(12))}).to_iterable_dataset(num_shards=4)


def rows(examples, workers):
    return sorted(int(a) for batch in DataLoader(examples, batch_size=2, num_workers=workers) for a in batch["a"])


found = {}
for workers in (0, 1, 2):
    found[workers] = [
        rows(stream().take(4), workers),
        rows(split_dataset_by_node(stream(), 0, 2).take(4), workers),
        [rows(split_dataset_by_node(stream().take(4), rank, 2), workers) for rank in (0, 1)],
    ]
    print(f"{workers} workers: take(4) {found[workers][0]}, split then take(4) {found[workers][1]}, ", end="")
    print(f"take(4) then split {found[workers][2]}")
assert [len(found[workers][0]) for workers in (0, 1, 2)] == [4, 4, 4], found
assert [len(found[workers][1]) for workers in (0, 1, 2)] == [4, 4, 6], found
assert found[0][2] != found[2][2], found
END
"$python" finding.py
