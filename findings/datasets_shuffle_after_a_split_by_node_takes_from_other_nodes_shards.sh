#!/usr/bin/env bash
# A stream shuffled after split_dataset_by_node draws which shards the node has, so that unequal seeds repeat and lose rows.
#
# Seen: split_dataset_by_node(stream, rank, 2).shuffle(seed=rank): the two nodes read some rows twice and some not
#   at all. The split is applied after the shuffle of the order of shards, whatever the order of the calls.
# Versions: datasets 5.2.0 on Python 3.11, on a CPU.
# Expected: That each node shuffles the rows of its own part: the split came first.
# Why it matters: seed=seed + rank is a habit, and so is a shuffle as the last call: part of the data is then never
#   seen, another part counts twice, in another way each epoch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python=${BASE_PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv venv
    python=$folder/venv/bin/python
    install() { "$python" -m pip install -q --no-compile "$@"; }
    install datasets==5.2.0
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor
cat > finding.py <<'END'
import datasets
from datasets.distributed import split_dataset_by_node


def rows(rank, seed):
    stream = datasets.Dataset.from_dict({"a": list(range(12))}).to_iterable_dataset(num_shards=4)
    part = split_dataset_by_node(stream, rank, 2)
    return [row["a"] for row in (part if seed is None else part.shuffle(seed=seed, buffer_size=4))]


found = {}
for name, seeds in (("no shuffle", (None, None)), ("equal seeds", (0, 0)), ("seed = rank", (0, 1))):
    found[name] = [rows(rank, seed) for rank, seed in enumerate(seeds)]
    both = found[name][0] + found[name][1]
    twice = sorted({a for a in both if both.count(a) > 1})
    never = sorted(set(range(12)) - set(both))
    print(f"{name}: node 0 {found[name][0]}, node 1 {found[name][1]}; twice {twice}, never {never}")
    assert bool(twice) == bool(never) == (name == "seed = rank"), found
END
"$python" finding.py
