"""Rows of labelled text from .csv, .tsv, .jsonl and .parquet files; whatever is wrong is named by file and line."""

import codecs
import csv
import dataclasses
import glob
import gzip
import json
import math
import sys
import zlib
from pathlib import Path

import numpy as np

from pipeline.errors import DataError
from pipeline.text import well_formed

_FORMS = (".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.gz", ".jsonl.gz", ".parquet")
_RELATIVE = "Relative paths start at the current directory."


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one or more files whose text is not blank.

    Attributes:
        texts: str per row, well-formed Unicode, otherwise as in the file.
        labels: str per row; "" when no label was asked for.
        numbers: int64 per row, its number over all files, blank ones counted, from 0.
        files: (path, number of its first row) per file.
        blank: how many rows were dropped because their text is empty or white space.
    """

    texts: list
    labels: list
    numbers: np.ndarray
    files: list
    blank: int

    def place(self, row):
        """Names file and row (from 1, the header not counted) of the `row`-th text."""
        number = int(self.numbers[row])
        path, first = [file for file in self.files if file[1] <= number][-1]
        return f"{path}, row {number - first + 1}"


def read_table(pattern, text_column, label_column, require_labels=True):
    """Reads every row of the files that `pattern` names.

    Args:
        pattern: a file, a glob, or a list of them; a glob's files are sorted, a file named twice is read once.
        text_column: the column, or JSON key, of the text. Numbers are read as JSON writes them.
        label_column: the column, or JSON key, of the label; white space around it is stripped.
        require_labels: False: `label_column` is not looked at.

    Returns:
        `Rows`.

    Raises:
        DataError: a file cannot be used; one line with file, line, column and remedy.
    """
    texts, labels, numbers, files, number = [], [], [], [], 0
    for path in find_files(pattern):
        files.append((path, number))
        columns = [text_column, label_column] if require_labels else [text_column]
        for place, values in _read_file(path, columns):
            text = _as_text(values[0], place, text_column)
            if text and not text.isspace():
                texts.append(text)
                labels.append(_label(values[1], place, label_column) if require_labels else "")
                numbers.append(number)
            number += 1
        if number == files[-1][1]:
            raise DataError(f"{path} has no rows. Add rows, or leave the file out.")
    return Rows(texts, labels, np.array(numbers, np.int64), files, number - len(texts))


def find_files(pattern):
    """Returns the paths (str) that a file, a glob or a list of them names.

    Raises:
        DataError: one does not exist, is no readable file or has an unknown suffix, or a glob matches nothing.
    """
    found = []
    for name in [pattern] if isinstance(pattern, str) else pattern:
        matches = [name]
        if glob.has_magic(name) and not Path(name).exists():
            matches = sorted(path for path in glob.glob(name, recursive=True) if not Path(path).is_dir())
            if not matches:
                raise DataError(f"{name} matches no file. Check the pattern. {_RELATIVE}")
        found += matches
    for path in found:
        try:
            open(path, "rb").close()
        except OSError as e:
            raise DataError(f"cannot read {path}: {e.strerror}. Give a readable file. {_RELATIVE}") from e
        file_form(path)
    return list(dict.fromkeys(found))


def file_form(path):
    """Returns the suffix that says how a file is read, e.g. ".csv.gz".

    Raises:
        DataError: the suffix is unknown.
    """
    form = next((form for form in _FORMS if path.lower().endswith(form)), None)
    if form is None:
        raise DataError(f"{path} has an unknown suffix. Use one of {', '.join(_FORMS)}.")
    return form


def _read_file(path, columns):
    """Yields (place, values of `columns`) for every row."""
    form = file_form(path)
    if form == ".parquet":
        return _read_parquet(path, columns)
    if form.startswith(".jsonl"):
        return _read_json_lines(path, columns)
    return _read_csv(path, columns, "\t" if form.startswith(".tsv") else ",")


def _read_csv(path, columns, delimiter):
    csv.field_size_limit(sys.maxsize)  # the default refuses fields over 128 KiB
    reader = csv.reader(_lines(path), delimiter=delimiter, strict=True)
    header, start = None, 1
    try:
        for row in reader:
            place, start = f"{path}, line {start}", reader.line_num + 1
            if not row:
                continue
            if header is None:
                header = row
                where = _positions(header, columns, path)
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{place}: {len(row)} fields, but the header has {len(header)}. "
                    "Put fields that hold the delimiter, quotes or line breaks in double quotes."
                )
            yield place, [row[i] for i in where]
    except csv.Error as e:
        raise DataError(
            f"{path}, line {start}: {e}. A field that starts with a double quote must end with one, "
            'and quotes inside it are doubled ("").'
        ) from e
    if header is None:
        raise _empty(path)


def _read_json_lines(path, columns):
    for place, row in read_json_lines(path):
        for column in columns:
            if column not in row:
                raise DataError(_missing(place, column, row))
        yield place, [row[column] for column in columns]


def read_json_lines(path):
    """Yields (place, dict) for every line of a .jsonl or .jsonl.gz file that is not blank; `place` is for messages.

    Raises:
        DataError: the file cannot be read or is empty, or a line is no JSON object.
    """
    empty = True
    for line_number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        empty, place = False, f"{path}, line {line_number}"
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as e:
            raise DataError(f"{place}: not valid JSON ({e}). Write one JSON object per line.") from e
        if not isinstance(row, dict):
            raise DataError(f"{place}: not a JSON object. Write one per line. Received: {line.strip()[:40]}")
        yield place, row
    if empty:
        raise _empty(path)


def _object(pairs):
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return values


def _read_parquet(path, columns):
    import pyarrow  # here: the other forms do not need it
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _positions(file.schema_arrow.names, columns, path)
            for batch in file.iter_batches(columns=columns):
                for values in zip(*(batch.column(column).to_pylist() for column in columns), strict=True):
                    number += 1
                    yield f"{path}, row {number}", values
    except UnicodeDecodeError as e:
        raise DataError(
            f"{path}, after row {number}: a string is not valid UTF-8 ({e.reason}). Write the file again as UTF-8."
        ) from e
    except (pyarrow.ArrowException, OSError) as e:
        reason = " ".join(str(e).split())
        raise DataError(f"{path} is not a readable parquet file ({reason}). Write or copy it again.") from e


def _lines(path):
    """Yields the lines of a UTF-8 text file, `.gz` or not, with their line ends; a BOM is left out."""
    offset = 0
    number = 0
    try:
        with gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                start = len(codecs.BOM_UTF8) if number == 1 and line.startswith(codecs.BOM_UTF8) else 0
                yield line[start:].decode("utf-8")
                offset += len(line)
    except UnicodeDecodeError as e:
        raise DataError(
            f"{path}, line {number}: not valid UTF-8 at byte {offset + start + e.start} of the file ({e.reason}). "
            "Convert the file to UTF-8, e.g. iconv -f WINDOWS-1252 -t UTF-8."
        ) from e
    except (EOFError, zlib.error, OSError) as e:
        raise DataError(f"{path}, after line {number}: cannot read on ({e}). Write or copy the file again.") from e


def _positions(names, columns, path):
    """The index of each column in `names`; each must occur exactly once."""
    for column in columns:
        if column not in names:
            raise DataError(_missing(path, column, names))
        if list(names).count(column) > 1:
            raise DataError(f"{path}: column {column!r} occurs more than once in the header. Rename all but one.")
    return [list(names).index(column) for column in columns]


def _missing(place, column, names):
    return (
        f"{place}: there is no column {column!r}; it has {join_some(names)}. "
        "Set data.text_column and data.label_column to the columns that hold text and label."
    )


def join_some(values, limit=10):
    """Returns the first values, quoted and joined by commas, for a message of one line; says how many are left out."""
    values = [repr(value if len(value) <= 60 else value[:60] + "…") for value in values]
    return ", ".join(values[:limit]) + (f" and {len(values) - limit} more" if len(values) > limit else "")


def _empty(path):
    return DataError(f"{path} is empty. Give a file with rows.")


def _as_text(value, place, column):
    """A cell as well-formed text; numbers as JSON writes them; null and NaN, its form in tables, become ""."""
    if isinstance(value, str):
        return well_formed(value)
    if value is None or isinstance(value, float) and math.isnan(value):
        return ""
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    raise DataError(
        f"{place}: column {column!r} must hold text or a number. Convert it to text. "
        f"Received: {str(value)[:40]!r} ({type(value).__name__})"
    )


def _label(value, place, column):
    label = _as_text(value, place, column).strip()
    if not label:
        raise DataError(f"{place}: column {column!r} has no label. Give the row a label, or remove the row.")
    return label
