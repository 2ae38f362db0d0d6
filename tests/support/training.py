"""How tests call train.py in their own process."""

import sys

SMALL = [
    "experiment=smoke",
    "model=vit_tiny",
    "data.num_images=100",
    "data.batch_size=16",
    "trainer.max_epochs=1",
]


def run_in(directory, monkeypatch, *overrides):
    """Call train.py as if started in `directory`: the exit code."""
    import train

    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    try:
        train.main()
    except SystemExit as stop:
        return stop.code
    return 0
