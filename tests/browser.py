"""A headless Chromium, driven over the WebDriver protocol with the standard library."""

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from contextlib import contextmanager

ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
LOGS = {"browser": "ALL", "performance": "ALL"}


def absent():
    """Names of what is not installed; "" if nothing."""
    return ", ".join(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)


class Page:
    """A window of the browser."""

    def __init__(self, driver):
        self.driver, self.session = driver, ""

    def call(self, path, content=None, method="POST"):
        data = json.dumps(content or {}).encode() if method == "POST" else None
        url = f"{self.driver}/session{self.session}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, url, width=1280, height=900, dark=False):
        """Show a page in a window of that size, as on a system of that theme."""
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setEmulatedMedia", features=media)
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        self.call("/url", {"url": url})

    def devtools(self, command, **parameters):
        return self.call("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def run(self, script, *arguments):
        """What a script returns, after a frame has been drawn."""
        wait = "const done = arguments[arguments.length - 1], own = () => { " + script + " }; const found = own();"
        frame = "requestAnimationFrame(() => setTimeout(() => done(found)));"
        named = wait.replace("arguments[0]", json.dumps(arguments[0] if arguments else None))
        return self.call("/execute/async", {"script": named + frame, "args": []})

    def click(self, selector):
        self.run("const e = document.querySelector(arguments[0]); e.focus(); e.click()", selector)

    def picture(self):
        """What is on the screen, as PNG."""
        return base64.b64decode(self.call("/screenshot", method="GET"))

    def complaints(self):
        """What the console has said since the last call."""
        return [entry["message"] for entry in self.call("/se/log", {"type": "browser"})]

    def requests(self):
        """The URLs that pages have asked for since the last call, but not what they hold themselves, nor what the
        browser's own pages have."""
        messages = [json.loads(entry["message"])["message"] for entry in self.call("/se/log", {"type": "performance"})]
        sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("data:", "chrome:", "chrome-"))]


@contextmanager
def browser(folder):
    """A ``Page``. folder: for the profile of the browser."""
    process = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = next(
            match for line in process.stdout if (match := re.search(r"started successfully on port (\d+)", line))
        )
        page = Page(f"http://127.0.0.1:{found[1]}")
        chrome = {"args": [*ARGUMENTS, f"--user-data-dir={folder}"], "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": LOGS}
        page.session = f"/{page.call('', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"
        try:
            yield page
        finally:
            page.call("", method="DELETE")
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
