"""What a layer measured for `VarianceLogger`."""

from normplug.modules.probe import averages


def probed(layer):
    """The averages of a layer's probe, as a tensor; None if it has no probe."""
    return averages([layer._probe])[0] if layer._probe is not None else None
