"""In what is built, told by name, and moved when what trains is changed."""

from tests.mutants.fault import Fault

NAMED, TRANSFER, BUILD = "engine/state/named.py", "engine/state/transfer.py", "engine/build.py"
SWITCH, OF_SWITCH = "engine/state/switch.py", ("unit/engine/test_set_stage.py",)
OF_NAMED = ("unit/engine/state/test_named.py",)
OF_TRANSFER = ("unit/engine/state/test_transfer.py",)
OF_BUILD = ("unit/engine/test_build.py",)

FAULTS = {
    "memory-of-master-weights-kept": Fault(
        SWITCH,
        "current[_relative(wanted, held)].clone()",
        "current[_relative(wanted, held)]",
        "in bf16 a rank keeps all master weights behind its shard of them",
        ("unit/engine/test_set_stage.py::test_a_rank_gives_back_the_memory_of_what_it_holds_no_more",),
    ),
    "engine-within-graphs": Fault(
        "engine/model/engine_call.py",
        "    outside: Callable[P, T] | None = None\n",
        "    return method\n    outside: Callable[P, T] | None = None\n",
        "torch's compiler dies in the midst of the engine",
        ("unit/engine/test_compiled_calls.py",),
    ),
    "memory-made-for-inference": Fault(
        "engine/model/engine_call.py",
        "torch.inference_mode(False)(method)",
        "method",
        "an engine whose stage changed within torch.inference_mode() fails in its next step",
        ("unit/engine/test_inference_mode.py",),
    ),
    "state-of-this-rank-alone": Fault(
        TRANSFER,
        'collectives.gather_objects(mine, name="optimizer state")',
        "[mine]",
        "a rank whose part held nothing of a group does not know its state",
        OF_TRANSFER,
    ),
    "values-from-16-bits": Fault(
        NAMED,
        "        part = _current_weight(bucket).to(",
        "        part = bucket.weights.held.float().to(",
        "full weights, and those that move, are rounded",
        (*OF_TRANSFER, *OF_NAMED),
    ),
    "one-counter-for-all": Fault(
        TRANSFER,
        "else deepcopy(value)",
        "else value",
        "spans share the number of steps, and count it once each",
        OF_TRANSFER,
    ),
    "state-for-what-is-new": Fault(
        TRANSFER,
        "            for name, dtype in self._per_element(members):\n"
        "                keys = [key for key, state in self._state.items() if name in state]",
        "            for name, dtype in self._per_element(members):\n"
        "                keys = [span.key for span in bucket.update.spans]",
        "what begins to train anew gets a state of zeros instead of none",
        OF_TRANSFER,
    ),
    "state-not-moved": Fault(
        TRANSFER,
        "                restore(bucket, name, self._whole_state(name, dtype, bucket, members), keys)\n",
        "                self._whole_state(name, dtype, bucket, members)\n",
        "a change of what trains forgets the momentum of all",
        OF_TRANSFER,
    ),
    "moved-to-the-old-place": Fault(
        TRANSFER,
        "slot_view(whole, slots[managed.parameter]).copy_(slot_view(values, slot))",
        "slot_view(whole, slots[managed.parameter]).copy_(slot_view(values, slots[managed.parameter]))",
        "momentum is taken from where a parameter will lie, not from where it lay",
        OF_TRANSFER,
    ),
    "old-buckets-keep-parameters": Fault(
        "engine/sharded_model.py",
        "            bucket.weights.let_go()\n",
        "            pass\n",
        "parameters stay marked as not ready when other buckets have them",
        OF_TRANSFER,
    ),
    "restored-where-not-asked": Fault(
        NAMED,
        "        if span.key in keys:\n",
        "        if True:\n",
        "all spans of a bucket get the state of some",
        OF_NAMED,
    ),
    "piece-counted-from-the-shard": Fault(
        NAMED,
        "in_tensor = slice(start - slot.offset, end - slot.offset)",
        "in_tensor = slice(start - where.start, end - where.start)",
        "which elements a piece holds is told wrong",
        OF_NAMED,
    ),
    "captured-at-the-wrong-place": Fault(
        NAMED,
        "part[piece.in_bucket.start - where.start : piece.in_bucket.stop - where.start] = piece.values",
        "part[: piece.values.numel()] = piece.values",
        "state lies where another parameter's belongs",
        OF_NAMED,
    ),
    "tied-under-one-name": Fault(
        "engine/state/full_weights.py",
        "for owner, name in managed.owners\n",
        "for owner, name in managed.owners[:1]\n",
        "of a tied weight a state dict has one name, and the other as it was built",
        OF_BUILD,
    ),
    "buffers-not-shared": Fault(
        BUILD,
        '            collectives.broadcast(tensor.data.view(-1).view(torch.uint8), name="buffers")\n',
        "            pass\n",
        "each rank has buffers of its own",
        OF_BUILD,
    ),
    "weights-not-shared": Fault(
        BUILD,
        "        self._collectives.broadcast(values.tensor, name=spec.name)\n",
        "",
        "other ranks begin with zeros",
        OF_BUILD,
    ),
    "cut-over-the-world": Fault(
        BUILD,
        "_layout(spec, self._collectives.shards.size)",
        "_layout(spec, self._collectives.world.size)",
        "where not all ranks share the shards, buckets are cut for too many",
        OF_BUILD,
    ),
    "switch-keeps-the-old-part": Fault(
        SWITCH,
        "value[_relative(wanted, held)].clone()",
        "value[: wanted.stop - wanted.start].clone()",
        "after a change of the stage every rank goes on with the first elements of the optimizer's state",
        OF_SWITCH,
    ),
    "switch-forgets-whole-tensors": Fault(
        SWITCH,
        "            if slot in new.whole.targets and (kept or owner == rank):\n",
        "            if slot in new.whole.targets and owner == rank and not self._is_gathered:\n",
        "matrices that are updated whole begin without momentum after a change to stage 0",
        OF_SWITCH,
    ),
    "switch-master-of-this-rank": Fault(
        SWITCH,
        "return current if wanted == held else current[_relative(wanted, held)].clone()",
        "return current if wanted == held else current[: wanted.stop - wanted.start].clone()",
        "after a change of the stage every rank updates the master weights of rank 0",
        OF_SWITCH,
    ),
    "whole-when-built": Fault(
        BUILD,
        "            weights.reshard()\n        return bucket\n",
        "            pass\n        return bucket\n",
        "a model that fits in parts alone is whole when it is built",
        OF_BUILD,
    ),
    "buckets-in-the-wrong-bytes": Fault(
        BUILD,
        "// options.precision.compute.itemsize",
        "// options.precision.master.itemsize",
        "in 16 bits a bucket is half as large as asked",
        OF_BUILD,
    ),
    "models-not-compared": Fault(
        BUILD,
        "        require_same(self._collectives, facts)\n",
        "",
        "ranks with different models train, or hang",
        OF_BUILD,
    ),
    "read-completes-nothing": Fault(
        "engine/schedule/schedule.py",
        "        schedule.touch(self._bucket)\n",
        "        pass\n",
        "a weight that is read without a call of its module cannot be",
        OF_BUILD,
    ),
    "strides-of-what-is-not-there": Fault(
        "sharding/units.py",
        'torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()',
        'torch.empty_like(self.parameter, device="meta").stride()',
        "at stage 3 where elements lie cannot be asked between the steps",
        OF_NAMED,
    ),
    "shards-not-aligned": Fault(
        "sharding/layout.py",
        "round_up(max(offset, 1), ALIGN_NUMEL * num_shards)",
        "round_up(max(offset, 1), num_shards)",
        "a block of 64 elements lies on two ranks, and the norm depends on how many there are",
        ("unit/sharding/test_layout.py",),
    ),
    "freeze-in-mid-step": Fault(
        "engine/sharded_model.py",
        "        if not all(bucket.gradient.is_empty for bucket in self.schedule.trained):\n",
        "        if False:\n",
        "a gradient that waits is lost when what trains is changed",
        OF_TRANSFER,
    ),
}
