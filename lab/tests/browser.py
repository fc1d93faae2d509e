"""A page in a headless Chromium, driven over a pipe (the DevTools protocol): what it asks for, says and shows.

    with Browser() as browser:
        seen = browser.open("file:///tmp/page.html", width=1280)       # seen.requests, seen.errors
        browser.evaluate("document.images.length")                     # a value that JSON can hold
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from types import SimpleNamespace

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.number = 0
        self.events = []
        self.rest = b""
        command, (self.read, out), (given, self.write) = [PROGRAM], os.pipe(), os.pipe()
        command += "--headless --no-sandbox --disable-gpu --remote-debugging-pipe".split()
        command += [f"--user-data-dir={self.folder.name}", "--no-first-run", "about:blank"]
        # The browser reads from descriptor 3 and writes to 4.
        words = ["bash", "-c", f'exec "$@" 3<&{given} 4>&{out}', "bash", *command]
        null = subprocess.DEVNULL
        self.child = subprocess.Popen(words, pass_fds=(given, out), stdout=null, stderr=null)
        os.close(given), os.close(out)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable", self.session)
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.wait()
        os.close(self.read), os.close(self.write)
        shutil.rmtree(self.folder.name, ignore_errors=True)

    def receive(self, limit: float) -> dict:
        while b"\0" not in self.rest:
            if not select.select([self.read], [], [], max(0, limit - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            if not (data := os.read(self.read, 1 << 20)):
                raise ConnectionError("the browser has ended")
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def ask(self, method: str, session: str | None = None, **params) -> dict:
        """The answer to a command; events that come before it are kept."""
        self.number += 1
        told = dict(id=self.number, method=method, params=params) | (dict(sessionId=session) if session else {})
        os.write(self.write, json.dumps(told).encode() + b"\0")
        limit = time.monotonic() + 60
        while (got := self.receive(limit)).get("id") != self.number:
            self.events.append(got)
        assert "error" not in got, got
        return got["result"]

    def open(self, url: str, width: int) -> SimpleNamespace:
        """Loads a page; returns the addresses that it asked for and what it complained of."""
        self.events.clear()
        self.ask("Emulation.setDeviceMetricsOverride", self.session, width=width, height=900, deviceScaleFactor=1,
                 mobile=False)  # fmt: skip
        self.ask("Page.navigate", self.session, url=url)
        limit = time.monotonic() + 60
        while not any(each.get("method") == "Page.loadEventFired" for each in self.events):
            self.events.append(self.receive(limit))
        self.evaluate("Promise.all([...document.images].map(each => each.decode())).then(() => true)")
        return SimpleNamespace(
            requests=[each["request"]["url"] for each in self.told("Network.requestWillBeSent")],
            errors=self.told("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"),
        )

    def told(self, *events: str) -> list[dict]:
        return [each["params"] for each in self.events if each.get("method") in events]

    def evaluate(self, script: str):
        found = self.ask("Runtime.evaluate", self.session, expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")
