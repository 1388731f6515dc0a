import json
import os
import shutil
import subprocess

import numpy as np
import pytest

from pipeline import checkpoint
from pipeline.checkpoint import Progress
from pipeline.config import TrainingConfig
from pipeline.contract import sha256_file
from pipeline.errors import CheckpointError

PROGRESS = Progress(3, 7, 120, 100, 0.1 + 0.2, 2, 4567, "")


def make_arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "model 0000": rng.normal(size=(3, 4)).astype(np.float32),
        "model 0001": np.array([0.0, -0.0, 1e-45, 3.4e38], np.float32),
        "model 0002 seed": rng.integers(0, 2**32, 2, dtype=np.uint32),
        "optimizer 0000": np.int64(2**62),
        "optimizer 0001": np.float32(0.1),
        "optimizer 0002": np.zeros((0, 3), np.float16),
    }


def assert_same(found, arrays):
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def no_warning(line):
    raise AssertionError(line)


@pytest.fixture
def two(tmp_path):
    """A folder with the checkpoints of steps 100 and 120."""
    directory = tmp_path / "checkpoints"
    checkpoint.save(directory, make_arrays(1), Progress(step=100), "key")
    checkpoint.save(directory, make_arrays(2), PROGRESS, "key")
    return directory


def test_round_trip_bit_for_bit(two):
    found = next(checkpoint.newest_first(two, no_warning), None)
    assert_same(found.arrays, make_arrays(2))
    assert (found.progress, found.key) == (PROGRESS, "key")
    assert_same(checkpoint.read(two, 100).arrays, make_arrays(1))
    assert sorted(p.name for p in two.iterdir()) == ["step-00000100", "step-00000120"]


def test_nothing_there(tmp_path):
    assert next(checkpoint.newest_first(tmp_path / "absent", no_warning), None) is None
    assert next(checkpoint.newest_first(tmp_path, no_warning), None) is None
    assert checkpoint.steps(tmp_path / "absent") == []


def test_the_newest_step_counts_as_a_number(tmp_path):
    for step in (99_999_999, 100_000_000, 0):
        checkpoint.save(tmp_path, {}, Progress(step=step), "key")
    assert checkpoint.steps(tmp_path) == [0, 99_999_999, 100_000_000]
    assert next(checkpoint.newest_first(tmp_path, no_warning), None).progress.step == 100_000_000


def test_the_same_step_is_replaced(two):
    checkpoint.save(two, make_arrays(3), PROGRESS, "other")
    found = next(checkpoint.newest_first(two, no_warning), None)
    assert_same(found.arrays, make_arrays(3))
    assert found.key == "other"
    assert checkpoint.steps(two) == [100, 120]


def cut(keep):
    def damage(path):
        data = path.read_bytes()
        path.write_bytes(data[: keep(len(data))])

    return damage


def flip_bit(where):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[int(where * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return damage


DAMAGE = {
    "cut to nothing": cut(lambda n: 0),
    "cut to half": cut(lambda n: n // 2),
    "cut by one byte": cut(lambda n: n - 1),
    "first bit": flip_bit(0.0),
    "middle bit": flip_bit(0.5),
    "last bit": flip_bit(1.0),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", [checkpoint.STATE, checkpoint.PROGRESS, checkpoint.SUMS])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_one_line(two, name, damage):
    DAMAGE[damage](two / "step-00000120" / name)
    lines = []
    found = next(checkpoint.newest_first(two, lines.append), None)
    assert_same(found.arrays, make_arrays(1))
    assert found.progress.step == 100
    assert len(lines) == 1
    assert len(lines[0].splitlines()) == 1
    assert "step-00000120 is damaged" in lines[0]
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.read(two, 120)


@pytest.mark.parametrize("name", [checkpoint.STATE, checkpoint.PROGRESS, checkpoint.SUMS])
@pytest.mark.parametrize("damage", DAMAGE)
def test_best_weights_that_are_damaged_are_not_counted_on(tmp_path, name, damage):
    """The checkpoint before that names others is used, and the last resort is one before any validation."""
    for step, best in ((90, -1), (100, 95), (120, 110)):
        progress = Progress(step=step, best_step=best)
        checkpoint.save(tmp_path / checkpoint.CHECKPOINTS, make_arrays(step), progress, "key")
        if best > 0:
            checkpoint.save(tmp_path / checkpoint.BEST, make_arrays(best), Progress(step=best), "key")
    found, best = checkpoint.resume_point(tmp_path, no_warning)
    assert (found.progress.step, best.progress.step) == (120, 110)
    lines = []
    DAMAGE[damage](tmp_path / checkpoint.BEST / "step-00000110" / name)
    found, best = checkpoint.resume_point(tmp_path, lines.append)
    assert (found.progress.step, best.progress.step) == (100, 95)
    assert_same(best.arrays, make_arrays(95))
    assert len(lines) == 1 and "step-00000110 is damaged" in lines[0]
    DAMAGE[damage](tmp_path / checkpoint.BEST / "step-00000095" / name)
    found, best = checkpoint.resume_point(tmp_path, lines.append)
    assert (found.progress.step, best) == (90, None)


def test_every_checkpoint_damaged(two):
    for step in two.iterdir():
        DAMAGE["cut to half"](step / checkpoint.STATE)
    lines = []
    assert next(checkpoint.newest_first(two, lines.append), None) is None
    assert ["120" in lines[0], "100" in lines[1], len(lines)] == [True, True, 2]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_value_that_is_not_finite_is_refused(two, value, dtype):
    arrays = {**make_arrays(), "model 0003": np.array([1.0, value], dtype)}
    with pytest.raises(CheckpointError, match="step 130: model 0003 holds a value that is not finite"):
        checkpoint.save(two, arrays, Progress(step=130), "key")
    assert sorted(p.name for p in two.iterdir()) == ["step-00000100", "step-00000120"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("needs root and mount, to fill a real file system")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("kib", [270, 500])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_half_written_one(small_disk, kib):
    checkpoint.save(small_disk, make_arrays(1), Progress(step=1), "key")
    large = {f"model {i:04d}": np.ones(kib * 1024 // 40, np.float32) for i in range(10)}
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step-00000002: No space left on device"):
            checkpoint.save(small_disk, large, Progress(step=2), "key")
        assert [p.name for p in small_disk.iterdir()] == ["step-00000001"]
    assert_same(next(checkpoint.newest_first(small_disk, no_warning), None).arrays, make_arrays(1))
    checkpoint.save(small_disk, make_arrays(2), Progress(step=2), "key")  # what was taken was given back
    assert next(checkpoint.newest_first(small_disk, no_warning), None).progress.step == 2


def test_a_directory_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        checkpoint.save(tmp_path / "file", make_arrays(), PROGRESS, "key")


def test_what_dead_processes_left_is_no_checkpoint(two):
    shutil.copytree(two / "step-00000120", two / ".staged-step-00000130-4242")
    assert checkpoint.steps(two) == [100, 120]
    assert next(checkpoint.newest_first(two, no_warning), None).progress.step == 120


def test_why_finished():
    def why(epoch, batch, waited, epochs, patience):
        progress = Progress(epoch=epoch, batch=batch, evaluations_without_improvement=waited)
        return progress.why_finished(TrainingConfig(epochs=epochs, patience=patience))

    assert why(0, 0, 0, 1, 0) == ""
    assert why(3, 0, 0, 3, 0) == why(3, 0, 2, 3, 2) == why(4, 0, 0, 3, 0) == "epochs"
    assert why(3, 0, 0, 4, 0) == why(3, 0, 9, 4, 0) == why(3, 0, 1, 4, 2) == ""
    assert why(3, 0, 2, 4, 2) == why(3, 0, 3, 4, 2) == "patience"
    assert why(2, 5, 2, 4, 2) == ""  # in the middle of an epoch
    assert [Progress(epoch=3, batch=b).epochs_begun for b in (0, 1)] == [3, 4]


def test_newest_progress(two, tmp_path):
    assert checkpoint.newest_progress(two) == PROGRESS
    record = two / "step-00000120" / checkpoint.PROGRESS
    record.write_text(record.read_text().replace('"epoch": 3', '"epoch": 7'))  # one flipped bit, and still JSON
    assert checkpoint.newest_progress(two) == Progress(step=100)
    assert checkpoint.newest_progress(tmp_path / "absent") is None


def test_a_value_that_is_not_finite_is_not_read(two):
    np.savez(two / "step-00000120" / checkpoint.STATE, a=np.array([1, np.nan], np.float32))
    sums = "".join(
        f"{sha256_file(two / 'step-00000120' / name)}  {name}\n" for name in (checkpoint.STATE, checkpoint.PROGRESS)
    )
    (two / "step-00000120" / checkpoint.SUMS).write_text(sums)
    with pytest.raises(CheckpointError, match="is damaged: a holds a value that is not finite"):
        checkpoint.read(two, 120)


def test_best_step(two):
    assert checkpoint.best_step(two, 120) == 100
    assert checkpoint.best_step(two, 100) == -1
    assert checkpoint.best_step(two, 7) is None
    for content in ("", "{}", "[]", "\x00"):
        (two / "step-00000100" / checkpoint.PROGRESS).write_text(content)
        assert checkpoint.best_step(two, 100) is None


def test_prune(two):
    checkpoint.save(two, {}, Progress(step=140), "key")
    (two / "step-notes").mkdir()
    checkpoint.prune(two, [120, 999])
    assert sorted(p.name for p in two.iterdir()) == ["step-00000120", "step-notes"]


def test_progress_is_plain_json(two):
    record = json.loads((two / "step-00000120" / checkpoint.PROGRESS).read_text())
    assert record == {
        "key": "key",
        "epoch": 3,
        "batch": 7,
        "step": 120,
        "best_step": 100,
        "best_value": 0.1 + 0.2,
        "evaluations_without_improvement": 2,
        "metrics_bytes": 4567,
        "finished": "",
        "replicas": 1,
    }
