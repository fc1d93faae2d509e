#!/usr/bin/env bash
# Lhotse's CutSet.infinite_mux draws from a set by its weight times its size: equal weights give 20 and not 50 per cent.
#
# Seen: Of 50'000 draws from sets of 10 and 40 cuts with weights 0.5 and 0.5, 20 per cent come from the first; with 0.9
#   and 0.1, 68; with 10 and 40, the lengths, which the docstring advises for a uniform draw of cuts, 6 in place of 20.
#   CutSet.mux of the repeated sets gives 50, 90 and 20. The weights choose a set to open, which is then read to its
#   end, so its share is weight times size. As the class advises, a data set's weight for each of its shards: 100 and
#   400 shards with 0.5 each give 20 per cent. Sets are opened with replacement, so that of 1000 and 4000 cuts some
#   seeds give in their first 4000 draws not one of the first set, another nothing else. The docstring warns of few
#   draws, but more of them do not help.
# Versions: torch 2.13.0, lhotse 1.33.0, numpy 2.4.6, urllib3 2.8.0 (which lhotse imports) on Python 3.11, on a CPU.
# Expected: Draws by the weights, in the long run at least, and cuts drawn uniformly with the lengths as weights.
# Why it matters: The mix of a training set is another than the one that was asked for, and the small sets, for which
#   one raises the weights, come least.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(lhotse==1.33.0 urllib3==2.8.0 numpy==2.4.6 torch==2.13.0)
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
export OMP_NUM_THREADS=1
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
import itertools

from lhotse import CutSet, MonoCut


def cuts(name, number):
    return CutSet.from_cuts(MonoCut(id=f"{name}-{i}", start=0, duration=1, channel=0) for i in range(number))


def share(mixed, draws):
    """The part of the draws that comes from the sets whose name begins with a."""
    return sum(cut.id.startswith("a") for cut in itertools.islice(mixed, draws)) / draws


a, b = cuts("a", 10), cuts("b", 40)
for weights in ([0.5, 0.5], [0.9, 0.1], [10, 40]):
    wanted = weights[0] / sum(weights)
    by_size = weights[0] * 10 / (weights[0] * 10 + weights[1] * 40)
    plain = share(CutSet.mux(a.repeat(), b.repeat(), weights=weights, seed=0), 50_000)
    infinite = [share(CutSet.infinite_mux(a, b, weights=weights, seed=seed), 50_000) for seed in range(3)]
    single = share(CutSet.infinite_mux(a, b, weights=weights, seed=0, max_open_streams=1), 50_000)
    print(f"10 and 40 cuts by {weights}: mux {plain:.3f}, infinite_mux by seed {infinite}, one open {single:.3f}")
    assert abs(plain - wanted) < 0.01, plain
    assert all(abs(value - by_size) < 0.03 for value in [*infinite, single]), (infinite, single)
    assert abs(wanted - by_size) > 0.1

shards = [cuts(f"a{i}", 10) for i in range(100)] + [cuts(f"b{i}", 10) for i in range(400)]
value = share(CutSet.infinite_mux(*shards, weights=[0.5] * 500, seed=0, max_open_streams=20), 20_000)
print(f"100 and 400 shards of 10 cuts, weight 0.5 each: {value:.3f}")
assert abs(value - 0.2) < 0.05, value

a, b = cuts("a", 1000), cuts("b", 4000)
first = [share(CutSet.infinite_mux(a, b, weights=[0.5, 0.5], seed=seed), 4000) for seed in range(20)]
print(f"1000 and 4000 cuts, the first 4000 draws by seed: {first}")
assert 0 in first and 1 in first, first
assert all(0.45 < share(CutSet.mux(a.repeat(), b.repeat(), weights=[0.5, 0.5], seed=i), 4000) < 0.55 for i in range(5))
END
"$python" finding.py
