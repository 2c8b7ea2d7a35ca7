import pytest

from zerotrain.sharding.plan import STAGES, Volume

MIXED_PRECISION_ADAM_NBYTES = 12
"""Of one element: fp32 master weight and two moments."""


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_memory_is_that_of_the_paper_for_16_bit_weights_and_fp32_adam(num_ranks):
    volume = Volume(trainable_nbytes=2 * 64_000, frozen_nbytes=0, num_shards=num_ranks)
    totals = [sum(volume.memory_nbytes(plan, 64_000 * MIXED_PRECISION_ADAM_NBYTES).values()) for plan in STAGES]
    bytes_per_parameter = [16, 4 + 12 / num_ranks, 2 + 14 / num_ranks, 16 / num_ranks]
    assert totals == [round(64_000 * each) for each in bytes_per_parameter]


def test_stages_0_to_2_send_what_data_parallelism_sends_and_stage_3_half_as_much_again():
    volume = Volume(trainable_nbytes=4000, frozen_nbytes=0, num_shards=4)
    data_parallel = 2 * 4000 * 3 // 4
    sent = [volume.sent_nbytes(plan, num_micro_batches=1, reshard_after_forward=True) for plan in STAGES]
    assert sent == [data_parallel, data_parallel, data_parallel, data_parallel * 3 // 2]


def test_accumulation_costs_gathers_only_where_parameters_are_sharded_and_freed():
    volume = Volume(trainable_nbytes=4000, frozen_nbytes=0, num_shards=2)
    sent = [volume.sent_nbytes(plan, num_micro_batches=5, reshard_after_forward=True) for plan in STAGES]
    assert sent == [4000, 4000, 4000, 11 * 2000]
    assert volume.sent_nbytes(STAGES[3], num_micro_batches=5, reshard_after_forward=False) == 4000


def test_frozen_parameters_are_sent_only_where_they_are_sharded():
    volume = Volume(trainable_nbytes=0, frozen_nbytes=4000, num_shards=2)
    sent = [volume.sent_nbytes(plan, num_micro_batches=1, reshard_after_forward=True) for plan in STAGES]
    assert sent == [0, 0, 0, 4000]
    assert volume.memory_nbytes(STAGES[3], 0) == {"parameters": 2000, "gradients": 0, "optimizer": 0}
