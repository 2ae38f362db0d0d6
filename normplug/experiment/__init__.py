"""Everything that `train.py` runs: data, models, training and results."""

from importlib.util import find_spec

from normplug._checks import needs

with needs("normplug.experiment", "train"):
    for _name in (
        "hydra",
        "lightning",
        "pydantic",
        "torchvision",
    ):
        # Found, but not imported.
        if find_spec(_name) is None:
            raise ModuleNotFoundError(_name, name=_name)
