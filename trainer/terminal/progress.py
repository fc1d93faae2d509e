"""What a process is doing and for how long, while nothing else is printed.

    with Progress("importing torch"): ...  # says every few seconds what takes so long

Imports no torch.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partialmethod
from typing import TextIO

from trainer.terminal.output import CLEAR_LINE, is_terminal, tell

ENDING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class Progress(AbstractContextManager):
    """Says what this process is doing and for how long. On a terminal that is a line with a spinner, which stays below
    all that is printed and goes when the process ends, by a signal, too; elsewhere a line for the first stage, and one
    for each EVERY_S that a stage lasts.

    speak: False on all ranks but one. stage: words, to which seconds are added before a "; ", or a function that gives
    them, which another thread calls; off a terminal empty words are not said."""

    EVERY_S = 10.0

    def __init__(self, stage: str = "", speak: bool = True, stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.live = None
        self.over = threading.Event()
        self.cleared = False
        self.stage(stage)
        # A process may have been started without standard output.
        if not speak or self.stream is None:
            return
        if is_terminal(self.stream):
            from rich.console import Console
            from rich.live import Live
            from rich.spinner import Spinner

            self.spinner = Spinner("dots")

            class Unwrapped(Console):
                """A line that is wider than the terminal stays one line, which can be copied."""

                print = partialmethod(Console.print, soft_wrap=True)

            self.console = console = Unwrapped(file=self.stream)
            how = dict(transient=True, refresh_per_second=5, redirect_stderr=sys.stderr.isatty())
            self.live = Live(get_renderable=lambda: self, console=console, **how)
            self.live.start(refresh=True)
            console.show_cursor()  # a process that is killed could not bring it back
            atexit.register(self.__exit__)
            # As long as nothing else handles them, as a run does later. Only the main thread may.
            with suppress(ValueError):
                for kind in ENDING:
                    if signal.getsignal(kind) == signal.SIG_DFL:
                        signal.signal(kind, self._end)
        else:
            tell(f"{self}", self.stream)
            with suppress(RuntimeError):  # no more threads: what needs one says so
                threading.Thread(target=self._repeat, name="progress", daemon=True).start()

    def stage(self, stage: str | Callable[[], str]) -> None:
        """What is done from now on."""
        self.words = stage
        self.said = None
        self.since = 0.0
        str(self)

    def __str__(self) -> str:
        words = self.words() if callable(self.words) else self.words
        if words != self.said:
            self.since = time.monotonic()  # before `said`, by which another thread takes it for set
            self.said = words
        what, mark, hint = words.partition("; ")
        seconds = int(time.monotonic() - self.since)
        return what + f", {seconds} s" * (seconds > 0 and what != "") + mark + hint

    def __rich__(self):
        """What rich draws, asked at the moment when it does: after `clear` a print would bring the old line back."""
        if self.cleared:
            return ""
        text = str(self)
        width = self.console.width - 3  # beside the spinner
        if len(text) > width:  # a second line would be left by `clear`
            text = text.partition("; ")[0][:width]
        self.spinner.update(text=text)
        return self.spinner

    def clear(self) -> None:
        """Removes the line where the process ends without `__exit__`: in a handler of signals, in another thread."""
        if self.live and not self.over.is_set():
            self.cleared = True
            with suppress(OSError, ValueError):
                os.write(self.stream.fileno(), CLEAR_LINE.encode())

    def _end(self, signum: int, _frame) -> None:
        self.clear()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    def _repeat(self) -> None:
        while not self.over.wait(self.EVERY_S):
            if text := str(self):
                tell(text, self.stream)

    def __exit__(self, *_) -> None:
        """Removes the line; a second call does nothing."""
        self.over.set()
        if self.live:
            self.live.stop()
            with suppress(ValueError):
                for kind in ENDING:
                    if signal.getsignal(kind) == self._end:
                        signal.signal(kind, signal.SIG_DFL)
