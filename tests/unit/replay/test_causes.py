"""Causes of a bad step that are no single row: a source of a mix, and a learning rate."""

import json
import random
from pathlib import Path

import pytest

from zerotrain.commands import replay
from zerotrain.config.schema import Config
from zerotrain.run import factory
from zerotrain.training import constant

SEQ_LEN, STEPS, SPIKE_AT = 16, 8, 5
GPT = {"_target_": "zerotrain.models.GPT", "vocab_size": 256, "max_seq_len": SEQ_LEN, "num_layers": 1, "num_heads": 1}
SGD = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.05}


def spike(step: int, max_steps: int) -> float:
    """A rate a thousand times too large, in one step."""
    return 1000.0 if step == SPIKE_AT - 1 else constant(step, max_steps)


def config_of(folder: Path, path: str) -> Config:
    data = {"_target_": "zerotrain.data.TextDataset", "path": path, "seq_len": SEQ_LEN, "cache_dir": str(folder / "c")}
    config = Config(model=GPT | {"hidden_size": 8}, data=data, optimizer=SGD)
    config.scheduler = {"_target_": "zerotrain.training.constant", "_partial_": True}
    config.train.max_steps, config.train.eval_batches, config.train.sample_tokens = STEPS, 1, 0
    config.train.micro_batch_size, config.train.max_grad_norm, config.launch.threads_per_rank = 4, None, 1
    return config


def replayed(folder: Path, *arguments: object) -> dict:
    out = folder / "replay.json"
    assert replay.main([str(folder / "run"), *map(str, arguments), "--trust-code", "--out", str(out)]) == 0
    body = json.loads(out.read_text())
    assert body["differs"] is None
    return body


def test_the_source_of_a_mix_whose_rows_are_bad_is_named_with_their_files(tmp_path: Path) -> None:
    draw = random.Random(0)
    for name, letters in (("prose", "ab"), ("noise", "".join(map(chr, range(33, 127))))):
        (tmp_path / name).mkdir()
        for number in range(2):
            (tmp_path / name / f"{number}.txt").write_text("".join(draw.choices(letters, k=2000)))
    config = config_of(tmp_path, str(tmp_path / "prose"))
    sources = {
        name: {"weight": weight, "data": config.data | {"path": str(tmp_path / name)}}
        for name, weight in (("prose", 7), ("noise", 1))
    }
    config.data = {"_target_": "zerotrain.data.Mix", "sources": sources, "seq_len": SEQ_LEN, "vocab_size": 256}
    (tmp_path / "run").mkdir()
    factory.run(config, tmp_path / "run", overrides=[], config_hash="")

    body = replayed(tmp_path, "--step", STEPS, "--rows")

    alone = sorted(body["rows"], key=lambda each: -each["alone"]["loss"])
    of_noise = [each["source"].startswith("noise: ") for each in alone]
    assert of_noise == sorted(of_noise, reverse=True)
    assert 0 < sum(of_noise) < len(alone)
    for each in alone:
        name, _, place = each["source"].partition(": ")
        path, _, number = place.rpartition(", token ")
        assert Path(path).parent == tmp_path / name
        assert each["text"] == Path(path).read_text()[int(number) : int(number) + SEQ_LEN]


def test_a_learning_rate_that_ruins_a_run_stands_beside_that_of_the_steps_around_it(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(random.Random(0).choices("abcdefgh", k=4000)))
    config = config_of(tmp_path, str(tmp_path / "text.txt"))
    config.scheduler = {"_target_": f"{__name__}.spike", "_partial_": True}
    (tmp_path / "run").mkdir()
    factory.run(config, tmp_path / "run", overrides=[], config_hash="")

    body = replayed(tmp_path, "--step", SPIKE_AT, "--around", 2)

    rates = {each["step"]: each["lr"] for each in body["around"]}
    assert rates == pytest.approx({step: 50.0 if step == SPIKE_AT else 0.05 for step in range(3, 8)})
    losses = {each["step"]: each["loss"] or float("inf") for each in body["around"]}
    assert max(losses[4], losses[5]) < min(losses[6], losses[7])
