"""The script that runs the tests under several versions of torch."""

from versions import counts, merged, page, requirements

REPORT = (
    '<?xml version="1.0"?><testsuites><testsuite name="pytest" tests="12" errors="1" failures="2" '
    'skipped="3" time="90.4"/></testsuites>'
)
ROW = {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.3.5", "python": "3.11.7"}
ROW |= {"date": "2026-11-24T10:11:12+00:00", "commit": 40 * "a"}


def test_the_table_of_versions():
    row = {**ROW, **counts(REPORT)}
    cells = "2.11.0 | 3.6.0 | - | 2.3.5 | 3.11.7 | 2026-11-24 | aaaaaaa | 6 | 3 | 3 | 1.5"
    assert f"\n| {cells} |\n" in page([row])


def test_a_row_takes_the_place_of_the_same_torch_in_the_order_of_versions():
    rows = [{"torch": "2.6.0+cu124"}, {"torch": "2.11.0", "passed": 1}, {"torch": "2.13.0+cpu"}]
    assert merged(rows, ROW) == [rows[0], ROW, rows[2]]
    assert [row["torch"] for row in merged(rows, {"torch": "2.9.1"})][:2] == [
        "2.6.0+cu124",
        "2.9.1",
    ]


def test_a_triton_that_needs_an_older_numpy_gets_it():
    assert requirements("2.11") == ["torch==2.11.*", "numpy<2.4"]
    assert requirements("2.12") == ["torch==2.12.*"]
