"""The compose file and the Kubernetes manifests: valid by the schemas, and one with the code they start.

The schemas are those that the two checkers carry: nothing is fetched, nothing is started.
"""

import copy
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from pipeline import errors
from pipeline.config import load_job
from serving import server_config
from serving.transport import check_address
from tests.serving.stand_in import StandIn, rest_server
from tests.serving.tiny import Tiny

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
RELEASES = ["1.31", "1.37"]  # podFailurePolicy is stable since 1.31


def _objects():
    """Returns (kind, name) -> object of all manifests."""
    loaded = [o for path in MANIFESTS for o in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    found = {(o["kind"], o["metadata"]["name"]): o for o in loaded}
    assert len(found) == len(loaded)
    return found


@pytest.fixture(scope="module")
def objects():
    return _objects()


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def config():
    """What tf-config writes for the model of the examples: file name -> text, and the flags."""
    model = server_config.Model("movie-reviews", "/models/movie-reviews", {})
    return server_config.files([model]), server_config.flags("/etc/tensorflow-serving", cores=2, batching=False)


def _pod(objects, kind, name):
    spec = objects[kind, name]["spec"]
    return spec.get("jobTemplate", {"spec": spec})["spec"]["template"]["spec"]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", sorted(_objects()), ids="/".join)
def test_manifest_is_valid(objects, kind, release):
    kubernetes_validate.validate(objects[kind], release, strict=True)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        (("CronJob", "movie-reviews-training"), ["spec", "concurrencyPolicies"], "Forbid"),  # unknown key
        (("CronJob", "movie-reviews-training"), ["spec", "jobTemplate", "spec", "backoffLimit"], "six"),
        (("Deployment", "movie-reviews"), ["spec", "template", "spec", "containers"], None),
        (("Deployment", "movie-reviews"), ["spec", "selector"], ...),  # missing
        (("HorizontalPodAutoscaler", "movie-reviews"), ["spec", "maxReplicas"], ...),
    ],
)
def test_broken_manifest_is_refused(objects, kind, path, value):
    broken = copy.deepcopy(objects[kind])
    *parents, last = path
    inner = broken
    for key in parents:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    for release in RELEASES:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, release, strict=True)


def _check_compose(path):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_compose_file(compose, tmp_path):
    done = _check_compose(COMPOSE)
    assert done.returncode == 0, done.stdout
    compose = copy.deepcopy(compose)
    compose["services"]["serving"]["volume"] = []
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(compose))
    done = _check_compose(tmp_path / "broken.yaml")
    assert done.returncode == 1
    assert "volume" in done.stdout


def test_configuration_is_what_tf_config_writes(objects, compose, config):
    files, flags = config
    assert objects["ConfigMap", "tf-serving"]["data"] == files
    assert {p.name: p.read_text(encoding="utf-8") for p in (ROOT / "deploy" / "tf-serving").iterdir()} == files
    (container,) = _pod(objects, "Deployment", "movie-reviews")["containers"]
    service = compose["services"]["serving"]
    assert container["args"] == service["command"] == flags
    assert container["command"] == service["entrypoint"] == ["tensorflow_model_server"]
    assert container["image"] == service["image"]
    assert f"ARG TF_SERVING_VERSION={service['image'].partition(':')[2]}\n" in (ROOT / "Dockerfile").read_text()
    assert container["resources"]["limits"]["cpu"] == container["resources"]["requests"]["cpu"] == "2"
    assert service["cpus"] == 2


def test_flags_of_the_image_are_those_of_tf_config(config):
    found = re.findall(r"ENTRYPOINT (\[\"/usr/bin/tf.*?\])", (ROOT / "Dockerfile").read_text(), re.DOTALL)
    assert len(found) == 2 and found[0] == found[1]
    flags = yaml.safe_load(found[0].replace("\\\n", ""))[1:]
    assert flags and set(flags) <= set(config[1])


def test_parts_fit_together(objects):
    """Every volume, label, port and name that a manifest refers to is there."""
    for kind, name in [("Deployment", "movie-reviews"), ("CronJob", "movie-reviews-training")]:
        pod = _pod(objects, kind, name)
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in objects
            else:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in objects
    deployment, service = objects["Deployment", "movie-reviews"], objects["Service", "movie-reviews"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {p["targetPort"]: p["port"] for p in service["spec"]["ports"]} == {"grpc": 8500, "rest": 8501}
    assert container["livenessProbe"]["httpGet"]["port"] in ports
    assert f'path: "{container["livenessProbe"]["httpGet"]["path"]}"' in objects["ConfigMap", "tf-serving"]["data"][
        "monitoring.config"
    ]
    target = objects["HorizontalPodAutoscaler", "movie-reviews"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) in objects
    assert objects["PersistentVolumeClaim", "models"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_training_job(objects, tmp_path):
    cron = objects["CronJob", "movie-reviews-training"]["spec"]
    assert cron["concurrencyPolicy"] == "Forbid"
    pod = _pod(objects, "CronJob", "movie-reviews-training")
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
    rules = cron["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    on_exit = {code: r["action"] for r in rules if "onExitCodes" in r for code in r["onExitCodes"]["values"]}
    fails, again = (errors.JobError, errors.DataError, errors.GateRefused), errors.Interrupted
    assert on_exit == {**{e.exit_code: "FailJob" for e in fails}, again.exit_code: "Ignore"}
    (container,) = pod["containers"]
    assert all(r["onExitCodes"]["containerName"] == container["name"] for r in rules if "onExitCodes" in r)
    # The job file is one, and what it names is mounted.
    (tmp_path / "job.toml").write_text(objects["ConfigMap", "movie-reviews-job"]["data"]["job.toml"])
    job = load_job(tmp_path / "job.toml", [])
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(job.model_dir.parent), str(job.run_dir.parents[1]), "/etc/job"} == mounts
    assert job.name in objects["ConfigMap", "tf-serving"]["data"]["models.config"]
    command, file, flag, address, *_ = container["args"]
    assert (command, file, flag) == ("run", "/etc/job/job.toml", "--wait-for")
    check_address(address)
    assert ("Service", address.split("/")[2].split(":")[0]) in objects


def test_compose_training(compose):
    training = compose["services"]["training"]
    assert (ROOT / "deploy" / training["build"]["context"]).resolve() == ROOT
    assert f" AS {training['build']['target']}\n" in (ROOT / "Dockerfile").read_text()
    command, file, flag, address = training["command"]
    assert (command, flag) == ("run", "--wait-for")
    assert load_job(ROOT / file, []).name == "movie-reviews"
    check_address(address)
    assert address.split(":")[0] in compose["services"]


def test_probe_knows_whether_a_version_is_available(objects, compose, tmp_path):
    (container,) = _pod(objects, "Deployment", "movie-reviews")["containers"]
    command = container["startupProbe"]["exec"]["command"]
    assert container["readinessProbe"]["exec"]["command"] == command
    assert compose["services"]["serving"]["healthcheck"]["test"] == ["CMD", *command]
    model = StandIn(Tiny.build().write_version(tmp_path / "3", precisions=["float32"]), name="movie-reviews")

    def probe(port):
        return subprocess.run([a.replace("8501", port) for a in command], capture_output=True, timeout=30).returncode

    with rest_server(model) as address:
        port = address.rpartition(":")[2]
        for states, is_ready in [
            ({3: [("AVAILABLE", "OK", "")]}, True),
            ({3: [("AVAILABLE", "OK", "")], 4: [("LOADING", "OK", "")]}, True),
            ({3: [("LOADING", "OK", "")]}, False),
            ({3: [("END", "UNAVAILABLE", "no disk")]}, False),
        ]:
            model.states = states
            assert (probe(port) == 0) is is_ready, states
        model.name = "other"
        assert probe(port) != 0
    assert probe("1") != 0  # nobody there
