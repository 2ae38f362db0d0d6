"""The data of an experiment: fixed parts, repeatable streams, right pixels, clear refusals."""

import hashlib
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torchvision
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from torch import nn

from normplug.experiment.data import (
    Digits,
    Fake,
    FilePart,
    ImageFolder,
    MemoryPart,
    Source,
    Torchvision,
    channel_statistics,
    crop_and_flip,
    decode,
    decode_parts,
    normalise,
    stream_seed,
)
from normplug.experiment.text import Text, _sources

CONFIGS = Path(__file__).parents[2] / "configs"
SIZE = 6  # of the images in `tree`


class Recorder(LightningModule):
    """The least a Trainer trains; it keeps the training batches of every epoch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 10)
        self.batches = {}
        self.val = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        self.batches.setdefault(self.current_epoch, []).append(images.clone())
        return nn.functional.cross_entropy(self.head(images.mean((2, 3))), labels)

    def validation_step(self, batch, batch_idx):
        self.val.append(batch[0].clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data, *, epochs=2, ckpt_path=None, **kwargs):
    model = Recorder()
    defaults = {"enable_checkpointing": False, "logger": False, "max_epochs": epochs}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(accelerator="cpu", devices=1, **defaults | quiet | kwargs)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model


def parts(data):
    data.setup("fit")
    return data.train_part, data.val_part, data.test_part


def paths(images):
    return [Path(path) for path, _ in images.samples]


@pytest.fixture
def tree(tmp_path):
    """Images of many shapes, so that resize and crop have work to do."""
    random = np.random.default_rng(0)
    for part, count in {"train": 20, "test": 4}.items():
        for name in ("cat", "dog"):
            folder = tmp_path / "pets" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (SIZE + i, SIZE + 2 + i // 2, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i:02}.png")
    return tmp_path / "pets"


@pytest.fixture
def single_process_group():
    """Take away what a one-process `strategy="ddp"` leaves behind for the tests that follow."""
    with patch.dict(os.environ):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class TestParts:
    def test_are_disjoint_stratified_and_the_same_for_every_seed(self):
        first, second = (parts(Digits(seed=seed)) for seed in range(2))
        images = torch.cat([part.inputs for part in first])
        assert len(torch.unique(images, dim=0)) == 1797  # no two digits are equal
        for part, other, share in zip(first, second, [0.72, 0.08, 0.2], strict=True):
            assert torch.equal(part.inputs, other.inputs)
            # 178 images a class, on average; the rounding of two splits moves at most one
            torch.testing.assert_close(
                part.targets.bincount() / 1797, torch.full((10,), share / 10), atol=5e-3, rtol=0
            )

    def test_a_split_takes_its_share_of_every_class_and_not_the_first(self):
        labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)[torch.randperm(100)]
        rows = MemoryPart(torch.arange(100), labels)
        kept, held = Fake().hold_out(rows, 0.1)
        assert held.targets.bincount().tolist() == [5, 3, 2]
        assert sorted(kept.inputs.tolist() + held.inputs.tolist()) == list(range(100))
        _, held = Fake().hold_out(MemoryPart(torch.arange(100), torch.zeros(100).long()), 0.2)
        assert held.inputs.tolist() != list(range(20))

    def test_an_empty_part_is_refused(self):
        with pytest.raises(ValueError, match=r"Fake: both parts .* val_fraction \(it is 0.1\)"):
            Fake(num_classes=10, num_images=30).setup("fit")

    def test_fake_images_show_their_class(self):
        data = Fake(num_classes=4, image_size=8, num_images=200)
        train, _, test = parts(data)
        means = torch.stack([train.inputs[train.targets == c].float().mean(0) for c in range(4)])
        distance = torch.cdist(test.inputs.float().flatten(1), means.flatten(1))
        assert (distance.argmin(1) == test.targets).float().mean() > 0.9


class TestStreams:
    def loaded(self, seed):
        data = Fake(seed=seed, image_size=8, num_images=400, batch_size=64)
        data.setup("fit")
        return [labels for _, labels in data.train_dataloader()]

    def test_order_is_of_the_seed_and_not_of_the_global_generator(self):
        torch.manual_seed(0)
        first = torch.cat(self.loaded(seed=0))
        torch.manual_seed(1)
        assert torch.equal(torch.cat(self.loaded(seed=0)), first)
        assert not torch.equal(torch.cat(self.loaded(seed=1)), first)

    def test_loading_draws_nothing_from_the_global_generator(self):
        data = Fake(image_size=8)
        data.setup("fit")
        before = torch.get_rng_state()
        for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
            next(iter(loader))
        assert torch.equal(torch.get_rng_state(), before)

    def test_near_seeds_epochs_and_shards_share_no_stream(self):
        near = itertools.product(range(3), repeat=4)
        assert len({stream_seed(*numbers) for numbers in near}) == 81

    def test_the_batches_of_all_shards_are_those_of_one_process(self, monkeypatch):
        def batches(shards, shard):
            data = Fake(image_size=4, batch_size=8 // shards)
            data.setup("fit")
            monkeypatch.setattr(data, "shards", lambda: (shards, shard))
            return list(data.train_dataloader())

        pairs = zip(batches(1, 0), batches(2, 0), batches(2, 1), strict=True)
        for whole, *halves in pairs:
            for one, *parts in zip(whole, *halves, strict=True):
                assert torch.equal(torch.stack(parts, 1).flatten(0, 1), one)

    @pytest.mark.parametrize(("samples", "shards"), [(21, 4), (17, 4), (12, 4), (33, 1)])
    def test_shards_of_an_evaluation_share_its_samples_in_as_many_batches(
        self, monkeypatch, samples, shards
    ):
        data = Fake(image_size=4, batch_size=1)
        data.test_part = MemoryPart(torch.zeros(samples, 3, 4, 4), torch.arange(samples))
        batches = []
        for shard in range(shards):
            monkeypatch.setattr(data, "shards", lambda shard=shard: (shards, shard))
            batches.append([labels for _, labels in data.test_dataloader()])
        assert len(set(map(len, batches))) == 1
        assert torch.cat(sum(batches, [])).sort().values.tolist() == list(range(samples))
        monkeypatch.setattr(data, "shards", lambda: (samples + 1, 0))
        with pytest.raises(ValueError, match="need a sample for each process"):
            data.test_dataloader()

    @pytest.mark.parametrize(("batch_size", "batches"), [(64, 11), (720, 1), (1000, 1)])
    def test_only_a_remainder_is_dropped(self, batch_size, batches):
        data = Fake(image_size=4, batch_size=batch_size)
        data.setup("fit")
        assert len(data.train_dataloader()) == batches


def drawn():
    return torch.Generator().manual_seed(1)


class TestPixels:
    @pytest.mark.parametrize("flip", [False, True])
    @pytest.mark.parametrize("pad", [0, 2])
    def test_crop_and_flip_matches_a_loop_over_images(self, pad, flip):
        images = torch.randn(16, 3, 5, 7)
        out = crop_and_flip(images, pad, flip, drawn())

        generator = drawn()
        offsets = torch.randint(2 * pad + 1, (2, 16), generator=generator)
        mirrored = torch.randint(2, (16,), generator=generator).bool()
        for i, image in enumerate(images):
            top, left = offsets[:, i]
            padded = torch.zeros(3, 5 + 2 * pad, 7 + 2 * pad)
            padded[:, pad : pad + 5, pad : pad + 7] = image
            expected = padded[:, top : top + 5, left : left + 7]
            if flip and mirrored[i]:
                expected = expected.flip(2)
            assert torch.equal(out[i], expected)

    def test_crops_reach_every_offset_and_flips_half(self):
        images = torch.zeros(2000, 1, 5, 5)
        images[:, :, 2, 1] = 1
        out = crop_and_flip(images, 1, False, drawn()).sum((0, 1))
        assert (out[1:4, :3] > 150).all()  # 222 each of 9 offsets
        assert out.sum() == 2000
        mirrored = crop_and_flip(images, 0, True, drawn()).sum((0, 1))
        assert 900 < mirrored[2, 3] < 1100

    def test_training_images_have_mean_0_and_std_1(self):
        data = Fake(num_images=500, image_size=8)
        train, _, _ = parts(data)
        images, _ = data.on_after_batch_transfer((train.inputs, train.targets), 0)
        var, mean = torch.var_mean(images.double(), (0, 2, 3), correction=0)
        torch.testing.assert_close(mean, torch.zeros(3).double(), atol=1e-6, rtol=0)
        torch.testing.assert_close(var, torch.ones(3).double(), atol=1e-6, rtol=0)

    def test_a_constant_channel_is_0(self):
        images = torch.full((2, 3, 4, 4), 7, dtype=torch.uint8)
        mean, std = channel_statistics(MemoryPart(images, torch.zeros(2)))
        assert normalise(images, mean, std).abs().max() < 1e-12

    def test_statistics_of_a_large_part_are_exact(self):
        images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
        images = images.expand(2, 3, 128, 128).repeat(1400, 1, 1, 1)  # sums exceed 64 bits
        mean, std = channel_statistics(MemoryPart(images, torch.zeros(2800)))
        assert mean.tolist() == std.tolist() == [0.5] * 3

    def test_grey_digits_become_three_equal_channels_of_the_full_range(self):
        images = parts(Digits())[0].inputs
        assert images.shape[1:] == (3, 8, 8)
        assert images.amax((0, 2, 3)).tolist() == [255] * 3


class TestDevice:
    GPU = torch.device("cuda", 0)

    def keeper(self, device, monkeypatch, *, parts=1, runs_on=GPU):
        """Where parts of 1 KiB are kept, by a GPU that has 8 KiB free."""
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (8192, 8192))
        data = Fake(device=device)
        data.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=runs_on))
        kib = MemoryPart(torch.empty(1016, dtype=torch.uint8), torch.empty(1, dtype=torch.int64))
        return data._storage([kib] * parts)

    def test_auto_is_the_gpu_up_to_a_quarter_of_its_free_memory(self, monkeypatch):
        cpu = torch.device("cpu")
        assert self.keeper("auto", monkeypatch, parts=2) == self.GPU
        assert self.keeper("auto", monkeypatch, parts=3) == cpu
        assert self.keeper("cuda", monkeypatch, parts=3) == self.GPU
        assert self.keeper("cpu", monkeypatch) == cpu
        assert self.keeper("auto", monkeypatch, runs_on=cpu) == cpu

    def test_what_no_gpu_can_keep_is_refused(self, monkeypatch):
        with pytest.raises(ValueError, match="this run is on cpu. Use data.device=auto"):
            self.keeper("cuda", monkeypatch, runs_on=torch.device("cpu"))
        with pytest.raises(ValueError, match="are decoded for every batch. Use data.device=auto"):
            self.keeper("cuda", monkeypatch, parts=0)


class TestTrainer:
    def data(self, seed=0):
        return Fake(
            seed=seed, image_size=8, num_images=400, batch_size=64, augment={"pad": 2, "flip": True}
        )

    @pytest.mark.usefixtures("single_process_group")
    def test_one_process_of_ddp_trains_on_what_a_plain_run_trains_on(self):
        plain = fit(self.data())
        ddp = fit(self.data(), strategy="ddp")
        for epoch in range(2):
            assert torch.equal(torch.cat(ddp.batches[epoch]), torch.cat(plain.batches[epoch]))

    def test_seed_decides_augmented_pixels_and_the_global_generator_does_not(self):
        torch.manual_seed(0)
        first = fit(self.data()).batches
        torch.manual_seed(1)
        again = fit(self.data()).batches
        other = fit(self.data(seed=1)).batches
        for epoch in range(2):
            assert torch.equal(torch.cat(again[epoch]), torch.cat(first[epoch]))
            assert not torch.equal(torch.cat(other[epoch]), torch.cat(first[epoch]))
        assert not torch.equal(torch.cat(first[0]), torch.cat(first[1]))

    def test_a_second_fit_starts_the_streams_again(self):
        data = self.data()
        first = fit(data, epochs=1)
        second = fit(data, epochs=1)
        assert torch.equal(torch.cat(first.batches[0]), torch.cat(second.batches[0]))

    def test_validation_is_not_augmented_and_takes_nothing_from_the_stream(self):
        data = self.data()
        model = fit(data, epochs=1, val_check_interval=2)
        _, val, _ = parts(data)
        expected, _ = data.on_after_batch_transfer((val.inputs, val.targets), 0)
        assert torch.equal(torch.cat(model.val)[: len(expected)], expected)
        undisturbed = fit(self.data(), epochs=1, limit_val_batches=0)
        assert torch.equal(torch.cat(model.batches[0]), torch.cat(undisturbed.batches[0]))

    def test_a_low_precision_model_gets_its_own_dtype(self):
        model = fit(self.data(), epochs=1, precision="bf16-true")
        assert model.batches[0][0].dtype == torch.bfloat16

    def test_a_resumed_run_with_workers_goes_on_as_if_uninterrupted(self, tree, tmp_path):
        def data():
            options = {"memory_gib": 0, "num_workers": 1, "augment": {"pad": 1, "flip": True}}
            return ImageFolder(str(tree), SIZE, batch_size=4, **options)

        checkpoint = str(tmp_path / "stopped.ckpt")
        whole = fit(data(), epochs=3)
        fit(data(), epochs=2).trainer.save_checkpoint(checkpoint)
        resumed = fit(data(), epochs=3, ckpt_path=checkpoint)
        assert list(resumed.batches) == [2]
        assert torch.equal(torch.cat(resumed.batches[2]), torch.cat(whole.batches[2]))


class TestImageFolder:
    def test_reads_names_and_classes_before_setup(self, tree):
        data = ImageFolder(str(tree), SIZE)
        assert (data.name, data.num_classes, data.image_size) == ("pets", 2, SIZE)
        assert data.classes == ["cat", "dog"]

    def test_batches_are_the_same_in_memory_and_decoded_on_demand(self, tree):
        memory = ImageFolder(str(tree), SIZE, batch_size=4)
        demand = ImageFolder(str(tree), SIZE, batch_size=4, memory_gib=0, num_workers=0)
        for data in (memory, demand):
            data.setup("fit")
        assert isinstance(memory.train_part, MemoryPart)
        assert isinstance(demand.train_part, FilePart)
        assert torch.equal(memory.mean, demand.mean)
        assert torch.equal(memory.std, demand.std)
        for part in ("train", "val", "test"):
            pair = (getattr(data, f"{part}_dataloader")() for data in (memory, demand))
            for (images, labels), (other_images, other_labels) in zip(*pair, strict=True):
                assert torch.equal(images, other_images)
                assert torch.equal(labels, other_labels)

    def test_a_cache_is_read_until_the_tree_changes(self, tree, tmp_path, monkeypatch):
        file = tmp_path / "new/pets.pt"

        def images():
            data = ImageFolder(str(tree), SIZE, cache=str(file))
            data.setup("fit")
            return data.train_part.inputs

        decoded = images()
        assert file.is_file()
        with monkeypatch.context() as no_decoder:
            fails = Mock(side_effect=AssertionError)
            no_decoder.setattr("normplug.experiment.data._decode_all", fails)
            assert torch.equal(images(), decoded)
        changed = min((tree / "train" / "cat").iterdir())
        Image.new("RGB", (SIZE, SIZE), (9, 9, 9)).save(changed)
        assert not torch.equal(images(), decoded)
        file.write_text("mine")
        with pytest.raises(
            ValueError, match=r"pets.pt holds no decoded images .* Name another file"
        ):
            images()
        assert file.read_text() == "mine"

    def test_a_cache_that_cannot_be_is_refused_at_once(self, tree, tmp_path):
        for cache, words in [
            (tmp_path, f"must be a file; {tmp_path} is none. Name another file"),
            (Path("/proc/x"), "cannot be written: "),
            (tree / "train/cat/00.png/x", "cannot be written: "),
        ]:
            with pytest.raises(ValueError, match="data.cache") as caught:
                ImageFolder(str(tree), SIZE, cache=str(cache)).setup("fit")
            assert words in str(caught.value)

    def test_a_disk_that_fills_leaves_no_half_cache(self, tree, tmp_path):
        limits = pytest.importorskip("resource")
        soft, hard = limits.getrlimit(limits.RLIMIT_FSIZE)
        limits.setrlimit(limits.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(ValueError, match="pets.pt cannot be written: File too large"):
                ImageFolder(str(tree), SIZE, cache=str(tmp_path / "pets.pt")).setup("fit")
        finally:
            limits.setrlimit(limits.RLIMIT_FSIZE, (soft, hard))
        assert not (tmp_path / "pets.pt").exists()

    def test_decodes_every_file_to_its_own_row(self, tmp_path):
        for name, value in [("black", 0), ("white", 250)]:
            (tmp_path / name).mkdir()
            for i in range(100):  # more than one block of the decoder
                Image.new("L", (5, 4), value + i % 5).save(tmp_path / name / f"{i:03}.png")
        data = ImageFolder(str(tmp_path), 4)
        train, test = data.load()
        assert len(train) == 160
        assert test.targets.bincount().tolist() == [20, 20]
        images = decode_parts([train])[0].inputs
        expected = [
            250 * (path.parent.name == "white") + int(path.stem) % 5 for path in paths(train)
        ]
        assert images.amin((1, 2, 3)).tolist() == images.amax((1, 2, 3)).tolist() == expected

    def test_keeps_the_centre_in_its_own_proportions(self, tmp_path):
        image = Image.new("RGB", (24, 8), "black")
        image.paste("white", (8, 0, 16, 8))
        image.save(tmp_path / "wide.png")
        assert (decode(tmp_path / "wide.png", 8) == 255).all()
        assert decode(tmp_path / "wide.png", 4).min() > 200  # the resize blurs the edges

    def test_val_stands_in_for_test(self, tree):
        (tree / "test").rename(tree / "val")
        _, test = ImageFolder(str(tree), SIZE).load()
        assert {path.parts[-3] for path in paths(test)} == {"val"}

    def test_a_train_directory_alone_gives_a_fifth_for_testing(self, tree):
        (tree / "test").rename(tree.parent / "elsewhere")
        train, test = ImageFolder(str(tree), SIZE).load()
        assert (len(train), len(test)) == (32, 8)
        assert not set(paths(train)) & set(paths(test))

    def test_refuses_a_tree_of_another_layout(self, tree):
        with pytest.raises(
            ValueError, match="must hold a directory of images for every class; got none"
        ):
            ImageFolder(str(tree / "train" / "cat"), SIZE)
        (tree / "test" / "emu").mkdir()
        with pytest.raises(ValueError, match="emu is only in"):
            ImageFolder(str(tree), SIZE)
        (tree / "train").rename(tree.parent / "elsewhere")
        with pytest.raises(ValueError, match="needs a train directory beside it"):
            ImageFolder(str(tree), SIZE)

    def test_refuses_parts_without_images(self, tree):
        for folder in ("train/emu", "test/emu"):
            (tree / folder).mkdir()
        with pytest.raises(ValueError, match="none for emu. Add images"):
            ImageFolder(str(tree), SIZE).setup("fit")
        (tree / "train" / "emu").rmdir()
        (tree / "test").rename(tree.parent / "elsewhere")
        (tree / "val").mkdir()
        with pytest.raises(ValueError, match="the test part needs images"):
            ImageFolder(str(tree), SIZE).setup("fit")

    @pytest.mark.parametrize("memory_gib", [4.0, 0.0])
    def test_names_an_unreadable_image(self, tree, memory_gib):
        (tree / "train" / "dog" / "05.png").write_bytes(b"no image")
        data = ImageFolder(str(tree), SIZE, memory_gib=memory_gib)
        with pytest.raises(ValueError, match=r"dog/05.png is not a readable image"):
            data.setup("fit")


class TestTorchvision:
    @pytest.mark.parametrize(
        ("name", "size", "shape"),
        [("CIFAR10", 32, (32, 32, 3)), ("FashionMNIST", 28, (28, 28))],
    )
    def test_reads_the_official_parts(self, monkeypatch, name, size, shape):
        downloads = []
        images = torch.randint(256, (40, *shape), dtype=torch.uint8)

        def dataset(root, train, download):
            if download:
                downloads.append(train)
            count = 40 if train else 20
            return SimpleNamespace(data=images[:count].numpy(), targets=[0, 1] * (count // 2))

        monkeypatch.setattr(torchvision.datasets, name, dataset)
        data = Torchvision(name, 10, size)
        data.prepare_data()
        train, val, test = parts(data)
        assert downloads == [True, False]
        assert (len(train), len(val)) == (36, 4)
        colours = images if images.ndim == 4 else images[..., None].expand(-1, -1, -1, 3)
        assert torch.equal(test.inputs, colours[:20].permute(0, 3, 1, 2))
        assert test.targets.tolist() == [0, 1] * 10


@pytest.mark.parametrize("path", sorted((CONFIGS / "data").glob("*.yaml")), ids=lambda p: p.stem)
def test_configs_build_their_source(path, tmp_path):
    (tmp_path / "only").mkdir()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose(overrides=[f"+data={path.stem}", "+seed=3"])
    if path.stem == "image_folder":
        cfg.data.update(root=str(tmp_path), image_size=SIZE)
    data = instantiate(cfg.data)
    assert isinstance(data, Source)
    assert data.seed == 3
    assert data.name in (path.stem, path.stem.replace("_", ""), tmp_path.name)


class TestText:
    def text(self, tmp_path, content, **options):
        (tmp_path / "a.txt").write_bytes(content)
        return Text(str(tmp_path / "a.txt"), **{"block_size": 4, "batch_size": 2} | options)

    def test_parts_follow_one_another_and_a_target_is_the_next_token(self, tmp_path):
        data = self.text(tmp_path, bytes(range(100)))
        data.setup("fit")
        rows = {}
        for name in ("train", "val", "test"):
            loader = getattr(data, f"{name}_dataloader")()
            batches = [data.on_after_batch_transfer(batch, 0) for batch in loader]
            assert all(torch.equal(y, x + 1) for x, y in batches)
            rows[name] = sorted(torch.cat([x for x, _ in batches]).flatten().tolist())
        # 80, 10 and 10 bytes; the last token of a part is a target only.
        assert rows["val"] == list(range(80, 88))
        assert rows["test"] == list(range(90, 98))
        assert set(rows["train"]) < set(range(80))
        assert len(rows["train"]) == 72  # of 19 blocks, the odd one is left for the next epoch
        assert data.sizes == {"vocabulary": 256, "block_size": 4}
        assert data.items_per_batch == 8

    def test_bytes_and_characters_have_one_entropy_a_character_where_they_are_the_same(
        self, tmp_path
    ):
        text = ("ab" * 50).encode()
        for unit, vocabulary in (("byte", 256), ("char", 2)):
            data = self.text(tmp_path, text, unit=unit)
            assert (data.vocabulary, data.unigram_bits) == (vocabulary, 1.0)
            assert data.facts() == {
                "text_sha256": hashlib.sha256(text).hexdigest(),
                "text_tokens": 100,
            }

    def test_bits_are_by_character_of_which_some_have_more_bytes(self, tmp_path):
        data = self.text(tmp_path, ("\u00e9" * 60).encode())  # two bytes, equally often
        assert data.unigram_bits == 2.0
        assert data.learner(nn.Identity(), None).tokens_per_character == {"val": 2.0, "test": 2.0}

    @pytest.mark.parametrize(("size", "count"), [(178, 59), (179, 59), (180, 60), (181, 61)])
    def test_a_limit_cuts_no_character(self, tmp_path, size, count):
        text = ("\u20ac" * 60).encode() + b"0123456789"  # three bytes each
        data = self.text(tmp_path, text, unit="char", megabytes=size / 1e6)
        assert len(data.tokens) == count

    def test_the_library_is_the_same_text_each_time_and_holds_no_tests(self):
        first, again = (Text(megabytes=0.02) for _ in range(2))
        assert first.sha256 == again.sha256
        assert len(first.tokens) == 20_000
        assert not [path for path in _sources(Path(os.__file__).parent) if "test" in path.parts]

    def test_what_cannot_be_a_text_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="path must be a readable file, got no.txt"):
            Text("no.txt")
        with pytest.raises(ValueError, match="unit=char needs a text in UTF-8; byte 1 of 100 is"):
            self.text(tmp_path, b"a\xff" * 50, unit="char")
        with pytest.raises(ValueError, match="longer than block_size=4; the smallest has 4 tokens"):
            self.text(tmp_path, b"a" * 40)
        with pytest.raises(ValueError, match="longer than block_size=4; the smallest has 0 tokens"):
            self.text(tmp_path, b"")
