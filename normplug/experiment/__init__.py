"""What `train.py` runs: data, models, training and its records; imports no other tool."""
