"""Ctrl-C and SIGTERM: end the run in order, and say how to resume it."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PLAIN = re.compile(r"[\w./-]+")  # a value that Hydra takes without quotes


class Interrupted(SystemExit):
    """A signal asked the process to end; its exit code is 128 plus the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class Signals:
    """Turn the first SIGINT or SIGTERM into `Interrupted`; the second ends the process at once.

    A signal that the process ignores, as SIGINT under nohup, stays ignored.
    """

    def __init__(self) -> None:
        self._received = False
        self._former: dict[int, Any] = {}

    def install(self) -> None:
        """Handle the signals from now on, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._former[signum] = signal.signal(signum, self._receive)

    def restore(self) -> None:
        """Give the signals back to their former handlers."""
        for signum, handler in self._former.items():
            signal.signal(signum, handler)
        self._former = {}

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._received:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self._received = True
        raise Interrupted(signum)


def command(checkpoint: Path | None) -> str:
    """This command as one would type it, with `ckpt_path` set to `checkpoint` if there is one."""
    arguments = list(sys.argv)
    if checkpoint is not None:
        value = str(checkpoint)
        if not PLAIN.fullmatch(value):
            value = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        arguments = [a for a in arguments if not a.startswith("ckpt_path=")]
        arguments.append(f"ckpt_path={value}")
    return shlex.join(["python", *arguments])
