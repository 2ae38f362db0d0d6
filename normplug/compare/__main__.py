"""`python -m normplug.compare RUNS`: the command line of `normplug.experiment.compare`."""

import sys

from normplug._extras import needs

with needs("normplug.compare", "train", SystemExit):
    from normplug.experiment.compare.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
