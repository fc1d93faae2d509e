"""Adapters (LoRA, arXiv 2106.09685) beside the linear layers of a frozen model, made by the library peft.

    attach(model, "qwen2.5-7b", 16, 32.0, ["all-linear"])    # of blank_model, in place
    saved(model, base="qwen2.5-7b")         # names, shapes and settings as PeftModel.from_pretrained reads them
    merged(inner, name, weight, read)       # a weight of the model with its adapter in it

An adapter of rank r beside a weight [m, n] is A [r, n] and B [m, r]: the layer gives W x + alpha / r B A x. A begins at
random, B at zero, both in fp32. Frozen weights keep the dtypes of their files. Experts that a model stacks in one
tensor have no adapters.
"""

import json
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import transpose
from torch import Tensor, nn
from torch.utils import swap_tensors
from transformers.pytorch_utils import Conv1D

from trainer.checkpoint import weights
from trainer.distributed.terminal import grouped
from trainer.finetuning.checks import weights_in
from trainer.finetuning.config import ALL_LINEAR
from trainer.finetuning.load import files_of
from trainer.finetuning.model import HuggingFaceModel, adapters_in, is_adapter

ADAPTER = "default"  # its name in peft
DRAWN = "drawn from --seed"  # what a checkpoint says of frozen weights that were not loaded


def attach(
    model: HuggingFaceModel,
    folder: str,
    lora: int,
    lora_alpha: float,
    lora_targets: list[str],
    random: bool = False,
) -> None:
    """Freezes a model on the meta device and puts adapters of rank `lora` beside the linear layers that `lora_targets`
    names. random: the frozen weights are drawn, not those of `folder`. ValueError: a target names no linear layer."""
    inner = model.model
    dtypes = {name: t.dtype for name, _, t in files_of(inner, folder).values()}
    how = dict(
        bias="none", lora_dropout=0.0, task_type="CAUSAL_LM", fan_in_fan_out=_has_conv1d(inner)
    )
    settings = LoraConfig(
        r=lora, lora_alpha=lora_alpha, target_modules=_targets(inner, lora_targets), **how
    )
    inject_adapter_in_model(settings, inner, ADAPTER, low_cpu_mem_usage=True)
    for name, p in [*inner.named_parameters()]:
        dtype = torch.float32 if is_adapter(name) else dtypes[name.replace(".base_layer.", ".")]
        swap_tensors(
            p, nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta"), is_adapter(name))
        )
    frozen = DRAWN if random else weights.glimpse(weights_in(folder))
    model.adapters = dict(
        lora=lora, lora_alpha=lora_alpha, lora_targets=sorted(lora_targets), frozen=frozen
    )


def _has_conv1d(inner: nn.Module) -> bool:
    """Whether linear layers are GPT-2's, which store weights as [n, m]."""
    return any(isinstance(module, Conv1D) for module in inner.modules())


def _targets(inner: nn.Module, names: list[str]) -> list[str]:
    """What peft is told to find exactly the linear layers of `names`, of which the head is none."""
    modules = dict(inner.named_modules())
    head = inner.get_output_embeddings()
    linear = [
        name for name, m in modules.items() if isinstance(m, nn.Linear | Conv1D) and m is not head
    ]
    chosen = set()
    for each in names:
        own = [
            name
            for name in linear
            if each == ALL_LINEAR or name == each or name.endswith(f".{each}")
        ]
        if not own:
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ValueError(
                f"--lora-targets {each}: names no linear layer of the model but its head; use {ends}"
            )
        chosen.update(own)
    last = {name.rpartition(".")[2] for name in chosen}
    alike = {name for name in modules if name.rpartition(".")[2] in last}
    return sorted(last if alike == chosen else chosen)


def in_words(model: HuggingFaceModel) -> str:
    """What is trained, for people."""
    inner = model.model
    layers = {
        name.rpartition(".")[2]: 0 for name, m in inner.named_modules() if isinstance(m, LoraLayer)
    }
    sizes = [(is_adapter(name), p) for name, p in inner.named_parameters()]
    own, rest = (sum(p.numel() for mine, p in sizes if mine == kind) for kind in (True, False))
    dtypes = ", ".join(
        sorted({str(p.dtype).removeprefix("torch.") for mine, p in sizes if not mine})
    )
    stacked = any(p.ndim > 2 and "expert" in name for name, p in inner.named_parameters())
    text = f"LoRA of rank {model.adapters['lora']} beside {', '.join(layers)}: {grouped(own)} parameters are trained, "
    text += f"{grouped(rest)} are frozen in {dtypes}"
    return text + "; experts, which are stacked in one tensor, have none" * stacked


class Saved(NamedTuple):
    """Adapters as peft saves them."""

    names: dict[str, str]  # {in the file: in the model}
    tensors: dict[str, Tensor]  # {in the file: its shape and dtype}
    settings: str  # the text of adapter_config.json


def saved(model: HuggingFaceModel, base: str) -> Saved:
    """What is to be written. base: the folder of the frozen model, of which an absolute path is not told."""
    inner = model.model
    own = adapters_in(inner.named_parameters())
    names = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": name for name in own}
    settings = inner.peft_config[ADAPTER].to_dict() | dict(inference_mode=True)
    settings["base_model_name_or_path"] = (
        os.path.basename(os.path.normpath(base)) if os.path.isabs(base) else base
    )
    settings["target_modules"] = sorted(settings["target_modules"])
    text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)
    return Saved(names, {file: own[name] for file, name in names.items()}, text)


def merged(inner: nn.Module, name: str, weight: Tensor, read: Callable[[str], Tensor]) -> Tensor:
    """A tensor of the model without adapters, by its name there, with its adapter in it if it has one. read: gives an
    adapter's tensor by its name in the model. The sum is made in fp32 and has the weight's dtype."""
    path, _, last = name.rpartition(".")
    layer = inner.get_submodule(path)
    if last != "weight" or not isinstance(layer, LoraLayer):
        return weight
    a, b = (read(f"{path}.{part}.{ADAPTER}.weight") for part in ("lora_A", "lora_B"))
    delta = transpose(b @ a, layer.fan_in_fan_out) * layer.scaling[ADAPTER]
    return (weight.float() + delta).to(weight.dtype)
