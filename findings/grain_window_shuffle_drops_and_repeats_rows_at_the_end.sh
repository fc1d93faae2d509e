#!/usr/bin/env bash
# In an epoch Grain's WindowShuffleMapDataset leaves rows out and repeats others, unless the window divides their number.
#
# Seen: The class is in grain.experimental. 1000 rows in windows of 300: the last 100 places are shuffled as if they were
#   300, and a place beyond the end gives a row of the beginning, unnoticed. By the seed, 65 to 72 rows never come and as many come twice; in one
#   window of 1500, 228 never come. Windows of 250 give each row once, and so does the window shuffle of an iterator
#   (WindowShuffleIterDataset) with windows of 300. With repeat() the windows run on into the next epoch: after two
#   epochs a row has come once to three times, after three (3000 is a multiple of 300) three times.
# Versions: grain 0.2.18, numpy 2.4.6 on Python 3.11.
# Expected: Each row once an epoch, in a smaller window at the end. The docstring promises a one-to-one mapping.
# Why it matters: A run over its data once, or a set smaller than the window, leaves a part of the rows out and trains on
#   others twice; the length and the number of rows that come are right.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(grain==0.2.18 numpy==2.4.6)
unset PYTHONOPTIMIZE  # the checks are asserts
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
if [ -z "$python" ]; then
    python3 -m venv venv || exit 3
    python=$folder/venv/bin/python
    "$python" -m pip install -q --no-compile "${packages[@]}" || exit 3
fi
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
import collections

import grain
from grain.experimental import WindowShuffleIterDataset, WindowShuffleMapDataset

ROWS = 1000


def source():
    return grain.MapDataset.source(range(ROWS))


def counts(rows):
    """How many rows came how often."""
    seen = collections.Counter(int(row) for row in rows)
    return dict(sorted(collections.Counter(seen[row] for row in range(ROWS)).items()))


def mapped(window, seed=1):
    shuffled = WindowShuffleMapDataset(source(), window_size=window, seed=seed)
    assert len(shuffled) == ROWS, len(shuffled)
    return shuffled


print("by how often they came, the number of rows")
for seed in (0, 1, 2, 3, 4):
    rows = [int(row) for row in mapped(300, seed)]
    strangers = sum(row < 900 for row in rows[900:])
    print(f"seed {seed}: windows of 250 {counts(mapped(250, seed))}, of 300 {counts(rows)}, of other windows {strangers}")
    assert counts(mapped(250, seed)) == {1: ROWS}
    iterated = WindowShuffleIterDataset(source().to_iter_dataset(), window_size=300, seed=seed)
    assert counts(iterated) == {1: ROWS}
    assert sorted(rows[:900]) == list(range(900))
    assert 40 < counts(rows)[0] < 90, counts(rows)
    assert strangers > 40, strangers

large = counts(mapped(1500))
print("one window of 1500:", large)
assert 150 < large[0] < 300, large
twice, thrice = counts(mapped(300).repeat(2)), counts(mapped(300).repeat(3))
print("windows of 300, repeat(2):", twice, "repeat(3):", thrice)
assert set(twice) == {1, 2, 3}, twice
assert thrice == {3: ROWS}, thrice
assert counts(mapped(250).repeat(2)) == {2: ROWS}
END
"$python" finding.py
