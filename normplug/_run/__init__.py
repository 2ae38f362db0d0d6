"""`python -m normplug run`: swap and fuse the models of a program without editing it."""
