"""Everything that `train.py` runs: data, models, training, results. It imports no other tool."""
