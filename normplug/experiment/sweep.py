"""The command line of train.py, and the comparison after a sweep."""

from __future__ import annotations

import difflib
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from normplug.experiment.config import Config
from normplug.experiment.errors import SEE_HELP, WHO, UserError, unwritable, user_sentence
from normplug.experiment.measure import REFUSAL
from normplug.experiment.resume import is_first_process

# The packed copy of a wheel, or the directory of a checkout.
PACKED, CHECKOUT = (Path(__file__).with_name("configs"), Path(__file__).parents[2] / "configs")
CONFIGS = str(PACKED if PACKED.is_dir() else CHECKOUT)

named: set[Path] = set()  # directories that this process has named and made itself


def command(application: Callable[[], Any]) -> Callable[[], Any]:
    """Decorate a Hydra application: each mistake of its command line is one sentence.

    Its command line also accepts `GROUP=null`, which Hydra knows as `GROUP=[]`, and `data=text`
    alone takes a language model.
    """

    @functools.wraps(application)
    def wrapper() -> Any:
        groups = "|".join(path.name for path in Path(CONFIGS).iterdir() if path.is_dir())
        sys.argv[1:] = [
            re.sub(r"(?<=[=,])null(?=,|$)", "[]", text)
            if re.match(rf"(?:{groups})=", text)
            else text
            for text in sys.argv[1:]
        ]
        chosen = {text.partition("=")[0] for text in sys.argv[1:]}
        if "data=text" in sys.argv and not {"model", "experiment"} & chosen:
            sys.argv.append("model=gpt_tiny")
        shows_all = "HYDRA_FULL_ERROR" in os.environ
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print
        try:
            return application()
        except Exception as error:
            sentence = user_sentence(error)
            if sentence is None or shows_all:
                raise
            if unknown := re.match(r"Could not override '([\w.]+)'", str(error)):
                near = difflib.get_close_matches(unknown[1], Config.__annotations__, 1, cutoff=0.7)
                advice = f"Did you mean {near[0]}?" if near else SEE_HELP
                sentence = f"{WHO}: {unknown[1]} is not a key of the configuration. {advice}"
            print(sentence, file=sys.stderr)
            sys.exit(1)
        finally:
            if not shows_all:
                del os.environ["HYDRA_FULL_ERROR"]

    return wrapper


def is_sweep() -> bool:
    """Whether this run is part of a sweep (`-m`)."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def new_directory(path: str) -> str:
    """Make a directory that no other run has, with a number if `path` exists."""
    number, place = 1, Path(path)
    while True:
        try:
            place.mkdir(parents=True)
            named.add(place.absolute())
            return str(place)
        except FileExistsError:
            number += 1
            place = Path(f"{path}_{number}")
        except OSError as error:
            raise UserError(unwritable(place.absolute(), error)) from None


OmegaConf.register_new_resolver("normplug.new", new_directory, replace=True, use_cache=True)


class CompareArms(Callback):
    """Compare the arms of a sweep when it ends.

    Args:
        compare: main function of the comparison: command-line arguments -> exit code. The
            configuration names it, so that training does not import it.
    """

    def __init__(self, compare: Callable[[list[str]], int]) -> None:
        self.compare = compare

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table; exit with the comparison's code if a run has not finished."""
        if not is_first_process():
            return
        root = Path(config.hydra.sweep.dir)
        code = self.compare([str(root)])
        for refusal in root.rglob(REFUSAL):  # of this sweep; the results beside them stay valid
            refusal.unlink()
        if code:
            sys.exit(code)
