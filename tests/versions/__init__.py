"""The tests under several versions of torch; run it with `python tests/versions`."""
