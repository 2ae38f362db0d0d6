"""End a run cleanly on Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """A signal asked the process to end; its exit code is 128 plus the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class Signals:
    """Turn the first SIGINT or SIGTERM into `Interrupted`; the second ends the process at once.

    A signal that the process ignores stays ignored, such as SIGINT under nohup.
    """

    def __init__(self) -> None:
        self._received = False
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers; do nothing outside the main thread, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._receive)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._received:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self._received = True
        raise Interrupted(signum)
