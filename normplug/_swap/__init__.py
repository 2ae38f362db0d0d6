"""A model of torch.nn layers to one of normplug's and back; over `modules` and `_fuse`."""
