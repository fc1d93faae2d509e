#!/usr/bin/env bash
# After split_dataset_by_node, take(n) yields n rows per DataLoader worker that has shards; without the split n in all.
#
# Seen: A stream of 24 rows in 4 shards, of which one of two nodes has 12 rows: split_dataset_by_node(.., 0,
#   2).take(2) gives 2 rows with no worker and with one, and 4 rows with two and with three workers: the third has no
#   shard. The same stream, not split, gives take(2) = 2 rows with no, one, two and three workers. take() is not
#   divided among workers once the stream is split by node.
# Versions: torch 2.13.0, datasets 5.2.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: 2 rows whatever the number of workers.
# Why it matters: The size of a validation set made with take() depends on num_workers.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(datasets==5.2.0 numpy==2.4.6 torch==2.13.0)
unset PYTHONOPTIMIZE  # the checks are asserts
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
if [ -z "$python" ]; then
    python3 -m venv venv || exit 3
    python=$folder/venv/bin/python
    install() { "$python" -m pip install -q --no-compile "$@"; }
    # PyPI's torch brings gigabytes of CUDA: the CPU build (+cpu goes to torch, the last package)
    # from where pip looks anyway, else from its own index; then pip's error about the first is no failure
    install "${packages[@]}+cpu" ||
        install --extra-index-url https://download.pytorch.org/whl/cpu "${packages[@]}" || exit 3
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor
"$python" - "${packages[@]}" <<'END'
import importlib.metadata
import sys

for pinned in sys.argv[1:]:
    name, version = pinned.split("==")
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        installed = "not installed"
    print(name, installed)
    if installed.split("+")[0] != version:
        print(f"this program is about {name} {version}", file=sys.stderr)
        sys.exit(3)
END
cat > finding.py <<'END'
import datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader


def stream():
    return datasets.Dataset.from_dict({"a": list(range(24))}).to_iterable_dataset(num_shards=4)


def rows(examples, workers):
    return sorted(int(a) for batch in DataLoader(examples, batch_size=2, num_workers=workers) for a in batch["a"])


if __name__ == "__main__":  # workers may be started by spawn, which imports this file
    whole, split = {}, {}
    for workers in (0, 1, 2, 3):
        whole[workers] = rows(stream().take(2), workers)
        split[workers] = rows(split_dataset_by_node(stream(), 0, 2).take(2), workers)
        print(f"{workers} workers: take(2) {whole[workers]}, split then take(2) {split[workers]}")
    node = rows(split_dataset_by_node(stream(), 0, 2), 0)
    print(f"the node has {len(node)} rows")
    assert [len(whole[workers]) for workers in (0, 1, 2, 3)] == [2, 2, 2, 2], whole
    assert [len(split[workers]) for workers in (0, 1, 2, 3)] == [2, 2, 4, 4], split
    assert len(node) == 12, node
END
"$python" finding.py
