"""Faults of data."""

from tests.mutants.changes import Always, Drop, Swap
from tests.mutants.fault import Fault

FAULTS = {
    "tokens-of-a-changed-file": Fault(
        "TokenStore.read_parts",
        Drop("_require_unchanged"),
        "a file that is written to in mid-run is read on",
        "unit/data/test_store.py::test_a_file_that_changes_while_it_is_read_is_named",
    ),
    "tokens-behind-the-header": Fault(
        "TokenStore._fill",
        Swap("self.shards[shard].first_byte", "0"),
        "a header is read as tokens",
        "unit/data/test_store.py::test_a_header_is_passed_over",
    ),
    "tokens-rows-too-far-apart": Fault(
        "RowsWithinRuns.parts",
        Swap("(indices - first_rows[runs]) * self._seq_len", "(indices - first_rows[runs]) * (self._seq_len + 1)"),
        "a token between two rows is lost",
        "unit/data/test_windows.py::test_labels_are_the_tokens_that_follow",
    ),
    "tokens-on-both-sides": Fault(
        "_split_by_chunk",
        Swap("np.arange(2 * num_pairs)", "0"),
        "the last label of training is the first token of validation",
        "unit/data/test_windows.py::test_a_text_is_read_once_but_for_its_last_row_and_no_token_is_on_both_sides",
    ),
    "tokens-validated-are-trained": Fault(
        "TokenFiles.__init__",
        Drop("_require_apart"),
        "validation is training",
        "unit/data/test_datasets.py::test_validation_must_not_be_training",
    ),
    "row-drawn-alike-in-each-epoch": Fault(
        "fetch_rows",
        Swap("seed_by('row', seed, epoch, row)", "seed_by('row', seed, row)"),
        "each epoch has the same augmentation",
        "unit/data/test_fetch.py::test_what_a_row_draws_depends_on_seed_epoch_and_row_alone",
    ),
    "mix-source-numbered-by-places": Fault(
        "MixedRows.order",
        Swap("self._counts[which]", "len(self._source_at)"),
        "rows of a source are left out",
        "unit/data/test_mix.py::test_each_source_is_read_as_often_as_its_weight_says_and_each_of_its_rows_once_an_epoch",
    ),
    "order-of-one-epoch-for-all": Fault(
        "rows_at",
        Swap("keys[:, of_position.flatten()]", "keys[:, :1]"),
        "behind the end of an epoch rows come in the order of the last one",
        "unit/data/test_batches.py::test_positions_go_through_one_epoch_after_another",
    ),
    "batch-of-ranks-without-leaves": Fault(
        "GlobalBatchSampler.micro_batches",
        Swap("self.num_virtual_ranks", "self.num_ranks"),
        "with virtual ranks rows are read twice in a step",
        "unit/data/test_batches.py::test_every_row_is_read_as_often_as_promised_at_any_number_of_ranks_and_batch_size",
    ),
    "loader-begins-anew": Fault(
        "StepLoader.__init__",
        Swap("start + place * size", "place * size"),
        "a run that goes on reads the first rows again",
        "unit/data/test_loader.py::test_the_rows_are_those_of_the_sampler_from_its_position_on",
    ),
    "text-shard-cut-short": Fault(
        "StoreWriter.__init__",
        Swap("nbytes != SHARD_TOKENS * self._dtype.itemsize", "False"),
        "a shard that was cut short since is filled up with nothing",
        "unit/data/test_prepare.py::test_behind_a_shard_that_is_not_as_it_was_noted_nothing_is_gone_on_from",
    ),
    "text-file-read-again": Fault(
        "write_store",
        Swap("number + at_end", "number"),
        "killed just behind a file, preparing reads it again, and its tokens stand there twice",
        "unit/data/test_prepare.py::test_killed_behind_any_piece_it_repeats_the_unfinished_shard_alone",
    ),
    "feeds-store-of-other-settings": Fault(
        "misfit",
        Always(False, "recipe"),
        "tokens that were made with another tokenizer are trained on",
        "unit/data/test_prepare.py::test_a_store_of_another_recipe_is_made_anew",
    ),
}
