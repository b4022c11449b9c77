"""The tokenizer of the tiny model."""

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.sim import bpe
from tuner.sim.tiny_model import TINY_MODEL, make_tiny_model, resolve_model


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_round_trips(text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text


@settings(deadline=None)
@given(st.text(max_size=200))
def test_every_id_is_in_the_vocabulary(text: str) -> None:
    assert all(0 <= i < len(bpe.vocabulary()) for i in bpe.encode(text))


def test_the_begin_token_is_added_unless_told_otherwise() -> None:
    assert bpe.encode("hello")[0] == 0
    assert bpe.encode("hello", add_special_tokens=False) == bpe.encode("hello")[1:]


def test_words_of_the_corpus_take_few_tokens() -> None:
    text = "The prefix cache keeps the blocks of a shared system prompt"
    assert len(bpe.encode(text)) < len(text) / 3


def test_a_later_merge_never_comes_before_the_pieces_it_joins() -> None:
    known = set(bpe.LETTERS)
    for left, right in bpe.merges():
        assert left in known
        assert right in known
        known.add(left + right)


def test_the_model_folder_is_whole_and_the_same_every_time(tmp_path: Path) -> None:
    one, two = make_tiny_model(tmp_path / "a"), make_tiny_model(tmp_path / "b")
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {p.name for p in one.iterdir()} == names
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_the_embedding_covers_the_vocabulary_and_the_heads_divide_the_width(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden=128, layers=2, heads=4, kv_heads=2)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    assert config["vocab_size"] >= len(tokenizer["model"]["vocab"])
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"] == 128
    assert config["num_hidden_layers"] == 2


def test_only_the_tiny_model_s_name_is_resolved(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_model("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    folder = resolve_model(TINY_MODEL)
    assert folder == resolve_model(TINY_MODEL)
    assert Path(folder).is_relative_to(tmp_path)
    assert (Path(folder) / "config.json").is_file()
