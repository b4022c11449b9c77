"""A study's folder: made, continued, or refused with the field named."""

from pathlib import Path

import pytest

from tests.fakes.profiles import SMALL
from tuner.clock import FakeClock
from tuner.domain.experiment import Fingerprint, StudyFile
from tuner.errors import FileFormatError, UsageError
from tuner.profile import parse_profile
from tuner.study.opening import exclusive, open_or_create, study_path


def opened(path: Path, *overrides: str, version: str = "0.32.0", seed: int = 0, live: bool = True) -> StudyFile:
    profile = parse_profile(SMALL, overrides=list(overrides))
    fingerprint = Fingerprint(model=profile.model, vllm_version=version, engine="vllm")
    design = {"live": live, "sampler": "enumeration"}
    with exclusive(path) as store:
        return open_or_create(store, profile, fingerprint, design, seed=seed, clock=FakeClock())


def test_the_same_study_is_continued(tmp_path: Path) -> None:
    first = opened(tmp_path / "s")
    before = (tmp_path / "s/study.json").stat().st_mtime_ns
    assert opened(tmp_path / "s") == first
    assert (tmp_path / "s/study.json").stat().st_mtime_ns == before
    assert first.design == {"live": True, "sampler": "enumeration"}


def test_more_budget_is_the_same_study(tmp_path: Path) -> None:
    opened(tmp_path / "s")
    assert opened(tmp_path / "s", "budget.trials=50").profile["budget"]["trials"] == 50


def test_another_way_of_measuring_is_another_study(tmp_path: Path) -> None:
    opened(tmp_path / "s")
    with pytest.raises(UsageError, match="--no-live"):
        opened(tmp_path / "s", live=False)


def test_another_seed_is_another_study(tmp_path: Path) -> None:
    opened(tmp_path / "s")
    with pytest.raises(UsageError, match="the seed: it has 0, now it would be 3"):
        opened(tmp_path / "s", seed=3)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("workload.requests=5", "workload.requests"),
        ("space.max_num_batched_tokens=[64]", "space.knobs.max_num_batched_tokens"),
        ("model=other", "model"),
        ("engine.args.max_num_seqs=4", "engine.args.max_num_seqs"),
        ("rounds=5", "rounds"),
        ("space.refine=false", "space.refine"),
    ],
)
def test_another_study_is_refused_by_the_field(tmp_path: Path, override: str, field: str) -> None:
    opened(tmp_path / "s")
    before = (tmp_path / "s/study.json").read_bytes()
    with pytest.raises(UsageError, match=field):
        opened(tmp_path / "s", override)
    assert (tmp_path / "s/study.json").read_bytes() == before


def test_another_vllm_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "s")
    with pytest.raises(UsageError, match="vllm_version"):
        opened(tmp_path / "s", version="0.33.0")


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "photos"
    path.mkdir()
    (path / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(FileFormatError, match=r"no study\.json"):
        opened(path)
    assert (path / "cat.jpg").read_bytes() == b"cat"


@pytest.mark.parametrize(("schema", "says"), [("1", "earlier chunktune"), ("9", r"chunktune\.study/9")])
def test_a_study_of_another_schema_is_refused(tmp_path: Path, schema: str, says: str) -> None:
    opened(tmp_path / "s")
    file = tmp_path / "s/study.json"
    file.write_text(file.read_text().replace("chunktune.study/2", f"chunktune.study/{schema}"))
    with pytest.raises(FileFormatError, match=says):
        opened(tmp_path / "s")


def test_a_second_sweep_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with exclusive(tmp_path / "s"), pytest.raises(UsageError, match="another chunktune"), exclusive(tmp_path / "s"):
        pass


def test_fresh_takes_a_new_name_and_deletes_nothing(tmp_path: Path) -> None:
    opened(tmp_path / "s")
    assert study_path(tmp_path, "s", fresh=True) == tmp_path / "s-2"
    assert study_path(tmp_path, "s", fresh=False) == tmp_path / "s"


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\nb", "\ud800"])
def test_a_name_that_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        study_path(tmp_path, name, fresh=False)
