"""A study's folder: made, continued, or refused with the field named."""

from pathlib import Path

import pytest

from tests.fakes.profiles import SMALL
from tuner.clock import FakeClock
from tuner.domain.experiment import Fingerprint, StudyFile
from tuner.errors import FileFormatError, UsageError
from tuner.profile import parse_profile
from tuner.study.opening import exclusive, open_or_create, study_path
from tuner.study.storage import open_storage


def opened(path: Path, *overrides: str, version: str = "0.32.0", seed: int = 0) -> tuple[StudyFile, bool]:
    profile = parse_profile(SMALL, overrides=list(overrides))
    fingerprint = Fingerprint(model=profile.model, vllm_version=version, engine="vllm")
    with exclusive(path) as directory:
        return open_or_create(
            directory, profile, fingerprint, name=path.name, seed=seed, sampler="grid", clock=FakeClock()
        )


def test_the_same_study_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert opened(path)[1] is False
    assert opened(path)[1] is True


def test_more_budget_is_the_same_study(tmp_path: Path) -> None:
    opened(tmp_path / "s")
    study, continued = opened(tmp_path / "s", "budget.trials=50")
    assert continued
    assert study.profile["budget"]["trials"] == 50


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("workload.requests=5", "workload.requests"),
        ("space.max_num_batched_tokens=[64]", "space.knobs.max_num_batched_tokens"),
        ("model=other", "model"),
        ("engine.args.max_num_seqs=4", "engine.args.max_num_seqs"),
        ("rounds=5", "rounds"),
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


def test_a_study_of_another_schema_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "s")
    file = tmp_path / "s/study.json"
    file.write_text(file.read_text().replace("chunktune.study/1", "chunktune.study/9"))
    with pytest.raises(FileFormatError, match=r"chunktune\.study/9"):
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


def test_a_dead_journal_lock_and_a_cut_off_line_do_no_harm(tmp_path: Path) -> None:
    import optuna

    journal = tmp_path / "journal.log"
    study = optuna.create_study(storage=open_storage(journal, None), study_name="s")
    study.add_trial(optuna.trial.create_trial(value=1.0))
    Path(f"{journal}.lock").symlink_to(journal)
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "worker_id": "cut')
    again = optuna.load_study(storage=open_storage(journal, None), study_name="s")
    again.add_trial(optuna.trial.create_trial(value=2.0))
    assert [t.value for t in optuna.load_study(storage=open_storage(journal, None), study_name="s").trials] == [
        1.0,
        2.0,
    ]


def test_a_storage_url_never_shows_its_password() -> None:
    with pytest.raises(UsageError) as caught:
        open_storage(Path("unused"), "nonsense://user:hunter2@host/db")
    assert "hunter2" not in str(caught.value)
