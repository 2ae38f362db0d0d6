"""The command lines of the documentation: each option in them exists."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

import normplug.bench.__main__
import normplug.native.__main__
from normplug._run import command

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMANDS = {
    "normplug": lambda words: command.main(words[1:]),
    "normplug.bench": normplug.bench.__main__.main,
    "normplug.native": normplug.native.__main__.main,
}
try:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    import normplug.compare.__main__
    from training import composed

    COMMANDS["normplug.compare"] = normplug.compare.__main__.main
except ImportError:
    composed = None


def command_lines():
    """The words after `python` of each command line in a shell block."""
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if "python" in words:
                    yield words[words.index("python") + 1 :]


LINES = [*command_lines()]


def only_parse(monkeypatch):
    """Have a command end, by a StopIteration, when its options are parsed."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse(self, arguments=None, namespace=None):
        parse_args(self, arguments, namespace)
        raise StopIteration

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)


def test_the_options_of_every_module_exist(monkeypatch):
    only_parse(monkeypatch)
    lines = [words for words in LINES if words[0] == "-m" and words[1] in COMMANDS]
    assert len(lines) > 10
    for _, module, *arguments in lines:
        with pytest.raises(StopIteration):
            COMMANDS[module](arguments)


@pytest.mark.skipif(composed is None, reason="needs hydra")
def test_every_override_of_train_py_fits_its_configuration():
    lines = [words for words in LINES if words[0] == "train.py"]
    assert len(lines) > 20
    for words in lines:
        if "<" in words:  # the rest comes from a file
            words = words[: words.index("<")]
        overrides = [word for word in words[1:] if not word.startswith(("-", "hydra"))]
        chosen = []
        for override in OverridesParser.create().parse_overrides(overrides):
            if override.is_sweep_override():
                key = override.get_key_element()
                chosen.append(f"{key}={next(override.sweep_string_iterator())}")
            else:
                chosen.append(override.input_line)
        composed(*chosen)


def test_the_options_of_every_script_exist():
    lines = [words for words in LINES if any("benchmarks/" in word for word in words)]
    assert len(lines) > 5
    # Scripts share options, which another module in their folder adds.
    text = "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))
    for words in lines:
        place = next(n for n, word in enumerate(words) if word.startswith("benchmarks/"))
        assert (ROOT / words[place]).exists(), words
        for word in words[place + 1 :]:
            if word.startswith("--"):
                assert f'"{word}"' in text, words
