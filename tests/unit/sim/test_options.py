"""The argv of `vllm serve`."""

import json
from pathlib import Path

import pytest

from tuner.sim.options import parse_serve


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    with pytest.raises(SystemExit) as left:
        parse_serve(argv)
    assert left.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("usage: vllm")
    return text


def test_options_under_both_spellings() -> None:
    one = parse_serve(["m", "--max-num-batched-tokens", "512", "--no-enable-chunked-prefill"])
    two = parse_serve(["m", "--max_num_batched_tokens=512", "--no-enable_chunked_prefill"])
    assert vars(one) == vars(two)
    assert (one.max_num_batched_tokens, one.enable_chunked_prefill) == (512, False)


def test_lengths_with_a_suffix() -> None:
    assert parse_serve(["m", "--max-model-len", "8k"]).max_model_len == 8000
    assert parse_serve(["m", "--max-model-len", "8K"]).max_model_len == 8192


def test_values_of_other_options_keep_their_underscores() -> None:
    assert parse_serve(["my_model", "--served-model-name", "a_b"]).served_model_name == ["a_b"]
    assert parse_serve(["my_model"]).model == "my_model"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["m", "--no-such-option", "3"], "unrecognized arguments: --no-such-option 3"),
        (["m", "--max-num-seq", "3"], "unrecognized arguments: --max-num-seq 3"),
        (["m", "--max-num-seqs", "many"], "invalid int value: 'many'"),
        (["m", "--additional-config", "{"], "cannot be converted to a JSON object"),
        ([], "model_tag"),
    ],
)
def test_what_vllm_refuses_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    assert says in refused(capsys, argv)


def test_the_plug_in_s_settings_are_read() -> None:
    settings = {"chunktune": {"max_cached_blocks": 80}}
    options = parse_serve(["m", "--additional-config", json.dumps(settings)])
    assert options.additional_config == settings


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_serve(["--help=all"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for option in ("--max-num-batched-tokens", "--no-enable-chunked-prefill", "--scheduler-cls", "--block-size"):
        assert option in text


def test_a_file_s_options_give_way_to_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: from-file\nmax-num-batched-tokens: 512\nmax-num-seqs: 16\nserved-model-name: [a, b]\n")
    options = parse_serve(["--config", str(file), "--max-num-seqs", "8"])
    assert (options.model, options.max_num_batched_tokens, options.max_num_seqs) == ("from-file", 512, 8)
    assert options.served_model_name == ["a", "b"]
    assert parse_serve(["mine", "--config", str(file)]).model == "mine"


def test_a_false_value_with_underscores_is_lost_as_in_vllm(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("enable_chunked_prefill: false\n")
    assert parse_serve(["m", "--config", str(file)]).enable_chunked_prefill is True
    file.write_text("no-enable-chunked-prefill: true\n")
    assert parse_serve(["m", "--config", str(file)]).enable_chunked_prefill is False
    file.write_text("enable-chunked-prefill: false\n")
    assert parse_serve(["m", "--config", str(file)]).enable_chunked_prefill is False


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/nowhere/x.yaml" in refused(capsys, ["m", "--config", "/nowhere/x.yaml"])
