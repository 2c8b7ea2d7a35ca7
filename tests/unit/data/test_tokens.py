from pathlib import Path

import numpy as np
import pytest

from zerotrain.data import TokenFiles

VOCAB_SIZE = 50257


def write_tokens(path: Path, num_tokens: int, first: int = 0) -> str:
    (np.arange(first, first + num_tokens) % VOCAB_SIZE).astype("<u2").tofile(path)
    return str(path)


def test_a_file_is_read_as_uint16_and_split(tmp_path):
    dataset = TokenFiles(write_tokens(tmp_path / "all.bin", 50_000), seq_len=16, vocab_size=VOCAB_SIZE)
    ids, labels = dataset.train[1000]
    assert (labels == ids + 1).all()
    assert len(dataset.validation) / (len(dataset.train) + len(dataset.validation)) == pytest.approx(0.1, rel=0.1)
    assert max(int(ids.max()) for ids, _ in dataset.train) > 2**15  # no sign bit


def test_a_folder_gives_train_and_val(tmp_path):
    write_tokens(tmp_path / "train.bin", 1000)
    write_tokens(tmp_path / "val.bin", 100, first=40_000)
    dataset = TokenFiles(str(tmp_path), seq_len=9, vocab_size=VOCAB_SIZE)
    assert (len(dataset.train), len(dataset.validation)) == (111, 11)
    assert dataset.validation[0][0].tolist() == list(range(40_000, 40_009))


def test_a_validation_file_of_its_own_leaves_all_of_path_to_training(tmp_path):
    train, validation = write_tokens(tmp_path / "a.bin", 1000), write_tokens(tmp_path / "b.bin", 100, first=7)
    dataset = TokenFiles(train, validation_path=validation, seq_len=9, vocab_size=VOCAB_SIZE)
    assert (len(dataset.train), len(dataset.validation)) == (111, 11)
    assert dataset.validation[0][0][0] == 7


def test_a_folder_without_val_is_split(tmp_path):
    write_tokens(tmp_path / "train.bin", 1000)
    dataset = TokenFiles(str(tmp_path), seq_len=9, vocab_size=VOCAB_SIZE)
    assert (len(dataset.train), len(dataset.validation)) == (99, 11)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    path = write_tokens(tmp_path / "all.bin", 1000)
    with pytest.raises(
        ValueError, match=f"data.path={path} holds the token 999; tokens must be below .*=999.* least 1000"
    ):
        TokenFiles(path, seq_len=9, vocab_size=999)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes; a file of uint16 tokens has an even number of at least 2"),
        (b"abc", "has 3 bytes; a file of uint16 tokens has an even number of at least 2"),
        (b"ab" * 20, "holds 20 tokens; with data.seq_len=9 and data.validation_fraction=0.1 it needs at least 100"),
    ],
    ids=["empty", "odd", "short"],
)
def test_a_broken_file_is_refused(tmp_path, content, message):
    (tmp_path / "all.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        TokenFiles(str(tmp_path / "all.bin"), seq_len=9, vocab_size=VOCAB_SIZE)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data.path=.*no.bin does not exist; give a file of uint16 tokens"):
        TokenFiles(str(tmp_path / "no.bin"), seq_len=9, vocab_size=VOCAB_SIZE)
    with pytest.raises(FileNotFoundError, match=f"data.path={tmp_path} is a folder without train.bin"):
        TokenFiles(str(tmp_path), seq_len=9, vocab_size=VOCAB_SIZE)
    path = write_tokens(tmp_path / "all.bin", 1000)
    with pytest.raises(FileNotFoundError, match=r"data.validation_path=no.bin does not exist"):
        TokenFiles(path, validation_path="no.bin", seq_len=9, vocab_size=VOCAB_SIZE)


def test_a_broken_validation_file_is_named_as_such(tmp_path):
    path, validation = write_tokens(tmp_path / "a.bin", 1000), write_tokens(tmp_path / "b.bin", 5)
    with pytest.raises(ValueError, match=f"data.validation_path={validation} holds 5 tokens; data.seq_len=9 needs"):
        TokenFiles(path, validation_path=validation, seq_len=9, vocab_size=VOCAB_SIZE)
