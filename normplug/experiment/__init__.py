"""What `train.py` builds: data, models and the LightningModule."""
