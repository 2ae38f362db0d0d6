"""The script that runs the tests under several versions of torch."""

from versions.__main__ import read, render, requirements

REPORT = (
    '<?xml version="1.0"?><testsuites><testsuite name="pytest" tests="12" errors="1" failures="2" '
    'skipped="3" time="90.4"/></testsuites>'
)


def test_the_table_of_versions():
    row = read(["2.11.0", "3.6.0", "-", "2.3.5", "3.11.7"], REPORT)
    assert row[1:] == (6, 3, 3, 90.4)
    assert "\n| 2.11.0 | 3.6.0 | - | 2.3.5 | 3.11.7 | 6 | 3 | 3 | 1.5 |\n" in render([row], [])
    assert "tests/swap -x" in render([row], ["tests/swap", "-x"])


def test_a_triton_that_needs_an_older_numpy_gets_it():
    assert requirements("2.11") == ["torch==2.11.*", "numpy<2.4"]
    assert requirements("2.12") == ["torch==2.12.*"]
    assert requirements("newest") == ["torch"]
