"""What a folder of Hugging Face would have run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerotrain.files.kept_out import refusal, require_no_kernels

OWN_CODE = ValueError("it contains custom code\nPlease pass the argument `trust_remote_code=True`")


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "evil/kernel@main:f"},
        {"_attn_implementation_internal": "paged|evil/kernel"},
        {"experts_implementation": {"": "evil/kernel"}},
        {"text_config": {"attn_implementation": {"vision": "sdpa", "text": "evil/kernel"}}},
        {"parts": [{"attn_implementation": "evil/kernel"}]},
        SimpleNamespace(
            model_type="a", text_config=SimpleNamespace(model_type="b", _attn_implementation="evil/kernel")
        ),
    ],
)
def test_code_of_the_hub_is_refused(fields: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^x asks for code of the hub \(.*evil/kernel.*\), which zerotrain does not run"
    ):
        require_no_kernels(fields, "x")


def test_what_transformers_has_itself_is_not() -> None:
    require_no_kernels(
        {"attn_implementation": "sdpa", "text_config": {"_attn_implementation": None}, "n": ["a/b"]}, "x"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"auto_map": {"AutoTokenizer": ["a.T", None]}}, " (a.T)"),
        ({"auto_map": ["a.T", "b.U"]}, " (a.T, b.U)"),
        ({"auto_map": {"A": "a.\x1b[2J", "B": 7}}, r" (a.\x1b[2J, 7)"),
        ({"auto_map": 7}, ""),
        ([], ""),
    ],
)
def test_what_a_folder_would_have_run_is_named(content: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert refusal(str(tmp_path), OWN_CODE) == f"it has code of its own{said}, which zerotrain does not run"
    assert refusal(str(tmp_path), ValueError("another\nreason")) == "another"
    assert refusal(str(tmp_path), KeyError()) == "KeyError"
