"""What pyproject.toml cannot say.

The wheel has configs/ as normplug/experiment/configs. Where NORMPLUG_REPOSITORY names the address
of the repository, as in the release workflow, the links of README lead there: on a package index,
there are no files beside it.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

CONFIGS = "normplug.experiment.configs"
REPOSITORY = os.environ.get("NORMPLUG_REPOSITORY", "").rstrip("/")
LINKS = {
    "Documentation": f"{REPOSITORY}/blob/main/docs/README.md",
    "Source": REPOSITORY,
    "Issues": f"{REPOSITORY}/issues",
    "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
}


def readme() -> str:
    """README with the addresses of its links and pictures."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    if REPOSITORY:
        text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{REPOSITORY}/raw/main/", text)
        text = re.sub(
            r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\1{REPOSITORY}/blob/main/", text
        )
    return text


setup(
    packages=[*find_packages(include=["normplug*"]), CONFIGS],
    package_dir={CONFIGS: "configs"},
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=LINKS if REPOSITORY else {},
)
