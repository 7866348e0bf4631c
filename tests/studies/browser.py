# SPDX-License-Identifier: Apache-2.0
"""A page in headless Chromium, driven by its DevTools protocol over two pipes."""

import base64
import json
import os
import shutil
import subprocess
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """Sends commands, and keeps the events that come between their answers."""

    def __init__(self, folder):
        to_it, ours = os.pipe()
        self.answers, from_it = os.pipe()

        def as_three_and_four():
            os.dup2(to_it, 33)
            os.dup2(from_it, 34)
            os.dup2(33, 3)
            os.dup2(34, 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
        self.process = subprocess.Popen(
            [CHROMIUM, *flags, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"],
            close_fds=False,
            pass_fds=(),
            preexec_fn=as_three_and_four,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(from_it)
        self.commands = ours
        self.buffer = b""
        self.number = 0
        self.events = []
        self.session = None
        page = next(one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def next(self):
        while b"\0" not in self.buffer:
            read = os.read(self.answers, 1 << 20)
            assert read, "Chromium ended"
            self.buffer += read
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path, width, scheme):
        self.visit(path.resolve().as_uri(), width, scheme)

    def visit(self, address, width, scheme):
        self.events = []
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        # The page before is complete, too, until the browser has an answer.
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        until = time.monotonic() + 30
        while self.run("location.href + document.readyState") != f"{address}complete":
            assert time.monotonic() < until
            time.sleep(0.05)

    def run(self, code):
        return self.send("Runtime.evaluate", expression=code, returnByValue=True)["result"].get("value")

    def picture(self):
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        return base64.b64decode(data)

    def requests(self):
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent if not one["request"]["url"].startswith(("data:", "about:"))]

    def complaints(self):
        return [
            event["params"] for event in self.events if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")
        ]

    def close(self):
        os.close(self.commands)
        self.process.kill()
        self.process.wait()
        os.close(self.answers)
