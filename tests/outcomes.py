"""What runs and exports ended with: for the tests of programs that run in this process."""

from fixtures import outcome
from running import one_line


def fine(done):
    """One that ended as it should."""
    assert done.code == 0, done.err
    return done


def refused(code, words, done):
    """Asserts that one ended with this code and one line."""
    assert done.code == code and words in one_line(done.err), done.err


def losses(done, name="loss"):
    """Of each step of a run."""
    return [step[name] for step in done.steps]


def later(capfd, *argv):
    """python -m trainer.finetuning.export in this process."""
    from trainer.finetuning import export

    return outcome(capfd, lambda: export.main([*map(str, argv)]))
