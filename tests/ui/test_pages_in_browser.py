"""The pages in a real browser: Chromium without a window, driven over its own debugging pipe."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hiresvis.run.events import Event
from hiresvis.ui.compare import write_comparison
from hiresvis.ui.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
PATIENCE_S = 60.0
SECTIONS = ["training", "calibration", "worst", "plan", "time", "data", "settings", "machine", "next"]

FACTS = """JSON.stringify({
  sections: [...document.querySelectorAll("section[id]")].map((one) => one.id),
  scores: document.querySelectorAll("section.scores").length,
  images: [...document.images].map((one) => [one.complete, one.naturalWidth]),
  wide: document.documentElement.scrollWidth - WIDTH,
  outside: [...document.querySelectorAll("body *")].filter((one) => !one.closest(".scroll, svg, pre, details:not([open]), .turn"))
    .filter((one) => one.getBoundingClientRect().right > WIDTH + 1).map((one) => one.tagName + "." + one.className),
  paper: getComputedStyle(document.documentElement).backgroundColor,
  ink: getComputedStyle(document.documentElement).color,
  drawings: [...document.querySelectorAll("svg.chart")].map((one) => one.getBoundingClientRect().width),
})"""
SORTED = """(() => {
  const head = document.querySelector("section.scores table.sort th:nth-child(2)"), at = () =>
    [...head.closest("table").tBodies[0].rows].map((row) => parseFloat(row.cells[1].textContent));
  const found = [at()];
  for (let click = 0; click < 2; click++) { head.click(); found.push(at()); }
  return JSON.stringify(found);
})()"""


class Browser:
    """One browser, one page after another. Messages are JSON with a zero byte behind each, on file descriptors 3 and 4."""

    def __init__(self, folder: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run --disable-background-networking"
        call = f'exec "$0" {options} "--user-data-dir=$1" about:blank 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", call, str(CHROMIUM), str(folder)], pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._numbers, self._buffer = itertools.count(1), b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None
    width = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What the browser answers; events that come before are kept."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium said nothing for {PATIENCE_S:.0f} s"
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        first, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(first))

    def open(self, page: Path, *, width: int, dark: bool, script: bool = True) -> None:
        """The page, loaded, in a window so wide."""
        self.events.clear()
        self.width = width
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """The JSON that an expression gives in the page; WIDTH in it is the window's, since a phone's grows with what is too wide."""
        expression = expression.replace("WIDTH", str(self.width))
        found = self.call("Runtime.evaluate", expression=expression)
        assert "exceptionDetails" not in found, found
        return json.loads(found["result"]["value"])

    def said(self) -> list[Any]:
        """What the page wrote to its console, errors of its own and of the network included."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
        return [event for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        return [event["params"]["request"]["url"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests here."""
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


def with_pictures(run: Path) -> Path:
    """The run with pictures of evidence for two of its worst errors, one of a class whose name is markup."""
    rows = [line.split(",") for line in (run / "predictions.csv").read_text(encoding="utf-8").splitlines()[1:]]
    wrong = sorted((row for row in rows if row[2] != row[3]), key=lambda row: -float(row[5]))[:2]
    index = []
    for number, row in enumerate(wrong):
        pictures = []
        for what in ("seen", "predicted", "label", "detail"):
            name = f"{number}_{what}.jpg"
            (run / "worst").mkdir(exist_ok=True)
            Image.effect_noise((360, 240), 60).convert("RGB").save(run / "worst" / name)
            pictures.append({"file": name, "what": what, "name": "<b>pinhole</b>" * 3, "size": [2048, 2048]})
        index.append({"split": row[0], "path": row[1], "pictures": pictures})
    (run / "worst" / "index.json").write_text(json.dumps({"version": 1, "samples": index}), encoding="utf-8")
    return run


@pytest.fixture
def report(make_events: Callable[..., list[Event]], make_run: Callable[..., Path]) -> Path:
    """A page with all that a run of classes can have."""
    return write_report(with_pictures(make_run(make_events(4, 20))), price_per_hour=2.5)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_the_report_is_whole_and_fits_the_window(browser: Browser, report: Path, width: int, dark: bool) -> None:
    """Every section is there, images are seen, nothing is asked for, said to the console or wider than the window, light and dark."""
    browser.open(report, width=width, dark=dark)
    facts = browser.evaluate(FACTS)
    assert [one for one in facts["sections"] if one != "warnings"] == SECTIONS
    assert facts["scores"] == 1
    assert len(facts["images"]) >= 8
    assert all(complete and natural > 0 for complete, natural in facts["images"])
    assert facts["wide"] <= 0
    assert facts["outside"] == []
    assert all(drawn > 100 for drawn in facts["drawings"])
    assert len(facts["drawings"]) == 6
    light = [sum(map(int, facts[part][4:-1].split(","))) > 384 for part in ("paper", "ink")]
    assert light == ([False, True] if dark else [True, False])
    assert [address for address in browser.requests() if not address.startswith("data:image/jpeg")] == [report.as_uri()]
    assert browser.said() == []
    assert report.stat().st_size < 5_000_000


def test_without_script_the_report_lacks_nothing_but_sorting(browser: Browser, report: Path) -> None:
    """The same sections, images and drawings; with script a click on a head sorts, a second one the other way."""
    browser.open(report, width=390, dark=False, script=False)
    without = browser.evaluate(FACTS)
    browser.open(report, width=390, dark=False)
    assert browser.evaluate(FACTS) == without
    before, up, down = browser.evaluate(SORTED)
    assert before != sorted(before)
    assert up == sorted(before)
    assert down == up[::-1]
    assert browser.said() == []


@pytest.mark.parametrize("width", [390, 1280])
def test_the_comparison_fits_the_window(
    browser: Browser, make_events: Callable[..., list[Event]], make_run: Callable[..., Path], tmp_path: Path, width: int
) -> None:
    """Three runs side by side scroll within their tables, on a phone too."""
    first = make_run(make_events(3, 8))
    others = [Path(shutil.copytree(first, tmp_path / f"{'long-' * 8}{number}")) for number in range(2)]
    page = write_comparison([first, *others], tmp_path / "compare.html", price_per_hour=1.0)
    browser.open(page, width=width, dark=True)
    facts = browser.evaluate(FACTS)
    assert [one for one in facts["sections"] if one != "cautions"] == ["results", "curves", "recipes", "plans", "times"]
    assert facts["wide"] <= 0
    assert facts["outside"] == []
    assert len(facts["drawings"]) == 4
    assert browser.requests() == [page.as_uri()]
    assert browser.said() == []
