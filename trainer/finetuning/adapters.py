"""Adapters (LoRA, arXiv 2106.09685) beside the linear layers of a frozen model, made by the library peft.

    attach(model, "qwen2.5-7b", 16, 32.0, ["all-linear"])    # of blank_model, in place
    saved(model, base="qwen2.5-7b")         # names, shapes and settings as PeftModel.from_pretrained reads them
    merged(inner, name, weight, read)       # a weight of the model with its adapter in it

An adapter of rank r beside a weight [m, n] is A [r, n] and B [m, r]: the layer gives W x + alpha / r B A x. A begins at
random, B at zero, both in fp32. Frozen weights keep the dtypes of their files. Experts that a model stacks in one
tensor [E, m, n] are no linear layers; the target "experts" gives each of them an A and a B of its own.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import transformers_weight_conversion as conversion
from peft.utils import transpose
from torch import Tensor, nn
from torch.utils import swap_tensors
from transformers.pytorch_utils import Conv1D

from trainer.checkpoint import load as checkpoint
from trainer.checkpoint import weights
from trainer.checkpoint.manifest import CheckpointError
from trainer.data import DataError
from trainer.distributed.control import Group, agree
from trainer.finetuning.adapter_settings import ALL_LINEAR, EXPERTS
from trainer.finetuning.checks import weights_in
from trainer.finetuning.config import Config
from trainer.finetuning.load import files_of
from trainer.finetuning.model import HuggingFaceModel, is_adapter, without_adapters
from trainer.terminal.text import grouped

ADAPTER = "default"  # its name in peft
FLAGS = (
    "lora",
    "lora_alpha",
    "lora_targets",
    "lora_rslora",
    "lora_modules_to_save",
)  # in a checkpoint, too
DRAWN = "drawn from --seed"  # what a checkpoint says of frozen weights that were not loaded
# Of these model types a kernel reads the weight of this layer, past its adapter, which peft therefore refuses.
KERNELS = dict.fromkeys(("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"), "out_proj")
# The function of peft (0.19 and later) that takes names of layers for those that transformers 4 had in experts.
REWRITING = "convert_peft_config_for_transformers"


class AdaptedExperts(ParamWrapper):
    """Adapters beside stacked experts. peft's own forward puts parametrizations on the experts and takes them off
    again, which a sharded module refuses: here their code is given what stands for them, with other tensors."""

    def forward(self, x: Tensor, *args, **kwargs):
        tensors = {}
        layer = self
        while isinstance(layer, ParamWrapper):
            left, right, scaling = layer.get_delta_factors(ADAPTER)  # [E, m, r], [E, r, n]
            whole = layer.get_param()  # [E, m, n]
            tensors[layer.parameter_name] = torch.baddbmm(whole, left, right, alpha=scaling)
            layer = layer.base_layer
        # Of the class that was wrapped: the forward of its subclass runs modules alone.
        plain = getattr(layer, "_data_parallel_class", type(layer))
        return plain.forward(_WithTensors(layer, tensors), x, *args, **kwargs)


class _WithTensors:
    """What a module has, but for some tensors."""

    def __init__(self, module: nn.Module, tensors: dict[str, Tensor]):
        self.module = module
        vars(self).update(tensors)

    def __getattr__(self, name: str):
        return getattr(self.module, name)


def attach(
    model: HuggingFaceModel,
    folder: str,
    lora: int,
    lora_alpha: float,
    lora_targets: list[str],
    lora_rslora: bool = False,
    lora_modules_to_save: Sequence[str] = (),
    random: bool = False,
) -> None:
    """Freezes a model on the meta device, but for the modules that `lora_modules_to_save` names, and puts adapters of
    rank `lora` beside the linear layers outside of them that `lora_targets` names. random: the frozen weights are
    drawn, not those of `folder`. ValueError: a name fits nothing."""
    inner = model.model
    dtypes = {name: t.dtype for name, _, t in files_of(inner, folder).values()}
    how = dict(
        bias="none", lora_dropout=0.0, task_type="CAUSAL_LM", fan_in_fan_out=_has_conv1d(inner)
    )
    whole = _modules_named(inner, lora_modules_to_save)
    model.beside_adapters = _parameters_of(inner, whole)
    trained = {id(inner.get_parameter(name)) for name in model.beside_adapters}

    def adaptable(names):
        return [name for name in names if not any(f"{name}.".startswith(f"{m}.") for m in whole)]

    chosen = {*adaptable(_chosen(inner, [name for name in lora_targets if name != EXPERTS]))}
    experts = adaptable(stacked(inner)) if EXPERTS in lora_targets else []
    if EXPERTS in lora_targets and not experts:
        raise ValueError(
            f"--lora-targets {EXPERTS}: the model has no experts that are stacked in one tensor; leave it out"
        )
    settings = LoraConfig(
        r=lora,
        lora_alpha=lora_alpha,
        target_modules=_in_short(inner, chosen),
        target_parameters=experts or None,
        use_rslora=lora_rslora,
        **how,
    )
    with _names_as_they_are():
        inject_adapter_in_model(settings, inner, ADAPTER, low_cpu_mem_usage=True)
    for module in inner.modules():
        if isinstance(module, ParamWrapper):
            module.__class__ = AdaptedExperts
    made = {*_adapted(inner)}
    if differ := sorted(made ^ {*chosen, *experts}):
        did = "an adapter" if differ[0] in made else "no adapter"
        raise ValueError(
            f"--lora-targets: peft created {did} for {differ[0]}, unlike asked; install another version of peft, or "
            "name other layers"
        )
    for name, p in [*inner.named_parameters()]:
        learned = is_adapter(name) or id(p) in trained
        dtype = torch.float32 if learned else dtypes[without_adapters(name)]
        swap_tensors(p, nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta"), learned))
    frozen = DRAWN if random else weights.glimpse(weights_in(folder))
    model.adapters = dict(
        lora=lora,
        lora_alpha=lora_alpha,
        lora_targets=sorted(lora_targets),
        lora_rslora=lora_rslora,
        lora_modules_to_save=sorted(lora_modules_to_save),
        frozen=frozen,
    )


def _modules_named(inner: nn.Module, ends: Sequence[str]) -> list[str]:
    """Paths of the modules that --lora-modules-to-save names, by the ends of their names."""
    modules = [name for name, module in inner.named_modules() if [*module.parameters()]]
    named = []
    for end in ends:
        own = [name for name in modules if name.endswith(end)]  # peft's rule
        if not own:
            leaves = {
                n.rpartition(".")[2] for n in modules if not [*inner.get_submodule(n).children()]
            }
            raise ValueError(
                f"--lora-modules-to-save {end}: names no module with weights; use {', '.join(sorted(leaves))}"
            )
        named += own
    return sorted({*named})


def _parameters_of(inner: nn.Module, paths: list[str]) -> list[str]:
    """Names of the parameters of these modules, each name of a tied one. ValueError: one is tied to another module."""
    every = [*inner.named_parameters(remove_duplicate=False)]
    own = {name for name, _ in every if any(name.startswith(f"{path}.") for path in paths)}
    shared = {id(p) for name, p in every if name in own}
    if outside := [name for name, p in every if id(p) in shared and name not in own]:
        other, _ = outside[0].rsplit(".", 1)
        raise ValueError(
            f"--lora-modules-to-save {' '.join(paths)}: shares its weight with {other} (tied); name {other} as well"
        )
    return sorted(own)


def stacked(inner: nn.Module) -> list[str]:
    """Names of the tensors that hold all experts of a block."""
    named = inner.named_parameters()
    return [name for name, p in named if p.ndim == 3 and "expert" in name and not is_adapter(name)]


def _adapted(inner: nn.Module) -> dict[str, LoraLayer]:
    """What has an adapter: modules, and tensors of experts, by their names without adapters."""
    layers = {}
    for name, module in inner.named_modules():
        if isinstance(module, LoraLayer):
            parts = without_adapters(f"{name}.").split(".")[:-1]
            last = [module.parameter_name] if isinstance(module, ParamWrapper) else []
            layers[".".join(parts + last)] = module
    return layers


def _has_conv1d(inner: nn.Module) -> bool:
    """Whether linear layers are GPT-2's, which store weights as [n, m]."""
    return any(isinstance(module, Conv1D) for module in inner.modules())


@contextmanager
def _names_as_they_are() -> Iterator[None]:
    """Without peft's rewriting, which takes the gate_proj of a dense layer for a part of stacked experts."""
    with mock.patch.object(conversion, REWRITING, lambda *_, **__: None):
        yield


def _is_rewritten(inner: nn.Module, target: str) -> bool:
    """Whether peft, where it opens adapters, would take the name of a layer for a part of stacked experts."""
    settings = LoraConfig(target_modules=[target])
    try:
        getattr(conversion, REWRITING)(settings, model=inner, conversions=None)
    except ValueError:  # it lacks the names of the other parts
        return True
    return {*settings.target_modules} != {target}


def _chosen(inner: nn.Module, names: list[str]) -> set[str]:
    """The linear layers of `names`, of which the head is none."""
    head = inner.get_output_embeddings()
    past = KERNELS.get(inner.config.model_type)
    linear = [
        name
        for name, m in inner.named_modules()
        if isinstance(m, nn.Linear | Conv1D) and m is not head and name.rpartition(".")[2] != past
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
            why = "matches no linear layer of the model apart from its head"
            if each.rpartition(".")[2] == past:
                why = f"a kernel of {inner.config.model_type} reads the weight of {past} directly and skips an adapter"
            raise ValueError(f"--lora-targets {each}: {why}; use {ends or '--lora 0'}")
        chosen.update(own)
    return chosen


def _in_short(inner: nn.Module, chosen: set[str]) -> list[str]:
    """What peft is told to find exactly these modules: the ends of their names, if no others end so."""
    last = {name.rpartition(".")[2] for name in chosen}
    alike = {name for name, _ in inner.named_modules() if name.rpartition(".")[2] in last}
    return sorted(last if alike == chosen else chosen)


def in_words(model: HuggingFaceModel) -> str:
    """What is trained, for people."""
    inner = model.model
    layers = {
        ".".join(name.split(".")[-2:])
        if isinstance(m, ParamWrapper)
        else name.rpartition(".")[2]: 0
        for name, m in _adapted(inner).items()
    }
    sizes = [(p.requires_grad, p) for p in inner.parameters()]
    own, rest = (sum(p.numel() for mine, p in sizes if mine == kind) for kind in (True, False))
    dtypes = ", ".join(
        sorted({str(p.dtype).removeprefix("torch.") for mine, p in sizes if not mine})
    )
    modules = {name.rsplit(".", 1)[0].rpartition(".")[2] for name in model.beside_adapters}
    also = f", {', '.join(sorted(modules))} trained whole in fp32" * bool(modules)
    text = f"LoRA of rank {model.adapters['lora']} beside {', '.join(layers)}{also}: "
    text += f"{grouped(own)} parameters are trained, {grouped(rest)} are frozen in {dtypes}"
    bare = stacked(inner) and not any(isinstance(m, ParamWrapper) for m in _adapted(inner).values())
    bare = (
        f"; experts, which are stacked in one tensor, have no adapters (add --lora-targets {ALL_LINEAR} {EXPERTS})"
        * bool(bare)
    )
    return text + bare


class Saved(NamedTuple):
    """Adapters as peft saves them."""

    names: dict[str, str]  # {in the file: in the model}
    tensors: dict[str, Tensor]  # {in the file: its shape and dtype}
    settings: str  # the text of adapter_config.json


def saved(model: HuggingFaceModel, base: str) -> Saved:
    """What is to be written. base: the folder of the frozen model, of which an absolute path is not told."""
    inner = model.model
    own = model.saved_with_adapters()
    names = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": name for name in own}
    settings = inner.peft_config[ADAPTER].to_dict() | dict(inference_mode=True)
    settings["base_model_name_or_path"] = (
        os.path.basename(os.path.normpath(base)) if os.path.isabs(base) else base
    )
    rewritten = {name for name in settings["target_modules"] if _is_rewritten(inner, name)}
    settings["target_modules"] = sorted({*settings["target_modules"]} - rewritten)
    # peft has the same adapters beside a parameter, and leaves the names of parameters as they are.
    settings["target_parameters"] = [
        name if isinstance(module, ParamWrapper) else f"{name}.weight"
        for name, module in _adapted(inner).items()
        if isinstance(module, ParamWrapper) or {name, name.rpartition(".")[2]} & rewritten
    ]
    # As whole paths: peft takes each module whose name ends so.
    modules = sorted({name.rsplit(".", 1)[0] for name in model.beside_adapters})
    settings["modules_to_save"] = modules or None
    text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)
    return Saved(names, {file: own[name] for file, name in names.items()}, text)


def merged(inner: nn.Module, name: str, weight: Tensor, read: Callable[[str], Tensor]) -> Tensor:
    """A tensor of the model without adapters, by its name there, with its adapter in it if it has one. read: gives an
    adapter's tensor by its name in the model. The sum is made in fp32 and has the weight's dtype."""
    path, _, last = name.rpartition(".")
    layer = inner.get_submodule(path)
    while isinstance(layer, ParamWrapper) and layer.parameter_name != last:
        layer = layer.base_layer
        path += ".base_layer"
    if not isinstance(layer, LoraLayer) or not (
        isinstance(layer, ParamWrapper) or last == "weight"
    ):
        return weight
    a, b = (read(f"{path}.{part}.{ADAPTER}.weight") for part in ("lora_A", "lora_B"))
    scaling = layer.scaling[ADAPTER]
    if isinstance(layer, ParamWrapper):
        E = layer.num_experts
        a = a.reshape(E, -1, a.shape[-1])  # [E, r, n]
        b = b.reshape(b.shape[0], -1, E)  # [m, r, E]
        order = "mre,ern->emn" if layer._did_swap_in_out_features else "mre,ern->enm"
        delta = torch.einsum(order, b, a) * scaling
        return weight + delta.to(weight.dtype)  # as peft adds it
    delta = transpose(b @ a, layer.fan_in_fan_out) * scaling
    return (weight.float() + delta).to(weight.dtype)


def load(config: Config, model: HuggingFaceModel, group: Group) -> None:
    """Fills the adapters of `model`, and what is trained beside them, with those of --adapter. A collective. DataError,
    on all ranks, for tensors that do not fit; Desync where ranks see different files."""
    files = [
        os.path.join(config.adapter, f"adapter_model.{kind}") for kind in ("safetensors", "bin")
    ]
    path = next(filter(os.path.exists, files), files[0])

    def read() -> Counter:
        names = saved(model, config.model).names
        regions = weights.table(path)
        if differ := sorted(regions.keys() ^ names.keys()):
            how = "has" if differ[0] in regions else "lacks"
            other = "lacks" if how == "has" else "has"
            raise CheckpointError(
                f"{path}: {how} {differ[0]}, which the model with these flags {other}"
            )
        there = {names[file]: region for file, region in regions.items()}
        return weights.fill(path, there, model.saved_with_adapters(), cast=True)

    try:
        agree({f"--adapter {config.adapter}": weights.glimpse(path)}, group)
        number = checkpoint.on_all(read, group, f"{path}: ")[0]
    except CheckpointError as error:
        raise DataError(f"{error}; use adapters of --model") from error
    checkpoint.say(f"{path}: {weights.listed(number)}; training starts from them")
