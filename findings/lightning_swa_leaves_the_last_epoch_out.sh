#!/usr/bin/env bash
# Lightning's StochasticWeightAveraging leaves the last epoch out: it averages the weights that epochs begin with.
#
# Seen: A weight that grows by 2 an epoch is 2, 4, .. 12 at the ends of six epochs. With swa_epoch_start=3 (or 0.5)
#   the model after fit has 7, the mean of 4, 6, 8 and 10: the third epoch, in which averaging starts, counts as it
#   was before, and the sixth not at all. With swa_epoch_start=6 the model has 10: the whole last epoch is thrown
#   away. At the default of 0.8, five epochs end with 7, the mean of the ends of the third and the fourth. torch's
#   AveragedModel, updated after the epochs 3 to 6, has 9, and so has Lightning's own WeightAveraging callback.
# Versions: torch 2.13.0, lightning 2.6.6, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: The mean of the weights after each epoch from the start on, the last one included, and nothing else.
# Why it matters: The last epoch costs its time and changes nothing; where few epochs are averaged the average is an
#   epoch older than it should be.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(lightning==2.6.6 numpy==2.4.6 torch==2.13.0)
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
import logging
import tempfile
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Growing(LightningModule):
    """Its weight grows by the learning rate of 1 in each of the two steps of an epoch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.after_epochs = []
        self.averaged = [torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1, bias=False))]  # a list: no submodule
        self.averaged_from = 0

    def training_step(self, batch, index):
        return -self.weight

    def on_train_epoch_end(self):
        self.after_epochs.append(self.weight.item())
        if len(self.after_epochs) >= self.averaged_from:
            now = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.constant_(now.weight, self.weight.item())
            self.averaged[0].update_parameters(now)

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=1.0)


class AfterEpochs(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None and epoch_idx + 1 >= 3


def fit(callback, averaged_from, epochs=6):
    """The weight after fit, AveragedModel's, and the weights after the epochs."""
    model = Growing()
    model.averaged_from = averaged_from
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, callbacks=[callback], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tempfile.mkdtemp(dir="."),
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(4, 1), batch_size=2))
    assert model.after_epochs == [2.0 * (epoch + 1) for epoch in range(epochs)], model.after_epochs
    return model.weight.item(), model.averaged[0].module.weight.item(), model.after_epochs


for epochs, start, first, expected, mean in (
    (6, {"swa_epoch_start": 3}, 3, 7, 9),
    (6, {"swa_epoch_start": 0.5}, 3, 7, 9),
    (6, {"swa_epoch_start": 6}, 6, 10, 12),
    (5, {}, 4, 7, 9),
):
    callback = StochasticWeightAveraging(swa_lrs=1.0, annealing_epochs=1, **start)
    found, reference, ends = fit(callback, first, epochs)
    print(f"{start or 'default start'}: the ends of the epochs {ends}, after fit {found}")
    print(f"  AveragedModel updated after the epochs {first} to {epochs}: {reference}")
    assert (found, reference) == (expected, mean), (found, reference)

found, reference, _ = fit(AfterEpochs(), 3)
print(f"WeightAveraging after the epochs 3 to 6: {found}")
assert found == reference == 9, (found, reference)
END
"$python" finding.py
