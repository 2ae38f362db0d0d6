"""The CSV file of a training run, which `VarianceLogger` and `NormCallback` write."""

from __future__ import annotations

from pathlib import Path

from normplug._files import write_file


def start_log(path: Path) -> None:
    """Start the file of a new run: remove the file of an earlier one."""
    path.unlink(missing_ok=True)


def resume_log(path: Path, step: int) -> None:
    """Continue the file of a run that resumes at `step`: drop the rows of steps that it repeats.

    A line without an end was cut off when the run stopped, and is dropped, too.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    header, *rows = [line for line in lines if line.endswith("\n")] or [""]
    earlier = [row for row in rows if int(row.split(",")[0]) < step]
    if earlier:
        write_file(path, "".join([header, *earlier]))
    else:
        path.unlink()
