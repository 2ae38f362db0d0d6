"""A callback for transformers' Trainer: it watches norms, keeps modes, and publishes the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from normplug import _checks, _convert
from normplug._checks import needs
from normplug._swap.record import refuse_other_modes
from normplug._swap.swap import unswap
from normplug._tools.log import resume_log, start_log
from normplug._tools.watching import Watch

with needs("normplug.transformers", "zoo"):
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

__all__ = ["NormCallback"]


class NormCallback(TrainerCallback, ExportableState):
    """Watch the norms of a model that transformers' Trainer trains, and keep their modes.

    - Every `every` optimizer steps it measures as `normplug.watch` does, and appends rows to
      `variance.csv` in the Trainer's output directory. A new run starts a new file, and a resumed
      run drops the rows of steps that it repeats. The main process measures its own part of the
      batch, in the last forward of an accumulated step.
    - Each checkpoint records the mode of each layer, in `trainer_state.json`. Resuming in other
      modes is refused.
    - With `publish`, a stock model with the same outputs is saved there at the end, by
      `save_pretrained`; the trained one stays swapped.

    Args:
        every: measure on optimizer steps 0, every, 2 * every, ...; None never measures.
        publish: the directory of the stock model, or None.

    Raises:
        ValueError: `every` below 1; a checkpoint of another mode is resumed.
        TypeError: an argument of another type.
    """

    def __init__(self, every: int | None = 50, publish: str | Path | None = None) -> None:
        if every is not None:
            _checks.count("transformers.NormCallback", "every", every)
        _checks.path("transformers.NormCallback", "publish", publish)
        self.every = every
        self.publish = publish
        self._measuring: Watch | None = None
        self._modes: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """The mode of each layer, for a checkpoint."""
        publish = None if self.publish is None else str(self.publish)
        arguments = {"every": self.every, "publish": publish}
        return {"args": arguments, "attributes": {"_modes": self._modes}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Record the modes; refuse other modes than a resumed checkpoint's; begin the file."""
        layers = _convert.normplug_layers(rest["model"])
        self._modes = {path: layer.target_variance for path, layer in layers}
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step > 0 and isinstance(saved, dict):
            before = saved["attributes"]["_modes"]
            refuse_other_modes("transformers.NormCallback", self._modes, before)
        self._stop()
        if self.every is not None and state.is_world_process_zero:
            path = _log_of(args)
            if state.global_step > 0:
                resume_log(path, state.global_step)
            else:
                start_log(path)

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """On a logged step, make every norm measure."""
        logged = self.every is not None and state.global_step % self.every == 0
        if logged and state.is_world_process_zero:
            self._measuring = Watch(rest["model"])
            self._measuring.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """After a logged step, write what was measured."""
        if self._measuring is None:
            return
        measured = self._measuring
        measured.finish(state.global_step - 1, int(state.epoch or 0))
        self._stop()
        measured.append_csv(_log_of(args))

    def _stop(self) -> None:
        """Stop measuring, also after an error in an earlier training, which has no event."""
        if self._measuring is not None:
            self._measuring.release()
            self._measuring = None

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Publish the stock model, if asked."""
        if self.publish is not None and state.is_world_process_zero:
            stock: Any = unswap(copy.deepcopy(rest["model"]))
            stock.save_pretrained(self.publish)


def _log_of(args: Any) -> Path:
    return Path(args.output_dir) / "variance.csv"
