"""Run the documentation: every Python block, and the options of every command line."""

import json
import re
from pathlib import Path

import pytest

import pages
from programs import program

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
RUN = "import sys, pages; pages.run(sys.argv[0])"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem) for page in PAGES if any(pages.blocks_of(page))],
)
def test_the_python_blocks_of_a_page_run(page, tmp_path):
    done = program(RUN, page, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [
        line for line in done.stdout.splitlines() if line.startswith('["' + page.name)
    ]
    outcomes = [json.loads(line) for line in lines]
    assert len(outcomes) == len([*pages.blocks_of(page)])
    failed = [
        f"{place}: {more}" for place, outcome, more in outcomes if outcome == "failed"
    ]
    assert not failed, "\n".join(failed)
    skipped = [
        f"{place}: {more}" for place, outcome, more in outcomes if outcome == "skipped"
    ]
    missing = [
        f"{place}: {more}" for place, outcome, more in outcomes if outcome == "missing"
    ]
    if missing or len(skipped) == len(outcomes):
        pytest.skip("; ".join(missing or skipped))


def test_every_python_block_is_found():
    """A fence that is indented, or has other options, would never run."""
    for page in PAGES:
        fences = re.findall(r"^ *```+ *py\w*", page.read_text(), re.M)
        assert len(fences) == len([*pages.blocks_of(page)]), page


def test_docstrings_have_sections_that_the_api_page_renders():
    """The Google style knows Examples; Example would be a nested quote, an admonition."""
    files = sorted((DOCS.parent / "normplug").rglob("*.py"))
    assert files
    wrong = [
        path.name for path in files if re.search(r"^ *Example:$", path.read_text(), re.M)
    ]
    assert wrong == []


def test_the_links_of_pages_outside_the_site_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        page = (DOCS.parent / name).read_text()
        for path in re.findall(r"\]\((?!https?:|#)([^)#]+)", page):
            assert (DOCS.parent / path).exists(), f"{name}: {path}"


def test_the_first_pages_are_short():
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= 120
    speed, study = ((DOCS / page).read_text() for page in ("speed.md", "study.md"))
    for text in (speed, study):
        assert len([word for word in text.split() if word.strip("|-:")]) <= 1500
    assert len(re.findall(r"^\|(?!---)", speed, re.M)) <= 67  # 60 rows and 7 headers
