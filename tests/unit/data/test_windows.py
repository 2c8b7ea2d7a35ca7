import numpy as np
import pytest
import torch

from zerotrain.data.store import TokenStore
from zerotrain.data.windows import are_validation, describe_tokens, fingerprint_tokens, split, whole

SEQ_LEN = 10


class Numbered(TokenStore):
    """A store in which each token is its own position, of any size: no file is read."""

    def __init__(self, num_tokens: int, documents: np.ndarray | None = None) -> None:
        super().__init__([], np.dtype("u4"), documents=None if documents is None else lambda: documents)
        self.tokens = num_tokens

    def read_parts(self, starts, lengths):
        firsts = np.cumsum(lengths) - lengths
        return np.repeat(starts - firsts, lengths) + np.arange(lengths.sum())

    def where(self, position):
        return f"numbers, token {position}"


def whole_numbered(num_tokens: int, seq_len: int = SEQ_LEN):
    return whole(Numbered(num_tokens), seq_len=seq_len, vocab_size=num_tokens, source="data.path=numbers")


def split_numbered(num_tokens: int, fraction: float, seq_len: int = SEQ_LEN, documents: np.ndarray | None = None):
    return split(
        Numbered(num_tokens, documents),
        seq_len=seq_len,
        vocab_size=num_tokens,
        fraction=fraction,
        source="data.path=numbers",
    )


def document_starts(num_tokens: int, mean_length: float, seed: int = 0) -> np.ndarray:
    """Documents of random lengths, some of them empty."""
    lengths = np.random.default_rng(seed).geometric(1 / mean_length, int(3 * num_tokens / mean_length) + 9) - 1
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return starts[starts < num_tokens]


def read(windows) -> torch.Tensor:
    """(num_windows, seq_len + 1): the ids of each and its last label. The others are the next ids."""
    ids, labels = windows.rows(np.arange(len(windows)))
    assert ids.dtype == labels.dtype == torch.int64
    assert torch.equal(ids[:, 1:], labels[:, :-1])
    return torch.cat([ids, labels[:, -1:]], dim=1)


def test_labels_are_the_tokens_that_follow():
    windows = whole_numbered(41)
    assert len(windows) == 4
    ids, labels = windows[3]
    assert ids.tolist() == list(range(30, 40))
    assert labels.tolist() == list(range(31, 41))
    assert ids.dtype == labels.dtype == torch.int64


def test_masking_labels_in_place_leaves_the_ids_alone():
    ids, labels = whole_numbered(41)[0]
    labels[:] = -100
    assert ids.tolist() == list(range(10))


def test_no_window_reaches_beyond_the_last_token():
    windows = whole_numbered(40)
    assert len(windows) == 3  # the fourth would lack its last label
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"sequence {index} of 3"):
            windows[index]


CASES = [
    (num_tokens, seq_len, fraction)
    for num_tokens in (102, 1000, 12_345, 100_000, 1_500_000)
    for seq_len in (1, 4, 10, 1000, 1024, 7000)
    for fraction in (0.01, 0.1, 0.3, 0.5, 0.9)
    if num_tokens >= seq_len / min(fraction, 1 - fraction) + seq_len + 2 and num_tokens < 1_000_000 * seq_len / 10
]


@pytest.mark.case(
    "data: Files of tokens",
    "Any number of tokens, `seq_len` and validation fraction",
    "each token is an input once and a label once but for less than a row; training and validation share none",
)
@pytest.mark.parametrize(("num_tokens", "seq_len", "fraction"), CASES)
def test_a_text_is_read_once_but_for_its_last_row_and_no_token_is_on_both_sides(num_tokens, seq_len, fraction):
    """Of chunks of 65,536 tokens half was lost at 32,768 a window (A7)."""
    sides = split_numbered(num_tokens, fraction, seq_len=seq_len)
    train, validation = (read(side) for side in sides)
    assert len(train)
    assert len(validation)
    assert len(validation) == pytest.approx(fraction * (len(train) + len(validation)), rel=0.01, abs=1)
    for side in (train, validation):  # the label of the last token is the next one of the text
        assert torch.equal(side[:, 0] + seq_len, side[:, -1])
    for columns in (slice(0, -1), slice(1, None)):  # ids, labels
        times = torch.bincount(torch.cat([train[:, columns].flatten(), validation[:, columns].flatten()]))
        assert times.max() == 1
    in_train, in_validation = (torch.bincount(side.flatten(), minlength=num_tokens) > 0 for side in (train, validation))
    assert not (in_train & in_validation).any()
    num_used = int((in_train | in_validation).sum())
    assert num_used > num_tokens - seq_len
    assert num_used == sum(side.layout.num_used for side in sides)


@pytest.mark.case(
    "data: Files of tokens", "Documents, empty ones too", "each complete on one side, which depends on its number alone"
)
@pytest.mark.parametrize("mean_length", [1.5, 6, 40, 900])
@pytest.mark.parametrize("seq_len", [1, 3, 10, 128])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.8])
def test_documents_go_to_one_side_whole_and_are_joined_there(mean_length, seq_len, fraction):
    num_tokens = int(mean_length * 600) + 1000
    documents = document_starts(num_tokens, mean_length)
    sides = split_numbered(num_tokens, fraction, seq_len=seq_len, documents=documents)
    assert [side.split for side in sides] == [f"by document, {fraction}"] * 2
    validation_numbers = are_validation(0, len(documents), fraction)
    document_of = np.searchsorted(documents, np.arange(num_tokens), side="right") - 1
    for side, is_validation in zip(sides, (False, True), strict=True):
        expected = np.flatnonzero(validation_numbers[document_of] == is_validation)
        rows = read(side)
        assert len(rows) == (len(expected) - 1) // seq_len
        assert rows[:, :-1].flatten().tolist() == expected[: len(rows) * seq_len].tolist()
        assert rows[:, -1].tolist() == expected[seq_len : len(rows) * seq_len + 1 : seq_len].tolist()
        assert side.layout.num_used == len(rows) * seq_len + 1


@pytest.mark.case("data: Files of tokens", "Documents, empty ones too")
def test_where_a_document_goes_depends_on_its_number_alone():
    all_at_once = are_validation(0, 10_000, 0.1)
    assert np.concatenate([are_validation(0, 77, 0.1), are_validation(77, 9923, 0.1)]).tolist() == all_at_once.tolist()
    assert all_at_once.mean() == pytest.approx(0.1, abs=0.01)
    assert (are_validation(0, 10_000, 0.3) >= all_at_once).all()
    assert np.flatnonzero(all_at_once)[:5].tolist() == np.flatnonzero(are_validation(0, 300, 0.1))[:5].tolist()
    neighbours = (all_at_once[1:] & all_at_once[:-1]).mean()
    assert neighbours == pytest.approx(0.01, abs=0.004)


@pytest.mark.case("data: Files of tokens", "Few documents, or very unequal ones", "split by chunk")
@pytest.mark.parametrize("documents", [[0], [0, 10], [0, 9_000], list(range(0, 10_000, 2500))])
def test_too_few_or_unequal_documents_are_split_by_chunk(documents):
    train, validation = split_numbered(10_000, 0.1, documents=np.array(documents))
    assert (train.split, len(train), len(validation)) == ("by chunk, 0.1", 899, 100)


def test_a_hundred_million_documents_take_a_few_bytes_each():
    """1e7 here. The starts are read once; what stays of both sides are runs of documents."""
    documents = np.arange(0, 10**10, 1000)
    sides = split_numbered(10**10, 0.1, seq_len=1024, documents=documents)
    assert sum(array.nbytes for side in sides for array in side.layout.arrays()) < 4 * len(documents)
    for side in sides:
        ids, labels = side.rows([0, len(side) // 2, len(side) - 1])
        assert torch.equal(ids[:, 1:], labels[:, :-1])
    assert sum(len(side) for side in sides) * 1024 > 10**10 - 4 * 1024


def test_a_text_too_short_for_one_window_on_each_side_is_refused():
    with pytest.raises(ValueError, match=r"data.path=numbers holds 101 tokens; .*seq_len=10.* needs at least 102"):
        split_numbered(101, 0.1)
    train, validation = split_numbered(102, 0.1)
    assert (len(train), len(validation)) == (9, 1)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5])
def test_a_validation_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ValueError, match=r"data.validation_fraction=.* must be 0 or between 0 and 1"):
        split_numbered(1000, fraction)


def test_at_a_fraction_of_nought_all_is_to_train_on():
    train, validation = split_numbered(1000, 0.0)
    everything = whole_numbered(1000)
    assert len(train) == len(everything)
    assert all(torch.equal(train[row][0], everything[row][0]) for row in range(len(train)))
    assert len(validation) == 0
    assert describe_tokens(train, validation).endswith("no validation")
    assert fingerprint_tokens(train, validation)["validation_rows"] == 0
    with pytest.raises(ValueError, match="holds 5 tokens"):
        split_numbered(5, 0.0)
