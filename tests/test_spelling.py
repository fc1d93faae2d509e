"""trainer/distributed/spelling.py: what a flag's value carries, and command lines of before, in rows and cells.

    pytest tests/test_spelling.py      # seconds, no torch
"""

import dataclasses
import functools
import re
import shlex

import pytest
from fixtures import outcome
from running import ROOT, fails, python, rows_of

from trainer import config as flags
from trainer.distributed import spelling
from trainer.distributed.command_line import explain, kinds_of
from trainer.finetuning import config as finetuning

FIELDS = {f.name: f.default for group in (flags.Training, flags.System, flags.Output)
          for f in dataclasses.fields(group)}  # fmt: skip
OWNERS = {known.part.of for known in flags.PARTS.values()}
TUNED = flags.PARTS | spelling.parts_of(finetuning.System)
RESULTS = sorted(ROOT.glob("results/*.jsonl"))


def read(text, parse=flags.parse):
    """The fields that are parts and do not have their defaults, and what a command line is written as."""
    c = parse(text.split())
    found = {name: getattr(c, name) for name, known in c.parts.items() if getattr(c, name) != known.usual}
    return found, flags.written(c, *found)


# ------------------------------------------------------------------------------------------------- values with parts

WRITTEN = {  # as it is written, and the fields that it sets beside the flag's own
    "--loss chunked:512": dict(chunk=512),
    "--mode hybrid_shard:4": dict(replicas=4),
    "--remat both:0.5:core:keep-norm": dict(remat_ratio=0.5, remat_core=True, remat_norm=False),
    "--remat pointwise:0.25": dict(remat_ratio=0.25),
    "--mlp lean:64": dict(mlp_chunk=64),
    "--attn math": dict(sdpa="math"),
    "--optimizer adamw:beta1=0.8:beta2=0.9": dict(beta1=0.8, beta2=0.9),
    "--optimizer muon:lr=0.02:adjust=original:momentum=0.9:steps=3:dtype=fp32": dict(
        muon_lr=0.02, muon_adjust_lr="original", muon_momentum=0.9, muon_steps=3, muon_dtype="fp32"),
    "--nonfinite skip:5:limit=2.0:warn=0.0": dict(max_skips=5, norm_limit=2.0, spike=0.0),
    "--nonfinite stop:limit=2.0": dict(norm_limit=2.0),
    "--eval-every 50:4": dict(eval_batches=4),
    "--save-every 100:async:warn": dict(save_async=True, save_errors="warn"),
    "--keep 2:best": dict(keep_best=True),
    "--timeout 60.0:90.0": dict(first_timeout=90.0),
    "--wandb offline:nightly:tags=a,b": dict(group="nightly", tags=("a", "b")),
    "--profile memory": dict(explain_memory=True),
}  # fmt: skip


@pytest.mark.parametrize("text", WRITTEN)
def test_a_value_carries_its_parts_and_is_written_as_it_was_given(text):
    assert read(text) == (WRITTEN[text], text)


def test_every_part_is_written_in_some_value_above():
    assert {name for found in WRITTEN.values() for name in found} == set(flags.PARTS)


def test_no_order_of_parts_is_asked_for_and_of_two_flags_the_last_counts_with_its_parts():
    assert read("--remat both:keep-norm:core:0.5") == read("--remat both:0.5:core:keep-norm")
    assert read("--remat both:0.5:core --depth 2 --remat block") == ({}, "")
    assert read("--attn math --attn=flex") == ({}, "")
    c = flags.parse("--profile memory --profile a".split())
    assert (c.explain_memory, c.profile) == (False, "a")
    assert flags.parse(["--profile", "a:b"]).profile == "a:b"


BAD = {
    "--remat both:x": "--remat both:x: RATIO must be a number",
    "--remat both:1.5": "--remat both:1.5: RATIO must be between 0 and 1",
    "--remat both:cor": "--remat both:cor: RATIO must be a number; did you mean core?",
    "--remat none:0.5": "--remat none:0.5: '0.5' is no part of none; there are mlp|attn|both|block|pointwise:RATIO, ",
    "--remat pointwise:core": "--remat pointwise:core: RATIO must be a number",
    "--remat both:": "--remat both:: '' is no part of both; there are ",
    "--remat both:core:core": "--remat both:core:core: core stands there twice",
    "--remat all:0.5": "--remat all:0.5: '0.5' is no part of all",
    "--loss chunked:0": "--loss chunked:0: CHUNK must be at least 1",
    "--loss chunked:1.5": "--loss chunked:1.5: CHUNK must be a whole number",
    "--loss full:512": "--loss full:512: '512' is no part of full; there are chunked:CHUNK",
    "--mode replicate:2": "--mode replicate:2: '2' is no part of replicate; there are hybrid_shard:REPLICAS",
    "--mlp plain:64": "--mlp plain:64: '64' is no part of plain; there are lean:CHUNK",
    "--attn bogus": "--attn bogus: must be auto, cudnn, flash, efficient, math, flex",
    "--optimizer adamw:lr=1": "--optimizer adamw:lr=1: 'lr=1' is no part of adamw; there are ",
    "--optimizer muon:lr=0": "--optimizer muon:lr=0.0: lr=LR must be a positive number",
    "--optimizer muon:dtype=fp16": "--optimizer muon:dtype=fp16: dtype=DTYPE must be fp32 or bf16",
    "--nonfinite stop:5": "--nonfinite stop:5: '5' is no part of stop; there are skip:SKIPS, ",
    "--nonfinite skip:0": "--nonfinite skip:0: SKIPS must be at least 1",
    "--nonfinite stop:limit=nan": "--nonfinite stop:limit=nan: limit=LIMIT must be 0 or a positive number",
    "--eval-every 0:4": "--eval-every 0:4: '4' is no part of 0; there are VALUE:BATCHES",
    "--save-every 5:asyncc": "--save-every 5:asyncc: 'asyncc' is no part of 5; there are VALUE:async, VALUE:warn; did",
    "--timeout 5:-1": "--timeout 5.0:-1.0: TIMEOUT must be 0 or a positive number",
    "--wandb off:a": "--wandb off:a: 'a' is no part of off; there are offline|online:GROUP, offline|online:tags=TAGS",
    "--remat": "--remat: needs a value",
    "--remat --depth 2": "--remat: needs a value",
}


@pytest.mark.parametrize("text", BAD)
def test_a_part_that_is_none_is_one_line_with_the_flag_the_part_and_what_there_is(text, capfd):
    fails(outcome(capfd, lambda: flags.parse(text.split())), 2, f"error: {BAD[text]}")


def test_in_finetune_blocks_alone_are_computed_again():
    own = "--model a --data b "

    def parse(words):
        return finetuning.parse([*own.split(), *words])

    assert read("--remat block:0.5", parse)[0] == dict(remat_ratio=0.5)
    assert (c := parse([])).remat == "none"
    assert c.remat_ratio == 1
    for text in ("block:core", "both"):
        with pytest.raises(SystemExit, match="2"):
            parse(["--remat", text])


# ------------------------------------------------------------------------------------------------ flags of before

OLD = {  # an old command line -> as it is written now
    "--loss chunked --chunk 512": "--loss chunked:512",
    "--chunk=512 --loss=chunked": "--loss chunked:512",
    "--mode hybrid_shard --replicas 4": "--mode hybrid_shard:4",
    "--remat both --remat-core --no-remat-norm --remat_ratio 0.5": "--remat both:0.5:core:keep-norm",
    "--no-remat-norm --remat both --remat-norm --no-remat-core": "--remat both",
    "--remat none --remat both:core --remat-ratio 0.5": "--remat none --remat both:core:0.5",
    "--mlp lean --mlp-chunk 64": "--mlp lean:64",
    "--compile regions": "--compile blocks",
    "--attn sdpa": "--attn auto", "--attn sdpa --sdpa flash": "--attn flash", "--sdpa math": "--attn math",
    "--beta1 0.8 --beta2 0.9": "--optimizer adamw:beta1=0.8:beta2=0.9",
    "--optimizer muon --muon-lr 0.1 --muon-steps 3": "--optimizer muon:lr=0.1:steps=3",
    "--max-skips 2 --nonfinite skip --norm-limit 3 --spike 0": "--nonfinite skip:2:limit=3.0:warn=0.0",
    "--eval-every 5 --eval-batches 2": "--eval-every 5:2",
    "--save-async --save-errors warn --save-every 9": "--save-every 9:async:warn",
    "--save a --save-async": "--save a --save-every 0:async",
    "--keep-best": "--keep 3:best", "--first-timeout 9": "--timeout 600.0:9.0",
    "--wandb offline --group g --tags a b": "--wandb offline:g:tags=a,b",
    "--explain-memory": "--profile memory", "--chunk 2048 --replicas 2": "",
    "--chunk 512 --replicas 4 --remat-ratio 0.5 --group a --tags b": "",  # of no value that is given
}  # fmt: skip


@pytest.mark.parametrize("text", OLD)
def test_an_old_command_line_does_what_it_did_and_says_how_it_is_written_now(text, capsys):
    words, lines = spelling.modern(text.split(), flags.PARTS)
    assert words == OLD[text].split()
    assert lines
    assert vars(flags.parse(text.split())) == vars(flags.parse(OLD[text].split()))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"note: {line}" for line in lines]
    assert all(line.split()[0].rstrip(":").replace("_", "-") in text.replace("_", "-") for line in lines)


def test_todays_command_line_is_not_touched():
    for text in [*WRITTEN, "-v --depth 2 stray --no-reshard --compile-options a=b c=--d -vv", "nproc=2 --lr -1"]:
        assert spelling.modern(text.split(), flags.PARTS) == (text.split(), [])


REFUSED = {
    "--optim in-backward": "--optim: is gone: in-backward had no clipping, ",
    "--mlp-chunk 64": "--mlp-chunk 64: is written --mlp lean:64 now, this is --mlp plain",
    "--remat-core --remat mlp": "--remat-core: is written --remat attn|both|block:core now, this is --remat mlp",
    "--no-remat-norm --remat block": "--no-remat-norm: is written --remat mlp|attn|both:keep-norm now, this is --remat",
    "--attn flex --sdpa math": "--sdpa math: is written --attn math now, this is --attn flex",
    "--muon-lr 1": "--muon-lr 1: is written --optimizer muon:lr=1.0 now, this is --optimizer adamw",
    "--max-skips 5": "--max-skips 5: is written --nonfinite skip:5 now, this is --nonfinite stop",
    "--eval-batches 5": "--eval-batches 5: is written --eval-every VALUE:5 now, this is --eval-every 0",
    "--explain-memory --profile a": "--explain-memory: is written --profile memory now, this is --profile a",
    "--chunk": "--chunk: takes one value", "--chunk x": "--chunk x: must be a whole number",
    "--chunk 1 2": "--chunk 1 2: takes one value", "--remat-core yes": "--remat-core yes: takes no value",
    "--save-errors skip": "--save-errors skip: must be stop or warn",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_an_old_flag_that_cannot_be_written_now_is_one_line_that_says_why(text, capfd):
    fails(outcome(capfd, lambda: flags.parse(text.split())), 2, f"error: {REFUSED[text]}")


def test_an_old_line_of_finetune_recomputes_blocks():
    c = finetuning.parse("--model a --data b --remat-ratio 0.5".split())
    assert (c.remat, c.remat_ratio) == ("block", 0.5)


def test_a_note_is_of_rank_0_and_ends_no_run():
    fails(python("--chunk", 2048, "--depth", 0, trace=False), 2, "error: --depth 0")  # a wrong line is one line


# ----------------------------------------------------------------------------------------------------- rows and cells


@functools.cache
def rows():
    return [row for path in RESULTS for row in rows_of(path)]


def test_every_field_of_a_row_of_before_is_one_of_today():
    """All rows that main.py has written: what it wrote is what it reads, but for two flags that are gone."""
    known = set(kinds_of(flags.Training, flags.System, flags.Output)) | set(flags.PARTS)
    main = [row["flags"] for row in rows() if "remat" in row.get("flags", {}) and "model" not in row["flags"]]
    assert len(main) > 500
    assert {name for each in main for name in each} <= known | {"optim", "flex_options"}
    gone = [each for each in main if each.get("optim") == "in-backward"]
    assert len(gone) <= 2, "the rows of what is gone are still read, as any other"


def test_the_setting_of_every_row_of_before_can_be_written_and_read_again():
    """A row -> a command line as it is written today -> the same values; of a part that means nothing its default."""
    usual = {name: known.usual for name, known in flags.PARTS.items()}
    seen = 0
    for row in rows():
        values = {n: v for n, v in row.get("flags", {}).items() if n in {*flags.PARTS, *OWNERS} and v is not None}
        if "remat" not in values or "model" in row["flags"] or row.get("study") in ("mlp", "estimators"):
            continue
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        told = [(n, v) for n, v in spelling.folded(values, flags.PARTS).items() if n in OWNERS]
        words, parts = spelling.unfold([w for n, v in told for w in (spelling.flag(n), str(v))], flags.PARTS)
        assert explain(words, kinds_of(flags.Training, flags.System, flags.Output)) is None
        own = dict(zip((word[2:].replace("-", "_") for word in words[::2]), words[1::2], strict=True))
        for name, value in values.items():
            if name in OWNERS:  # without its words it has its default, as --attn sdpa of --attn flash
                assert own.get(name, str(FIELDS[name])) == str(value), values
            elif flags.PARTS[name].fits(values.get(flags.PARTS[name].part.of)):
                assert parts.get(name, usual[name]) == value, (name, values)
            else:
                assert name not in parts
        seen += 1
    assert seen > 500


def test_the_command_of_every_row_of_before_can_be_run_again():
    """Those of the tools that take main.py's flags beside their own: `command` is the whole line."""
    kinds = kinds_of(flags.Training, flags.System, flags.Output) | dict(arch=str, published=bool, compile=str)
    commands = {row["command"] for row in rows() if "command" in row and "flags" in row}
    found = [spelling.modern(shlex.split(text), flags.PARTS) for text in commands]
    assert len(found) > 100
    assert sum(len(lines) for _, lines in found) > 100
    for words, _ in found:
        assert explain(spelling.unfold(words, flags.PARTS)[0], kinds) is None, words


def test_every_cell_of_before_has_one_name_and_is_one_of_today():
    """Of rows, and of the files of cells: read as they are written now, and then no more changed."""
    kinds = kinds_of(flags.Training, flags.System, flags.Output) | dict(arch=str, published=bool, compile=str)
    cells = {row["cell"] for row in rows() if re.match("nproc=|--", row.get("cell") or "") and "remat" in row["flags"]}
    renamed = 0
    tuned = kinds_of(finetuning.Tuning, finetuning.System, finetuning.Output)
    for cell in {cell for cell in cells if "in-backward" not in cell}:
        own, parts = (tuned, TUNED) if "--model" in cell else (kinds, flags.PARTS)
        words, lines = spelling.modern(shlex.split(cell), parts)
        assert spelling.modern(words, parts) == (words, [])
        words = [word for word in words if not word.startswith("nproc=")]
        assert explain(spelling.unfold(words, parts)[0], own) is None, cell
        renamed += bool(lines)
    assert len(cells) > 100
    assert renamed > 20
