"""Train a network with its norms in one mode; report accuracy or loss, speed and memory.

    python train.py mode=golden
    python train.py -m mode=baseline,standard,golden seed=0,1,2

The configuration is in configs/; `python train.py --help` lists all options. The training itself is
normplug.experiment.run, which an installed normplug has as the command `normplug-train`.
"""

from normplug._checks import needs

with needs("train.py", "train", SystemExit):
    from normplug.experiment.run import main

if __name__ == "__main__":
    main()
