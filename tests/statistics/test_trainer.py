"""`normplug.transformers.NormCallback`."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from normplug import swap  # noqa: E402
from normplug.transformers import NormCallback  # noqa: E402
from statistics_cases import rows_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::Warning", "error:normplug:UserWarning")
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


def trainer(model, directory, steps, callback):
    words = torch.randint(32, (8, 12), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        str(directory), max_steps=steps, per_device_train_batch_size=4, report_to=[],
        save_steps=2, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in words]
    return Trainer(model, arguments, train_dataset=rows, callbacks=[callback])


def make(mode):
    torch.manual_seed(0)
    return swap(LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **SIZES)), mode)


def test_it_logs_keeps_the_modes_of_checkpoints_and_publishes_the_stock_model(tmp_path):
    model, published = make("golden"), tmp_path / "published"
    trainer(model, tmp_path, 3, NormCallback(every=2, publish=published)).train()
    rows = rows_of(tmp_path / "variance.csv")
    assert [row["step"] for row in rows] == ["0"] * 3 + ["2"] * 3
    assert all(0.5 < float(row["output_variance"]) < 0.63 for row in rows)
    stock, x = LlamaForCausalLM.from_pretrained(published), torch.arange(6)[None]
    torch.testing.assert_close(stock(x).logits, model.eval()(x).logits)
    assert not hasattr(stock.model.norm, "mode")
    resumed = trainer(make("golden"), tmp_path, 4, NormCallback(every=None))
    resumed.train(resume_from_checkpoint=True)
    other = trainer(make("standard"), tmp_path, 5, NormCallback())
    with pytest.raises(
        ValueError, match="NormCallback: the checkpoint was trained in other modes"
    ):
        other.train(resume_from_checkpoint=True)


def steps(directory):
    """The steps in the file, each once for the 3 norms of the model."""
    return [int(row["step"]) for row in rows_of(directory / "variance.csv")][::3]


def test_a_resumed_run_repeats_no_row_and_a_new_run_starts_a_new_file(tmp_path):
    trainer(make("golden"), tmp_path, 5, NormCallback(every=1)).train()
    assert steps(tmp_path) == [0, 1, 2, 3, 4]
    resumed = trainer(make("golden"), tmp_path, 6, NormCallback(every=1))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    trainer(make("golden"), tmp_path, 1, NormCallback(every=1)).train()
    assert steps(tmp_path) == [0]


def test_an_error_in_a_step_leaves_nothing_in_the_next_training(tmp_path):
    model = make("golden")
    run = trainer(model, tmp_path, 1, NormCallback(every=1))

    def fail(*_):
        raise ZeroDivisionError

    hook = model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run.train()
    hook.remove()
    run.train()
    assert not any("_probe" in vars(module) for module in model.modules())


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="NormCallback: every must be at least 1; got 0"):
        NormCallback(every=0)
