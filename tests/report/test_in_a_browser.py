"""Each kind of page in Chromium: no error, no outside request, no violation known to axe-core."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli._main import app

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium; apt-get install chromium")

MOST_BYTES = 500_000
EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = "fat_tree:4,gpus=2,bandwidth=12.5GB/s"
COMMANDS = {
    "plan": ["plan", str(EXAMPLES / "plan_job.toml"), "--cluster", "h100-nemo", "--gpus", "16"],
    "simulate": ["simulate", str(EXAMPLES / "codesign_jobs.toml"), "--cluster", CLUSTER],
    "ablate": ["ablate", "--cluster", CLUSTER, "--seeds", "2"],
    "synthesize": ["collectives", "synthesize", "all_gather", "switch:4,bandwidth=25MB/s",
                   "--size", "1MB", "--time-limit", "2 s"],
}  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--no-first-run",
                 "--disable-background-networking"]  # fmt: skip
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return a function that writes a command's page, once."""
    folder, written = tmp_path_factory.mktemp("pages"), {}

    def page(name):
        if name not in written:
            written[name] = folder / f"{name}.html"
            words = [*COMMANDS[name], "--report", str(written[name])]
            found = CliRunner().invoke(app, words)
            assert found.exit_code == 0, found.output
        return written[name]

    return page


def look_at(browser, path, *, width, scheme):
    """Open a page; check what a person with a phone, a dark desk or a screen reader needs."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    page, errors, requests = context.new_page(), [], []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    for folded in page.query_selector_all("details"):
        folded.evaluate("folded => folded.open = true")
    violations = axe.Axe().run(page).response["violations"]
    over = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith(("data:", path.as_uri()))] == []
    assert [
        (v["id"], [(node["html"][:200], node["failureSummary"][:300]) for node in v["nodes"]][:3])
        for v in violations
    ] == []
    assert over <= 0, f"{over} pixels wider than the window"
    assert path.stat().st_size < MOST_BYTES


LOOKS = pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")]
)


@LOOKS
@pytest.mark.parametrize("name", COMMANDS)
def test_pages_of_commands(browser, pages, name, width, scheme):
    look_at(browser, pages(name), width=width, scheme=scheme)


@LOOKS
def test_the_report_of_runs(browser, comparison, width, scheme):
    found = CliRunner().invoke(app, ["report", str(comparison)])
    assert found.exit_code == 0, found.output
    look_at(browser, comparison / "report.html", width=width, scheme=scheme)
