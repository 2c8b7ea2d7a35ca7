"""Data of which some labels count, in each item others."""

import torch
from torch.utils.data import Dataset


class Items(Dataset):
    def __init__(self, num_items: int, seq_len: int) -> None:
        self.num_items, self.seq_len = num_items, seq_len

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(256, (self.seq_len + 1,), generator=torch.Generator().manual_seed(index))
        labels = tokens[1:].clone()
        labels[index * 7 % self.seq_len :] = -100  # of item 0 none counts
        return tokens[:-1], labels


class Masked:
    vocab_size = 256

    def __init__(self, *, seq_len: int, num_items: int = 40, num_validation: int = 13) -> None:
        self.train, self.validation = Items(num_items, seq_len), Items(num_validation, seq_len)
