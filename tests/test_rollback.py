"""A scheduled job whose version was rolled back."""

import dataclasses
import shutil

import pytest

from pipeline.contract import Manifest
from serving.publish import publish
from tests.jobs import contents, copy_trained, make_job, make_rows, published_job, write_csv
from tests.serving.stand_in import StandIn, rest_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return published_job(tmp_path_factory)


def test_a_rolled_back_version_does_not_come_back_by_itself(published, tmp_path):
    """Version 1 is an older one, 2 is the job's; they differ in nothing but what the manifest says."""
    keep = ["data", "checkpoints", "best", "metrics.jsonl", "evaluation"]
    job = copy_trained(published, tmp_path, keep)
    made = Manifest.read(published.model_dir / "1")
    for version, key in ((1, "of another week"), (2, made.export_key)):
        candidate = shutil.copytree(published.model_dir / "1", tmp_path / f"candidate-{version}")
        dataclasses.replace(made, version=version, export_key=key).write(candidate)
        publish(candidate, job.model_dir, keep_versions=5)
    done = job.run()
    assert (done.code, "nothing to do: this job is done" in done.stderr) == (0, True), done.stderr

    # A training may be at work meanwhile; neither its data nor its run directory is touched.
    before = contents(job.directory / "runs")
    done = job.run(command="rollback")
    assert (done.code, done.stdout) == (0, f"live: {job.model_dir / '3'}\n"), done.stderr
    assert contents(job.directory / "runs") == before
    assert Manifest.read(job.model_dir / "3").republished["from"] == 1

    served = StandIn(job.model_dir / "3")
    served.states = {3: [("AVAILABLE", "OK", "")]}
    with rest_server(served) as address:
        done = job.run("--wait-for", address)
    assert (done.code, "this job's version was rolled back, version 3 took its place" in done.stderr) == (0, True)
    assert f"{address} serves version 3 of tiny" in done.last_line

    # Nor after a week whose data the gate refused.
    kept = shutil.copytree(job.directory / "runs", tmp_path / "kept")
    data = job.data_file.read_bytes()
    write_csv(job.data_file, [row for row in make_rows() if row[1] == "good"])
    assert job.run().code == 4
    job.data_file.write_bytes(data)
    assert "this job's version was rolled back, version 3 took its place" in job.run().error
    shutil.rmtree(job.directory / "runs")
    shutil.move(kept, job.directory / "runs")
    assert job.versions == ["1", "2", "3"]
    shutil.rmtree(job.model_dir / "2")  # nor when the bad version was thrown away
    for command in ("run", "export", "publish"):
        done = job.run(command=command)
        assert (done.code, "nothing to do" in done.error) == (0, True)
    assert job.versions == ["1", "3"]

    # Until it is asked for: its copy counts as this job's version.
    shutil.copytree(tmp_path / "candidate-2", job.model_dir / "2")
    assert job.run("--to", "2", command="rollback").code == 0
    assert job.versions == ["1", "2", "3", "4"]
    assert "nothing to do: this job is done" in job.run().stderr
    assert job.run("--to", "1", command="rollback").code == 0
    assert "version 5 took its place" in job.run().error

    # New data makes a new run, which is compared with the version that is live now.
    make_job(tmp_path, make_rows(400), training={"epochs": 1})
    done = job.run("--set", "evaluation.min_value=0.9999")
    assert done.code == 4, done.stderr
    assert "starting a new run" in done.stderr
    assert job.report["gate"]["live"]["version"] == 5
    assert job.versions == ["1", "2", "3", "4", "5"]
