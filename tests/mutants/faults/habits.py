"""In what keeps an engine right where its user changes weights, gradients or the model around it."""

from tests.mutants.fault import Fault

LIVE = "engine/model/live_parameter.py"
WEIGHTS, UPDATE, LOAD = "engine/buckets/weights.py", "engine/buckets/update.py", "engine/state/sources/state_dict.py"
NEWCOMERS, FORWARD = "engine/model/newcomers.py", "engine/model/unit_forward.py"
OF_LIVE = ("unit/engine/model/test_live_parameter.py",)
OF_WEIGHTS = ("unit/engine/test_weight_habits.py",)
OF_MODULES = ("unit/engine/test_module_habits.py",)
OF_LOAD = ("unit/engine/state/sources/test_state_dict.py",)

FAULTS = {
    "data-replaced": Fault(
        LIVE,
        "            own.copy_(value.detach())\n",
        "            set_data(self, value)\n",
        "a parameter leaves its bucket, and nothing trains it any more",
        OF_LIVE,
    ),
    "data-of-another-kind-taken": Fault(
        LIVE,
        "        if mine != given:\n",
        "        if False:\n",
        "what `.double()` gives is rounded without a word",
        OF_LIVE,
    ),
    "gradient-said-to-be-none": Fault(
        LIVE,
        "        if owner is not None and owner.holds_gradient():\n",
        "        if False:\n",
        "clip_grad_norm_ clips nothing without a word",
        (*OF_LIVE, *OF_MODULES),
    ),
    "later-hook-runs-last": Fault(
        LIVE,
        "            hooks[key] = hooks.pop(key)\n",
        "            pass\n",
        "a hook registered after the build meets a parameter whose gradient is gone",
        (*OF_LIVE, *OF_MODULES),
    ),
    "uncounted-writes-lost": Fault(
        WEIGHTS,
        "        if not (counted or self.may_be_uncounted):\n",
        "        if not counted:\n",
        "what is written through p.data is lost",
        OF_WEIGHTS,
    ),
    "counted-writes-lost": Fault(
        WEIGHTS,
        "        if not (counted or self.may_be_uncounted):\n",
        "        if not self.may_be_uncounted:\n",
        "what load_state_dict and clamp_ write is lost",
        OF_WEIGHTS,
    ),
    "other-writes-not-told": Fault(
        WEIGHTS,
        "            self.digest = (31 * self.digest + _digest(weights) + 1) % _MODULUS\n",
        "            pass\n",
        "ranks that write other weights go on",
        OF_WEIGHTS,
    ),
    "shard-not-brought-up-to-date": Fault(
        WEIGHTS,
        "            self.shard.copy_(self.model_weight.tensor[self.own])\n",
        "            pass\n",
        "what is written into gathered weights goes with their memory",
        OF_WEIGHTS,
    ),
    "master-not-brought-up-to-date": Fault(
        UPDATE,
        "            torch.where(held == master.to(held.dtype), master, held.to(master.dtype), out=master)\n",
        "            pass\n",
        "in 16 bits the next step undoes what was written",
        OF_WEIGHTS,
    ),
    "whole-master-rounded": Fault(
        UPDATE,
        "            torch.where(held == master.to(held.dtype), master, held.to(master.dtype), out=master)\n",
        "            master.copy_(held)\n",
        "in 16 bits a write to one element rounds all others",
        OF_WEIGHTS,
    ),
    "newcomers-not-noted": Fault(
        NEWCOMERS,
        "        if module in self._names:\n",
        "        if False:\n",
        "a layer that came after the build is never trained",
        OF_MODULES,
    ),
    "copy-computes-with-the-original": Fault(
        FORWARD,
        "        return copy.deepcopy(self._own, memo)\n",
        "        return self\n",
        "a copy of a checkpointed model computes with the weights of the model it was copied from",
        OF_MODULES,
    ),
    "master-not-loaded": Fault(
        "engine/state/named.py",
        "    if isinstance(bucket, TrainedBucket):\n        yield from pieces(bucket, WEIGHT)\n",
        "    if False:\n        yield from pieces(bucket, WEIGHT)\n",
        "in 16 bits the master weights stay what they were",
        OF_LOAD,
    ),
    "loaded-on-rank-0-alone": Fault(
        LOAD,
        "            self._collectives.broadcast(whole, name=bucket.spec.name)\n",
        "",
        "each rank loads what it was given itself",
        OF_LOAD,
    ),
}
