#!/usr/bin/env bash
# In Keras' first fit() over a PyDataset with two workers epochs begin late, and a longer epoch lacks rows.
#
# Seen: Ten batches, three epochs: 1 to 9 and then 0, three times. Each epoch ends with the first batch of the next
#   round. Of 30 batches the first epoch lacks some and has others twice: the batches that were prefetched, as many as
#   the queue holds (max_queue_size, 10), come first, and then the data set from its beginning. Where on_epoch_end()
#   shuffles the rows, an epoch of 40 rows lacks four and has four twice. A second fit() of the same model begins with
#   batch 0, and so does the first with workers=0 or 1. The first fit() takes a batch to build the model's metrics. Then
#   the other data sets begin anew, but the workers, when they are stopped, keep what they have prefetched. The related
#   report keras#20394 (closed: with steps_per_epoch the batch for the build is lost) was met by that new beginning,
#   which workers do not take part in, still in 3.15.1; keras#23283 is about the workers' start before on_epoch_begin.
# Versions: torch 2.13.0 (KERAS_BACKEND=torch), keras 3.15.1, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: Each row once an epoch in the order of the data set, as without workers.
# Why it matters: A data set that is sorted for a curriculum, or whose batches continue those before (stateful layers),
#   comes out of order, and what an epoch holds depends on the number of workers. Nothing shows it: the number of
#   batches is right.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(keras==3.15.1 numpy==2.4.6 torch==2.13.0)
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
export OMP_NUM_THREADS=1 KERAS_BACKEND=torch KERAS_HOME=$folder/keras
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
import keras
import numpy

BATCHES, SIZE = 10, 4


class Rows(keras.utils.PyDataset):
    """Rows that hold their number; with shuffle in a new order from the second round on."""

    def __init__(self, shuffle=False, batches=BATCHES, **settings):
        super().__init__(**settings)
        self.batches = batches
        self.order = numpy.arange(batches * SIZE)
        self.shuffle = numpy.random.default_rng(0).shuffle if shuffle else None

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        rows = self.order[index * SIZE : (index + 1) * SIZE].astype("float32")[:, None]
        return rows, rows

    def on_epoch_end(self):
        if self.shuffle:
            self.shuffle(self.order)


class Recorder(keras.Sequential):
    seen = None

    def train_step(self, data):
        self.seen[-1].extend(data[0].ravel().int().tolist())
        return super().train_step(data)


class NewEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.seen.append([])


def epochs(data, fits=1):
    """The rows of each epoch of the last of so many calls of fit()."""
    model = Recorder([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for _ in range(fits):
        model.seen = []
        model.fit(data, epochs=3, shuffle=False, verbose=0, callbacks=[NewEpoch()])
    return model.seen


late = [*range(1, BATCHES), 0]
for workers, fits, expected in ((0, 1, sorted(late)), (1, 1, sorted(late)), (2, 1, late), (2, 2, sorted(late))):
    seen = epochs(Rows(workers=workers), fits)
    batches = [[row // SIZE for row in epoch[::SIZE]] for epoch in seen]
    print(f"workers={workers}, fit() number {fits}: batches {batches}")
    assert batches == [expected] * 3, batches

for workers in (0, 2):
    first = epochs(Rows(batches=30, workers=workers))[0]
    batches = [row // SIZE for row in first[::SIZE]]
    lacking = 30 - len(set(batches))
    print(f"workers={workers}, 30 batches, the first epoch: {batches}, {lacking} batches are lacking")
    assert len(batches) == 30 and (lacking > 0) == (workers > 0), batches

for workers in (0, 2):
    seen = epochs(Rows(shuffle=True, workers=workers))
    different = [len(set(epoch)) for epoch in seen]
    print(f"workers={workers}, shuffled after each round: {different} different rows of {BATCHES * SIZE}")
    assert all(len(epoch) == BATCHES * SIZE for epoch in seen)
    if workers:
        assert seen[0][0] == SIZE and all(number < BATCHES * SIZE for number in different), (seen, different)
    else:
        assert different == [BATCHES * SIZE] * 3
END
"$python" finding.py
