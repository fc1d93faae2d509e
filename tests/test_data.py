"""The batches of trainer/data.py: the same on any number of ranks, every chunk once an epoch, bad files named.

    python -m pytest tests/test_data.py

On a CPU, in one process (and one subprocess), from files of a few kilobytes.
"""

import errno
import os
import re
import resource
import struct
import sysconfig
from pathlib import Path

import pytest
import torch

from trainer import data
from trainer.data import Batches, DataError, check_source

pytestmark = pytest.mark.filterwarnings("error")

T = 16
SOURCES = ["stdlib", "text", "bin", "random", "overfit"]


def batches(source, **changes):
    return Batches(source, **{"global_batch": 8, "seqlen": T, "vocab": 65536, "seed": 3, **changes})


def raw(path, ids):
    """Write ids as nanoGPT does."""
    path.write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    return path


def llmc(path, ids, magic=20240520, version=1, count=None, code="H"):
    """Write ids as llm.c does."""
    header = struct.pack("<3i", magic, version, len(ids) if count is None else count)
    path.write_bytes(header.ljust(1024, b"\0") + struct.pack(f"<{len(ids)}{code}", *ids))
    return path


@pytest.fixture
def batches_of(tmp_path):
    """batches_of(ids) -> batches of a file of them, tmp_path/a.bin."""
    return lambda ids, **changes: batches(f"bin:{raw(tmp_path / 'a.bin', ids)}", **changes)


def tokens_of(stream, steps):
    """The tokens of so many steps: [steps, B, T]."""
    return torch.stack([next(stream)[0] for _ in range(steps)])


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One value of --data for each kind. In the bin file, token number i is i."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_bytes(bytes(range(256)) * 3)
    raw(folder / "a.bin", range(1000))
    return {name: {"text": f"text:{folder}/a.txt", "bin": f"bin:{folder}/a.bin"}.get(name, name) for name in SOURCES}


@pytest.fixture
def counting(sources):
    return sources["bin"]


# Every source


@pytest.mark.parametrize("kind", SOURCES)
def test_batches_are_int64_in_the_vocabulary_and_targets_are_tokens_moved_on_by_one(sources, kind):
    stream = batches(sources[kind])
    assert iter(stream) is stream
    for _, (tokens, targets) in zip(range(3), stream, strict=False):
        for part in (tokens, targets):
            assert part.shape == (8, T) and part.dtype == torch.int64 and part.device.type == "cpu"
            assert part.is_contiguous() and 0 <= int(part.min()) and int(part.max()) < 65536
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert stream.sample == 24
    assert "\n" not in stream.description
    assert stream.description.startswith(sources[kind])


@pytest.mark.long
@pytest.mark.parametrize("kind", SOURCES)
def test_one_two_and_four_ranks_see_the_same_global_batches(sources, kind):
    whole = tokens_of(batches(sources[kind]), 20)  # 160 samples: over two epochs of the bin file
    for world in (2, 4):
        ranks = [tokens_of(batches(sources[kind], rank=rank, world=world), 20) for rank in range(world)]
        assert torch.equal(torch.cat(ranks, dim=1), whole), world


@pytest.mark.parametrize("kind", SOURCES)
def test_a_jump_by_start_or_by_sample_equals_iterating(sources, kind):
    whole = tokens_of(batches(sources[kind]), 12)
    assert torch.equal(tokens_of(batches(sources[kind], start=72), 3), whole[9:])
    stream = batches(sources[kind])
    for step in (11, 0, 7):
        stream.sample = 8 * step
        assert torch.equal(next(stream)[0], whole[step]), step
        assert stream.sample == 8 * step + 8


@pytest.mark.parametrize("kind", ["stdlib", "text", "bin", "random"])
def test_a_sample_does_not_depend_on_the_size_of_the_batch(sources, kind):
    by_8 = tokens_of(batches(sources[kind]), 3).flatten(0, 1)
    by_4 = tokens_of(batches(sources[kind], global_batch=4), 6).flatten(0, 1)
    assert torch.equal(by_8, by_4)


@pytest.mark.parametrize("kind", SOURCES)
def test_another_seed_gives_other_batches(sources, kind):
    assert not torch.equal(next(batches(sources[kind]))[0], next(batches(sources[kind], seed=4))[0])


@pytest.mark.parametrize("kind", SOURCES)
def test_a_default_device_does_not_move_the_batches(sources, kind):
    with torch.device("meta"):
        tokens, _ = next(batches(sources[kind]))
    assert torch.equal(tokens, next(batches(sources[kind]))[0])


# Epochs


def epoch_starts(source, epoch, seed=3):
    """First token of every sample of an epoch of the bin file, in the order drawn; its ids are positions."""
    n = batches(source).epoch_samples
    return tokens_of(batches(source, global_batch=1, start=epoch * n, seed=seed), n)[:, 0, 0]


def test_an_epoch_draws_every_chunk_once(counting):
    for epoch in range(5):
        starts = epoch_starts(counting, epoch)
        assert torch.equal(starts.sort().values, torch.arange(len(starts)) * T + starts.min())
        assert 0 <= int(starts.min()) < T
        assert int(starts.max()) + T < 1000
        assert 1000 - 1 - len(starts) * T < 2 * T  # what is left out


def test_epochs_and_seeds_differ_in_order_and_in_offset(counting):
    runs = [epoch_starts(counting, epoch, seed) for seed in (3, 4) for epoch in range(4)]
    offsets = [int(starts.min()) for starts in runs]
    orders = [tuple((starts - starts.min()).tolist()) for starts in runs]
    assert len(set(orders)) == len(orders)
    assert len(set(offsets)) > 4


def test_every_offset_of_the_grid_is_drawn(counting):
    stream = batches(counting)
    n = stream.epoch_samples
    assert {stream.position(epoch * n) % T for epoch in range(200)} == set(range(T))


def test_a_global_batch_may_be_larger_than_an_epoch(batches_of):
    stream = batches_of(range(3 * T), global_batch=64)
    assert stream.epoch_samples == 2
    assert len({tuple(row.tolist()) for row in next(stream)[0]}) > 4


@pytest.mark.parametrize("extra", range(1, 2 * T + 2))
def test_no_sample_leaves_a_small_file(batches_of, extra):
    tokens, targets = next(batches_of(range(T + extra), global_batch=64))
    assert torch.equal(targets, tokens + 1)
    assert int(targets.max()) < T + extra


# Text


@pytest.mark.long
def test_stdlib_is_the_library_without_tests_in_order_of_path():
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    files = [files[name] for name in sorted(files) if not left_out & set(name.split("/")[:-1])]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(root).parts)]
    stream = batches("stdlib")
    text = bytearray().join(file.read_bytes() for file in files)
    assert stream.stream.shards[0].read(0, len(text)).tobytes() == text
    assert (root / "pydoc_data/topics.py").read_bytes() in text
    said = re.fullmatch(r"stdlib, ([\d']+) files, ([\d']+) tokens, ([\d']+) samples of 16 an epoch", stream.description)
    assert [int(part.replace("'", "")) for part in said.groups()] == [len(files), len(text), stream.epoch_samples]


def test_a_text_folder_is_read_recursively_in_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.md", "a-/c", ".hidden", ".git/x", "a/.y"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode().ljust(T, b"."))
    (tmp_path / "a/empty").touch()
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    stream = batches(f"text:{tmp_path}")
    assert bytes(stream.stream.shards[0].read(0, stream.stream.shards[0].count).tolist()) == b"".join(
        name.ljust(T, b".") for name in (b"a-/c", b"a/z.md", b"b.txt"))
    assert f"text:{tmp_path}, 4 files, 48 tokens, 2 samples of 16 an epoch" == stream.description


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    assert "100 tokens" in batches("text:~/a.txt").description


# Random and overfit


def test_random_tokens_are_uniform_and_fresh():
    stream = batches("random", vocab=50, seqlen=4096)
    tokens = tokens_of(stream, 4)
    counts = tokens.flatten().bincount(minlength=50)
    assert len(counts) == 50
    expected = tokens.numel() / 50
    assert float((counts - expected).abs().max()) < 5 * expected**0.5
    rows = tokens.flatten(0, 1)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
    assert stream.description == "random: fresh tokens below 50, no epochs"


def test_overfit_is_the_first_batch_of_stdlib_for_ever():
    first = next(batches("stdlib"))
    for stream in (batches("overfit"), batches("overfit", start=8 * 1000 + 3)):
        for _ in range(3):
            tokens, targets = next(stream)
            assert torch.equal(tokens, first[0])
            assert torch.equal(targets, first[1])
            tokens.zero_()  # a caller may do as it likes with a batch
    assert len({tuple(row.tolist()) for row in first[0]}) == 8


# Token shards


def test_both_formats_of_llm_c_and_the_raw_one_hold_the_same_tokens(tmp_path):
    ids = [(7 * i) % 50257 for i in range(500)]
    raw(tmp_path / "a.bin", ids)
    llmc(tmp_path / "b.bin", ids)
    llmc(tmp_path / "c.bin", ids, 20240801, 7, code="I")
    a, b, c = (tokens_of(batches(f"bin:{tmp_path}/{name}.bin"), 4) for name in "abc")
    assert torch.equal(a, b)
    assert torch.equal(a, c)
    position = batches(f"bin:{tmp_path}/a.bin").position(0)
    assert a[0, 0].tolist() == ids[position : position + T]


def test_ids_above_two_to_the_sixteenth_are_read(tmp_path):
    llmc(tmp_path / "a.bin", [100000 + i for i in range(200)], 20240801, 7, code="I")
    stream = batches(f"bin:{tmp_path}/a.bin", vocab=128256)
    assert int(next(stream)[0][0, 0]) == 100000 + stream.position(0)


def test_shards_are_one_stream_and_samples_cross_their_borders(tmp_path):
    raw(tmp_path / "x_0.bin", range(0, 5))  # shorter than a sample
    llmc(tmp_path / "x_1.bin", range(5, 40))
    llmc(tmp_path / "x_2.bin", range(40, 47), 20240801, 7, code="I")
    raw(tmp_path / "x_3.bin", range(47, 300))
    raw(tmp_path / "x_4.bin", range(300, 301))
    stream = batches(f"bin:{tmp_path}/x_*.bin")
    for _ in range(20):
        tokens, targets = next(stream)
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(T))
        assert torch.equal(targets, tokens + 1)
    assert stream.description == f"bin:{tmp_path}/x_*.bin, 5 files, 301 tokens, 17 samples of 16 an epoch"
    raw(tmp_path / "all.bin", range(301))
    one, many = (tokens_of(batches(f"bin:{tmp_path}/{name}.bin"), 9) for name in ("all", "x_*"))
    assert torch.equal(one, many)


def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path):
    raw(tmp_path / "a[1].bin", range(100))
    assert "100 tokens" in batches(f"bin:{tmp_path}/a[1].bin").description


def test_token_files_are_mapped_and_not_read(tmp_path):
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(4 << 30)  # sparse: no blocks on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = batches(f"bin:{tmp_path}/a.bin", seqlen=65536)
    tokens, _ = next(stream)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert not tokens.any() and grown < 64 << 10, f"{grown} KiB more"


def test_the_fingerprint_follows_the_data_and_not_its_place(tmp_path, batches_of):
    (tmp_path / "b").mkdir()
    first = batches_of(range(1000)).fingerprint
    assert batches(f"bin:{raw(tmp_path / 'b/c.bin', range(1000))}").fingerprint == first
    longer, other = (batches_of(ids).fingerprint for ids in (range(1001), range(1, 1001)))
    with_header = batches(f"bin:{llmc(tmp_path / 'a.bin', range(1000))}").fingerprint
    assert len({first, longer, other, with_header, *(batches(s).fingerprint for s in ("stdlib", "overfit"))}) == 6


# Bad flags


@pytest.mark.parametrize("source", ["", "tex", "stdlib:", "text:", "bin:", "text", "random:3", "a.bin", "Bin:x"])
def test_an_unknown_source_is_refused_with_the_forms_allowed(source):
    message = re.escape(f"--data {source}: expected one of stdlib, text:PATH, bin:GLOB, random, overfit")
    with pytest.raises(ValueError, match=rf"^{message}(; did you mean (stdlib|text:|random)\?)?$"):
        check_source(source)
    with pytest.raises(ValueError, match=message):
        batches(source)


def test_a_file_without_its_kind_is_refused_with_the_word_to_write_before_it(tmp_path):
    (tmp_path / "corpus.md").write_text("text")
    with pytest.raises(ValueError, match=f"did you mean text:{tmp_path}/corpus.md"):
        check_source(f"{tmp_path}/corpus.md")


def test_known_sources_are_accepted_without_opening_a_file():
    for source in ("stdlib", "random", "overfit", "text:/no/such", "bin:/no/such*", "text:C:x"):
        check_source(source)


@pytest.mark.parametrize("kind", ["stdlib", "text", "overfit"])
def test_bytes_need_a_vocabulary_of_256(sources, kind):
    with pytest.raises(ValueError, match=f"^--vocab 255: --data {re.escape(sources[kind])} is read as bytes .* 256"):
        batches(sources[kind], vocab=255)
    batches(sources[kind], vocab=256)


@pytest.mark.parametrize("size, world, sum_", [(66, 4, "66 = 4 ranks x 16 + 2"), (3, 4, "3 = 4 ranks x 0 + 3"),
                                               (0, 2, "0 = 2 ranks x 0 + 0")])
def test_a_global_batch_that_does_not_divide_is_refused_with_the_numbers(size, world, sum_):
    with pytest.raises(ValueError, match=rf"^--batch: {size} .* {world} ranks \({re.escape(sum_)}\); use a multiple"):
        batches("random", global_batch=size, world=world)


# Bad files: the message has the file, the place, expected, found, the fix


# name: (--data, what is in the file F, how the message begins); D is the folder and F is D/f
LLAMA = {"magic": 20240801, "version": 7}
FAULTS = {
    "text missing": ("text:D/none", None, "D/none: expected readable data, found No such file or directory; check"),
    "text under a file": ("text:F/x", b"x", "F/x: expected readable data, found Not a directory; check"),
    "text empty": ("text:F", b"", "F, byte 0: expected text, found 0 bytes in 1 file; name a file"),
    "text folder empty": ("text:D", None, "D, byte 0: expected text, found 0 bytes in 0 files; name a file"),
    "text short": ("text:F", b"x" * T, "text:F, token 16: expected at least 17 tokens (--seqlen + 1), found the end of "
                   "the data; add data or lower --seqlen"),
    "bin missing": ("bin:F", None, "F: expected at least one token file, found none; check --data bin:GLOB"),
    "bin glob empty": ("bin:D/*.x", b"x", "D/*.x: expected at least one token file, found none; check"),
    "bin folder": ("bin:D", b"x", "D: expected at least one token file, found none; check"),
    "bin empty": ("bin:F", b"", "F, byte 0: expected token ids, found an empty file; copy or write"),
    "bin short": ("bin:F", b"..." * 10, "bin:F, token 15: expected at least 17 tokens"),
    "odd": ("bin:F", b"." * 1235, "F, byte 1'234: expected an even number of bytes (raw uint16), found 1'235; copy"),
    "one byte": ("bin:F", b".", "F, byte 0: expected an even number of bytes (raw uint16), found 1; copy"),
    "magic": ("bin:F", {"magic": 20240326}, "F, byte 0: expected the magic number of llm.c's token files (20240520 "
              "or 20240801), found 20240326; name token files"),
    "version": ("bin:F", {"version": 2}, "F, byte 4: expected version 1 of magic 20240520, found 2; copy"),
    "version of Llama": ("bin:F", LLAMA | {"version": 1}, "F, byte 4: expected version 7 of magic 20240801, found 1;"),
    "uint16 as Llama": ("bin:F", LLAMA, "F, byte 8: expected 1'424 bytes for 100 tokens, found 1'224 bytes; copy"),
    "truncated": ("bin:F", {"count": 1000}, "F, byte 8: expected 3'024 bytes for 1'000 tokens, found 1'224 bytes;"),
    "appended": ("bin:F", {"count": 99}, "F, byte 8: expected 1'222 bytes for 99 tokens, found 1'224 bytes;"),
    "negative": ("bin:F", {"count": -1}, "F, byte 8: expected 1'022 bytes for -1 tokens, found 1'224 bytes;"),
    "no tokens": ("bin:F", {"ids": []}, "F, byte 8: expected 1'024 bytes for 0 tokens, found 1'024 bytes;"),
    "header cut": ("bin:F", struct.pack("<3i", 20240520, 1, 9), "F, byte 8: expected 1'042 bytes for 9 tokens, found"),
    "id, raw": ("bin:F", struct.pack("<1100H", *range(64000, 65100)), "F, token 1'000 (byte 2'000): expected an id "
                "below --vocab 65000, found 65000; raise --vocab"),
    "id, llm.c": ("bin:F", {"ids": [1, 2, 3, 65001]}, "F, token 3 (byte 1'030): expected an id below --vocab 65000, "
                  "found 65001; raise --vocab"),
    "id, Llama": ("bin:F", LLAMA | {"ids": [1, 2**32 - 1], "code": "I"}, "F, token 1 (byte 1'028): expected an id "
                  "below --vocab 65000, found 4294967295; raise"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_file_is_named_with_place_expected_found_and_fix(tmp_path, name):
    source, content, message = FAULTS[name]
    source, message = (re.sub(r"\b[DF]\b", lambda m: {"D": f"{tmp_path}", "F": f"{tmp_path}/f"}[m[0]], text)
                       for text in (source, message))
    if isinstance(content, bytes):
        (tmp_path / "f").write_bytes(content)
    elif content:
        llmc(tmp_path / "f", **{"ids": range(100), **content})
    with pytest.raises(DataError) as caught:
        batches(source, vocab=65000)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["text", "bin"])
def test_an_unreadable_file_is_named(tmp_path, monkeypatch, kind):
    raw(tmp_path / "f", range(100))

    def deny(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", deny)
    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(DataError, match=f"^{tmp_path}/f: expected readable data, found Permission denied; check the"):
        batches(f"{kind}:{tmp_path}/f")


def test_in_a_file_too_large_to_scan_a_bad_id_is_found_when_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SCAN_BYTES", 100)
    raw(tmp_path / "a.bin", range(150))
    llmc(tmp_path / "b.bin", [60000 if i == 77 else i for i in range(200)])
    stream = batches(f"bin:{tmp_path}/*.bin", vocab=1000, global_batch=1)
    message = f"^{tmp_path}/b.bin, token 77 \\(byte 1'178\\): expected an id below --vocab 1000, found 60000; "
    with pytest.raises(DataError, match=message):
        for _ in range(2 * stream.epoch_samples):
            before = stream.sample
            next(stream)
    assert stream.sample == before < stream.epoch_samples + 1  # nothing was consumed by the sample that failed


def test_the_scan_names_the_first_bad_id(batches_of):
    with pytest.raises(DataError, match=r"token 50 \(byte 100\): expected an id below --vocab 50, found 50;"):
        batches_of(range(100), vocab=50)
