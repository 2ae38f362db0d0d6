"""The data of an experiment: fixed parts, repeatable streams, right pixels, clear refusals."""

import pytest

pytest.importorskip("normplug.experiment")

import hashlib
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call, patch

import numpy as np
import torch
import torchvision
from hydra.utils import instantiate
from PIL import Image
from torch import nn

import lightning_cases
from normplug.experiment.data import (
    Digits,
    Fake,
    ImageFolder,
    Part,
    Source,
    Text,
    Torchvision,
    crop_and_flip,
)
from normplug.experiment.errors import CONFIGS, UserError, user_sentence
from normplug.experiment.image_files import ImageFiles
from training import composed

SIZE = 6  # of the images in `tree`


class Recorder(lightning_cases.Module):
    """Keeps the images of each epoch's training batches, and of the validation."""

    def __init__(self):
        super().__init__(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)))
        self.batches, self.val = {}, []

    def training_step(self, batch, batch_idx):
        self.batches.setdefault(self.current_epoch, []).append(batch[0].clone())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.val.append(batch[0].clone())


def fit(data, *, epochs=2, **options):
    model = Recorder()
    options = {"num_sanity_val_steps": 0, "max_epochs": epochs, **options}
    lightning_cases.trainer(None, **options).fit(model, data)
    return model


def parts(data):
    """The training, validation and test part."""
    data.setup("fit")
    tensors = (part.tensors for part in (data.train_part, data.val_part, data.test_part))
    return [
        SimpleNamespace(inputs=inputs, targets=targets) for inputs, targets in tensors
    ]


@pytest.fixture
def tree(tmp_path):
    """Dark cats and bright dogs of many shapes, so that resize and crop have work to do."""
    random = np.random.default_rng(0)
    for part, count in {"train": 20, "test": 4}.items():
        for label, name in enumerate(("cat", "dog")):
            place = tmp_path / "pets" / part / name
            place.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(
                    0, 100, (SIZE + i, SIZE + 2 + i // 2, 3), np.uint8
                )
                Image.fromarray(pixels + np.uint8(150 * label)).save(
                    place / f"{i:02}.png"
                )
    return tmp_path / "pets"


def plant(root, value=200, count=10):
    """Cats and dogs of one grey value."""
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image = Image.new("RGB", (SIZE, SIZE), (value, value, value))
            image.save(root / name / f"{number}.png")


def folder(root, **options):
    return ImageFolder(root=str(root), image_size=SIZE, **options)


def test_parts_are_disjoint_stratified_and_the_same_for_every_seed():
    first, second = (parts(Digits(seed=seed)) for seed in range(2))
    images = torch.cat([part.inputs for part in first])
    assert len(torch.unique(images, dim=0)) == 1797  # no two digits are equal
    assert images.shape[1:] == (3, 8, 8)
    assert images.amax((0, 2, 3)).tolist() == [255] * 3  # grey, of the full range
    for part, other, share in zip(first, second, [0.72, 0.08, 0.2], strict=True):
        assert torch.equal(part.inputs, other.inputs)
        # 178 images a class, on average; the rounding of two splits moves at most one
        torch.testing.assert_close(
            part.targets.bincount() / 1797,
            torch.full((10,), share / 10),
            atol=5e-3,
            rtol=0,
        )


class TestStreams:
    def test_loading_draws_nothing_from_the_global_generator(self):
        data = Fake(image_size=8)
        data.setup("fit")
        before = torch.get_rng_state()
        for loader in (
            data.train_dataloader(),
            data.val_dataloader(),
            data.test_dataloader(),
        ):
            next(iter(loader))
        assert torch.equal(torch.get_rng_state(), before)

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
        data.test_part = Part(torch.zeros(samples, 3, 4, 4), torch.arange(samples))
        batches = []
        for shard in range(shards):
            monkeypatch.setattr(data, "shards", lambda shard=shard: (shards, shard))
            batches.append([labels for _, labels in data.test_dataloader()])
        assert len(set(map(len, batches))) == 1
        assert torch.cat(sum(batches, [])).sort().values.tolist() == list(range(samples))
        monkeypatch.setattr(data, "shards", lambda: (samples + 1, 0))
        with pytest.raises(
            ValueError, match=f"for each process; got {samples} for {samples + 1}"
        ):
            data.test_dataloader()

    @pytest.mark.parametrize(("batch_size", "batches"), [(64, 11), (720, 1), (1000, 1)])
    def test_only_a_remainder_is_dropped(self, batch_size, batches):
        data = Fake(image_size=4, batch_size=batch_size)
        data.setup("fit")
        assert len(data.train_dataloader()) == batches


class TestPixels:
    @pytest.mark.parametrize("flip", [False, True])
    @pytest.mark.parametrize("pad", [0, 2])
    def test_each_image_has_its_own_crop_and_flip(self, pad, flip):
        images = torch.randn(500, 3, 5, 7)
        out = crop_and_flip(images, torch.Generator().manual_seed(1), pad, flip)
        padded = nn.functional.pad(images, [pad] * 4)
        offsets = list(itertools.product(range(2 * pad + 1), repeat=2))
        crops = [padded[:, :, top : top + 5, left : left + 7] for top, left in offsets]
        crops += [crop.flip(3) for crop in crops] if flip else []
        found = torch.stack([(crop == out).all(-1).all(-1).all(-1) for crop in crops])
        assert (found.sum(0) == 1).all()
        # Every offset, flipped or not, is about equally frequent: 50 ways at most.
        assert (found.sum(1) > 0.2 * 500 / len(crops)).all()

    def test_training_images_have_mean_0_and_std_1_and_a_constant_channel_is_0(
        self, monkeypatch
    ):
        data = Fake(num_images=500, image_size=8)
        images, test = data.load()
        images.tensors[0][:, 2] = 7
        monkeypatch.setattr(data, "load", lambda: (images, test))
        train, _, _ = parts(data)
        pixels, _ = data.on_after_batch_transfer((train.inputs, train.targets), 0)
        var, mean = torch.var_mean(pixels.double(), (0, 2, 3), correction=0)
        torch.testing.assert_close(mean, torch.zeros(3).double(), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            var, torch.tensor([1.0, 1, 0]).double(), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize(
    ("device", "free", "on_gpu"),
    [("auto", 24, True), ("auto", 23, False), ("cuda", 23, True), ("cpu", 24, False)],
)
def test_device_decides_where_data_are_kept(monkeypatch, device, free, on_gpu):
    """auto: on the GPU if they take at most a quarter of its free memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free, free))
    data = Fake(device=device)
    data.trainer = Mock()
    data.trainer.strategy.root_device = torch.device("cuda")
    tensor = Mock(spec=torch.Tensor, nbytes=1, **{"size.return_value": 1})
    tensor.to.return_value = tensor
    data.set_parts(*[Part(tensor, tensor)] * 3)
    assert tensor.to.called == on_gpu


class TestTrainer:
    def data(self, seed=0):
        augment = {"pad": 2, "flip": True}
        return Fake(
            seed=seed, image_size=8, num_images=400, batch_size=64, augment=augment
        )

    def test_seed_decides_augmented_pixels_and_the_global_generator_does_not(self):
        torch.manual_seed(0)
        data = self.data()
        first = fit(data).batches
        torch.manual_seed(1)
        again = fit(data).batches  # a second fit starts the streams again
        other = fit(self.data(seed=1)).batches
        for epoch in range(2):
            assert torch.equal(torch.cat(again[epoch]), torch.cat(first[epoch]))
            assert not torch.equal(torch.cat(other[epoch]), torch.cat(first[epoch]))
        assert not torch.equal(torch.cat(first[0]), torch.cat(first[1]))

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


class TestImageFolder:
    @pytest.mark.parametrize(
        ("test", "counts"),
        [("test", (36, 4, 8)), ("val", (36, 4, 8)), ("../other", (28, 4, 8))],
    )
    def test_has_its_test_images_in_test_or_val_or_holds_them_out(
        self, tree, test, counts
    ):
        (tree / "test").rename(tree / test)
        data = folder(tree)
        assert data.sizes == {"num_classes": 2, "image_size": SIZE}
        for part, count in zip(parts(data), counts, strict=True):
            assert part.inputs.shape == (count, 3, SIZE, SIZE)
            assert torch.equal(
                part.inputs.float().mean((1, 2, 3)) > 125, part.targets == 1
            )

    def test_a_cache_is_read_until_the_tree_changes(self, tree, tmp_path):
        file = tmp_path / "new/pets.pt"
        images, *_ = parts(folder(tree, cache=str(file)))
        with patch.object(ImageFiles, "decoded", side_effect=AssertionError):
            again, *_ = parts(folder(tree, cache=str(file)))
        assert torch.equal(images.inputs, again.inputs)
        Image.new("RGB", (SIZE, SIZE)).save(tree / "train/cat/00.png")
        changed, *_ = parts(folder(tree, cache=str(file)))
        assert not torch.equal(images.inputs, changed.inputs)
        # Two for training, one for test.
        assert len(list(file.parent.glob("pets-*.pt"))) == 3

    def test_keeps_the_centre_in_its_own_proportions(self, tmp_path):
        image = Image.new("RGB", (24, 8), "black")
        image.paste("white", (8, 0, 16, 8))
        image.save(tmp_path / "wide.png")
        samples = [(str(tmp_path / "wide.png"), 0)]
        assert (ImageFiles(samples, 8).decoded() == 255).all()
        # The resize blurs the edges.
        assert ImageFiles(samples, 4).decoded().min() > 200

    @pytest.mark.parametrize("workers", [0, 2])
    def test_images_beyond_the_memory_are_streamed_to_the_same_batches(
        self, tree, workers
    ):
        options = {"root": str(tree), "image_size": 8, "batch_size": 5}
        cached = ImageFolder(**options)
        streamed = ImageFolder(**options, memory_gib=0, num_workers=workers)
        assert cached.about().endswith("; decoded into memory (8.58e-06 GiB)")
        assert streamed.about().endswith("GiB decoded, above data.memory_gib=0)")
        models = [fit(data) for data in (cached, streamed)]
        for epoch in range(2):
            batches = [torch.cat(model.batches[epoch]) for model in models]
            assert torch.equal(*batches)
        assert torch.equal(*(torch.cat(model.val) for model in models))
        assert len(cached.test_part) == len(streamed.test_part)

    def test_refuses_a_tree_that_it_cannot_use(self, tree):
        with pytest.raises(FileNotFoundError, match="Couldn't find any class folder"):
            folder(tree / "train" / "cat")
        (tree / "test" / "emu").mkdir()
        with pytest.raises(FileNotFoundError, match="no valid file for the classes emu"):
            folder(tree)
        Image.new("RGB", (SIZE, SIZE)).save(tree / "test/emu/0.png")
        with pytest.raises(
            UserError, match=r"got 2 for training. In one part only: \['emu'\]"
        ):
            folder(tree)

    @pytest.mark.parametrize(
        ("names", "counts", "line"),
        [
            (
                "train val",
                (18, 2, 20),
                "test val/ (20 images), validation 10% of the training images",
            ),
            (
                "train valid",
                (18, 2, 20),
                "training train/ (20 images), test valid/ (20 images), vali",
            ),
            (
                "Train Validation",
                (18, 2, 20),
                "training Train/ (20 images), test Validation/ (20 images)",
            ),
            (
                "training testing",
                (18, 2, 20),
                "training training/ (20 images), test testing/ (20 images)",
            ),
            (
                "train val test",
                (20, 20, 20),
                "test test/ (20 images), validation val/ (20 images)",
            ),
            (
                "TRAINING VALID TEST",
                (20, 20, 20),
                "TEST/ (20 images), validation VALID/ (20 images)",
            ),
            (
                "train",
                (14, 2, 4),
                "train/ (20 images), test 20% of it, validation 10% of the rest",
            ),
            (
                ".",
                (14, 2, 4),
                "pets/ (20 images), test 20% of it, validation 10% of the rest",
            ),
        ],
    )
    def test_reads_each_part_from_the_directory_that_has_its_name(
        self, tmp_path, names, counts, line
    ):
        root = tmp_path / "pets"
        for number, name in enumerate(names.split()):
            plant(root / name, value=50 * (number + 1))
        data = folder(root)
        assert [len(part.inputs) for part in parts(data)] == list(counts)
        folders = data.folders.values()
        assert {tuple(each.classes) for each in folders} == {("cat", "dog")}
        test = len(data.folders) - 1
        values = {"train_part": 0, "val_part": 1 if test == 2 else 0, "test_part": test}
        for part, number in values.items():
            assert getattr(data, part).tensors[0].unique().tolist() == [50 * (number + 1)]
        assert line in data.about()

    def test_leaves_out_what_is_hidden_or_no_image(self, tmp_path):
        root = tmp_path / "pets"
        plant(root / "train")
        plant(root / "valid")
        for name in (
            "__MACOSX/train",
            "train/.ipynb_checkpoints",
            "train/cat/.ipynb_checkpoints",
        ):
            plant(root / name)
        (root / "labels").mkdir()
        (root / "labels/cat.txt").write_text("cat")
        (root / "train/cat/._0.png").write_text("of macOS")
        Image.new("RGB", (SIZE, SIZE)).save(root / "preview.png")
        assert [len(part.inputs) for part in parts(folder(root))] == [18, 2, 20]

    @pytest.mark.parametrize(
        ("names", "sentence"),
        [
            (
                "train val valid",
                "train/, val/, valid/: val/ and valid/ are the same part. Rename",
            ),
            (
                "train holdout",
                "It has holdout/, train/: holdout/ is not a part, but has images.",
            ),
            ("val test", "It has test/, val/: train/ is missing."),
            ("train .", "has cat/, dog/, train/: cat/ is not a part, but has images; "),
            (
                "seg_train seg_test",
                "seg_test/ and seg_train/ have the names of parts; each of",
            ),
            ("fold1 fold2", "each of them has cat/ and dog/, which may be the classes."),
            (
                "one",
                "directory for each of at least two classes, the same for training and test",
            ),
        ],
    )
    def test_refuses_a_tree_of_which_it_would_read_a_part(
        self, tmp_path, names, sentence
    ):
        root = tmp_path / "pets"
        for name in names.split():
            plant(root / name)
        with pytest.raises(UserError) as caught:
            folder(root)
        assert sentence in str(caught.value)

    def test_refuses_images_beside_the_classes_of_a_part(self, tree):
        Image.new("RGB", (SIZE, SIZE)).save(tree / "train/unsorted.png")
        with pytest.raises(UserError, match="train/ has images next to its classes"):
            folder(tree)

    def test_refuses_pixels_that_8_bits_cannot_hold(self, tree):
        pixels = np.full((SIZE, SIZE), 40000, np.uint16)
        Image.fromarray(pixels).save(tree / "train/dog/05.png")
        with pytest.raises(
            ValueError, match=r"05.png is .*\(its pixels have the mode I;16, more"
        ):
            folder(tree).setup("fit")

    @pytest.mark.parametrize("memory", [4.0, 0.0])
    def test_names_an_unreadable_image(self, tree, memory):
        broken = tree / "train/dog/05.png"
        broken.write_bytes(b"no image")
        data = folder(tree, memory_gib=memory, num_workers=1)
        with pytest.raises(ValueError, match="is not a readable image") as caught:
            fit(data)
        sentence = user_sentence(caught.value)
        assert sentence.startswith(f"normplug.experiment: {broken} is not a readable")
        assert sentence.endswith("Replace or delete it.")


@pytest.mark.parametrize(
    ("name", "shape"), [("CIFAR10", (32, 32, 3)), ("FashionMNIST", (28, 28))]
)
def test_torchvision_gives_its_official_parts(monkeypatch, name, shape):
    images = torch.randint(256, (40, *shape), dtype=torch.uint8)
    labels = [0, 1] * 20
    dataset = Mock(return_value=SimpleNamespace(data=images.numpy(), targets=labels))
    monkeypatch.setattr(torchvision.datasets, name, dataset)
    data = Torchvision(dataset=name, num_classes=10, image_size=shape[0], root="here")
    data.prepare_data()
    assert dataset.call_args_list == [
        call("here", train=t, download=True) for t in (True, False)
    ]
    train, val, test = parts(data)
    assert (len(train.targets), len(val.targets)) == (36, 4)
    colours = images if images.ndim == 4 else images[..., None].expand(-1, -1, -1, 3)
    assert torch.equal(test.inputs, colours.permute(0, 3, 1, 2))
    assert test.targets.tolist() == labels
    assert [c.kwargs["train"] for c in dataset.call_args_list[2:]] == [True, False]


@pytest.mark.parametrize("options", [{"num_classes": 9}, {"image_size": 16}])
def test_torchvision_refuses_sizes_that_the_images_do_not_have(monkeypatch, options):
    images = np.zeros((40, 8, 8), np.uint8)
    dataset = SimpleNamespace(data=images, targets=[*range(10)] * 4)
    monkeypatch.setattr(torchvision.datasets, "MNIST", lambda *_, **__: dataset)
    data = Torchvision(
        **{"dataset": "MNIST", "num_classes": 10, "image_size": 8} | options
    )
    with pytest.raises(
        UserError, match="MNIST has 10 classes and images of 8x8 pixels; got"
    ):
        data.setup("fit")


@pytest.mark.parametrize(
    "path", sorted(Path(CONFIGS, "data").glob("*.yaml")), ids=lambda p: p.stem
)
def test_configs_build_their_source(path, tree):
    cfg = composed(f"data={path.stem}", "seed=3")
    if path.stem == "image_folder":
        cfg.data.update(root=str(tree), image_size=SIZE)
    data = instantiate(cfg.data, _convert_="all")
    assert isinstance(data, Source)
    assert data.seed == 3


class TestText:
    def text(self, tmp_path, content, **options):
        (tmp_path / "a.txt").write_bytes(content)
        options = {"block_size": 4, "batch_size": 2} | options
        return Text(path=str(tmp_path / "a.txt"), **options)

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
        # Of 19 blocks, the odd one is left for the next epoch.
        assert len(rows["train"]) == 72
        assert data.sizes == {"vocabulary": 256, "block_size": 4}

    @pytest.mark.parametrize(("character", "size"), [("a", 1), ("\u00e9", 2)])
    def test_a_result_names_the_text_and_has_bits_by_character(
        self, tmp_path, character, size
    ):
        text = (100 * character).encode()
        assert self.text(tmp_path, text).facts(1.0) == {
            "text_sha256": hashlib.sha256(text).hexdigest(),
            "text_tokens": 100 * size,
            "test_bits_per_character": pytest.approx(size / math.log(2)),
        }

    def test_the_library_is_the_same_text_each_time_and_holds_no_tests(self):
        first, again = (Text(megabytes=0.02) for _ in range(2))
        assert first.sha256 == again.sha256
        assert len(first.tokens) == 20_000

    def test_what_cannot_be_a_text_is_refused(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no.txt"):
            Text(path="no.txt")
        with pytest.raises(
            UserError, match="longer than block_size=4; the smallest has 4 tokens"
        ):
            self.text(tmp_path, b"a" * 40)
        with pytest.raises(
            UserError, match="longer than block_size=4; the smallest has 0 tokens"
        ):
            self.text(tmp_path, b"")
