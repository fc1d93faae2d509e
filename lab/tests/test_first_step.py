"""lab/benchmarks/first_step.py: three rows of a program, by the state of its compile cache, and their table.

    pytest lab/tests/test_first_step.py        # some 30 s
"""

from pathlib import Path

import pytest

from lab.benchmarks import first_step
from lab.report import published, tables

pytestmark = pytest.mark.usefixtures("isolated")
TINY = "main.py --device cpu --depth 1 --width 32 --head-dim 16 --grouping 1 --seqlen 32 --steps 2"


@pytest.mark.long
def test_a_program_has_a_row_for_each_state_of_its_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(first_step, "PROGRAMS", {"tiny": f"{TINY} --compile model"})
    results = tmp_path / "rows.jsonl"
    assert first_step.main(["--only", "tiny", "--results", str(results)]) == 0
    rows = published.read([results])
    assert [row["cache"] for row in rows] == ["cold", "warm", "copied"]
    assert all(row["command_cpu_s"] > row["first_step_cpu_s"] > 0 for row in rows)
    cold, warm, copied = (row["first_step_cpu_s"] for row in rows)
    assert max(warm, copied) < cold, "the cache was not used"
    _, columns = tables.first_step(rows)
    assert [title for title, _ in columns][:2] == ["name", "cache"] and len(columns) == 5


def test_a_program_that_fails_is_named_with_its_exit_code(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(first_step, "PROGRAMS", {"bad": "main.py --depth 0"})
    with pytest.raises(SystemExit, match="1"):
        first_step.main(["--only", "bad", "--results", str(tmp_path / "rows.jsonl")])
    assert "main.py --depth 0: exit code 2: error: --depth 0" in capsys.readouterr().err
    assert not Path(tmp_path / "rows.jsonl").read_text()
