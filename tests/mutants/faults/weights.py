"""In the weights of a bucket, their update, and tensors that travel to be updated whole."""

from tests.mutants.fault import Fault

WEIGHTS, UPDATE, WHOLE = (
    "engine/buckets/weights.py",
    "engine/buckets/update.py",
    "engine/buckets/parts/whole_tensors.py",
)
SPANS = "engine/buckets/parts/spans.py"
OF_WEIGHTS = ("unit/engine/buckets/test_weights.py",)
OF_UPDATE = ("unit/engine/buckets/test_update.py",)
OF_WHOLE = ("unit/engine/buckets/parts/test_whole_tensors.py",)

FAULTS = {
    "class-not-given-back": Fault(
        WEIGHTS,
        "        self.life.become(WeightState.FULL)\n        self._become_live()\n",
        "        self.life.become(WeightState.FULL)\n",
        "parameters that are there are read as if they were not",
        OF_WEIGHTS,
    ),
    "class-not-taken": Fault(
        WEIGHTS,
        "            parameter.__class__ = UnreadyParameter\n",
        "            pass\n",
        "freed memory is read without a word",
        OF_WEIGHTS,
    ),
    "class-not-given-back-when-let-go": Fault(
        WEIGHTS,
        "        self.finish_gather()\n        self._become_live()\n",
        "        self.finish_gather()\n",
        "new buckets begin with parameters that refuse to be read",
        OF_WEIGHTS,
    ),
    "let-go-does-not-wait": Fault(
        WEIGHTS,
        "        self.finish_gather()\n        self._become_live()\n",
        "        self._become_live()\n",
        "a gather writes into memory that has another owner",
        ("unit/engine/buckets/test_weights.py",),
    ),
    "memory-not-freed": Fault(
        WEIGHTS,
        "            self.model_weight.release()\n",
        "            pass\n",
        "stage 3 holds all weights",
        OF_WEIGHTS,
    ),
    "gathered-a-second-time": Fault(
        WEIGHTS,
        "        if self.life.state is not WeightState.SHARD:\n            return\n        self.life",
        "        if self.life.state is WeightState.GATHERING:\n            return\n        self.life",
        "what is there is gathered again",
        OF_WEIGHTS,
    ),
    "last-gather-not-waited-for": Fault(
        WEIGHTS,
        "        self.finish_gather()\n        self._gather.prepare()",
        "        self._gather.prepare()",
        "of a unit that was not called two gathers are under way at once",
        OF_WEIGHTS,
    ),
    "drain-forgets-what-was-prepared": Fault(
        WEIGHTS,
        "            self.reshard()\n            self.start_gather()\n",
        "            pass\n",
        "an update that failed leaves receives open when its engine is deleted",
        OF_WEIGHTS,
    ),
    "drain-does-not-wait": Fault(
        WEIGHTS,
        "            self.start_gather()\n        self.finish_gather()\n\n    def let_go",
        "            self.start_gather()\n\n    def let_go",
        "memory is freed into which a gather writes",
        OF_WEIGHTS,
    ),
    "part-of-the-world": Fault(
        WEIGHTS,
        "layout.shard(collectives.shards.rank)",
        "layout.shard(collectives.world.rank)",
        "where not all ranks share the shards, a rank takes the part of another",
        OF_WEIGHTS,
    ),
    "shard-within-freed-memory": Fault(
        WEIGHTS,
        "            self.shard = self.shard.clone()\n",
        "            pass\n",
        "at stage 3 this rank's part is freed with the rest",
        OF_WEIGHTS,
    ),
    "groups-in-one-span": Fault(
        "sharding/bucketing.py",
        "None if managed.is_updated_whole else managed.span",
        "None if managed.is_updated_whole else (0, 0)",
        "parameters of one group get the hyperparameters of another",
        OF_UPDATE,
    ),
    "span-of-the-wrong-group": Fault(
        SPANS,
        "        Span(place, master_weight[place].detach(), key)",
        "        Span(place, master_weight[place].detach(), runs[0][1])",
        "all spans of a bucket are told to be of its first group",
        OF_UPDATE,
    ),
    "master-from-16-bits": Fault(
        UPDATE,
        "            self.master_weight = master\n",
        "            self.master_weight = weights.model_weight.tensor[self.where].float()\n",
        "training begins with weights that were rounded",
        OF_UPDATE,
    ),
    "model-not-updated": Fault(
        UPDATE,
        "            self._held().copy_(self.master_weight)\n",
        "            pass\n",
        "the model keeps old weights",
        OF_UPDATE,
    ),
    "updated-weights-not-at-rest": Fault(
        UPDATE,
        "            self._weights.reshard()\n",
        "            pass\n",
        "the parts of other ranks stay as they were before the step",
        OF_UPDATE,
    ),
    "factor-ignored": Fault(
        UPDATE,
        "return gradient if factor is None else gradient.mul_(factor.to(gradient.dtype)), None",
        "return gradient, None",
        "gradients are neither clipped nor freed of the loss scale",
        OF_UPDATE,
    ),
    "factor-of-what-is-widened-ignored": Fault(
        UPDATE,
        "        return out.copy_(gradient).mul_(factor)\n",
        "        return out.copy_(gradient)\n",
        "gradients of 16 bits are neither clipped nor freed of the loss scale",
        ("distributed/test_gpu.py::test_a_gradient_is_widened_before_it_is_multiplied",),
    ),
    "widened-given-back-before-it-is-read": Fault(
        UPDATE,
        "            try:\n                step(self.optimizer",
        "            if lent is not None:\n                self._pool.give_back(lent)\n                lent = None\n"
        "            try:\n                step(self.optimizer",
        "whole tensors are gathered into the gradient they are updated with",
        OF_UPDATE,
    ),
    "widened-not-given-back": Fault(
        UPDATE,
        "                    self._pool.give_back(lent)\n        yield from rest\n",
        "                    pass\n        yield from rest\n",
        "every step holds more",
        OF_UPDATE,
    ),
    "gradients-left-at-the-optimizer": Fault(
        "engine/buckets/update.py",
        "            target.grad = None\n",
        "",
        "buffers that were given back are kept alive",
        OF_UPDATE,
    ),
    "leaving-parts-not-by-owner": Fault(
        WHOLE,
        "        self._leaving.sort(key=lambda each: each.owner)\n",
        "",
        "a rank gets the parts of another's tensors",
        OF_WHOLE,
    ),
    "sent-given-back-early": Fault(
        WHOLE,
        "        return Shipment(exchange, received, buffers)",
        "        self._pool.give_back(buffers.pop(0))\n        return Shipment(exchange, received, buffers)",
        "the next bucket writes over what is on the wire",
        OF_WHOLE,
    ),
    "received-given-back-early": Fault(
        WHOLE,
        "        return Shipment(exchange, received, buffers)",
        "        self._pool.give_back(buffers.pop(1))\n        return Shipment(exchange, received, buffers)",
        "the next bucket writes over what arrives",
        OF_WHOLE,
    ),
    "whole-given-back-early": Fault(
        WHOLE,
        "        sent = [source[each.in_shard] for",
        "        self._pool._free.append(whole)\n        sent = [source[each.in_shard] for",
        "what is sent lies where the tensors are put together",
        OF_WHOLE,
    ),
    "own-tensors-not-put-back": Fault(
        WHOLE,
        "            master[each.in_shard].copy_(tensors[each.slot].view(-1)[each.in_tensor])\n",
        "            pass\n",
        "what an owner holds itself is never updated",
        OF_WHOLE,
    ),
    "whole-tensors-stay-whole": Fault(
        WHOLE,
        "            for target in self.targets.values():\n                target.data = self._at_rest",
        "            for target in ():\n                target.data = self._at_rest",
        "an owner's tensors hold on to a buffer that was given back",
        OF_WHOLE,
    ),
    "one-owner-for-all": Fault(
        "sharding/ownership.py",
        "owner = load.index(min(load))",
        "owner = 0",
        "one rank updates all whole tensors, and the others wait",
        ("unit/sharding/test_ownership.py",),
    ),
}
