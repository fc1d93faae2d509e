"""The fixtures of tests/fixtures.py, which product and lab share; and programs run in this process."""

import shlex

import pytest
from fixtures import *  # noqa: F403
from running import one_line

from lab.report import __main__ as command


@pytest.fixture
def ended(capsys):
    """ended(main, words) -> (exit code, stdout, stderr) of a program."""

    def ended(main, words):
        try:
            code = main(shlex.split(words))
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return ended


@pytest.fixture
def report(ended):
    """report(words) -> what `python -m lab.report WORDS` prints, which ends well."""

    def report(words):
        code, out, err = ended(command.main, words)
        assert code == 0, err
        return out

    return report


@pytest.fixture
def refused(ended):
    """refused(main, words) -> the message by which a program refuses them, with exit code 2."""

    def refused(main, words):
        code, _, err = ended(main, words)
        assert code == 2, err
        return err if err.count("\n") == 1 else one_line(err)

    return refused
