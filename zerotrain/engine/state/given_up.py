"""Memory that parameters had before their stage changed, and who keeps it."""

import gc
import warnings

from torch.multiprocessing.reductions import StorageWeakRef

from zerotrain.engine.buckets.weights import BucketWeights
from zerotrain.sharding.layout import FlatBuffer
from zerotrain.sharding.plan import Plan


class GivenUpMemory:
    """The memory that whole weights leave when the plan of their buckets changes.

    Args:
        plan: as the buckets are to lie.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._given_up: dict[str, StorageWeakRef] = {}
        """By the name of the bucket."""

    def memory_for(self, weights: BucketWeights) -> FlatBuffer:
        """The whole weights of a bucket where the model is to read them. Sharded parameters get memory of their own:
        theirs is given back between uses, and who read a `p.data` from before died of SIGSEGV (2026-11-22); nor does
        torch give back what numpy has seen, as it has what was saved or loaded on a CPU."""
        if not self._plan.shards_parameters:
            return weights.model_weight
        self._given_up[weights.spec.name] = StorageWeakRef(weights.model_weight.tensor.untyped_storage())
        return weights.model_weight.copy()

    def tell_of_held(self) -> None:
        """Warn of memory that parameters had and somebody keeps. The old buckets are gone."""
        if any(not memory.expired() for memory in self._given_up.values()):
            gc.collect()
        if held := [name for name, memory in self._given_up.items() if not memory.expired()]:
            warnings.warn(
                f"engine.set_stage: the old memory of parameters of {', '.join(held)} is still in use by a tensor "
                "taken from them before (p.data, p.detach(), a state dict, the graph of a loss): it keeps the present "
                "values, and its memory is not freed; take such a tensor again, or delete it before",
                stacklevel=2,
            )
