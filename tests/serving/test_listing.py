"""The table of versions."""

import dataclasses
import re
import shutil

import pytest

from pipeline.contract import Manifest, list_files
from serving.ledger import Ledger
from serving.listing import table
from serving.publish import publish
from tests.jobs import run_python

FORCED = {"by": "ada@home", "at": "then", "reasons": ["too low\n", "too few"]}


@pytest.fixture
def model_dir(tmp_path):
    return tmp_path / "models" / "tiny"


@pytest.fixture
def candidate(tmp_path):
    """Returns a function: version number -> a whole candidate directory of 1.2 MB."""

    def make(version, **changes):
        directory = tmp_path / f"candidate-{version}"
        directory.mkdir()
        (directory / "tokenizer.model").write_bytes(b"a" * 1_200_000)
        manifest = Manifest(
            name="tiny", version=version, created="2025-01-02T03:04:05+00:00", labels=[], max_length=1, pad_id=0,
            files=list_files(directory), metrics={"accuracy": version / 10, "macro_f1": 0.25, "loss": 1}, parity={},
            warnings=[], job={}, data_fingerprint="", export_key="", packages={}, source_revision="",
        )  # fmt: skip
        dataclasses.replace(manifest, **changes).write(directory)
        return directory

    return make


def _table(model_dir):
    """Cells by row, as a program would cut them; times as T."""
    warnings = []
    lines = table(model_dir, warnings.append)
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    return [re.split(r"\s\s+", re.sub(time, "T", line)) for line in lines], warnings


def test_no_version(model_dir):
    assert table(model_dir, None) == [f"no version in {model_dir}"]
    model_dir.mkdir(parents=True)
    (model_dir / "notes.txt").write_text("")
    (model_dir / "v7").mkdir()
    assert table(model_dir, None) == [f"no version in {model_dir}"]


def test_a_line_for_every_version(candidate, model_dir):
    publish(candidate(1), model_dir, 5)
    publish(candidate(2, forced=FORCED), model_dir, 2)
    publish(candidate(3, metrics={"accuracy": float("nan")}), model_dir, 2)
    publish(candidate(10, republished={"from": 2, "by": "bob@home", "at": "then"}), model_dir, 3)
    found, warnings = _table(model_dir)
    assert warnings == []
    assert found == [
        ["version", "created", "published", "accuracy", "macro-F1", "loss", "size", "state", "remarks"],
        ["1", "T", "T", "0.1000", "0.2500", "1.0000", "-", "removed", "on T"],
        ["2", "T", "T", "0.2000", "0.2500", "1.0000", "1.2MB", "kept", "forced by ada@home: too low , too few"],
        ["3", "T", "T", "nan", "-", "-", "1.2MB", "kept"],
        ["10", "T", "T", "1.0000", "0.2500", "1.0000", "1.2MB", "live", "rollback to 2 by bob@home"],
    ]
    states = ["state", "removed", "kept", "kept", "live"]
    assert len({line.index(state) for line, state in zip(table(model_dir, None), states, strict=True)}) == 1


def test_foreign_and_damaged_entries_are_said(candidate, model_dir, tmp_path):
    for version in (1, 2, 3):
        publish(candidate(version), model_dir, 5)
    (model_dir / "1" / "tokenizer.model").write_bytes(b"other")
    (model_dir / "2" / "manifest.json").unlink()
    (model_dir / "3" / "manifest.json").write_bytes(b"\xff")
    (model_dir / "003").mkdir()
    (model_dir / "4").mkdir()
    (model_dir / "5").write_text("")
    (model_dir / "6").symlink_to(tmp_path / "nowhere")
    shutil.copytree(candidate(7), model_dir / "8")
    (model_dir / "9").symlink_to(tmp_path / "candidate-7")
    Ledger.read(model_dir).announce(Manifest.read(candidate(11)))
    found, warnings = _table(model_dir)
    assert warnings == []
    figures = ["T", "T", "0.1000", "0.2500", "1.0000"]
    other = ["neither a directory nor a link to one, but servers try to load it"]
    empty = ["-"] * 6
    assert found[1][:8] == ["1", *figures, "1.2MB", "damaged"]
    assert "tokenizer.model is damaged" in found[1][8]
    assert found[2][:8] == ["2", "T", "T", "0.2000", "0.2500", "1.0000", "-", "damaged"]
    assert "cannot read manifest.json" in found[2][8]
    assert found[3][6:] == ["-", "ignored", "servers read its number in '3', too"]
    assert found[4][7] == "damaged"
    assert found[5] == ["4", *empty, "foreign", "has no manifest.json"]
    assert found[6] == ["5", *empty, "foreign", *other]
    assert found[7] == ["6", *empty, "foreign", *other]
    assert found[8][7:] == ["kept", "its manifest says version 7"]
    assert found[9][7:] == ["live", "its manifest says version 7"]
    assert found[10][7:] == ["unpublished", "publishing was stopped before it was visible"]


@pytest.mark.parametrize("damage", [b"{", b'{"versions": {"1": {"metrics": 3, "forced": [1]}, "2": 5}}'])
def test_a_damaged_ledger_is_said(candidate, model_dir, damage):
    publish(candidate(3), model_dir, 5)
    (model_dir / "versions.json").write_bytes(damage)
    found, warnings = _table(model_dir)
    assert "versions.json is damaged" in warnings[0]
    assert found[-1][:2] == ["3", "T"] and found[-1][2] == "-" and found[-1][7] == "live"
    assert (model_dir / "versions.json").read_bytes() == damage


def test_a_damaged_live_version(candidate, model_dir):
    publish(candidate(1), model_dir, 5)
    (model_dir / "1" / "tokenizer.model").unlink()
    assert _table(model_dir)[0][1][7] == "live, damaged"


def test_command(candidate, model_dir, tmp_path):
    """In a process that needs no TensorFlow, ONNX Runtime, run directory or data, and while another publishes."""
    publish(candidate(1), model_dir, 5)
    file = tmp_path / "job.toml"
    file.write_text(
        f'name = "tiny"\nwork_dir = "{tmp_path}/runs"\n[data]\ntrain = "absent.csv"\n'
        f'[publish]\nbase_path = "{model_dir.parent}"\n'
    )
    script = (
        "import contextlib, io, json, sys\n"
        "from pipeline import commands\n"
        "from pipeline.files import locked\n"
        "sys.argv = ['pipeline', 'versions', sys.argv[1]]\n"
        f"with contextlib.redirect_stdout(io.StringIO()) as out, locked('{model_dir}/.lock', 'it'):\n"
        "    commands.main()\n"
        "loaded = sorted({'tensorflow', 'keras', 'onnx', 'onnxruntime'} & set(sys.modules))\n"
        "print(json.dumps([out.getvalue().splitlines(), loaded]))\n"
    )
    lines, loaded = run_python(script, file)
    assert lines == table(model_dir, None)
    assert loaded == []
    assert not (tmp_path / "runs").exists()
