"""What the files about the project say of each other."""

import re
from pathlib import Path

import pytest

import normplug

ROOT = Path(__file__).parents[1]


def project():
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_citation_is_of_the_version_and_its_day_in_the_changelog():
    citation = (ROOT / "CITATION.cff").read_text()
    version = re.search(r"^version: (.+)$", citation, re.MULTILINE)[1]
    day = re.search(r"^date-released: (.+)$", citation, re.MULTILINE)[1]
    assert version == normplug.__version__
    assert f"\n## {version} ({day})\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_authors_of_the_package_are_those_of_the_citation():
    authors = project()["project"]["authors"]
    block = re.search(
        r"^authors:\n((?:  .+\n)+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    )[1]
    assert [author["name"] for author in authors] == re.findall(r"name: (.+)", block)


def test_a_dependency_group_has_the_tools_of_the_extra_of_its_name():
    found = project()
    for name, group in found["dependency-groups"].items():
        extra = found["project"]["optional-dependencies"][name]
        assert group == [each for each in extra if not each.startswith("normplug[")]


def test_every_link_of_llms_txt_is_a_page():
    links = re.findall(r"\]\(([^)]+)/\)", (ROOT / "docs/llms.txt").read_text())
    assert len(links) > 10
    for link in links:
        assert (ROOT / f"docs/{link}.md").exists(), link


def test_the_page_for_agents_is_short_and_names_files_that_exist():
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 45
    for name in re.findall(r"\b((?:tests|normplug|benchmarks|docs)/[\w/.]+\w)", text):
        assert (ROOT / name).exists() or "*" in name or name.endswith("plan_"), name
