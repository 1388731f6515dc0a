"""Which numbers were given to versions, and what became of each."""

import dataclasses
import json
import shutil

import pytest

from pipeline.contract import Manifest, ledger_rows, next_version, versions
from pipeline.errors import ArtifactError
from serving.ledger import Ledger
from serving.publish import publish

_FIGURES = {"accuracy": 0.5, "macro_f1": 0.25, "loss": 1.5, "per_class": {"a": {}}}


@pytest.fixture
def model_dir(tmp_path):
    return tmp_path / "models" / "tiny"


@pytest.fixture
def candidate(tmp_path):
    """Returns a function: version number -> a whole candidate directory that holds nothing but its manifest."""

    def make(version, **changes):
        directory = tmp_path / f"candidate-{version}"
        directory.mkdir()
        manifest = Manifest(
            name="tiny", version=version, created=f"time {version}", labels=[], max_length=1, pad_id=0, files={},
            metrics=_FIGURES, parity={}, warnings=[], job={}, data_fingerprint="", export_key=f"key {version}",
            packages={}, source_revision="",
        )  # fmt: skip
        dataclasses.replace(manifest, **changes).write(directory)
        return directory

    return make


def _path(model_dir):
    return model_dir / "versions.json"


def test_a_row_for_every_version(candidate, model_dir):
    forced = {"by": "ada", "at": "then", "reasons": ["why"]}
    publish(candidate(1), model_dir, 1)
    publish(candidate(2, forced=forced), model_dir, 1)
    rows = json.loads(_path(model_dir).read_text())["versions"]
    assert list(rows) == ["1", "2"]
    assert rows["1"].pop("removed_at") >= rows["2"].pop("published_at") >= rows["1"].pop("published_at") > "2025"
    figures = {"accuracy": 0.5, "macro_f1": 0.25, "loss": 1.5}
    expected = {"created": "time 1", "metrics": figures, "export_key": "key 1", "forced": {}, "republished": {}}
    assert rows["1"] == expected
    assert rows["2"] == expected | {"created": "time 2", "export_key": "key 2", "forced": forced, "removed_at": ""}


def test_numbers_of_deleted_versions_are_not_given_again(candidate, model_dir):
    for version in (1, 2, 3):
        publish(candidate(version), model_dir, 5)
    shutil.rmtree(model_dir / "3")
    shutil.rmtree(model_dir / "2")
    assert next_version(model_dir) == 4
    publish(candidate(4), model_dir, 5)
    assert list(versions(model_dir)) == [1, 4]
    rows = ledger_rows(model_dir)
    assert [bool(row["removed_at"]) for row in rows.values()] == [False, True, True, False]
    # One that is put back is there again.
    shutil.copytree(model_dir.parents[1] / "candidate-2", model_dir / "2")
    publish(candidate(5), model_dir, 5)
    assert [bool(row["removed_at"]) for row in ledger_rows(model_dir).values()] == [False, False, True, False, False]


@pytest.mark.parametrize("damage", [None, b"", b"{", b"[]", b"\xff", b'{"versions": []}', "a directory"])
def test_a_lost_or_damaged_ledger_is_made_anew(candidate, model_dir, damage):
    for version in (1, 2, 3):
        publish(candidate(version), model_dir, 2)
    whole = ledger_rows(model_dir)
    _path(model_dir).unlink()
    if damage == "a directory":
        _path(model_dir).mkdir()
    elif damage is not None:
        _path(model_dir).write_bytes(damage)
    warnings = []
    publish(candidate(4), model_dir, 5, warnings.append)
    (line,) = warnings
    assert f"{_path(model_dir)} is {'missing' if damage is None else 'damaged'}: it is made anew" in line
    rows = ledger_rows(model_dir)
    assert list(rows) == [2, 3, 4]
    for number in (2, 3):
        assert rows[number] == whole[number] | {"published_at": ""}
    aside = model_dir / "versions.json.damaged"
    assert aside.exists() is (damage is not None)
    if isinstance(damage, bytes):
        assert aside.read_bytes() == damage
    publish(candidate(5), model_dir, 5, warnings.append)
    assert len(warnings) == 1


def test_a_damaged_row_loses_no_other(candidate, model_dir):
    for version in (1, 2, 3, 4):
        publish(candidate(version), model_dir, 2)
    values = json.loads(_path(model_dir).read_text())
    values["versions"]["3"] = "damaged"
    values["versions"]["x"] = {}
    _path(model_dir).write_text(json.dumps(values))
    before = ledger_rows(model_dir)
    assert list(before) == [1, 2, 4]
    warnings = []
    publish(candidate(5), model_dir, 5, warnings.append)
    assert "is damaged" in warnings[0]
    rows = ledger_rows(model_dir)
    assert list(rows) == [1, 2, 3, 4, 5]
    assert {n: rows[n] for n in before} == before


def test_what_a_later_version_wrote_stays(candidate, model_dir):
    for version in (1, 2):
        publish(candidate(version), model_dir, 1)
    values = json.loads(_path(model_dir).read_text())
    values["later"] = [1]
    for row in values["versions"].values():
        row["later"] = {"a": 2}
    _path(model_dir).write_text(json.dumps(values))
    warnings = []
    publish(candidate(3), model_dir, 5, warnings.append)
    assert warnings == []
    found = json.loads(_path(model_dir).read_text())
    assert found["later"] == [1]
    assert [row.get("later") for row in found["versions"].values()] == [{"a": 2}, {"a": 2}, None]


def _stopped_before_the_rename(model_dir, candidate_dir):
    """As a kill right before the rename leaves it."""
    model_dir.mkdir(parents=True, exist_ok=True)
    manifest = Manifest.read(candidate_dir)
    Ledger.read(model_dir).announce(manifest)
    shutil.copytree(candidate_dir, model_dir / f".staged-{manifest.version}-4711")


def test_a_kill_before_the_rename_loses_neither_number_nor_candidate(candidate, model_dir):
    publish(candidate(1), model_dir, 5)
    source = candidate(2)
    _stopped_before_the_rename(model_dir, source)
    assert next_version(model_dir) == 3
    assert ledger_rows(model_dir)[2]["pending"]
    # Another candidate does not get the number, the same one does, also with an addition to its manifest.
    shutil.rmtree(model_dir / ".staged-2-4711")
    other = shutil.copytree(source, source.with_name("other"))
    dataclasses.replace(Manifest.read(source), created="another time").write(other)
    with pytest.raises(ArtifactError, match="the candidate is version 2, but 3 is the next one"):
        publish(other, model_dir, 5)
    dataclasses.replace(Manifest.read(source), forced={"by": "ada"}).write(source)
    publish(source, model_dir, 5)
    assert list(versions(model_dir)) == [1, 2]
    assert "pending" not in ledger_rows(model_dir)[2]
    assert ledger_rows(model_dir)[2]["forced"] == {"by": "ada"}


def test_a_kill_after_the_rename_does_not_give_the_number_again(candidate, model_dir):
    source = candidate(1)
    _stopped_before_the_rename(model_dir, source)
    (model_dir / ".staged-1-4711").rename(model_dir / "1")
    assert next_version(model_dir) == 2
    assert not Ledger.read(model_dir).is_free(Manifest.read(source))
    publish(candidate(2), model_dir, 5)
    assert "pending" not in ledger_rows(model_dir)[1]
    shutil.rmtree(model_dir / "1")
    assert not Ledger.read(model_dir).is_free(Manifest.read(source))


def test_a_candidate_that_another_overtook_is_not_published(candidate, model_dir):
    source = candidate(1)
    _stopped_before_the_rename(model_dir, source)
    publish(candidate(2), model_dir, 5)
    with pytest.raises(ArtifactError, match="the candidate is version 1, but 3 is the next one"):
        publish(source, model_dir, 5)
    row = ledger_rows(model_dir)[1]
    assert (bool(row["pending"]), row["removed_at"]) == (True, "")


def test_a_directory_without_a_ledger_is_read_and_left_as_it_is(candidate, model_dir):
    assert Ledger.read(model_dir).rows == {}
    assert not model_dir.exists()
    shutil.copytree(candidate(3), model_dir / "3")
    (model_dir / "7").mkdir()
    ledger = Ledger.read(model_dir)
    assert list(ledger.rows) == [3]
    assert "is missing" in ledger.problem
    assert not _path(model_dir).exists()
