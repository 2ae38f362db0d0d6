"""Fuse norms with the operations around them: `normplug.fuse`, `unfuse` and `fusions`."""
