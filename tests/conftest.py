"""One CPU thread, as each rank has: the bits of a matrix product depend on the number of threads."""

import torch

torch.set_num_threads(1)
