"""An old version again under a new number; no TensorFlow needed."""

import dataclasses
import json
import os
import shutil

import numpy as np
import onnx
import pytest

from pipeline.contract import MANIFEST, ONNX_FILES, Manifest, ledger_rows, list_files, versions
from pipeline.errors import ArtifactError, LockHeld, VerificationError
from pipeline.files import locked
from serving.onnx_classifier import OnnxClassifier
from serving.publish import publish
from serving.rollback import compare, rollback
from tests.jobs import contents, run_pipeline, run_python, run_script, snapshot
from tests.serving.tiny import TEXTS, Tiny


@pytest.fixture(scope="module")
def tiny():
    return Tiny.build()


@pytest.fixture(scope="module")
def published(tiny, tmp_path_factory):
    """`base_path/name` with versions 1 to 3, each of which answers otherwise. Tests work on copies."""
    root = tmp_path_factory.mktemp("published")
    for number in (1, 2, 3):
        version = dataclasses.replace(tiny, bias=tiny.bias + np.float32([number, 0, 0]))
        directory = version.write_version(root / f"candidate-{number}", version=str(number))
        manifest = Manifest.read(directory)
        (directory / "saved_model.pb").write_bytes(b"not looked into")
        dataclasses.replace(
            manifest,
            version=number,
            export_key=f"key {number}",
            metrics={"accuracy": number / 10, "macro_f1": 0.5, "loss": 1.0},
            files=list_files(directory),
        ).write(directory)
        publish(directory, root / "tiny", keep_versions=5)
    return root / "tiny"


@pytest.fixture
def model_dir(published, tmp_path):
    return shutil.copytree(published, tmp_path / "models" / "tiny")


@pytest.fixture
def job_file(model_dir, tmp_path):
    """A job whose data and run directory do not exist."""
    file = tmp_path / "job.toml"
    file.write_text(
        f'name = "tiny"\nwork_dir = "{tmp_path}/runs"\n[data]\ntrain = "{tmp_path}/absent.csv"\n'
        f'[publish]\nbase_path = "{model_dir.parent}"\n'
    )
    return file


def _roll_back(model_dir, number=0):
    notes = []
    target = rollback(model_dir, number, notes.append, notes.append)
    return target, notes


def test_the_version_before_comes_back_under_a_new_number(model_dir):
    before = snapshot(model_dir)
    target, notes = _roll_back(model_dir)
    assert target == model_dir / "4"
    assert list(versions(model_dir)) == [1, 2, 3, 4]
    assert {k: v for k, v in snapshot(model_dir).items() if k in before and k[0].isdigit()} == {
        k: v for k, v in before.items() if k[0].isdigit()
    }
    assert notes == [f"publishing {model_dir / '2'} again as {target}, checked in a fresh process"]

    # All is as it was but for the number.
    old, new = Manifest.read(model_dir / "2"), Manifest.read(target)
    new.check_files(target)
    assert new.files == list_files(target)
    assert (new.version, new.republished["from"]) == (4, 2)
    assert new.republished["by"] and new.republished["at"].startswith("20")
    assert dataclasses.replace(new, version=2, republished={}, files=old.files) == old
    files, old_files = contents(target), contents(model_dir / "2")
    changed = {name for name in old_files | files if files.get(name) != old_files.get(name)}
    onnx_files = [file for file in ONNX_FILES.values() if file in old_files]
    assert changed == {MANIFEST, *onnx_files} and len(onnx_files) == 2
    for file in onnx_files:
        graphs = [onnx.load(model_dir / name / file) for name in ("2", "4")]
        props = [{p.key: p.value for p in graph.metadata_props} for graph in graphs]
        assert props[1] == props[0] | {"version": "4"}
        assert graphs[0].graph == graphs[1].graph
    found, expected = (OnnxClassifier.load(model_dir / n).probabilities(TEXTS) for n in ("4", "2"))
    np.testing.assert_array_equal(found, expected)
    row = ledger_rows(model_dir)[4]
    assert (row["republished"], row["export_key"], row["removed_at"]) == (new.republished, "key 2", "")
    assert "pending" not in row


def test_keys_of_a_manifest_that_we_do_not_know_stay(model_dir):
    path = model_dir / "2" / MANIFEST
    path.write_text(json.dumps({"later": [1.5], **json.loads(path.read_text())}))
    target, _ = _roll_back(model_dir, 2)
    assert list(json.loads((target / MANIFEST).read_text()).items())[0] == ("later", [1.5])


def test_again_goes_further_back_and_never_to_what_was_rolled_back(model_dir):
    assert _roll_back(model_dir)[0].name == "4"
    target, _ = _roll_back(model_dir)
    assert (target.name, Manifest.read(target).republished["from"]) == ("5", 1)
    with pytest.raises(ArtifactError, match=r"no whole version before 1, which is live as 5, .*: 1, 2, 3, 4, 5;"):
        _roll_back(model_dir)
    # A copy of a copy is one of the original.
    target, _ = _roll_back(model_dir, 4)
    assert (target.name, Manifest.read(target).republished["from"]) == ("6", 2)
    assert list(versions(model_dir)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("damage", ["onnx/model.onnx", "saved_model.pb", MANIFEST])
def test_a_damaged_version_is_passed_over_and_refused(model_dir, damage):
    (model_dir / "2" / damage).write_bytes(b"damaged")
    with pytest.raises(ArtifactError, match=r"version 2 cannot be published again: .*Whole versions: 1, 3; choose"):
        _roll_back(model_dir, 2)
    assert list(versions(model_dir)) == [1, 2, 3]
    target, _ = _roll_back(model_dir)
    assert Manifest.read(target).republished["from"] == 1


def test_from_a_damaged_live_version(model_dir):
    (model_dir / "3" / MANIFEST).unlink()
    with pytest.raises(ArtifactError, match="version 3 cannot be published again"):
        _roll_back(model_dir, 3)
    target, _ = _roll_back(model_dir)
    assert (target.name, Manifest.read(target).republished["from"]) == ("4", 2)
    (target / "tokenizer.model").unlink()
    target, _ = _roll_back(model_dir, 2)
    assert (target.name, Manifest.read(target).republished["from"]) == ("5", 2)


def test_nothing_to_do(model_dir):
    before = snapshot(model_dir)
    target, notes = _roll_back(model_dir, 3)
    assert (target, notes) == (model_dir / "3", [f"nothing to do: {model_dir / '3'} is live already"])
    del before[".lock"]
    after = snapshot(model_dir)
    del after[".lock"]
    assert after == before
    target, _ = _roll_back(model_dir, 1)
    again, notes = _roll_back(model_dir, 1)
    assert again == target == model_dir / "4"
    assert notes == [f"nothing to do: {target} is live already; it is a copy of version 1"]


def test_there_must_be_a_version(model_dir, tmp_path):
    with pytest.raises(ArtifactError, match=r"there is no version 7 in .*tiny\. Whole versions: 1, 2, 3; choose one"):
        _roll_back(model_dir, 7)
    for number in (0, 1):
        with pytest.raises(ArtifactError, match=r"there is no version in .*/none to go back to"):
            _roll_back(tmp_path / "none", number)
    assert not (tmp_path / "none").exists()
    shutil.rmtree(model_dir / "1")
    shutil.rmtree(model_dir / "2")
    with pytest.raises(ArtifactError, match=r"there is no whole version before 3, in .*Whole versions: 3\."):
        _roll_back(model_dir)


def test_what_does_not_answer_alike_is_not_published(model_dir, monkeypatch):
    """The copy is made wrong here; the fresh process notices."""
    set_version = "serving.rollback._set_version"

    def spoil(graph, number):
        for entry in graph.metadata_props:
            if entry.key == "version":
                entry.value = str(number)
        graph.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.float32([[0]]), "embedding"))

    monkeypatch.setattr(set_version, spoil)
    before = contents(model_dir)
    with pytest.raises(VerificationError, match=r"to be the same: exit code 1, onnx/model.*\.onnx differs\. No"):
        _roll_back(model_dir)
    monkeypatch.setattr(set_version, lambda graph, number: None)
    with pytest.raises(VerificationError, match=r"the version in onnx/model.*\.onnx differs\. Nothing was published"):
        _roll_back(model_dir)
    after = contents(model_dir)
    assert {k: v for k, v in after.items() if k != ".lock"} == {k: v for k, v in before.items() if k != ".lock"}
    assert list(versions(model_dir)) == [1, 2, 3]


def _copied(model_dir, change):
    """A copy of version 2 as a rollback makes it, then changed."""
    target, _ = _roll_back(model_dir)
    change(target)
    dataclasses.replace(Manifest.read(target), files=list_files(target)).write(target)
    return target


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("saved_model.pb", r"saved_model\.pb differs"),
        ("tokenizer.model", r"tokenizer\.model differs"),
        ("new", r"manifest\.json differs"),
    ],
)
def test_compare_finds_other_files(model_dir, file, message):
    target = _copied(model_dir, lambda path: (path / file).write_bytes(b"other"))
    with pytest.raises(VerificationError, match=message):
        compare(model_dir / "2", target)


def test_compare_finds_another_manifest_and_damage(model_dir):
    target, _ = _roll_back(model_dir)
    compare(model_dir / "2", target)
    for damaged in (target, model_dir / "2"):
        content = (damaged / "saved_model.pb").read_bytes()
        (damaged / "saved_model.pb").write_bytes(b"damaged")
        with pytest.raises(ArtifactError, match=r"saved_model\.pb is damaged"):
            compare(model_dir / "2", target)
        (damaged / "saved_model.pb").write_bytes(content)
    dataclasses.replace(Manifest.read(target), labels=["c", "b", "a"]).write(target)
    with pytest.raises(VerificationError, match=r"manifest\.json differs"):
        compare(model_dir / "2", target)


def test_compare_finds_other_answers(model_dir, monkeypatch):
    """Of equal graphs: what it runs is looked at, not only what is written."""
    target, _ = _roll_back(model_dir)
    probabilities = OnnxClassifier.probabilities

    def shifted(self, texts):
        found = probabilities(self, texts)
        return np.nextafter(found, np.float32(1)) if self.version == 4 else found

    monkeypatch.setattr(OnnxClassifier, "probabilities", shifted)
    with pytest.raises(VerificationError, match=r"what onnx/model\.onnx answers differs"):
        compare(model_dir / "2", target)


def test_command(job_file, model_dir, tmp_path):
    """Without data, run directory and TensorFlow."""
    script = (
        "import json, sys\n"
        "sys.modules['tensorflow'] = sys.modules['keras'] = None  # importing them is an ImportError\n"
        "from pipeline import commands\n"
        "sys.argv = ['pipeline', 'rollback', sys.argv[1]]\n"
        "commands.main()\n"
        "print(json.dumps('done'))\n"
    )
    assert run_python(script, job_file) == "done"
    assert list(versions(model_dir)) == [1, 2, 3, 4]
    done = run_pipeline("rollback", job_file, "--to", "3")
    assert (done.code, done.stdout) == (0, f"live: {model_dir / '5'}\n"), done.stderr
    assert not (tmp_path / "runs").exists()
    done = run_pipeline("rollback", job_file, "--to", "5")
    assert (done.code, done.stdout) == (0, f"live: {model_dir / '5'}\n")
    assert "nothing to do" in done.error
    done = run_pipeline("rollback", job_file, "--to", "9")
    assert (done.code, done.stdout) == (1, "")
    assert "there is no version 9" in done.error
    done = run_pipeline("rollback", job_file, "--to", "x")
    assert (done.code, "--to" in done.error) == (2, True)


def test_a_signal_that_comes_too_late_does_not_ask_for_another_rollback(job_file, model_dir, tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pipeline import commands\n"
        "from serving import rollback\n"
        "settle = rollback.settle\n"
        "def settle_late(*args):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    settle(*args)\n"
        "rollback.settle = settle_late\n"
        "sys.argv = ['pipeline', 'rollback', sys.argv[1]]\n"
        "commands.main()\n"
    )
    done = run_script(script, job_file)
    assert (done.code, done.stdout) == (0, f"live: {model_dir / '4'}\n"), done.stderr


def test_a_signal_whose_exception_was_lost_stops_it_before_anything_is_visible(job_file, model_dir, tmp_path):
    """Python drops what a signal raises inside a `__del__`."""
    script = tmp_path / "lost.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pipeline import commands\n"
        "from serving import rollback\n"
        "class Lost:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "copy = rollback._copy\n"
        "def copy_and_lose(*args):\n"
        "    Lost()\n"
        "    copy(*args)\n"
        "rollback._copy = copy_and_lose\n"
        "sys.argv = ['pipeline', 'rollback', sys.argv[1]]\n"
        "commands.main()\n"
    )
    done = run_script(script, job_file)
    assert done.code == 75, done.stderr
    assert list(versions(model_dir)) == [1, 2, 3]


def test_one_process_at_a_time(job_file, model_dir, tmp_path):
    with locked(model_dir / ".lock", "publishing tiny"):
        with pytest.raises(LockHeld, match=f"pid {os.getpid()}.*publishing tiny"):
            _roll_back(model_dir)
        assert run_pipeline("rollback", job_file).code == 5
    # A run at work keeps nobody from going back.
    with locked(tmp_path / "runs" / ".tiny.lock", "job tiny"):
        assert run_pipeline("rollback", job_file).code == 0
    assert list(versions(model_dir)) == [1, 2, 3, 4]
