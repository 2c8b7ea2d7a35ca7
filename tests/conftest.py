"""One CPU thread, as each rank has: the bits of a matrix product depend on the number of threads. And no network."""

import os

import torch

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"  # read when its packages are imported; the ranks of a test inherit it
