"""Which kernels torch takes on GPUs: those of equal bits from equal runs, as far as torch can promise them, or faster
ones."""

import os

import torch


def choose_kernels(*, deterministic: bool, tf32: bool) -> None:
    """Do in this process, from now on, as `train.deterministic` and `precision.tf32` say. To be called before the first
    use of a GPU."""
    if deterministic:
        _make_deterministic()
    elif tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True


def _make_deterministic() -> None:
    """Let torch run what has the same bits each time.

    Algorithms without such a variant raise torch's own RuntimeError, which names them. Matrix products do without TF32;
    cuBLAS gets a workspace of fixed size, unless the environment has set one; cuDNN does not choose algorithms by their
    speed. (torch's notes on reproducibility.)
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
