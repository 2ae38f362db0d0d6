"""`python -m normplug run`: swap and fuse the models of a program that nobody edits."""
