"""Models by name, with random weights and a random batch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from normplug.bench.models import Loss

Target = tuple[nn.Module, Any, Loss | None]
TOKENS = 512  # of a text
IMAGE = 224  # pixels, unless the model says otherwise


def load(target: str, batch: int | None, options: dict[str, Any]) -> Target:
    """A model, a batch, and a function that returns the loss (None for the default).

    `target` is `file.py:function`, `name` or `library:name`. The name is a model of torchvision or
    timm, or a model type of transformers. `options` are keyword arguments of the function, of the
    model's constructor, or of its config. A wrong target is a ValueError.
    """
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        return _from_file(Path(place), name, options | ({"batch": batch} if batch else {}))
    for library, (names, make) in _LIBRARIES.items():
        if place in ("", library) and importlib.util.find_spec(library) and name in names():
            return make(name, batch or 8, **options)
    raise ValueError(f"no model {target!r} in torchvision, timm or transformers, if installed.")


def _from_file(path: Path, name: str, options: dict[str, Any]) -> Target:
    spec: Any = importlib.util.spec_from_file_location(f"normplug_target_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{path} has no function {name!r}.")
    made = function(**options)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(f"{path}:{name} must return (model, batch) or (model, batch, step).")
    model, data, *step = made
    return model, data, step[0] if step else None


def _images(model: nn.Module, batch: int, size: int) -> Target:
    with torch.no_grad():
        classes = model.eval()(torch.zeros(1, 3, size, size)).shape[-1]
    data = torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))
    return model.train(), data, lambda model, data: F.cross_entropy(model(data[0]), data[1])


def _torchvision(name: str, batch: int, size: int = IMAGE, **options: Any) -> Target:
    if name in ("googlenet", "inception_v3"):  # in training they return several outputs, else
        options |= {"init_weights": False, "aux_logits": False}
    model = import_module("torchvision.models").get_model(name, weights=None, **options)
    return _images(model, batch, size)


def _timm(name: str, batch: int, size: int | None = None, **options: Any) -> Target:
    model = import_module("timm").create_model(name, **options)
    return _images(model, batch, size or model.default_cfg.get("input_size", (IMAGE,))[-1])


def _transformers(name: str, batch: int, length: int = TOKENS, **options: Any) -> Target:
    auto = import_module("transformers.models.auto.modeling_auto")
    config = import_module("transformers").AutoConfig.for_model(name, **options)
    for kind in ("SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "MASKED_LM", "CAUSAL_LM"):
        mapping = getattr(auto, f"MODEL_FOR_{kind}_MAPPING")
        if type(config) in mapping:
            break
    else:
        raise ValueError(f"{name!r} of transformers is no language model or classifier of images.")
    model = mapping[type(config)](config)
    if kind == "IMAGE_CLASSIFICATION":
        size = getattr(config, "image_size", IMAGE)
        images = torch.randn(batch, getattr(config, "num_channels", 3), size, size)
        labels = torch.randint(config.num_labels, (batch,))
        return model, {"pixel_values": images, "labels": labels}, None
    length = min(length, getattr(config, "max_position_embeddings", length))
    tokens = torch.randint(config.vocab_size, (batch, length))
    data = {"input_ids": tokens, "labels": tokens.clone()}
    return model, data | ({"decoder_input_ids": tokens} if kind.startswith("SEQ") else {}), None


# library -> the names of its models, and what makes one
_LIBRARIES: dict[str, tuple[Callable[[], Iterable[str]], Callable[..., Target]]] = {
    "torchvision": (lambda: import_module("torchvision.models").list_models(), _torchvision),
    "timm": (lambda: import_module("timm").list_models(), _timm),
    "transformers": (lambda: import_module("transformers").CONFIG_MAPPING, _transformers),
}
