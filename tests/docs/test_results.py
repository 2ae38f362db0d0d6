"""The files of docs/results: which pages quote them, and whether their rows name a commit."""

import csv
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?:\.\./)*(?:docs/)?results/(\w+)\.(?:json|csv)\)")
NOTE = re.compile(r"Results with rows that name no commit: (`\w+`(?:, `\w+`)*)\.")


def rows_of(path):
    """The rows of a file of results; a file that is one object is one row."""
    if path.suffix == ".csv":
        with path.open() as file:
            return list(csv.DictReader(file))
    content = json.loads(path.read_text())
    return content if isinstance(content, list) else [content]


def names_commits(path):
    return all(row.get("commit") not in (None, "", "unknown") for row in rows_of(path))


WITHOUT = {path.stem for path in RESULTS.iterdir() if not names_commits(path)}


def quoted_by(page):
    return {*LINK.findall(page.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_which_of_its_results_name_no_commit(page):
    notes = NOTE.findall(" ".join(page.read_text().split()))
    named = [name for note in notes for name in re.findall(r"\w+", note)]
    assert sorted(named) == sorted(quoted_by(page) & WITHOUT)


def test_every_file_of_results_is_quoted_by_a_page():
    quoted = set().union(*map(quoted_by, PAGES))
    assert quoted == {path.stem for path in RESULTS.iterdir()}
