"""The navigation of the documentation: short, and no page is lost outside it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TABLES = ("tables.md", "zoo.md", "versions.md")  # not in the search
# The pages that list those outside the navigation.
LISTS = ("speed.md", "tables.md", "reproduce.md", "internals.md", "compatibility.md")
LISTS += ("study.md",)


def pages_of_the_navigation():
    block = re.search(r"^nav:\n((?: .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.M)[1]
    return re.findall(r"(\S+\.md)$", block, re.M)


def links_of(page):
    text = (DOCS / page).read_text()
    return {link.split("#")[0] for link in re.findall(r"\]\(([^)]+\.md[^)]*)\)", text)}


def test_the_navigation_is_short_and_every_other_page_is_in_a_list():
    shown = pages_of_the_navigation()
    assert len(shown) == len(set(shown)) <= 36
    listed = set().union(*(links_of(page) for page in LISTS))
    every = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert every - set(shown) - listed == set()


def test_the_tables_of_reports_are_not_in_the_search_of_the_site():
    left_out = "search: {exclude: true}\n"
    for page in (*DOCS.glob("*_h?00.md"), *map(DOCS.joinpath, TABLES)):
        assert page.read_text().startswith(f"---\n{left_out}---\n"), page
    for folder in ("study", "sweep", "digits", "cifar10"):
        assert (DOCS / folder / ".meta.yml").read_text().endswith(left_out)


def test_the_first_page_says_how_many_rows_the_page_about_speed_has():
    table = (DOCS / "speed.md").read_text().split("| model, batch |", 1)[1]
    rows = [line for line in table.split("\n\n")[0].splitlines() if line.startswith("| ")]
    earlier = sum("†" in row for row in rows)
    text = f"has {len(rows)} rows, {earlier} of them of version 0.3.0"
    assert text in " ".join((DOCS / "README.md").read_text().split())
