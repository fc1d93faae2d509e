"""Rows of results hold their whole setting, and are read as such: lab/report/published.py, config.setting."""

import dataclasses

import pytest
from running import ROOT
from test_report import CPU

from lab.report import published as rows
from trainer import config
from trainer.attention_kernel import Shape

NEW = config.setting(config.filled(config.parse("--depth 8 --loss chunked".split()), "cpu"))

# What a row says of its setting where a study takes no flags of main.py.
SETTINGS = {
    "attention": {*Shape._fields, "backend", "options"},
    "failures": {*"world steps seed at_once".split()},
    "first_step": {*"name cache command".split()},
    "trl": {*"pad compile batch seqlen threads chats trl transformers".split()},
}


def test_a_default_that_changes_changes_no_setting_of_a_row(monkeypatch):
    new = CPU | {"flags": NEW, "loss": 2.5, "loss_kind": "chunked"}
    before = [rows.setting(new, name) for name in NEW]
    assert (rows.setting(new, "loss"), rows.setting(new, "depth"), rows.setting(new, "vocab")) == ("chunked", 8, 256)
    for device in ("cpu", "cuda"):
        for name in config.DEFAULTS[device]:
            monkeypatch.setitem(config.DEFAULTS[device], name, "changed")
    for group in (config.Training, config.System):
        for field in dataclasses.fields(group):
            monkeypatch.setattr(group, field.name, "changed")
            monkeypatch.setattr(field, "default", "changed")
    assert [rows.setting(new, name) for name in NEW] == before
    with pytest.raises(ValueError, match="^the row of '--depth 8' does not say what remat was"):
        rows.setting({"line": "--depth 8", "flags": {"depth": 8}}, "remat")


def test_every_row_here_holds_its_whole_setting():
    for path in sorted((ROOT / "results").glob("*.jsonl")):
        for row in rows.read([path]):
            if row.get("study") == "mlp":
                assert row["flags"] == {name: row[name] for name in row["flags"]} and len(row["flags"]) == 15
            elif row.get("study") in SETTINGS:
                assert SETTINGS[row["study"]] <= row.keys()
            elif "setting" in row:  # of a study, whose settings are no flags of main.py
                assert row["setting"] and row["study"] and row["outcome"]
            elif "model" in row["flags"]:  # of finetune.py, whose models have no such shape
                told = {*"depth width vocab seqlen batch grad_accum param_dtype remat_ratio random".split()}
                assert told | {*"steps lr compile mode device seed".split()} <= row["flags"].keys()
            else:
                assert {*rows.SHAPE, *"steps lr compile remat mode device seed".split()} <= row["flags"].keys()


@pytest.mark.parametrize("argv, kept", [
    ("--data text:/home/ann/words.txt", dict(data="text:words.txt")), ("--data bin:/a/b/*.bin", dict(data="bin:*.bin")),
    ("--data text:../ann/corpus/", dict(data="text:corpus")), ("--data bin:a/*.bin", dict(data="bin:a/*.bin")),
    ("--init ~/ann/w.pt --profile /tmp/ann", dict(init="w.pt", profile="ann")), ("", dict(data="stdlib", init=None)),
])
def test_a_setting_names_no_folder_outside_of_the_working_directory(argv, kept):
    found = config.setting(config.filled(config.parse(argv.split()), "cpu"))
    assert {name: found[name] for name in kept} == kept and not {"results", "save", "resume"} & found.keys()
