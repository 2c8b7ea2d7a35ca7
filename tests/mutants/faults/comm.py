"""Faults of ranks, collectives and means."""

from tests.mutants.changes import Always, Drop, Swap
from tests.mutants.fault import Fault

FAULTS = {
    "mean-over-ranks-and-not-leaves": Fault(
        "mean_by_tree",
        Swap("1 / num_leaves", "1 / len(parts)"),
        "with several virtual ranks on each rank gradients are too large",
        "unit/comm/test_wires.py::test_parts_may_be_sums_of_several_leaves_each_and_the_mean_is_over_the_leaves",
    ),
    "parts-not-in-rank-order": Fault(
        "PostedReduction._complete",
        Swap("self._parts(self._received_parts(self._size - 1), own)", "[own, *self._received_parts(self._size - 1)]"),
        "parts are not added in rank order",
        "unit/comm/test_collectives.py",
    ),
    "rows-backwards": Fault(
        "_sum_of_rows",
        Swap("into[::2]", "into[::2].flip(0)"),
        "of many ranks the parts are not added by the tree",
        "unit/comm/test_wires.py::test_the_mean_of_a_matrix_of_parts_is_added_row_by_row",
    ),
    "middle-part-left-out": Fault(
        "_sum",
        Always(False, "2", nth=1),
        "of three ranks one is left out of the sum",
        "unit/comm/test_wires.py::test_the_mean_is_a_quotient_to_the_last_bit_also_where_fp32_ends",
    ),
    "16-bits-added-in-16-bits": Fault(
        "wires._add",
        Swap("total.copy_(a).add_(b)", "torch.add(a, b, out=total)"),
        "parts of 16 bits are rounded at each level of the tree",
        "unit/comm/test_wires.py::test_the_mean_of_a_matrix_of_parts_is_added_row_by_row",
    ),
    "own-part-not-copied": Fault(
        "PostedGather._issue",
        Drop("copy_"),
        "a posted gather leaves out this rank's own part",
        "unit/comm/test_collectives.py::test_every_way_to_send_gives_sums_in_order_counts_its_bytes_and_ends_what_it_began",
    ),
    "one-tag-for-all": Fault(
        "process_groups",
        Swap("tags", "iter([0] * 99)", nth=2),
        "parts of two buckets meet",
        "unit/comm/test_collectives.py::test_every_way_to_send_gives_sums_in_order_counts_its_bytes_and_ends_what_it_began",
    ),
    "exchange-sizes-swapped": Fault(
        "AllToAll._issue",
        Swap("spec.received_numels", "spec.sent_numels"),
        "what is sent is cut as what is received",
        "unit/comm/test_collectives.py::test_every_way_to_send_gives_sums_in_order_counts_its_bytes_and_ends_what_it_began",
    ),
    "broadcast-from-another": Fault(
        "process_groups",
        Swap("source", "1 - source"),
        "another rank's initial weights are used",
        "unit/comm/test_collectives.py::test_every_way_to_send_gives_sums_in_order_counts_its_bytes_and_ends_what_it_began",
    ),
    "finished-without-wait": Fault(
        "Handle.finish",
        Drop("if", nth=1),
        "the result is used before it is there",
        "unit/comm/test_handles.py::test_it_is_done_when_it_says_so_and_must_be_finished_all_the_same",
    ),
    "not-noted": Fault(
        "Handle._issue_noted",
        Drop("note"),
        "gathers and reductions have no place in the order that ranks compare",
        "unit/comm/test_handles.py::test_each_use_is_noted_once_with_its_bytes_whatever_else_is_called",
    ),
    "order-as-a-sum": Fault(
        "Journal.note",
        Swap("into[kind] * _FACTOR", "into[kind]"),
        "another order is not told apart",
        "unit/comm/test_ledger.py::test_within_a_kind_names_order_and_number_tell_apart",
    ),
    "objects-run-code": Fault(
        "handles._unpacked",
        Swap("True", "False"),
        "another process says what code is run in a rank",
        "unit/comm/test_collectives.py::test_every_way_to_send_gives_sums_in_order_counts_its_bytes_and_ends_what_it_began",
    ),
    "metrics-blame-others": Fault(
        "Whereabouts.blame",
        Drop("if"),
        "an own error that surfaces in the sum of metrics or a barrier is told as the loss of other ranks",
        "unit/comm/test_whereabouts.py::test_an_error_is_told_as_a_loss_of_others_only_where_it_is_one",
    ),
    "groups-in-another-order": Fault(
        "Shards.axes",
        Swap(
            "(self._axis(inside, device), self._axis(across, device))",
            "tuple(self._axis(lines, device) for lines in ((across, inside) if self.rank == 1 else (inside, across)))",
        ),
        "one rank makes the groups of a mesh in another order than the others",
        "unit/comm/test_world.py::test_a_mesh_has_neighbours_inside_and_the_ranks_of_one_place_across",
    ),
    "across-before-inside": Fault(
        "Relayed.pass_on",
        Drop("finish"),
        "a host sends its sums across before it has added them",
        "bits/test_meshes.py::test_two_by_two_ranks_in_bf16_with_a_late_one",
    ),
    "mean-on-each-axis": Fault(
        "Collectives.reduction",
        Swap("(1, num_leaves)", "(num_inside, num_leaves)"),
        "sums of a host are divided, and then the mean again",
        "bits/test_meshes.py::test_two_by_two_ranks_in_bf16_with_a_late_one",
    ),
    "sums-rounded-on-the-way": Fault(
        "Collectives.reduction",
        Swap("sums if sums is not None and self._ordered else pool", "pool"),
        "sums of a host are rounded to 16 bits before they go across",
        "bits/test_meshes.py::test_two_by_two_ranks_in_bf16_with_a_late_one",
    ),
}
