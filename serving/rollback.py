"""An old version again, under a new, higher number: servers ignore numbers below the one that they serve.

The copy differs from the old version in its number alone, which the manifest and the metadata of the ONNX files hold. A
fresh process makes sure of that, and that both give the same answers, before the copy becomes visible.
"""

import datetime
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx

from pipeline.contract import MANIFEST, ONNX_FILES, Manifest, list_files, next_version, version_number, versions
from pipeline.errors import ArtifactError, PipelineError, VerificationError
from pipeline.fresh_process import FreshProcess, run_fresh
from serving.actor import actor
from serving.onnx_classifier import OnnxClassifier
from serving.publish import becoming_visible, publishing, settle

# Short, long, empty, and what tokenizers stumble over.
_TEXTS = ["good", "a fine film , moving and funny .", "two hours I will never get back !!!", "", "   ", "\t\r\n"]
_TEXTS += ["naïve café – 100 %", "好看，推荐！", "\U0001f600\U0001f44d\u200d", "ﬁ ½ İ ß", "so " * 3000, "x" * 500]


def rollback(model_dir, number, note, warn, on_ready=lambda: None):
    """Publishes an old version again under the next number. Nothing is removed.

    Args:
        model_dir: `base_path/name`.
        number: the version to go back to; 0 for the newest whole one before the live one. If that is a copy itself,
            for the newest one before its original: what was rolled back once is not chosen again.
        note: called with one line per step.
        warn: called with one line for what the user should know.
        on_ready: called when the copy is about to become visible. From there on an interruption must not be reported
            as one: who ran the command again would go one version further back.

    Returns:
        The path of the new version, or of the live one if that is what was asked for.

    Raises:
        ArtifactError: there is no such version, or it is damaged; names those that can be chosen.
        VerificationError: the copy does not answer as the old version does; nothing was published.
        LockHeld: another process publishes the same model.
    """
    model_dir = Path(model_dir)
    if not versions(model_dir):
        raise ArtifactError(f"there is no version in {model_dir} to go back to. `run` publishes the first one.")
    with publishing(model_dir, model_dir.name, warn) as ledger:
        source = _choose(model_dir, number)
        live = list(versions(model_dir).values())[-1]
        if _is_whole(live) and _origin(live) == _origin(source):
            copy = "" if live == source else f"; it is a copy of version {_origin(live)}"
            note(f"nothing to do: {live} is live already{copy}")
            return live
        target = model_dir / str(next_version(model_dir))
        note(f"publishing {source} again as {target}, checked in a fresh process")
        with becoming_visible(ledger, target) as staged:
            _copy(source, staged, int(target.name))
            _compare_in_fresh_process(source, staged)
            on_ready()
        settle(ledger, target, warn)
    return target


def _choose(model_dir, number):
    """Returns the path of the whole version that is to be published again."""
    present = versions(model_dir)
    if number:
        if number not in present:
            raise ArtifactError(f"there is no version {number} in {model_dir}. {_others(present)}")
        try:
            Manifest.read(present[number]).check_files(present[number])
        except ArtifactError as e:
            raise ArtifactError(
                f"version {number} cannot be published again: {str(e).partition('. ')[0]}. {_others(present)}"
            ) from e
        return present[number]
    live, path = list(present.items())[-1]
    first = _origin(path)
    for candidate in (present[n] for n in reversed(present) if n < first):
        if _is_whole(candidate):
            return candidate
    copy = "" if first == live else f", which is live as {live}"
    raise ArtifactError(f"there is no whole version before {first}{copy}, in {model_dir}. {_others(present)}")


def _others(present):
    whole = [str(number) for number, path in present.items() if _is_whole(path)]
    live = str(list(present)[-1])
    choose = "; choose one with --to N" if set(whole) - {live} else ""
    return f"Whole versions: {', '.join(whole) or 'none'}{choose}."


def _is_whole(path):
    try:
        Manifest.read(path).check_files(path)
    except ArtifactError:
        return False
    return True


def _origin(path):
    """Returns the number of the first version with the weights of this one."""
    try:
        return Manifest.read(path).republished.get("from", version_number(path.name))
    except ArtifactError:
        return version_number(path.name)


def _copy(source, staged, number):
    """Copies a version into an empty directory under another number; keys that we do not know stay in its manifest."""
    shutil.copytree(source, staged, dirs_exist_ok=True)
    values = json.loads((source / MANIFEST).read_text(encoding="utf-8"))
    for file in filter(_is_onnx, values["files"]):
        graph = onnx.load_model(staged / file, load_external_data=False)
        _set_version(graph, number)
        _replace(staged / file, graph.SerializeToString())
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    files = list_files(staged)
    values["version"] = number
    values["files"] = {file: files[file] for file in values["files"]}
    values["republished"] = {"from": _origin(source), "by": actor(), "at": now}
    _replace(staged / MANIFEST, (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())


def _is_onnx(file):
    return file.endswith(".onnx")


def _set_version(graph, number):
    for entry in graph.metadata_props:
        if entry.key == "version":
            entry.value = str(number)


def _replace(path, data):
    path.unlink()  # the old file may be read-only
    path.write_bytes(data)


def _compare_in_fresh_process(old, new):
    with FreshProcess("serving.rollback", old, new) as process:
        problem = process.wait()
    if problem:
        raise VerificationError(
            f"the copy of {old} could not be shown to be the same: {problem}. Nothing was published."
        )


# What follows runs in the fresh process.


def compare(old, new):
    """Makes sure that two version directories differ in their number alone.

    Raises:
        VerificationError: they differ in more; says in what.
        ArtifactError: one of them is damaged.
    """
    directories = Path(old), Path(new)
    manifests = [Manifest.read(path) for path in directories]
    for path, manifest in zip(directories, manifests, strict=True):
        manifest.check_files(path)
    values = [json.loads((path / MANIFEST).read_text(encoding="utf-8")) for path in directories]
    _require_equal(MANIFEST, *({**v, "version": 0, "files": list(v["files"]), "republished": 0} for v in values))
    for file in manifests[0].files:
        if _is_onnx(file):
            graphs = [onnx.load_model(path / file, load_external_data=False) for path in directories]
            _require_equal(f"the version in {file}", _version(graphs[1]), str(manifests[1].version))
            _require_equal(file, *map(_without_version, graphs))
        else:
            _require_equal(file, *(m.files[file] for m in manifests))
    for precision, file in ONNX_FILES.items():
        if file in manifests[0].files:
            _require_equal(f"what {file} answers", *(_answers(path, precision) for path in directories))


def _require_equal(what, one, other):
    if one != other:
        raise VerificationError(f"{what} differs")


def _without_version(graph):
    """Bytes of an ONNX graph but for its version."""
    _set_version(graph, 0)
    return graph.SerializeToString(deterministic=True)


def _version(graph):
    return next((entry.value for entry in graph.metadata_props if entry.key == "version"), None)


def _answers(version_dir, precision):
    # One thread of the CPU: the same sums in the same order.
    classifier = OnnxClassifier.load(version_dir, precision, providers=["CPUExecutionProvider"], threads=1)
    answers = classifier.probabilities(_TEXTS)
    if not np.isfinite(answers).all():
        raise VerificationError(f"an answer of {precision} is not finite")
    return answers.tobytes()


if __name__ == "__main__":
    try:
        run_fresh(compare, *sys.argv[1:])
    except PipelineError as e:
        sys.exit(str(e).rstrip("."))
