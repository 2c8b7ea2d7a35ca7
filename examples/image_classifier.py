"""A classifier of images: a convolutional network with batch norm, on drawn circles, squares and crosses.

    PYTHONPATH=examples python launch.py model=own model._target_=image_classifier.Net \
        data=own data._target_=image_classifier.Shapes loss=cross_entropy metrics=accuracy \
        train.num_epochs=4 train.micro_batch_size=32 optimizer.lr=3e-3 train.eval_batches=all

A vision transformer of transformers in its place has a loss of its own:

    PYTHONPATH=examples python launch.py model=huggingface model.task=image_classification model.vocab_size=null \
        +model.config.model_type=vit +model.config.image_size=16 +model.config.patch_size=4 \
        +model.config.num_channels=1 +model.config.num_labels=3 +model.config.hidden_size=48 \
        data=own data._target_=image_classifier.Shapes train.num_epochs=4 train.micro_batch_size=32
"""

import torch
from torch import nn

SIZE = 16
CLASSES = ("circle", "square", "cross")


def draw(shape: int, generator: torch.Generator) -> torch.Tensor:
    """A shape of some size at some place in noise: (1, SIZE, SIZE)."""
    radius, row, column = (torch.rand(3, generator=generator) * torch.tensor([3.0, 6.0, 6.0])).tolist()
    radius, row, column = radius + 2.5, row + 5, column + 5
    down = (torch.arange(SIZE) - row).abs()[:, None]
    right = (torch.arange(SIZE) - column).abs()[None, :]
    if CLASSES[shape] == "circle":
        is_inside = (down**2 + right**2).sqrt() <= radius
    elif CLASSES[shape] == "square":
        is_inside = torch.maximum(down, right) <= radius
    else:
        is_inside = (torch.minimum(down, right) <= 1) & (torch.maximum(down, right) <= radius)
    return is_inside.float()[None] + 0.2 * torch.randn(1, SIZE, SIZE, generator=generator)


class Images(torch.utils.data.Dataset):
    """Rows by number: image `n` is the same whenever it is asked for, and so are the bits of a run."""

    draws = False  # no random numbers but its own: a thread reads it beside the training

    def __init__(self, first: int, num_rows: int) -> None:
        self.first, self.num_rows = first, num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        number = self.first + row
        label = number % len(CLASSES)
        return {"pixel_values": draw(label, torch.Generator().manual_seed(number)), "labels": torch.tensor(label)}


class Shapes:
    """Images to train on and others to validate; for files of your own, read them in `__getitem__`."""

    def __init__(self, num_rows: int = 1500) -> None:
        self.train, self.validation = Images(0, num_rows), Images(num_rows, 300)


class Net(nn.Module):
    """Images to scores of the classes. It is never told of labels: `loss=cross_entropy` compares with them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, stride=2), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(2 * width * 9, len(CLASSES))),
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.layers(pixel_values)
