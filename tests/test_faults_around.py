"""What lies around a run and breaks: torchrun, homes, caches, numbers of a command line.

    pytest tests/test_faults_around.py        # no GPU; a few seconds
"""

import socket
import threading

import pytest

from trainer.distributed import launch

pytestmark = pytest.mark.usefixtures("isolated")


@pytest.mark.parametrize("alive", [True, False])
def test_a_rank_whose_launcher_was_killed_before_it_could_know_it_ends(alive, monkeypatch):
    """It was a child of another process from its first line on; the store of torchrun tells."""
    ended, connected = threading.Event(), threading.Event()
    monkeypatch.setattr("os._exit", lambda code: (ended.set(), connected.set()))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for name, value in dict(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
            monkeypatch.setenv(name, value)
        if not alive:
            server.close()
        threading.Timer(2 if alive else 60, connected.set).start()
        launch.end_without_launcher(connected)
    assert ended.is_set() == (not alive)
