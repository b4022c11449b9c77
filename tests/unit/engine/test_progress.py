"""Starts that are slow and starts that hang."""

from __future__ import annotations

from pathlib import Path

from tuner.engine.effective import blobs_folder
from tuner.engine.progress import Progress

GIB = 1 << 30


def start(tmp_path: Path, **more: Path) -> Progress:
    return Progress(tmp_path / "engine.log", more.get("blobs"), timeout_s=600.0, began_s=100.0)


def say(tmp_path: Path, text: str) -> None:
    with (tmp_path / "engine.log").open("a") as log:
        log.write(f"(EngineCore pid=7) INFO 11-29 10:54:19 [core.py:1] {text}\n")


def test_a_start_that_says_nothing_is_over_after_its_timeout(tmp_path: Path) -> None:
    progress = start(tmp_path)
    assert progress.over(699.0) == ""
    assert progress.over(700.0) == "not ready, and nothing moved for 10 min 00 s"


def test_new_lines_prolong_it_up_to_a_hard_end(tmp_path: Path) -> None:
    progress = start(tmp_path)
    for minute in range(29):
        say(tmp_path, f"loading shard {minute}")
        assert progress.over(100.0 + 60 * minute) == ""
    assert progress.over(1900.0) == "not ready after 30 min 00 s"


def test_an_engine_that_repeats_one_line_hangs(tmp_path: Path) -> None:
    progress = start(tmp_path)
    for minute in range(1, 11):
        say(tmp_path, "No available shared memory broadcast block found in 60 seconds.")
        assert progress.over(100.0 + 60 * minute) == ""
    assert "nothing moved" in progress.over(760.0)


def test_a_silent_download_is_progress_and_is_told_every_minute(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    with (blobs / "old").open("wb") as file:
        file.truncate(3 * GIB)
    progress = start(tmp_path, blobs=blobs)
    say(tmp_path, "Starting to load model")
    assert progress.told(159.0) == ""
    with (blobs / "new.incomplete").open("wb") as file:
        file.truncate(2 * GIB)
    assert progress.over(160.0) == ""
    assert progress.told(160.0) == (
        "not ready after 1 min 00 s; 2.0 GiB downloaded (`hf download` beforehand shows a progress bar); "
        "its log says: Starting to load model"
    )
    assert progress.told(219.0) == ""
    assert progress.over(759.0) == ""


def test_the_download_of_a_model_on_disk_is_not_watched(tmp_path: Path) -> None:
    assert blobs_folder(str(tmp_path), {}) is None
    assert blobs_folder("meta/llama", {"HF_HUB_CACHE": "/c"}) == Path("/c/models--meta--llama/blobs")
