import pytest
import torch

from zerotrain.data import SyntheticTokens

SETTINGS = {"seq_len": 16, "vocab_size": 50, "num_sequences": 200}


def test_sequences_count_by_their_stride_around_the_vocabulary():
    for ids, labels in (SyntheticTokens(**SETTINGS).train[index] for index in range(200)):
        tokens = torch.cat([ids, labels[-1:]])
        strides = tokens.diff() % 50
        assert len(strides.unique()) == 1
        assert 1 <= strides[0] <= 8
        assert torch.equal(tokens[1:], labels)
        assert tokens.min() >= 0
        assert tokens.max() < 50


def test_a_sequence_is_the_same_whenever_it_is_made():
    first, second = SyntheticTokens(**SETTINGS), SyntheticTokens(**SETTINGS | {"num_sequences": 300})
    assert torch.equal(first.train[7][0], second.train[7][0])


def test_masking_labels_in_place_leaves_the_ids_alone():
    ids, labels = SyntheticTokens(**SETTINGS).train[7]
    labels[:] = -100
    assert ids.min() >= 0


def test_validation_has_other_sequences():
    dataset = SyntheticTokens(**SETTINGS | {"vocab_size": 50_000})
    assert (len(dataset.train), len(dataset.validation)) == (200, 20)
    starts = {int(dataset.train[index][0][0]) for index in range(200)}
    assert not starts & {int(dataset.validation[index][0][0]) for index in range(20)}


def test_there_is_no_sequence_beyond_the_last():
    with pytest.raises(IndexError, match="sequence 200 of 200"):
        SyntheticTokens(**SETTINGS).train[200]


@pytest.mark.parametrize(("name", "minimum"), [("seq_len", 1), ("vocab_size", 2), ("num_sequences", 1)])
def test_a_wrong_argument_of_random_tokens_is_refused_by_name(name, minimum):
    with pytest.raises(ValueError, match=f"data.{name}={minimum - 1} is too small; it must be at least {minimum}"):
        SyntheticTokens(**SETTINGS | {name: minimum - 1})
