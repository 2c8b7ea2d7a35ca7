"""In the head and the loss of a language model."""

from tests.mutants.fault import Fault

LOSS = "models/loss.py"
OF_LOSS = ("unit/models/test_gpt.py",)

FAULTS = {
    "padded-tokens-are-likely": Fault(
        LOSS,
        "value=-math.inf",
        "value=0.0",
        "tokens that do not exist take a share of the softmax",
        OF_LOSS,
    ),
    "scale-of-chunks-in-16-bits": Fault(
        LOSS,
        "(of_hidden.float() * factor).to(of_hidden.dtype)",
        "of_hidden * factor.to(of_hidden.dtype)",
        "all gradients below the head are up to 0.4 % too long or short",
        OF_LOSS,
    ),
    "chunks-summed-in-16-bits": Fault(
        LOSS,
        "torch.zeros_like(weight, dtype=torch.float32)",
        "torch.zeros_like(weight)",
        "many chunks round the gradient of the head as often",
        OF_LOSS,
    ),
    "chunks-of-one-part": Fault(
        LOSS,
        "            begin += len(rows)\n",
        "",
        "positions get the gradient of others",
        OF_LOSS,
    ),
    "labels-in-one-chunk": Fault(
        LOSS,
        "labels.flatten().chunk(num_chunks), strict=True\n        ):\n",
        "labels.flatten().chunk(1), strict=False\n        ):\n",
        "only the first part of the positions is learnt from",
        OF_LOSS,
    ),
}
