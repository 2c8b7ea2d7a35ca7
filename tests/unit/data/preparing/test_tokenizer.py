"""A tokenizer of Hugging Face that comes with code: what transformers would ask on a terminal is answered no."""

import json
from pathlib import Path

import pytest

from zerotrain.data.tokenizer import TextTokenizer

pytest.importorskip("transformers")


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["laid.Laid", "laid.Laid"]}, ["laid.Laid", None]])
def test_code_of_a_tokenizer_is_not_run_and_nobody_is_asked(auto_map, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    canary = tmp_path / "canary"
    (tmp_path / "laid.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Laid: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    with pytest.raises(ValueError, match=r"it has code of its own \(laid\.Laid\), which zerotrain does not run"):
        TextTokenizer(str(tmp_path))
    assert not canary.exists()
