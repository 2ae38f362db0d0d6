"""Run the documentation's programs, which are the code blocks with a title."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
PROGRAM = re.compile(r'^```python title="(\S+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
PROGRAMS = {
    name: code
    for page in sorted(DOCS.glob("*.md"))
    for name, code in PROGRAM.findall(page.read_text())
}
GPU = {"cuda_graph.py"}
NEEDS = {"with_transformers.py": "accelerate"}  # beyond what they import


@pytest.mark.filterwarnings("ignore::Warning", "error:normplug:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.gpu] if n in GPU else []) for n in PROGRAMS]
)
def test_a_documented_program_runs(name, tmp_path, monkeypatch, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    if name == "train_fsdp2.py":
        if not torch.cuda.is_available() and torch.__version__ < "2.14":
            pytest.skip("fully_shard before torch 2.14 does not run on the CPU")
        # As `torchrun --nproc_per_node 1` sets them.
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        for variable, value in place.items():
            monkeypatch.setenv(variable, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            exec(compile(PROGRAMS[name], name, "exec"), {"__name__": "__main__"})
        except ModuleNotFoundError as missing:
            if missing.name.startswith("normplug"):
                raise
            pytest.skip(str(missing))


def test_docstrings_have_sections_that_the_api_page_renders():
    """The Google style knows Examples; Example would be a nested quote, an admonition."""
    files = sorted((DOCS.parent / "normplug").rglob("*.py"))
    assert files
    wrong = [path.name for path in files if re.search(r"^ *Example:$", path.read_text(), re.M)]
    assert wrong == []


def test_the_links_of_pages_outside_the_site_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        page = (DOCS.parent / name).read_text()
        for path in re.findall(r"\]\((?!https?:|#)([^)#]+)", page):
            assert (DOCS.parent / path).exists(), f"{name}: {path}"


def test_the_first_pages_are_short():
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= 150
    speed, study = ((DOCS / page).read_text() for page in ("speed.md", "study.md"))
    for text in (speed, study):
        assert len([word for word in text.split() if word.strip("|-:")]) <= 1500
    assert len(re.findall(r"^\|(?!---)", speed, re.M)) <= 67  # 60 rows and 7 headers
