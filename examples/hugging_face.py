"""Hugging Face: fine-tune a language model with swapped norms, and publish a stock model.

    pip install -e . transformers accelerate  # in a clone of the repository
    python examples/hugging_face.py

It downloads nothing: the script makes a small Llama from a configuration, trains it on sums such as
"12+7=19;", saves it, and fine-tunes it on differences. On a CPU it takes about a minute.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import normplug
from normplug.callbacks import NormCallback

SYMBOLS = "0123456789+-=;"
LENGTH = 32  # tokens of a sample


def tokens(operation: str, samples: int) -> list[dict[str, torch.Tensor]]:
    """Samples of LENGTH tokens: calculations with numbers below 20, in one text."""
    made = []
    for _ in range(samples):
        text = ""
        while len(text) < LENGTH:
            a, b = torch.randint(20, (2,)).tolist()
            result = a + b if operation == "+" else abs(a - b)
            text += f"{max(a, b)}{operation}{min(a, b)}={result};"
        ids = torch.tensor([SYMBOLS.index(symbol) for symbol in text[:LENGTH]])
        made.append({"input_ids": ids, "labels": ids})
    return made


def train(
    model: LlamaForCausalLM, data: Any, steps: int, out: Path, callbacks: list[Any]
) -> None:
    """Train with transformers' Trainer."""
    arguments = TrainingArguments(
        str(out),
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        logging_steps=max(steps // 4, 1),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()


def loss_of(model: LlamaForCausalLM, data: list[dict[str, torch.Tensor]]) -> float:
    """The mean loss of a token, in nats."""
    batch = torch.stack([sample["input_ids"] for sample in data])
    with torch.no_grad():
        return model.eval()(input_ids=batch, labels=batch).loss.item()


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150, help="of each; default: 150")
    parser.add_argument("--out", type=Path, default=Path("hugging_face"))
    a = parser.parse_args()
    torch.manual_seed(0)
    sums, differences = tokens("+", 2000), tokens("-", 2000)

    # 1. A pretrained model, as you would load it.
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_hidden_layers=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    pretrained = LlamaForCausalLM(config)
    train(pretrained, sums, a.steps, a.out, [])
    pretrained.save_pretrained(a.out / "pretrained")

    # 2. Swap before the Trainer is built. In mode standard the outputs stay the same.
    model = LlamaForCausalLM.from_pretrained(a.out / "pretrained")
    before = loss_of(model, differences[:200])
    normplug.fuse(normplug.swap(model))
    print(normplug.plan(model).summary())
    print(f"loss of differences, before the swap {before:.3f}, ", end="")
    print(f"after the swap {loss_of(model, differences[:200]):.3f}")

    # 3. Fine-tune. The callback watches the norms, and publishes a stock model at the end.
    published = a.out / "published"
    callback = NormCallback(every=max(a.steps // 4, 1), publish=published)
    train(model, differences, a.steps, a.out, [callback])
    print(f"loss of differences, fine-tuned: {loss_of(model, differences[:200]):.3f}")

    # 4. What is published needs no normplug.
    stock = LlamaForCausalLM.from_pretrained(published)
    print(f"the published model: {loss_of(stock, differences[:200]):.3f}")


if __name__ == "__main__":
    main()
