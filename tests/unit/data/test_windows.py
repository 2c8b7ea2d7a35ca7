import numpy as np
import pytest
import torch

from zerotrain.data.windows import split, whole

SEQ_LEN = 10


def numbered_tokens(num_tokens: int) -> np.ndarray:
    """Each token its own position."""
    return np.arange(num_tokens, dtype=np.uint32)


def tokens_read(windows) -> set[int]:
    return {int(token) for ids, labels in windows for token in torch.cat([ids, labels])}


def split_numbered(num_tokens: int, fraction: float, seq_len: int = SEQ_LEN):
    return split(
        numbered_tokens(num_tokens),
        seq_len=seq_len,
        vocab_size=num_tokens,
        validation_fraction=fraction,
        source="data.path=numbers",
    )


def test_labels_are_the_tokens_that_follow():
    windows = whole(numbered_tokens(41), seq_len=SEQ_LEN, vocab_size=41, source="data.path=numbers")
    assert len(windows) == 4
    ids, labels = windows[3]
    assert ids.tolist() == list(range(30, 40))
    assert labels.tolist() == list(range(31, 41))
    assert ids.dtype == labels.dtype == torch.int64


def test_masking_labels_in_place_leaves_the_ids_alone():
    ids, labels = whole(numbered_tokens(41), seq_len=SEQ_LEN, vocab_size=41, source="data.path=numbers")[0]
    labels[:] = -100
    assert ids.tolist() == list(range(10))


def test_no_window_reaches_beyond_the_last_token():
    windows = whole(numbered_tokens(40), seq_len=SEQ_LEN, vocab_size=40, source="data.path=numbers")
    assert len(windows) == 3  # the fourth would lack its last label
    with pytest.raises(IndexError, match="sequence 3 of 3"):
        windows[3]


@pytest.mark.parametrize("num_tokens", [1000, 12_345, 100_000])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_training_and_validation_share_no_token(num_tokens, fraction):
    train, validation = split_numbered(num_tokens, fraction, seq_len=4)
    train_tokens, validation_tokens = tokens_read(train), tokens_read(validation)
    assert train_tokens
    assert validation_tokens
    assert not train_tokens & validation_tokens


def test_validation_gets_its_fraction_and_little_is_lost():
    train, validation = split_numbered(1_000_000, 0.1)
    assert len(validation) / (len(train) + len(validation)) == pytest.approx(0.1, rel=0.01)
    assert (len(train) + len(validation)) * SEQ_LEN > 0.99 * 1_000_000


def test_validation_is_spread_over_the_whole_text():
    _, validation = split_numbered(10_000_000, 0.1)
    tenths = {int(validation[index][0][0]) * 10 // 10_000_000 for index in range(0, len(validation), 100)}
    assert tenths == set(range(10))


def test_a_text_too_short_for_one_window_on_each_side_is_refused():
    with pytest.raises(ValueError, match=r"data.path=numbers holds 109 tokens; .*seq_len=10.* needs at least 110"):
        split_numbered(109, 0.1)
    train, validation = split_numbered(110, 0.1)
    assert (len(train), len(validation)) == (9, 1)


def test_a_file_too_short_for_one_window_is_refused():
    with pytest.raises(ValueError, match=r"holds 10 tokens; data.seq_len=10 needs at least 11"):
        whole(numbered_tokens(10), seq_len=SEQ_LEN, vocab_size=10, source="data.path=numbers")


@pytest.mark.parametrize("fraction", [-0.1, 0.0, 1.0, 1.5])
def test_a_validation_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ValueError, match=r"data.validation_fraction=.* must be between 0 and 1"):
        split_numbered(1000, fraction)


def test_a_token_beyond_the_vocabulary_is_refused_when_it_is_read():
    windows = whole(numbered_tokens(41), seq_len=SEQ_LEN, vocab_size=31, source="data.path=numbers")
    windows[2]
    with pytest.raises(ValueError, match=r"holds the token 40; tokens must be below data.vocab_size=31"):
        windows[3]
