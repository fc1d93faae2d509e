"""Chat data in the files that people have: tables, arrays, folders, mixtures by weight, columns of other programs.

    pytest tests/test_chat_sources.py        # seconds, no network

Lines, labels and batches: tests/test_chat.py, tests/test_chat_batches.py.
"""

import importlib.util
import json
import shutil
from datetime import date
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from conversations import chats, jsonl, refuse
from outcomes import fine, losses, refused

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
pytest.importorskip("datasets", reason="needs datasets: pip install -e '.[hf]'")

import datasets
import pyarrow.parquet
from tiny_hf import lines, write_data

from trainer.finetuning.chat import ChatBatches
from trainer.finetuning.columns import Columns
from trainer.finetuning.messages import BadLine
from trainer.finetuning.sources import check_files, records, weighted

pytestmark = pytest.mark.usefixtures("isolated")
HOW = dict(global_batch=4, seqlen=64, vocab=512, seed=3)
TOOLS = [dict(messages=[dict(role="user", content=content), dict(role="assistant", content="y", tool_calls=[
    dict(type="function", function=dict(name="find", arguments=arguments))])])
    for content, arguments in (("x", dict(a=1)), ([dict(type="text", text="x")], dict(b=[1.5, None])))]  # fmt: skip


def write(path: Path, rows: list[dict]) -> Path:
    """Rows in the form that the suffix says; .stream: the folder that save_to_disk of datasets makes."""
    if path.suffix == ".jsonl":
        jsonl(path, rows)
    elif path.suffix == ".json":
        path.write_text("\ufeff " + json.dumps(rows, indent=1))
    elif path.suffix == ".saved":
        datasets.Dataset.from_list(rows, on_mixed_types="use_json").save_to_disk(path, num_shards=2)
    else:
        table = pyarrow.Table.from_pylist([dict.fromkeys(chain(*rows)) | row for row in rows])
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=7)
        else:
            with pyarrow.ipc.new_file(path, table.schema) as file:
                file.write_table(table, 7)
    return path


def batches_of(source, tokenizer, tmp_path, **changes):
    return ChatBatches(source, tokenizer("qwen2.5"), cache=str(tmp_path / "cache"), **HOW | changes)


def same(one, other, count=12):
    pairs = zip(islice(one, count), islice(other, count), strict=True)
    return all(torch.equal(a, b) for first, second in pairs for a, b in zip(first[:2], second[:2], strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", ["[a].parquet", "a.json", "a::b.arrow", "a.saved"])
def test_the_same_examples_in_another_file_are_the_same_batches_and_may_go_on_a_run(name, tokenizer, tmp_path):
    plain = batches_of(str(write(tmp_path / "a.jsonl", lines(40))), tokenizer, tmp_path)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / name, lines(40))
    other = batches_of(str(tmp_path / "folder" / (name if "saved" in name else "")), tokenizer, tmp_path)
    assert same(plain, other) and plain.fingerprint == other.fingerprint


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.saved", "a.jsonl", "a.json"])
def test_a_row_has_what_was_written_and_no_more(name, tmp_path):
    """In a table each call of a function has the arguments of all, most of them null, and a date is no text."""
    rows = [*TOOLS, dict(text="2024-07-26", more=1), dict(text="2024-07-27", image=dict(path="/absent", bytes=None))]
    if name in ("a.parquet", "a.arrow"):
        rows = rows[:1] + [json.loads(json.dumps(TOOLS[0]).replace('"a": 1', '"b": [1.5]'))] + rows[2:]
    else:
        rows[3].pop("image")
    (file,) = [each for each in check_files(str(write(tmp_path / name, rows))) if "00001-of" not in each.name]
    found = [record if isinstance(record, dict) else json.loads(record) for _, record in records(file)]
    expected = rows[: len(found)]
    if "image" in expected[-1]:
        expected[-1]["image"].pop("bytes")
    assert found == expected


def test_values_of_a_table_that_json_has_not_are_text(tmp_path):
    rows = [dict(text=b"a", when=date(2024, 7, 26)), dict(text=b"\xff", when=None)]
    assert [each for _, each in records(write(tmp_path / "a.parquet", rows))] == [
        dict(text="a", when="2024-07-26"), dict(text="\udcff")]  # fmt: skip


def conversations(kind, count=12):
    """Chats of which the values have other shapes from line to line, by a rule."""
    made = []
    for i in range(count):
        text = f'Line {i}:\n"{i}"'
        question, answer = dict(role="user", content=text), dict(role="assistant", content=f"Yes, {i}.")
        if kind == "parts" and i % 3:
            question["content"] = [dict(type="text", text=text)]
        if kind == "calls":
            arguments = [dict(a=i), dict(b=[i, None]), dict(c=dict(d=str(i)))][i % 3]
            call = dict(type="function", function=dict(name="find", arguments=arguments))
            answer = dict(answer, tool_calls=[call])
        if kind == "nulls":
            call = dict(type="function", function=dict(name="find", arguments=dict(a=i, b=None if i % 2 else "x")))
            answer = dict(answer, tool_calls=[call], name=None)
        made.append(dict(messages=[question, answer]))
    return made


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "parts", "calls", "nulls"])
def test_one_data_set_saved_as_a_table_or_as_lines_is_one_text(kind, tokenizer, tmp_path):
    rows = conversations(kind)
    made = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "a.saved")
    made.to_json(tmp_path / "a.jsonl")
    jsonl(tmp_path / "b.jsonl", rows)
    jsonl(tmp_path / "c.jsonl", [dict(messages=json.dumps(row["messages"])) for row in rows])
    datasets.Dataset.from_json(str(tmp_path / "c.jsonl"), cache_dir=str(tmp_path)).to_parquet(tmp_path / "c.parquet")
    found = {}
    for name in ("a.parquet", "a.saved", "a.jsonl", "b.jsonl", "c.jsonl", "c.parquet"):
        how = HOW | dict(seqlen=128)
        stream = ChatBatches(str(tmp_path / name), tokenizer("all"), cache=str(tmp_path / "cache"), **how)
        found[name] = stream.fingerprint
        assert stream.preview(4, False).count("Line 4:\n") == 1 and "\\n" not in stream.preview(4, False), name
        assert "null" not in stream.preview(1, False).replace("1, null]", ""), name
    assert len({*found.values()}) == 1


TURNS = [dict(role="user", content="Why?"), dict(role="assistant", content="So.")]
TURN = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
OTHERS = {
    "dictionary": pyarrow.list_(pyarrow.struct([("role", pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
                                                ("content", pyarrow.large_string())])),
    "large list": pyarrow.large_list(TURN), "fixed list": pyarrow.list_(TURN, 2),
    "more keys": pyarrow.list_(pyarrow.struct([*TURN, ("tool_calls", pyarrow.list_(pyarrow.string()))])),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_of_another_type_has_the_value_that_it_stands_for(kind, suffix, tmp_path):
    table = pyarrow.table(dict(messages=pyarrow.array([TURNS], OTHERS[kind])))
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    assert [row for _, row in records(path)] == [dict(messages=TURNS)]


@pytest.mark.parametrize("kind", ["map", "map inside", "list view"])
def test_a_column_that_cannot_be_read_is_named_with_its_type(kind, tokenizer, tmp_path):
    text = pyarrow.map_(pyarrow.string(), pyarrow.string())
    column, expected = {
        "map": (pyarrow.array([[("a", "b")]], text), "more of type map<string, string"),
        "map inside": (pyarrow.array([[dict(a=[("a", "b")])]], pyarrow.list_(pyarrow.struct([("a", text)]))),
                       "more of type list<element: struct<a: map<string, string"),
        "list view": (pyarrow.array([[1]], pyarrow.list_view(pyarrow.int64())), "more of type list_view<"),
    }[kind]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table(dict(text=["x"], more=column)), tmp_path / "a.parquet")
    words = rf"a.parquet: expected columns that datasets can read, found {expected}.*; leave the column out, or save"
    refuse(words, batches_of, str(tmp_path / "a.parquet"), tokenizer, tmp_path)


@pytest.mark.parametrize("named", ["/absent/a.png", "https://127.0.0.1:9/a.png"])
def test_a_column_of_images_does_not_open_what_it_names(named, tmp_path, monkeypatch):
    """datasets itself would read the file, or ask another machine for it."""
    features = datasets.Features(text=datasets.Value("string"), image=datasets.Image())
    rows = datasets.Dataset.from_dict(dict(text=["a"], image=[named]), features=features)
    pyarrow.parquet.write_table(rows.data.table, tmp_path / "a.parquet")
    assert datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(tmp_path / "a.parquet")) == features
    calls = []
    monkeypatch.setattr("socket.socket.connect", lambda *given: calls.append(given))
    assert [each["text"] for _, each in records(tmp_path / "a.parquet")] == ["a"] and not calls


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_table_and_a_bad_row_are_named(name, tokenizer, tmp_path):
    path = write(tmp_path / name, [*lines(3), dict(messages=[dict(role="user", content="x")])])
    refuse(rf"{name}, row 4: expected an answer", batches_of, str(path), tokenizer, tmp_path)
    path.write_bytes(b"ARROW1" + bytes(99))
    refuse(rf"{name}: expected a {path.suffix} file", batches_of, str(path), tokenizer, tmp_path)


def test_what_is_wrong_in_an_array_is_named(tmp_path):
    path = tmp_path / "a.json"
    for text, found in (('[{"text": "a"}, {"text": ]', "Expecting value: line 1"), ('[{"text": "a"}', "Expecting ','"),
                        ('[{"a": 1, "a": 2}]', "the key 'a' twice in one object")):  # fmt: skip
        path.write_text(text)
        refuse(f"a.json: expected an array of JSON, found {found}", list, records(path))
    path.write_text('{"text": "a"}\n{"text": "b"}\n')  # lines, whatever it is called
    assert [each for _, each in records(path)] == [b'{"text": "a"}\n', b'{"text": "b"}\n']


def test_without_datasets_files_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuse(r"a.jsonl: expected the library datasets, to read it, found none; pip install",
        check_files, str(write(tmp_path / "a.jsonl", lines(1))))


FOLDERS = [  # files with what is in them, and what is said
    (dict(a=".jsonl", c=".parquet"), r"files of one kind, found .jsonl and .parquet; name a pattern in --data"),
    ({"train-0": ".jsonl", "sub/test-0": ".jsonl"}, r"of one split, found test and train; .*/\*\*/train\*.jsonl"),
    ({"dataset_dict": ".json", "train/a": ".arrow", "test/a": ".arrow"}, "found the splits test, train; name one of"),
    (dict(state=".json", dataset_info=".json"), "state.json: expected a file that datasets saved, found KeyError"),
]


@pytest.mark.parametrize(("files", "found"), FOLDERS)
def test_a_folder_has_files_of_one_kind_and_one_split(files, found, tmp_path):
    for name, suffix in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}{suffix}").write_text("{}")
    refuse(found, check_files, str(tmp_path))


def test_a_folder_may_have_other_json_beside_its_files(tmp_path):
    for name in ("a.jsonl", "about.json", "b.jsonl"):
        (tmp_path / name).write_text("{}")
    assert [each.name for each in check_files(str(tmp_path))] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize("named", ["../secret.arrow", "/etc/hostname", "link.arrow", "sub/../../secret.arrow"])
def test_a_saved_folder_that_names_files_outside_of_itself_is_refused(named, tmp_path):
    write(tmp_path / "secret.arrow", lines(2))
    folder = write(tmp_path / "a.saved", lines(2))
    (folder / "link.arrow").symlink_to(tmp_path / "secret.arrow")
    (folder / "state.json").write_text(json.dumps(dict(_data_files=[dict(filename=named)])))
    refuse("state.json: expected files of its folder, found .*(secret|link|hostname)", check_files, str(folder))


@pytest.mark.parametrize("text", [
    "[" * 99_999, '{"_data_files": 1}', '{"_data_files": [{"filename": "a\\u0000b"}]}',
    '{"_data_files": [{"filename": "circle.arrow"}]}',
])  # fmt: skip
def test_an_odd_state_of_a_saved_folder_is_refused_by_its_name(text, tmp_path):
    folder = write(tmp_path / "a.saved", lines(2))
    (folder / "circle.arrow").symlink_to(folder / "circle.arrow")
    (folder / "state.json").write_text(text)
    refuse("state.json: expected a file that datasets saved, found ", check_files, str(folder))


# ------------------------------------------------------------------------------------------------- mixtures by weight


@pytest.mark.parametrize("pad", ["fixed", "pack"])
def test_each_epoch_of_a_mixture_has_exactly_its_shares_and_passes_each_source_evenly(pad, tokenizer, tmp_path):
    paths = [write(tmp_path / "a.jsonl", lines(20)), write(tmp_path / "b.jsonl", chats(9))]
    mixed = batches_of([f"{paths[0]}:3", f"{paths[1]}:1"], tokenizer, tmp_path, pad=pad)
    rows, (a, b) = mixed.epoch_samples, mixed.sizes
    assert mixed.shares == [round(rows * 0.75), rows - round(rows * 0.75)] and a + b == rows
    counts = torch.zeros(rows, dtype=torch.long)
    for epoch in range(6):
        order = [mixed.position(epoch * rows + i) for i in range(rows)]
        assert sum(each < a for each in order) == mixed.shares[0]
        counts += torch.bincount(torch.tensor(order), minlength=rows)
        for own in (counts[:a], counts[a:]):
            assert own.max() - own.min() <= 1
    assert f"{mixed.shares[0] / rows:.1%} from {paths[0]} ({mixed.shares[0] / a:.2f} passes)" in mixed.description


def test_without_weights_several_sources_are_one(tokenizer, tmp_path):
    paths = [str(write(tmp_path / f"{n}.jsonl", rows)) for n, rows in (("a", lines(30)), ("b", chats(12)))]
    both = batches_of(paths, tokenizer, tmp_path)
    assert same(both, batches_of(f"{tmp_path}/*.jsonl", tokenizer, tmp_path)) and both.shares is None


def test_weights_that_make_no_sense_are_one_line(tokenizer, tmp_path, tune):
    assert weighted(["a", "b:c"]) == [("a", None), ("b:c", None)]
    assert weighted(["a:2", "b:0.5"]) == [("a", 2.0), ("b", 0.5)]
    a, b = (write_data(tmp_path / f"{n}.jsonl", 8) for n in "ab")
    bare = f"--data {b}: has no weight, but others have one; give each source a weight ({b}:0.5)"
    for words, said in (([f"{a}:0.5", b], bare),
                        ([f"{a}:-1"], f"--data {a}:-1: a weight must be a positive number"),
                        ([f"{a}:nan"], "a weight must be a positive number"),
                        ([f"{a}:99", f"{b}:0.01"], f"--data {b}: gives none of the 16 rows of an epoch; raise its")):
        refused(2, said, tune("--steps", 1, "--data", *words))
    twice = [f"{a}:1", f"{tmp_path}/[ab].jsonl:1"]
    refuse("each file once, found one file twice", batches_of, twice, tokenizer, tmp_path)


@pytest.mark.long
def test_a_run_of_a_mixture_is_resumed_bit_equal_and_refused_for_another(tune, tmp_path):
    a, b = (write_data(tmp_path / f"{n}.jsonl", 16) for n in "ab")
    usual = "--steps", 2, "--log-every", 1, "--save", "s", "--save-every", 1, "--data"
    whole = fine(tune(*usual, f"{a}:0.8", f"{b}:0.2"))
    assert whole.row["flags"]["data"] == ["a.jsonl:0.8", "b.jsonl:0.2"]  # no path: it may name a user
    shutil.rmtree("s/step-00000002")
    again = fine(tune(*usual, f"{a}:0.8", f"{b}:0.2"))
    assert losses(again) == losses(whole)[1:] and "the command line wins" not in again.out
    refused(3, f"--data {a}:0.7 {b}:0.3: expected the data of s/step-", tune(*usual, f"{a}:0.7", f"{b}:0.3"))


# ------------------------------------------------------------------------------------------- columns of other programs


TURNS = [dict(role="user", content="a"), dict(role="assistant", content="b")]
SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
RENAMED = [dict(who="human", said="a"), dict(who="gpt", said="b")]
CALL = dict(name="find", arguments=dict(x=1))
READ = {  # --format, --columns, a line, what it is read as, and what is said of it
    "own": ("auto", {}, dict(messages=TURNS), TURNS, ""),
    "sharegpt": ("auto", {}, dict(conversations=SHARED), TURNS, "read as ShareGPT's: conversations of from and value"),
    "conversations": ("auto", {}, dict(conversations=TURNS), TURNS, "conversations of role and content"),
    "renamed": ("auto", dict(messages="chat", role="who", content="said"), dict(chat=RENAMED), TURNS, "who and said"),
    "system": ("auto", {}, dict(conversations=SHARED, system="s"), [dict(role="system", content="s"), *TURNS], "Share"),
    "call": ("auto", {}, dict(conversations=[SHARED[0], {"from": "function_call", "value": json.dumps(CALL)}]), [
        TURNS[0], dict(role="assistant", content="", tool_calls=[dict(type="function", function=CALL)])], "ShareGPT"),
    "alpaca": ("auto", {}, dict(instruction="a", input="", output="b", text="all"), TURNS, "read as Alpaca's: instr"),
    "input": ("auto", {}, dict(instruction="a", input="c", output="b"),
              [dict(TURNS[0], content="a\n\nc"), TURNS[1]], "Alpaca"),
    "history": ("auto", {}, dict(instruction="a", output="b", history=[["a", "b"]]), TURNS * 2, "Alpaca"),
    "question": ("auto", dict(instruction="q", output="r"), dict(q="a", r="b", id=1), TURNS, "Alpaca"),
    "chosen": ("messages", {}, dict(instruction="x", output="y", messages=TURNS), TURNS, "as --format messages"),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_columns_of_other_programs_are_read_and_it_is_said(kind):
    form, columns, line, expected, said = READ[kind]
    found, words = Columns(form, columns).read(line)
    assert found["messages"] == expected and words.startswith("read as" if said else "") and said in words
    assert line == READ[kind][2]  # not changed


UNREAD = [
    ("auto", {}, dict(conversations=[{"from": "narrator", "value": "a"}]), "one of the roles human", "'narrator' in"),
    ("auto", {}, dict(conversations=[SHARED[0], {"from": "gpt"}]), "from and value in each message", "in message 2"),
    ("auto", {}, dict(conversations="no JSON"), "conversations, a list of messages", "Expecting value"),
    ("auto", {}, dict(conversations={"from": "gpt"}), "conversations, a list of messages", "dict"),
    ("auto", dict(output="r"), dict(instruction="a"), "the column r of --columns", "instruction"),
    ("alpaca", {}, dict(instruction="a"), "instruction and output (--format alpaca)", "no output"),
    ("auto", {}, dict(instruction=["a"], output="b"), "instruction and input as text", "list"),
    ("auto", {}, dict(instruction="a", output="b", history=["c"]), "history, a list of pairs", '["c"]'),
]  # fmt: skip


@pytest.mark.parametrize(("form", "columns", "line", "expected", "found"), UNREAD)
def test_what_has_other_columns_is_a_bad_line(form, columns, line, expected, found):
    with pytest.raises(BadLine) as error:
        Columns(form, columns).read(line)
    assert expected in error.value.args[0] and found in error.value.args[1]
