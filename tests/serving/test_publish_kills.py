"""Publishing killed at 50 points while another process looks at the directory every millisecond."""

import dataclasses
import json
import random
import re
import shutil
import subprocess
import sys

import pytest

from pipeline.contract import Manifest, ledger_rows, list_files, next_version, versions
from tests.jobs import ROOT, TIMEOUT_S, environment
from tests.serving.publish_kills import KEEP
from tests.serving.tiny import Tiny

KILLS = 50


@pytest.fixture
def candidate(tmp_path):
    """Some MB, so that copying takes a while."""
    directory = Tiny.build().write_version(tmp_path / "candidate")
    rng = random.Random(0)
    (directory / "variables").mkdir()
    for i in range(4):
        (directory / "variables" / f"part-{i}").write_bytes(rng.randbytes(1 << 20))
    dataclasses.replace(Manifest.read(directory), files=list_files(directory)).write(directory)
    return directory


def _start(*arguments):
    command = [sys.executable, "-m", "tests.serving.publish_kills", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, text=True)


def _watch(model_dir):
    process = _start("watch", model_dir)
    assert process.stdout.readline() == "ready\n"
    return process


def _answer(process):
    stdout, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    return json.loads(stdout.splitlines()[-1])


def test_a_version_is_absent_or_whole_wherever_publishing_is_killed(candidate, tmp_path):
    model_dir = tmp_path / "models" / "tiny"
    model_dir.mkdir(parents=True)
    watcher = _watch(model_dir)
    done = _answer(_start("publish", candidate, model_dir, KILLS, 7))
    watched = _answer(watcher)

    assert watched["wrong"] == []
    assert watched["looks"] > KILLS
    assert str(done["last"]) in watched["seen"]

    # A killed candidate can be published as it is, unless it was; and no other one gets its number.
    for attempt in done["attempts"]:
        assert attempt["is_free"] is not attempt["visible"], attempt
        assert attempt["next"] == attempt["version"] + attempt["is_used"], attempt

    # The kills were spread over all of it.
    killed = [a for a in done["attempts"] if a["killed"]]
    assert len(killed) >= KILLS
    assert {_where(attempt) for attempt in killed} >= {"copying", "ledger", "removing", "after"}

    # What is left is as if nothing had been killed.
    assert [p.name for p in model_dir.iterdir() if p.name.startswith(".staged-")] == []
    assert sorted(p.name for p in model_dir.iterdir()) == sorted(
        [".lock", "versions.json", *map(str, range(done["last"] - KEEP + 1, done["last"] + 1))]
    )
    rows = ledger_rows(model_dir)
    assert list(rows) == list(range(1, done["last"] + 1))
    assert [n for n, row in rows.items() if not row["removed_at"]] == list(versions(model_dir))
    assert all(row["published_at"] and row["created"] == f"made for {n}" for n, row in rows.items())
    assert not any("pending" in row for row in rows.values())
    assert next_version(model_dir) == done["last"] + 1


def _where(attempt):
    """Names the moment of a kill by what it left."""
    if any("versions.json" in name for name in attempt["left"]):
        return "ledger"
    if any(name.endswith("-removed") for name in attempt["left"]):
        return "removing"
    if attempt["visible"]:
        return "after"
    return "copying" if attempt["left"] else "before"


def test_the_watcher_sees_half_a_version(candidate, tmp_path):
    model_dir = tmp_path / "models" / "tiny"
    shutil.copytree(candidate, model_dir / "1")
    assert _answer(_watch(model_dir))["wrong"] == []
    file = model_dir / "1" / "variables" / "part-2"
    data = file.read_bytes()
    for content in (data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
        file.write_bytes(content)
        watched = _answer(_watch(model_dir))
        assert len(watched["wrong"]) == watched["looks"]
        assert re.fullmatch("1: variables/part-2", watched["wrong"][0])
    file.unlink()
    assert "holds" in _answer(_watch(model_dir))["wrong"][0]
