"""TensorFlow Serving's configuration files and the flags that suit a machine.

Flags, and what they do when they are left out, are those of `tensorflow_serving/model_servers/main.cc`.
"""

import dataclasses
import json
import os
import shlex
from pathlib import Path

from pipeline.contract import JOB_NAME, versions
from pipeline.errors import JobError
from pipeline.files import write_atomic

MODELS, BATCHING, MONITORING = "models.config", "batching.config", "monitoring.config"
COMMAND = "serve.sh"
GRPC_PORT, REST_PORT = 8500, 8501  # those of TensorFlow Serving's images

# Rows that the server runs at once: max_execution_batch_size in batching.config. The largest warm-up record and the
# client's largest request.
MAX_BATCH_ROWS = 32

_CONFIG_DIR = Path(__file__).parent / "config"

_MODELS_HEADER = """\
# The models that TensorFlow Serving serves; written by `python -m serving tf-config`.
"""

_LATEST = """\
    # The newest version only: a version that is published is loaded beside the old one, warmed up and swapped in.
    model_version_policy { latest { num_versions: 1 } }
"""

# A label can be moved only to a version that is loaded: the server checks the labels of a changed file before it looks
# at its policy. So the policy must load a new version by itself, and keep those that labels still point at:
# `specific` does not do the one, `latest` not the other.
_ALL = """\
    # Every version in the directory: a label can only be moved to a version that is loaded already, and must keep the
    # one it points at while newer ones are published. Publishing leaves publish.keep_versions of them; rollbacks add.
    model_version_policy { all {} }
    # Ask for models/NAME/labels/stable. A request without a label gets the newest version, labelled or not. Run
    # tf-config again to move a label; the server reads this file again by itself. Move `stable` before keep_versions
    # removes its version.
"""

@dataclasses.dataclass(frozen=True)
class Model:
    """One entry of models.config.

    Attributes:
        name: the served model's name.
        base_path: absolute path of the directory that holds its versions.
        labels: label, e.g. "stable" -> version number; may be empty.
    """

    name: str
    base_path: str
    labels: dict


def find_models(base_path, names, labels, server_base_path=""):
    """Returns the models to serve, sorted by name.

    Args:
        base_path: `publish.base_path` of the jobs.
        names: which models; empty: all that have a version.
        labels: model name -> {label: version number}.
        server_base_path: where the server finds `base_path`, "" for there.

    Raises:
        JobError: there is none, a name cannot be one, or a label points at a version that is not published.
    """
    base_path = Path(base_path).absolute()
    found = [p.name for p in base_path.iterdir() if JOB_NAME.fullmatch(p.name)] if base_path.is_dir() else []
    chosen = sorted(set(names or (name for name in found if versions(base_path / name))))
    if not chosen:
        raise JobError(f"no model has a version under {base_path}. Publish one first, or name it with --name.")
    for name in chosen:
        if not JOB_NAME.fullmatch(name):
            raise JobError(f"a model's name has only a-z, 0-9 and -. Received: --name {name}")
    for name, of_model in labels.items():
        if name not in chosen:
            raise JobError(f"a label is given for {name!r}, which is not among the models {', '.join(chosen)}.")
        there = versions(base_path / name)
        for label, version in of_model.items():
            if version not in there:
                raise JobError(
                    f"{base_path / name} has no version {version}; it has {', '.join(map(str, there)) or 'none'}. "
                    f"Received: --{label} {version}"
                )
    served = Path(server_base_path or base_path)
    return [Model(name, str(served / name), labels.get(name, {})) for name in chosen]


def files(models):
    """Returns file name -> text of the three configuration files."""
    fixed = {name: (_CONFIG_DIR / name).read_text(encoding="utf-8") for name in (BATCHING, MONITORING)}
    return {MODELS: _models_config(models), **fixed}


def _models_config(models):
    lines = [_MODELS_HEADER, "model_config_list {\n"]
    for model in models:
        lines += [
            "  config {\n",
            f"    name: {_quoted(model.name)}\n",
            f"    base_path: {_quoted(model.base_path)}\n",
            '    model_platform: "tensorflow"\n',
            _ALL if model.labels else _LATEST,
        ]
        for label, version in model.labels.items():
            lines.append(f"    version_labels {{ key: {_quoted(label)} value: {version} }}\n")
        lines.append("  }\n")
    return "".join([*lines, "}\n"])


def _quoted(text):
    return json.dumps(text, ensure_ascii=False)


def flags(config_dir, cores, batching):
    """Returns the arguments of tensorflow_model_server, ports included.

    Args:
        config_dir: where the server finds the configuration files.
        cores: CPU cores that the server may use.
        batching: whether the server puts requests together; see batching.config.
    """
    # Threads: TensorFlow would count the cores of the whole machine, also in a container that may use two of them.
    given = {
        "port": GRPC_PORT,
        "rest_api_port": REST_PORT,
        "model_config_file": f"{config_dir}/{MODELS}",
        "model_config_file_poll_wait_seconds": 10,  # by default it is read once
        # When a server with labels starts, no version is loaded yet; without this it would refuse them and end.
        "allow_version_labels_for_unavailable_models": "true",
        "monitoring_config_file": f"{config_dir}/{MONITORING}",
        "file_system_poll_wait_seconds": 1,  # for new versions
        # With one, or none, a version that fails to load holds up every model for as long as it is retried.
        "num_load_threads": 2,
        # A published version is whole, so only the storage can be at fault: twice more, 10 s apart, instead of five
        # times, a minute apart.
        "max_num_load_retries": 2,
        "load_retry_interval_micros": 10_000_000,
        # By default 4 for each core, and 16 clients at once are refused (RESOURCE_EXHAUSTED).
        "grpc_max_threads": max(256, 16 * cores),
        "rest_api_num_threads": max(64, 4 * cores),
        "tensorflow_intra_op_parallelism": cores,
        "tensorflow_inter_op_parallelism": cores,
    }
    if batching:
        given |= {"enable_batching": "true", "batching_parameters_file": f"{config_dir}/{BATCHING}"}
    return [f"--{name}={value}" for name, value in given.items()]


def command(arguments):
    """Returns the shell script that starts the server."""
    lines = ["exec tensorflow_model_server", *(f"  {shlex.quote(a)}" for a in arguments), '  "$@"']
    return "#!/bin/sh\n# Written by `python -m serving tf-config`.\n" + " \\\n".join(lines) + "\n"


def write(directory, texts):
    """Writes file name -> text into `directory`; a server that reads meanwhile sees a file as it was or as it is.

    Raises:
        JobError: the directory cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomic(directory / name, text)
        (directory / COMMAND).chmod(0o755)
    except OSError as e:
        raise JobError(f"cannot write to {directory}: {e.strerror}. Give --output another directory.") from e


def available_cores():
    """Returns how many CPU cores this process may use, in a container those of its limit."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
