#!/usr/bin/env bash
# A StatefulDataLoader with a generator, resumed without workers, has other batches than the run from the next epoch on.
#
# Seen: With shuffle=True, generator=torch.Generator().manual_seed(3) and num_workers=0 a state that was saved after the
#   second batch gives the right rest of the epoch, and then epochs in other orders than those of the run that was not
#   interrupted; one that was saved after the last batch gives them at once. With two workers, and with num_workers=0
#   without a generator, all epochs agree. The cause: in one process the new iterator draws its base seed from the same
#   generator before the saved state is set, so that the generator is a draw behind afterwards.
# Versions: torch 2.13.0, torchdata 0.11.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: A resumed run that is the run without the interruption, as with workers. The generator is what one passes
#   for that.
# Why it matters: Two runs of the same seed differ if one of them was interrupted, and the rest of an epoch that was
#   interrupted does not show it. Related reports (meta-pytorch/data#1437, #1440, closed) are about other losses.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(torchdata==0.11.0 numpy==2.4.6 torch==2.13.0)
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
import copy
import warnings

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.simplefilter("ignore")


def loader(workers, seeded):
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(3) if seeded else None
    return StatefulDataLoader(range(12), batch_size=2, shuffle=True, generator=generator, num_workers=workers)


def epoch(batches):
    return [row for batch in batches for row in batch.tolist()]


for workers, seeded in ((0, True), (0, False), (2, True), (2, False)):
    whole = loader(workers, seeded)
    epochs = [epoch(whole) for _ in range(4)]
    assert all(sorted(rows) == list(range(12)) for rows in epochs)
    for number in (2, 6):
        first = loader(workers, seeded)
        iterator = iter(first)
        before = epoch(next(iterator) for _ in range(number)) + (epoch(iterator) if number == 6 else [])
        state = copy.deepcopy(first.state_dict())
        resumed = loader(workers, seeded)
        resumed.load_state_dict(state)
        rest = epoch(resumed) if number == 2 else []
        following = [epoch(resumed) for _ in range(3)]
        print(f"workers {workers}, generator {seeded}, saved after batch {number} of 6: ", end="")
        print(f"the epoch as without the interruption {before + rest == epochs[0]}, the next three ", end="")
        print([a == b for a, b in zip(following, epochs[1:], strict=True)])
        assert before + rest == epochs[0]
        assert all(sorted(rows) == list(range(12)) for rows in following)
        assert [a == b for a, b in zip(following, epochs[1:], strict=True)] == 3 * [not (seeded and workers == 0)]
        if seeded and not workers:
            print(f"  the second epoch {epochs[1]}, resumed {following[0]}")
END
"$python" finding.py
