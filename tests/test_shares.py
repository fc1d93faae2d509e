"""TEST_SHARE=I/N (tests/fixtures.py), by which CI takes a part of the slow suite.

pytest tests/test_shares.py        # less than a second
"""

from pathlib import Path
from types import SimpleNamespace

import fixtures
import pytest


@pytest.mark.parametrize("shares", [2, 3])
def test_each_file_is_in_one_share_though_both_conftests_have_the_hook(monkeypatch, shares):
    paths = [Path(f"test_{i}.py") for i in range(8)]
    ran = []
    for which in range(shares):
        monkeypatch.setenv("TEST_SHARE", f"{which}/{shares}")
        config = SimpleNamespace(stash=pytest.Stash(), hook=SimpleNamespace(pytest_deselected=lambda items: None))
        items = [SimpleNamespace(path=path, name="test", add_marker=None) for path in paths for _ in range(2)]
        for _ in range(2):  # of tests/conftest.py, and of lab/tests/conftest.py
            fixtures.pytest_collection_modifyitems(config, items)
        ran += [item.path for item in items]
    assert sorted(ran) == sorted(paths * 2)
