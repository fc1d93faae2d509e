#!/usr/bin/env bash
# With gradient accumulation over k batches Keras blends its average of the weights k times per update.
#
# Seen: SGD(use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=4): the average equals that of momentum
#   0.9 ** 4 = 0.656 over whole batches, not that of 0.9, although the weights are the same. With fit(), which ends with
#   the average in the model, the model is another than that of whole batches. With ema_overwrite_frequency=3 the
#   average is written into the weights at the first batch of every third window, too, and not at its update alone:
#   that update's gradients are of two different weights. Clipping, weight decay and the
#   optimizers' states are those of whole batches. The docstring says that the EMA's frequency counts accumulated
#   iterations, and that learning rate schedules count batches; of the momentum it says nothing.
# Versions: torch 2.13.0 (KERAS_BACKEND=torch), keras 3.15.1, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: One blend per update, as the weights change only then: accumulation gives the run of the larger batch.
# Why it matters: A momentum of 0.999 averages 1000 updates; accumulated over 16 batches, 63. Whoever lowers the batch
#   size for memory gets a noisier averaged model and compares it with the old one.
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
import torch

STEPS = 4
generator = numpy.random.default_rng(0)
GRADIENTS = generator.normal(size=(12 * STEPS, 3)).astype("float32")
WHOLE = GRADIENTS.reshape(12, STEPS, 3).mean(1)


def run(gradients, **settings):
    """The weights after each call of apply(), and the average of them at the end."""
    weight = keras.Variable(numpy.array([1.0, -2.0, 3.0], "float32"))
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, **settings)
    optimizer.build([weight])
    weights = []
    for gradient in gradients:
        optimizer.apply([torch.tensor(gradient)], [weight])
        weights.append(weight.numpy().copy())
    optimizer.finalize_variable_values([weight])
    return numpy.array(weights), weight.numpy()


momentum = 0.9
# Three batches of a next window follow, at which the weights stand still: so the last ones, too, are blended four times.
more = numpy.concatenate([GRADIENTS, GRADIENTS[: STEPS - 1]])
accumulated = run(GRADIENTS, ema_momentum=momentum, gradient_accumulation_steps=STEPS)[0]
average = run(more, ema_momentum=momentum, gradient_accumulation_steps=STEPS)[1]
whole, whole_average = run(WHOLE, ema_momentum=momentum)
power_average = run(WHOLE, ema_momentum=momentum**STEPS)[1]
print("weights:", accumulated[-1], "accumulated,", whole[-1], "whole batches")
print("averages:", average, "accumulated,", whole_average, "whole,", power_average, "whole at momentum 0.9 ** 4")
assert numpy.abs(accumulated[STEPS - 1 :: STEPS] - whole).max() < 1e-6
assert numpy.abs(average - power_average).max() < 1e-5, (average, power_average)
assert numpy.abs(average - whole_average).max() > 0.05, (average, whole_average)

moved = {}
for name, gradients, steps in (("whole", WHOLE, None), ("accumulated", GRADIENTS, STEPS)):
    settings = {"ema_momentum": momentum, "gradient_accumulation_steps": steps}
    weights = run(gradients, ema_overwrite_frequency=3, **settings)[0]
    weights = numpy.concatenate([[[1.0, -2.0, 3.0]], weights])
    moved[name] = [i + 1 for i, change in enumerate(numpy.abs(numpy.diff(weights, axis=0)).max(1)) if change > 1e-6]
print("with ema_overwrite_frequency=3 the weights move at batches", moved["accumulated"])
assert moved["whole"] == list(range(1, 13))
assert moved["accumulated"] == sorted([*range(4, 49, 4), 9, 21, 33, 45]), moved

rows = generator.normal(size=(64, 4)).astype("float32")
targets = rows.sum(1, keepdims=True)


def fitted(batch, **settings):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, use_ema=True, **settings), "mse")
    model.fit(rows, targets, batch_size=batch, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()[0].ravel()


result = fitted(4, ema_momentum=momentum, gradient_accumulation_steps=STEPS)
as_whole = fitted(16, ema_momentum=momentum)
print("after fit:", result, "accumulated,", as_whole, "whole batches")
assert numpy.abs(result - as_whole).max() > 0.01
END
"$python" finding.py
