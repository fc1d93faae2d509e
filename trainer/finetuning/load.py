"""Weights of a Hugging Face folder into a model that is sharded: each rank reads its rows of one tensor at a time.

    columns = load_weights(config, model, group)      # in place, cast to the stored dtype; or from --prepared
    columns["load_s"], columns["loaded_from"]

transformers tells by which names a file holds what the model has, and how its experts are stacked. `.bin` files are
read by torch's weights_only loader. All that is wrong with a folder is a DataError, exit code 3.
"""

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from transformers import conversion_mapping, core_model_loading

from trainer.checkpoint import load as checkpoint
from trainer.checkpoint import weights
from trainer.checkpoint.lock import acquire, release
from trainer.checkpoint.manifest import CheckpointError, Refused
from trainer.checkpoint.save import save_step
from trainer.data import DataError
from trainer.distributed.control import agree
from trainer.finetuning.checks import weights_in
from trainer.finetuning.config import Config
from trainer.finetuning.model import HuggingFaceModel, is_adapter, without_adapters

STEP = "step-00000000"  # of --prepared


class Converted(NamedTuple):
    """A tensor of the model that transformers makes of several in files, such as the experts of a block."""

    file: str
    like: Tensor  # on the meta device: shape and dtype
    name: str  # in the model
    first: str  # the name by which its sources are known to the converter
    converter: Any  # of transformers
    sources: tuple  # (pattern of the converter, name in the file, its Region), in order

    def read(self, first: int, shape: tuple[int, ...]) -> Tensor:
        """[*shape] on the CPU: the rows from `first` on. Of stacked tensors only those of these rows are read."""
        op = self.converter.operations[0]
        if isinstance(op, core_model_loading.MergeModulelist) and op.dim == 0:
            if not shape[0]:
                return self.like.new_empty(shape, device="cpu")
            lists: dict[str, list] = {}
            for source in self.sources:
                lists.setdefault(source[0], []).append(source)
            some = [source for each in lists.values() for source in each[first : first + shape[0]]]
            return self._made(some)
        return self._made(self.sources)[first : first + shape[0]].contiguous()

    def _made(self, sources: Iterable[tuple]) -> Tensor:
        read = (
            (pattern, name, region.read(0, tuple(region.like.shape)))
            for pattern, name, region in sources
        )
        return convert(self.converter, self.first, read)[self.name]


def convert(converter, first: str, sources: Iterable[tuple]) -> dict[str, Tensor]:
    """{name in the model: tensor} of (pattern, name in the file, tensor), in order, by a copy of the converter."""
    own = deepcopy(converter)
    for pattern, name, tensor in sources:
        own.add_tensor(first, name, pattern, tensor)
    return {name: t[0] if isinstance(t, list) else t for name, t in own.convert(first).items()}


def renamed(path: str, there: dict, model: nn.Module) -> dict:
    """A table of `path`, {name in the file: Region}, by the names of `model`; what it is known to ignore left out."""
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    converters = [
        each for each in transforms if isinstance(each, core_model_loading.WeightConverter)
    ]
    renamings = [each for each in transforms if each not in converters]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    own = base_tensors(model)
    tensors = {}
    groups = {}
    left = []
    ignored = [
        *(model._keys_to_ignore_on_load_unexpected or ()),
        r"rotary_emb\.inv_freq$",
        r"\.masked_bias$",
    ]
    for name in sorted(there, key=core_model_loading.dot_natural_key):
        rename = core_model_loading.rename_source_key
        new, pattern = rename(name, renamings, converters, model.base_model_prefix, own)
        if pattern is not None:
            groups.setdefault(new, []).append((pattern, name, there[name]))
        elif new in own or not any(re.search(each, name) for each in ignored):
            tensors[new] = there[name]
        else:
            left.append(name)
    if left:
        checkpoint.say(
            f"{path}: {len(left)} tensors that the model does not use are left out: {', '.join(left[:3])}"
        )
    for new, sources in groups.items():
        converter = by_pattern[sources[0][0]]
        try:
            made = convert(
                converter, new, ((pattern, name, region.like) for pattern, name, region in sources)
            )
        except (RuntimeError, ValueError) as error:  # of other shapes, or one is missing
            names = ", ".join(name for _, name, _ in sources[:5])
            raise CheckpointError(
                f"{path}: does not fit the model: {names}, .. cannot be combined into {new}: {error}"
            ) from error
        tensors |= {
            n: Converted(path, like, n, new, converter, tuple(sources)) for n, like in made.items()
        }
    return tensors


def load_weights(
    config: Config, model: HuggingFaceModel, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Fills the sharded parameters of `model` in place; returns load_s and loaded_from for the row. A collective.
    Raises, on all ranks, DataError for a bad folder, Desync where ranks see different files, CheckpointError for
    --prepared."""
    began = time.perf_counter()
    path = weights_in(config.model)
    inner = model.model
    seen = weights.glimpse(path)
    agree({f"--model {config.model}": seen}, group)
    files = (
        checkpoint.on_rank_0(partial(_files, path), group) if config.prepared is not None else None
    )
    source = dict(model=json.loads(json.dumps(model.identity)), source=[seen, files])
    prepared = config.prepared is not None and checkpoint.on_rank_0(
        partial(os.path.exists, f"{config.prepared}/{STEP}"), group
    )
    if prepared:
        _load_prepared(config.prepared, inner, source, group)
    else:

        def read() -> Counter:
            return weights.fill(
                path, renamed(path, weights.table(path), inner), base_tensors(inner), cast=True
            )

        try:
            number = checkpoint.on_all(read, group, f"{path}: ")[0]
        except CheckpointError as error:
            raise DataError(
                f"{error}; use weights of the model that config.json describes"
            ) from error
        checkpoint.say(f"{path}: {weights.listed(number)}; each rank read its rows")
        if config.prepared is not None:
            _save_prepared(config.prepared, inner, source, group)
    return dict(
        load_s=round(time.perf_counter() - began, 4),
        loaded_from="prepared" if prepared else "slices",
    )


def _files(path: str) -> list[list]:
    """[name, bytes, time of its last change in ns] of each file of weights; of files that cannot be read nothing."""
    files = []
    with suppress(CheckpointError):  # loading raises it
        files = sorted({region.file for region in weights.table(path).values()})
    return [
        [os.path.basename(file), os.stat(file).st_size, os.stat(file).st_mtime_ns] for file in files
    ]


def base_tensors(inner: nn.Module) -> dict[str, Tensor]:
    """The state dict, of the tensors themselves, without adapters and by the names that there are without them."""
    state = inner.state_dict(keep_vars=True).items()
    return {without_adapters(name): t for name, t in state if not is_adapter(name)}


def own_tensors(inner: nn.Module) -> dict[str, Tensor]:
    """`base_tensors` with one name of each tensor."""
    kept = {id(t): (name, t) for name, t in reversed(base_tensors(inner).items())}
    return {name: t.detach() for name, t in kept.values()}


def files_of(inner: nn.Module, folder: str) -> dict[str, tuple[str, str, Tensor]]:
    """{name in the files: (name in the model, name by transformers, tensor on the meta device)} of all that is saved of
    `inner`. Dtypes are those of `folder`'s files, without any those of its config; names, too, where old files lack the
    prefix of the model's base. CheckpointError: transformers cannot tell the names."""
    path = weights_in(folder)
    usual = inner.config.dtype or torch.float32
    stored = (
        {name: region.like.dtype for name, region in weights.table(path).items()} if path else {}
    )
    state = {
        name: torch.empty(t.shape, dtype=t.dtype, device="meta")
        for name, t in own_tensors(inner).items()
    }
    files = {}
    prefix = f"{inner.base_model_prefix}."
    for name, t in state.items():
        for own, made in core_model_loading.revert_weight_conversion(inner, {name: t}).items():
            file = (
                own.removeprefix(prefix)
                if own not in stored and own.removeprefix(prefix) in stored
                else own
            )
            dtype = stored.get(file, usual) if made.is_floating_point() else made.dtype
            files[file] = name, own, made.to(dtype)
    whole = core_model_loading.revert_weight_conversion(inner, state)
    made = {own: t.shape for _, own, t in files.values()}
    if wrong := [
        own
        for own in sorted(made.keys() | whole.keys())
        if own not in made or own not in whole or made[own] != whole[own].shape
    ]:
        raise CheckpointError(
            f"{type(inner).__name__}: {wrong[0]} cannot be split into the tensors of the files; use another model"
        )
    return files


def _load_prepared(
    folder: str, inner: nn.Module, source: dict, group: dist.ProcessGroup | None
) -> None:
    again = f"name another folder, or delete {STEP} in it to build it again"
    try:
        saved_step = checkpoint.newest([os.path.join(folder, STEP)], group)
        if {name: saved_step.about.get(name) for name in source} != source:
            raise CheckpointError(
                "was made from another --model, or --model was changed or copied since"
            )
        state = own_tensors(inner)
        if saved_step.about["tensors"] != checkpoint.table_of(state):
            raise CheckpointError("holds other tensors than the model")
        checkpoint.on_all(
            partial(
                dcp.load, state, storage_reader=checkpoint.reader(saved_step), process_group=group
            ),
            group,
        )
    except CheckpointError as error:
        raise CheckpointError(f"--prepared {folder}: {error}; {again}") from error
    checkpoint.say(f"--prepared {folder}: loaded")


def _claim(folder: str) -> str | None:
    """Locks the folder, or returns why nothing is saved there. CheckpointError: it holds checkpoints of a run."""
    try:
        acquire(folder)
    except Refused:
        return "another run is saving it"
    if there := [name for name in checkpoint.steps_in(folder) if name != STEP]:
        release(folder)
        raise CheckpointError(
            f"--prepared {folder}: holds {there[0]}, a checkpoint of a run; name another folder"
        )
    if os.path.exists(os.path.join(folder, STEP)):
        release(folder)
        return "another run has saved it"


def _save_prepared(
    folder: str, inner: nn.Module, source: dict, group: dist.ProcessGroup | None
) -> None:
    if why := checkpoint.on_rank_0(partial(_claim, folder), group):
        checkpoint.say(f"--prepared {folder}: not saved, {why}")
        return
    state = own_tensors(inner)
    about = source | dict(
        format=checkpoint.FORMAT, step=0, samples=0, tensors=checkpoint.table_of(state)
    )
    try:
        save_step(
            SimpleNamespace(save=folder, keep=sys.maxsize, keep_best=False),
            STEP,
            about,
            group,
            state,
        )
    finally:
        release(folder)
    checkpoint.say(f"--prepared {folder}: saved; the next start loads it")
