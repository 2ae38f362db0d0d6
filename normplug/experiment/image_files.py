"""Trees of image files: the directories of their parts, the classes, and the images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.transforms import v2

from normplug.experiment.errors import WHO, UserError

# The names of the directories of the parts, in lower case.
PART_NAMES = {
    "train": "training",
    "training": "training",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}

# A stream takes the mean and the variance of its channels from this many images.
SAMPLED_IMAGES = 4096


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Image files with their labels, each read when it is asked for.

    An image is RGB, (3, image_size, image_size), uint8. Its shorter side is resized to
    `image_size`, then the centre is cut out.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], image_size: int) -> None:
        self.samples = samples
        self.image_size = image_size
        size = [image_size]
        steps = [v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor()]
        self.transform = v2.Compose(steps)

    @property
    def targets(self) -> Tensor:
        """The labels, (N,), int64."""
        return torch.tensor([label for _, label in self.samples])

    def subset(self, rows: Sequence[int]) -> ImageFiles:
        """Return the images of some rows."""
        return ImageFiles([self.samples[row] for row in rows], self.image_size)

    def sample(self) -> Tensor:
        """Return images at even distances, at most `SAMPLED_IMAGES`, as `decoded` does."""
        step = -(-len(self) // SAMPLED_IMAGES)
        return self.subset(range(0, len(self), step)).decoded()

    def decoded(self) -> Tensor:
        """Read all images, (N, 3, image_size, image_size), uint8."""
        shape = (len(self), 3, self.image_size, self.image_size)
        images = torch.empty(shape, dtype=torch.uint8)

        def read(row: int) -> None:
            images[row] = self[row][0]

        with ThreadPoolExecutor() as pool:  # Pillow releases the GIL to decode and resize
            list(pool.map(read, range(len(self))))  # the list raises the error of a file
        return images

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        path, label = self.samples[row]
        try:
            with Image.open(path) as file:
                if file.mode.startswith(("I", "F")):  # Pillow would clip them to 8 bits
                    raise ValueError(
                        f"its pixels have the mode {file.mode}, more than 8 bits"
                    )
                picture = file.convert("RGB")
        except Exception as error:  # Pillow's readers raise many types
            raise ValueError(
                f"{WHO}: {path} is not a readable image ({error}). Replace or delete it."
            ) from error
        return self.transform(picture), label


def is_visible(name: str) -> bool:
    """Whether a file or directory is the user's, unlike .ipynb_checkpoints or __MACOSX."""
    return not name.startswith((".", "__"))


def is_image(path: Path) -> bool:
    """Whether a file has the name of a visible image."""
    return is_visible(path.name) and datasets.folder.is_image_file(path.name)


def folders_in(directory: Path) -> list[Path]:
    """The visible directories in a directory, sorted by name."""
    return sorted(
        path for path in directory.iterdir() if path.is_dir() and is_visible(path.name)
    )


def has_own_images(directory: Path) -> bool:
    """Whether an image lies in the directory itself."""
    return any(map(is_image, directory.iterdir()))


def has_images(directory: Path) -> bool:
    """Whether a directory holds an image at any depth."""
    return has_own_images(directory) or any(map(has_images, folders_in(directory)))


class ClassFolders(datasets.ImageFolder):
    """The images of a directory with a directory for each class. Classes are sorted by name."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), is_valid_file=self._is_image)

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        names = [path.name for path in folders_in(Path(directory))]
        if not names:
            raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
        return names, {name: number for number, name in enumerate(names)}

    def _is_image(self, path: str) -> bool:
        inner = Path(path).relative_to(self.root)
        return all(map(is_visible, inner.parts)) and is_image(inner)


def find_parts(root: Path) -> dict[str, Path]:
    """Return part -> directory, for those of "training", "validation" and "test" that are there.

    A single part besides the training part is the test part. If there are no parts, the directories
    in `root` are the classes, and `root` is for training.

    Raises:
        UserError: images would not be read, or would be taken for those of another class.
    """
    folders = folders_in(root)
    parts: dict[str, Path] = {}
    for folder in folders:
        part = PART_NAMES.get(folder.name.lower())
        if part is not None:
            parts.setdefault(part, folder)
    problems = _unread(folders, parts) if parts else _parts_among_classes(folders)
    if problems:
        seen = ", ".join(f"{folder.name}/" for folder in folders)
        raise UserError(
            f"{WHO}: {root} must have train/ with val/, test/ or both, and in each the same "
            f"directories, one for each class; or only a directory for each class. It has {seen}: "
            f"{'; '.join(problems)}. Rename, move or delete what does not fit."
        )
    if "validation" in parts and "test" not in parts:
        parts["test"] = parts.pop("validation")
    return parts or {"training": root}


def _unread(folders: Sequence[Path], parts: Mapping[str, Path]) -> list[str]:
    """Say which images of a tree with parts would not be read."""
    problems: list[str] = []
    for folder in folders:
        part = PART_NAMES.get(folder.name.lower())
        if part is None:
            if has_images(folder):
                problems.append(f"{folder.name}/ is not a part, but has images")
        elif parts[part] != folder:
            problems.append(f"{parts[part].name}/ and {folder.name}/ are the same part")
        elif folders_in(folder) and has_own_images(folder):
            problems.append(f"{folder.name}/ has images next to its classes")
    if "training" not in parts:
        problems.append("train/ is missing")
    return problems


def _parts_among_classes(folders: Sequence[Path]) -> list[str]:
    """Say why these directories may be parts and not classes, such as seg_train and seg_test."""
    problems: list[str] = []
    names: dict[str, str] = {}
    for folder in folders:
        for word in re.findall("[a-z]+", folder.name.lower()):
            if word in PART_NAMES:
                names[PART_NAMES[word]] = folder.name
    if len(names) > 1:
        problems.append(f"{'/ and '.join(names.values())}/ have the names of parts")
    if len(folders) > 1:
        inner = [{path.name for path in folders_in(folder)} for folder in folders]
        shared = sorted(set.intersection(*inner))
        if len(shared) > 1:
            problems.append(
                f"each of them has {'/ and '.join(shared)}/, which may be the classes"
            )
    return problems
