"""What of a run is saved and restored: how far it is, in train_state.json, and its tensors, in DCP's files."""

from dataclasses import asdict, dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.step import Step


@dataclass
class TrainState:
    """How far a run is."""

    step: int = 0  # optimizer steps done
    samples: int = 0  # consumed by all ranks together
    origin: str | None = None  # fingerprint of the checkpoint elsewhere at which the run began

    def as_dict(self) -> dict:
        """The entries of train_state.json, without those that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, about: dict) -> "TrainState":
        """From a whole train_state.json, of this program or of an older one. KeyError without step or samples."""
        return cls(about["step"], about["samples"], about.get("origin"))


def tensors(step: Step) -> dict[str, Tensor]:
    """What is saved of a `trainer.step.Step`, by name: the model's state dict, Adam's moments as "m.<parameter>" and
    "v.<parameter>", and "t", the number of updates.

    Nothing is copied: filling the tensors fills the model and the optimizer. The moments of a sharded parameter are
    DTensors with its placements, so that DCP reshards them alike."""
    optimizer = step.optimizer
    names = {id(p): name for name, p in step.model.named_parameters()}
    state = dict(step.model.state_dict()) | dict(t=optimizer.t)
    for p, *moments in zip(optimizer.params, optimizer.m, optimizer.v, strict=True):
        for kind, moment in zip("mv", moments, strict=True):
            if isinstance(p, DTensor):
                how = dict(run_check=False, shape=p.shape, stride=p.stride())
                moment = DTensor.from_local(moment, p.device_mesh, p.placements, **how)
            state[f"{kind}.{names[id(p)]}"] = moment
    return state


def table_of(state: dict[str, Tensor]) -> dict[str, list]:
    """{name: [shape, dtype]}, as train_state.json holds it."""
    return {name: [[*t.shape], str(t.dtype)] for name, t in state.items()}
