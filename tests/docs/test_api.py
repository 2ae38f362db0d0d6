"""The API page: it has every public name and no other."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import normplug

PAGE = Path(__file__).parents[2] / "docs/api.md"
# The rows of reports, whose classes are not public by name.
ROWS = {
    "normplug._swap.plan.PlanRow",
    "normplug._swap.check.CheckedLayer",
    "normplug._fuse.fuse.Row",
}
MODULES = ("bench", "compare", "functional", "lightning", "native", "transformers")


def test_the_page_has_every_public_name_and_no_other():
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    public = {f"normplug.{name}" for name in normplug.__all__} - {"normplug.functional"}
    for module in MODULES:
        names = import_module(f"normplug.{module}").__all__
        public |= {f"normplug.{module}.{name}" for name in names}
    for name in import_module("normplug.modules").__all__:
        if name not in normplug.__all__:
            public.add(f"normplug.modules.{name}")
    public.add("normplug.experiment.speed.compare_modes")  # which experiments.md names
    listed = re.findall(r"^::: (\S+)$", PAGE.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) - ROWS == public
    assert set(listed) >= ROWS


def test_the_callbacks_are_those_of_the_page():
    from normplug import callbacks

    text = PAGE.read_text()
    for name, library in callbacks._LIBRARIES.items():
        assert f"::: normplug.{library}.{name}\n" in text
