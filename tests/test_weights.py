"""trainer/checkpoint/weights.py and --init: what a file of weights holds the model then holds, or a line says why not.

    pytest tests/test_weights.py        # no GPU; seconds

Files are those of trainer/checkpoint/export.py, of the safetensors library and of torch.save, and planted ones that
none of them would write. Two ranks: tests/test_export.py.
"""

import json
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from running import fails
from safetensors.torch import save_file
from saved import assert_bitwise, contents, parameters, state_of
from torch import nn

from simple_fsdp import data_parallel, unsharded
from trainer.checkpoint import export, weights
from trainer.checkpoint.manifest import CheckpointError

pytestmark = pytest.mark.usefixtures("isolated")


@pytest.mark.long
def test_init_starts_at_step_0_with_the_same_bits_and_fresh_moments(trains, exported, saved_run, tmp_path):
    straight = parameters(saved_run / "step-00000006")
    for form, path in exported.items():  # a learning rate that changes no bit
        done = trains("--init", path, "--steps", 1, "--lr", 1e-30, "--save", tmp_path / form, "--seed", 7)
        assert f"--init {path}: 16 tensors of float32; the optimizer starts at zero" in done.out, done.err
        assert_bitwise(parameters(tmp_path / form / "step-00000001"), straight)
        about = state_of(tmp_path / form / "step-00000001")
        assert about["step"] == 1
        assert about["samples"] == 2
        state = contents(tmp_path / form / "step-00000001")
        m, v = state["m.head.weight"], state["v.head.weight"]  # 0.1 g and 0.05 g^2 after one step from zero
        assert state["t"] == 1 and m.any() and torch.allclose(v, 5 * m**2)
    assert done.row["resumed_after"] is None
    assert done.row["flags"]["init"] == exported["pt"].name


def test_a_checkpoint_in_save_goes_before_init_and_says_so(trains, exported, folder):
    done = trains("--init", "absent.safetensors", "--save", folder, "--steps", 7)
    assert done.row["resumed_after"] == 6, done.err
    assert f"--init absent.safetensors: not read, because the run resumes from {folder}/step-00000006" in done.out


def test_weights_of_another_dtype_need_cast(train, trains, saved_run, tmp_path):
    out = tmp_path / "out.safetensors"
    assert export.main([str(saved_run), str(out), "--dtype", "bf16"]) == 0
    done = train("--init", out, "--steps", 1)
    fails(done, 4, "16 tensors of another dtype: emb.weight bfloat16")
    assert "--cast" in done.err
    assert done.row["outcome"].startswith("failed: ")
    done = trains("--init", out, "--steps", 1, "--cast", "--lr", 1e-30, "--save", "run")
    assert "16 tensors of bfloat16" in done.out
    assert_bitwise(
        parameters("run/step-00000001"),
        {name: t.bfloat16().float() for name, t in parameters(saved_run / "step-00000006").items()},
    )


CAST = {  # what is not converted but refused
    "int8": (torch.ones(2, 3, dtype=torch.int8), "1 tensor of another dtype: weight int8 (the model: float32)"),
    "complex": (torch.ones(2, 3).to(torch.complex64), "weight complex64 (the model: float32)"),
    "large": (torch.full((2, 3), -1e300, dtype=torch.float64), "weight has values that are not finite in float32"),
    "nan": (torch.full((2, 3), float("nan"), dtype=torch.bfloat16), "weight has values that are not finite in float32"),
}


@pytest.mark.parametrize("kind", CAST)
def test_cast_converts_floating_numbers_alone_and_none_to_infinity(kind, tmp_path):
    t, text = CAST[kind]
    torch.save(dict(weight=t, bias=torch.ones(2).double()), tmp_path / "cast.pt")
    model = nn.Linear(3, 2)
    with pytest.raises(CheckpointError) as error:
        weights.load_weights(str(tmp_path / "cast.pt"), model, cast=True)
    assert str(error.value).endswith(text)
    assert model.weight.isfinite().all()


class Planted:  # leaves a file where somebody runs it
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def planted(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


A = "a.safetensors"
B = "b.safetensors"


def index(path, **weight_map):
    Path(f"{path}.index.json").write_text(json.dumps(dict(metadata={}, weight_map=weight_map)))
    save_file({"weight": torch.ones(2, 3)}, path.parent / A)
    save_file({"bias": torch.ones(2)}, path.parent / B)


def edited(**change):
    """A safetensors file of a linear layer by the library, with other tensors or, for None, without them."""
    state = dict(weight=torch.ones(2, 3), bias=torch.ones(2)) | change
    return lambda path: save_file({name: t for name, t in state.items() if t is not None}, path)


def cut(path):
    edited()(path)
    os.truncate(path, path.stat().st_size - 1)


def entry(**change):
    whole = dict(dtype="F32", shape=[2, 3], data_offsets=[0, 24]) | change
    bias = dict(dtype="F32", shape=[2], data_offsets=[24, 32])
    return lambda path: planted(path, dict(weight=whole, bias=bias), b"\0" * 32)


def torch_file(content, **how):
    return lambda path: torch.save(content, path, **how)


LIBRARY = "is damaged, cut short or not a safetensors file (Error while deserializing header: "
WEIGHT = torch.ones(2, 3)
NAN = torch.tensor([1.0, float("nan")])
INF = torch.tensor([1.0, -float("inf")])
BAD = {  # what is planted, what the line says besides the path
    "absent.safetensors": (lambda path: None, "absent.safetensors: No such file"),
    "cut.safetensors": (cut, f"{LIBRARY}incomplete metadata, file not fully covered"),
    "empty.safetensors": (lambda path: path.touch(), f"{LIBRARY}header too small"),
    "long.safetensors": (lambda path: path.write_bytes(b"\xff" * 16), f"{LIBRARY}header too large"),
    "larger.safetensors": (lambda path: path.write_bytes((99).to_bytes(8, "little") + b"{}"), f"{LIBRARY}invalid hea"),
    "garbage.safetensors": (lambda path: planted(path, b"no json"), f"{LIBRARY}invalid JSON"),
    "list.safetensors": (lambda path: planted(path, b"[1, 2]"), f"{LIBRARY}invalid JSON"),
    "nested.safetensors": (lambda path: planted(path, b"[" * 200), f"{LIBRARY}invalid JSON"),
    "strange.safetensors": (entry(dtype="F8_E4M3", shape=[24]), "weight is of dtype float8_e4m3fn"),
    "beyond.safetensors": (entry(data_offsets=[24, 48]), f"{LIBRARY}invalid offset"),
    "before.safetensors": (entry(data_offsets=[-24, 0]), f"{LIBRARY}invalid JSON"),
    "size.safetensors": (entry(shape=[2, 4]), f"{LIBRARY}invalid shape"),
    "negative.safetensors": (entry(shape=[-2, -3]), f"{LIBRARY}invalid JSON"),
    "nan.safetensors": (edited(bias=NAN), "bias has values that are not finite"),
    "inf.safetensors": (edited(bias=INF), "bias has values that are not finite"),
    "shape.safetensors": (edited(bias=torch.ones(3)), "1 tensor of another shape: bias [3] (the model: [2])"),
    "dtype.safetensors": (edited(bias=torch.ones(2).double()), "bias float64 (the model: float32; --cast converts)"),
    "more.safetensors": (edited(scale=torch.ones(2)), "1 tensor unexpected: scale"),
    "less.safetensors": (edited(bias=None), "1 tensor missing: bias"),
    "gone.safetensors": (lambda path: index(path, weight=A, bias="c.safetensors"), "c.safetensors: No such file"),
    "out.safetensors": (lambda path: index(path, weight=A, bias=f"../{B}"), f"names '../{B}'; expected a"),
    "linked.safetensors": (lambda path: index(path, weight=A, bias="b.pt"), "names 'b.pt'; expected a .safetensors or"),
    "swap.safetensors": (lambda path: index(path, weight=B, bias=A), f"says that bias is in {A}, but it is in {B}"),
    "part.safetensors": (lambda path: index(path, weight=A, bias=A), f"says that bias is in {A}, but it is in no file"),
    "short.safetensors": (lambda path: (index(path, weight=A, bias=B), os.truncate(path.parent / B, 60)), f"/{B}: "),
    "planted.pt": (torch_file(dict(weight=Planted())), "holds more than tensors, of which nothing was run"),
    "pickle.pt": (lambda path: path.write_bytes(pickle.dumps(Planted())), "pickle.pt: is not a file of weights"),
    "module.pt": (torch_file(nn.Linear(3, 2)), "holds more than tensors"),
    "number.pt": (torch_file(dict(weight=3)), "holds more than tensors by name"),
    "row.pt": (torch_file([WEIGHT]), "holds more than tensors by name"),
    "old.pt": (torch_file(dict(weight=WEIGHT), _use_new_zipfile_serialization=False), "older than torch 1.6"),
    "sparse.pt": (torch_file(dict(weight=WEIGHT.to_sparse())), "weight is sparse"),
    "meta.pt": (torch_file(dict(weight=WEIGHT.to("meta"))), "weight is on the meta device and has no values"),
    "nan.pt": (torch_file(dict(weight=WEIGHT, bias=NAN)), "bias has values that are not finite"),
    "cut.pt": (lambda path: path.write_bytes(b"PK\3\4" + b"\0" * 60), "cut.pt: is not a file of weights"),
    "empty.pt": (lambda path: path.touch(), "empty.pt: is not a file of weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line_and_nothing_in_it_runs(name, tmp_path):
    (tmp_path / "folder").mkdir()
    path, (plant, text) = tmp_path / "folder" / name, BAD[name]
    plant(path)
    with pytest.raises(CheckpointError) as error, warnings.catch_warnings(action="error"):
        weights.load_weights(str(path), nn.Linear(3, 2))
    line = str(error.value)
    assert text in line and "\n" not in line and str(tmp_path / "folder") in line and len(line) < 400
    assert not Path("ran").exists()


def test_views_and_parameters_in_a_pt_are_read_as_they_are(tmp_path):
    whole = torch.arange(12.0).reshape(4, 3)
    state = dict(weight=whole.t()[:2, 1:], bias=nn.Parameter(whole[2:, 0]))
    torch.save(state, tmp_path / "views.pt")
    model = nn.Linear(3, 2)
    assert weights.load_weights(str(tmp_path / "views.pt"), model) == {"float32": 2}
    assert torch.equal(model.weight, state["weight"]) and torch.equal(model.bias, state["bias"])
    assert "2 tensors of 32 bytes" in weights.glimpse(str(tmp_path / "views.pt"))


def test_a_file_is_mapped_anew_once_enough_of_it_was_read_and_what_was_read_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MAPPED", 30)
    state = {f"t{i}": torch.full((2, 3), float(i)) for i in range(6)}
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    maps = []
    mapped = weights._mapped
    monkeypatch.setattr(weights, "_mapped", lambda path: (maps.append(path), mapped(path))[1])
    for name in ("a.safetensors", "a.pt"):
        regions = weights.table(str(tmp_path / name))
        maps.clear()
        read = {key: region.read(0, (2, 3)) for key, region in regions.items()}
        assert len(maps) == 3, "after each second tensor"
        assert all(torch.equal(read[key], t) for key, t in state.items())


@pytest.mark.parametrize("name", ["planted.pt", "nan.safetensors", "absent.safetensors", "more.safetensors"])
def test_init_with_a_bad_file_exits_4_with_one_line_and_a_row(name, train, tmp_path):
    BAD[name][0](tmp_path / name)
    done = train("--init", tmp_path / name)
    fails(done, 4, str(tmp_path / name))
    assert done.row["outcome"].startswith("failed: ")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.tensor(2.0))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_tied_parameter_needs_one_of_its_names_and_no_two_values(sharded, tmp_path, alone):
    model = Tied()
    path = tmp_path / "tied.safetensors"
    values = torch.arange(15.0).reshape(5, 3)
    if sharded:
        model = data_parallel(model, dist.init_device_mesh("cpu", (1,)))
    for names in (["emb.weight"], ["head.weight"], ["emb.weight", "head.weight"]):
        with torch.no_grad():
            model.emb.weight.zero_()
        save_file({name: values.clone() for name in names} | dict(scale=torch.tensor(3.0)), path)
        assert weights.load_weights(str(path), model) == {"float32": len(names) + 1}
        with unsharded():
            assert torch.equal(model.head.weight, values)
            assert model.scale == 3
        assert len([*model.parameters()]) == 1
    save_file({"emb.weight": values, "head.weight": values + 1, "scale": torch.tensor(3.0)}, path)
    with pytest.raises(CheckpointError, match="head.weight and emb.weight differ, but are one parameter"):
        weights.load_weights(str(path), model)
