"""What pyproject.toml cannot say: the wheel has configs/ as normplug/experiment/configs."""

from setuptools import find_packages, setup

CONFIGS = "normplug.experiment.configs"

setup(
    packages=[*find_packages(include=["normplug*"]), CONFIGS],
    package_dir={CONFIGS: "configs"},
)
