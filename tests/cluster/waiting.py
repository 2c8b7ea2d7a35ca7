"""A model whose steps wait until a test lets them go on."""

import os
import time

import torch

from zerotrain.models import MLP


class WaitingMLP(MLP):
    """Each training forward takes a second, until there is a file go_on in the working folder."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.training and not os.path.exists("go_on"):
            time.sleep(1.0)
        return super().forward(ids, labels)
