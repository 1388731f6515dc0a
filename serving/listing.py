"""The versions of a served model as a table for people."""

from pathlib import Path

from pipeline.contract import MANIFEST, Manifest, version_number, versions
from pipeline.errors import ArtifactError
from serving.ledger import Ledger

_COLUMNS = ("version", "created", "published", "accuracy", "macro-F1", "loss", "size", "state", "remarks")


def table(model_dir, warn):
    """Returns lines of aligned columns, the first one with their names: one line per version, also of removed ones.

    Args:
        model_dir: `base_path/name`, which need not exist.
        warn: called with one line when the ledger is missing or damaged.
    """
    model_dir = Path(model_dir)
    ledger = Ledger.read(model_dir)
    if ledger.problem:
        warn(ledger.problem)
    entries = sorted(model_dir.iterdir()) if model_dir.is_dir() else []
    named = [(version_number(path.name), path) for path in entries]
    named = [(number, path) for number, path in named if number is not None]
    present = versions(model_dir)
    lines = [(n, _describe_entry(n, path, ledger.rows.get(n, {}), present)) for n, path in named]
    numbers = {number for number, _ in named}
    lines += [(n, _describe_row(n, row)) for n, row in ledger.rows.items() if n not in numbers]
    if not lines:
        return [f"no version in {model_dir}"]
    return _align([_COLUMNS, *(line for _, line in sorted(lines, key=lambda line: line[0]))])


def _describe_entry(number, path, row, present):
    """One line for an entry of the directory."""
    if not path.is_dir():
        return _line(number, row, "", "foreign", ["neither a directory nor a link to one, but servers try to load it"])
    if path != present[number]:
        return _line(number, row, "", "ignored", [f"servers read its number in {present[number].name!r}, too"])
    state, remarks, size = [], [], ""
    if number == max(present):
        state.append("live")
    try:
        manifest = Manifest.read(path)
        row = vars(manifest) | {"published_at": row.get("published_at", "")}
        size = f"{sum(file['size'] for file in manifest.files.values()) / 1e6:.1f}MB"
        if manifest.version != number:
            remarks.append(f"its manifest says version {manifest.version}")
        manifest.check_files(path)
    except ArtifactError as e:
        is_foreign = not (path / MANIFEST).exists() and not row
        state.append("foreign" if is_foreign else "damaged")
        remarks.append(f"has no {MANIFEST}" if is_foreign else str(e).partition(". ")[0])
    return _line(number, row, size, ", ".join(state or ["kept"]), remarks)


def _describe_row(number, row):
    """One line for a version that is no longer in the directory."""
    if row.get("pending"):
        return _line(number, row, "", "unpublished", ["publishing was stopped before it was visible"])
    return _line(number, row, "", "removed", [f"on {_time(row.get('removed_at'))}"])


def _line(number, row, size, state, remarks):
    """One cell per column; `row` is one of the ledger, or a manifest's values, and may be damaged."""
    metrics, forced, republished = (_dict(row.get(key)) for key in ("metrics", "forced", "republished"))
    figures = [metrics.get(name) for name in ("accuracy", "macro_f1", "loss")]
    if forced:
        remarks = [*remarks, f"forced by {forced.get('by')}: {_join(forced.get('reasons'))}"]
    if republished:
        remarks = [*remarks, f"rollback to {republished.get('from')} by {republished.get('by')}"]
    cells = [number, _time(row.get("created")), _time(row.get("published_at")), *map(_figure, figures), size, state]
    return [*(str(cell) or "-" for cell in cells), " ".join("; ".join(remarks).split())]


def _dict(value):
    return value if isinstance(value, dict) else {}


def _join(reasons):
    return ", ".join(map(str, reasons)) if isinstance(reasons, list) else str(reasons)


def _figure(value):
    return f"{value:.4f}" if isinstance(value, (int, float)) else ""


def _time(value):
    return str(value or "").replace("+00:00", "Z")


def _align(lines):
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
