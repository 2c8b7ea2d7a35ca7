"""In what keeps off the device what forwards save."""

from tests.mutants.fault import Fault

SAVED = "offload/saved.py"
OF_SAVED = "unit/engine/test_offload_activations.py"

FAULTS = {
    "saved-before-it-was-written": Fault(
        SAVED,
        "        if known is not None and known.version == tensor._version:\n",
        "        if known is not None:\n",
        "a backward uses what a memory held before the forward wrote into it",
        (f"{OF_SAVED}::test_a_memory_that_was_written_to_is_saved_anew",),
    ),
    "saved-and-written-unnoticed": Fault(
        SAVED,
        "        _require_version(self._tensor, self._version, self._tensor.shape)\n",
        "",
        "a backward uses what was written after it was saved, and says nothing",
        (f"{OF_SAVED}::test_what_is_written_into_a_saved_tensor_is_found_as_in_plain_pytorch",),
    ),
    "saved-weights-too": Fault(
        SAVED,
        "        return is_here and storage.nbytes() >= MIN_NBYTES and storage._cdata not in self._staying\n",
        "        return is_here and storage.nbytes() >= MIN_NBYTES\n",
        "each unit's forward copies its weights to the host",
        (f"{OF_SAVED}::test_each_memory_is_stored_once_and_weights_never",),
    ),
    "saved-and-kept-to-the-end": Fault(
        SAVED,
        "        still_arriving = None if self.arriving is DONE else self.memory\n",
        "        still_arriving = self.memory\n",
        "the memory of a backward grows with the depth",
        (f"{OF_SAVED}::test_the_device_holds_what_one_unit_has_saved_and_in_a_backward_two",),
    ),
    "saved-and-kept-from-the-start": Fault(
        SAVED,
        "            newest.drop()\n",
        "            pass\n",
        "the memory of a forward grows with the depth",
        (f"{OF_SAVED}::test_the_device_holds_what_one_unit_has_saved_and_in_a_backward_two",),
    ),
    "saved-under-others-hooks": Fault(
        SAVED,
        "        if torch._C._current_autograd_node() is not None or not _may_hook():\n",
        "        if torch._C._current_autograd_node() is not None:\n",
        "a checkpoint around units computes again what others have saved, and finds that it is not the same",
        (f"{OF_SAVED}::test_a_checkpoint_around_units_stays_what_it_is",),
    ),
}
