"""The memory of a model of which nothing but its size is known: figure 1 of ZeRO (arXiv 1910.02054)."""

from collections.abc import Mapping

from zerotrain.sharding.plan import STAGES, Volume

STATE_PER_PARAMETER: Mapping[str, int] = {
    "adam": 2,
    "adamw": 2,
    "sgd": 0,
    "momentum": 1,
    "adagrad": 1,
    "adafactor": 0,
    "muon": 1,
}
"""fp32 numbers that an optimizer keeps of a parameter. Adafactor keeps a row and a column of a matrix, which is next to
nothing; Muon's embeddings and vectors are AdamW's, which keep two."""
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
MASTER_ITEMSIZE = 4


def stages_of_size(num_parameters: float, num_ranks: int, optimizer: str, precision: str) -> list[dict[str, int]]:
    """Bytes of a rank by stage: {parameters, gradients, optimizer, sent}. In 16 bits the optimizer's are with fp32
    master weights. Sent is in a step of one micro-batch (ZeRO, section 7).

    Args:
        optimizer: one of `STATE_PER_PARAMETER`.
        precision: one of `ITEMSIZE`.
    """
    itemsize = ITEMSIZE[precision]
    master = 0 if itemsize == MASTER_ITEMSIZE else MASTER_ITEMSIZE
    state = round(num_parameters * (MASTER_ITEMSIZE * STATE_PER_PARAMETER[optimizer] + master))
    volume = Volume(round(num_parameters * itemsize), 0, num_ranks)
    return [
        volume.memory_nbytes(plan, state) | {"sent": volume.sent_nbytes(plan, 1, reshard_after_forward=True)}
        for plan in STAGES
    ]
