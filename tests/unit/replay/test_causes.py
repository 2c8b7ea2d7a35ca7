"""A cause of a bad step that is no single row: a source of a mix."""

import json
import random
from pathlib import Path

from zerotrain.commands import replay
from zerotrain.config.schema import Config
from zerotrain.run import factory

SEQ_LEN, STEPS = 16, 8
GPT = {"_target_": "zerotrain.models.GPT", "vocab_size": 256, "max_seq_len": SEQ_LEN, "num_layers": 1, "num_heads": 1}
SGD = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.05}


def test_the_source_of_a_mix_whose_rows_are_bad_is_named_with_their_files(tmp_path: Path) -> None:
    draw, sources = random.Random(0), {}
    for name, letters, weight in (("prose", "ab", 7), ("noise", "".join(map(chr, range(33, 127))), 1)):
        (tmp_path / name).mkdir()
        for number in range(2):
            (tmp_path / name / f"{number}.txt").write_text("".join(draw.choices(letters, k=2000)))
        data = {"_target_": "zerotrain.data.TextDataset", "path": str(tmp_path / name), "seq_len": SEQ_LEN}
        sources[name] = {"weight": weight, "data": data | {"cache_dir": str(tmp_path / "c")}}
    config = Config(model=GPT | {"hidden_size": 8}, optimizer=SGD)
    config.data = {"_target_": "zerotrain.data.Mix", "sources": sources, "seq_len": SEQ_LEN, "vocab_size": 256}
    config.scheduler = {"_target_": "zerotrain.training.constant", "_partial_": True}
    config.train.max_steps, config.train.eval_batches, config.train.sample_tokens = STEPS, 1, 0
    config.train.micro_batch_size, config.train.max_grad_norm, config.launch.threads_per_rank = 4, None, 1
    (tmp_path / "run").mkdir()
    factory.run(factory.RunSpec(config, tmp_path / "run", []))

    out = tmp_path / "replay.json"
    assert replay.main([str(tmp_path / "run"), "--step", str(STEPS), "--rows", "--out", str(out)]) == 0
    body = json.loads(out.read_text())

    assert body["differs"] is None
    alone = sorted(body["rows"], key=lambda each: -each["alone"]["loss"])
    of_noise = [each["source"].startswith("noise: ") for each in alone]
    assert of_noise == sorted(of_noise, reverse=True)
    assert 0 < sum(of_noise) < len(alone)
    for each in alone:
        name, _, place = each["source"].partition(": ")
        path, _, number = place.rpartition(", token ")
        assert Path(path).parent == tmp_path / name
        assert each["text"] == Path(path).read_text()[int(number) : int(number) + SEQ_LEN]
