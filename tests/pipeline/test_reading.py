import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from pipeline import dataset, reading
from pipeline.errors import DataError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


def read(path, **options):
    return dataset.read_rows(str(path), "text", "label", **options)


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def _gzipped(text):
    return gzip.compress(text.encode(), mtime=0)  # the tests' names hold it, and must be those of every test process


ROWS = (["good film", 'a, "b"\nc', "电影"], ["pos", "neg", "pos"])
CSV = 'id,text,label\n1,good film,pos\n2,"a, ""b""\nc", neg \n3,电影,pos\n'
TSV = CSV.replace("a, ", "a@ ").replace(",", "\t").replace("@", ",")
JSON_LINES = "".join(json.dumps({"text": t, "label": n}) + "\n" for t, n in zip(*ROWS, strict=True))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", CSV, ROWS),
        ("a.CSV", CSV, ROWS),
        ("a.tsv", TSV, ROWS),
        ("a.jsonl", JSON_LINES, ROWS),
        ("a.csv.gz", _gzipped(CSV), ROWS),
        ("a.tsv.gz", _gzipped(TSV), ROWS),
        ("a.jsonl.gz", _gzipped(JSON_LINES), ROWS),
        ("bom.csv", b"\xef\xbb\xbftext,label\nx,y\n", (["x"], ["y"])),
        ("bom.jsonl", b'\xef\xbb\xbf{"text": "x", "label": "y"}\n', (["x"], ["y"])),
        ("crlf.csv", 'text,label\r\nx,y\r\n\r\n"1\r\n2",z\r\n', (["x", "1\r\n2"], ["y", "z"])),
        ("crlf.jsonl", '{"text": "x", "label": "y"}\r\n\r\n', (["x"], ["y"])),
        ("no-line-end.csv", "text,label\nx,y", (["x"], ["y"])),
        ("nul.csv", "text,label\na\0b,y\n", (["a b"], ["y"])),
        ("surrogate.jsonl", '{"text": "a\\ud800", "label": "\\ud83d\\ude00"}', (["a\ufffd"], ["😀"])),
        ("huge.csv", "text,label\n" + "x" * 300_000 + ",y\n", (["x" * 300_000], ["y"])),
        ("separators.csv", "text,label\na\u2028b\x0bc,y\n", (["a\u2028b\x0bc"], ["y"])),
        (
            "types.jsonl",
            '{"text": 12, "label": true}\n{"text": 1.5, "label": 3}\n{"text": "x", "label": 1.0}\n',
            (["12", "1.5", "x"], ["true", "3", "1.0"]),
        ),
    ],
)
def test_reads(tmp_path, name, content, expected):
    assert read(write(tmp_path / name, content)) == expected


def test_reads_parquet(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", other=[1, 2, 3, 4], text=["x", None, " ", "w"], label=[1, 2, None, 0])
    assert read(path) == (["x", "w"], ["1", "0"])


def test_blank_texts_are_dropped_and_counted_but_keep_their_numbers(tmp_path):
    write(tmp_path / "1.csv", 'text,label\n,\nx,a\n" \n\u3000",b\n')
    write(tmp_path / "2.jsonl", '{"text": null, "label": 1}\n{"text": NaN, "label": 1}\n{"text": "y", "label": "c"}\n')
    rows = reading.read_table([f"{tmp_path}/1.csv", f"{tmp_path}/2.jsonl"], "text", "label")
    assert (rows.texts, rows.labels, rows.blank) == (["x", "y"], ["a", "c"], 4)
    assert rows.numbers.tolist() == [1, 5]
    assert [rows.place(0), rows.place(1)] == [f"{tmp_path}/1.csv, row 2", f"{tmp_path}/2.jsonl, row 3"]


def test_labels_are_not_looked_at_when_they_are_not_required(tmp_path):
    path = write(tmp_path / "a.csv", "text\nx\ny\n")
    assert read(path, require_labels=False) == (["x", "y"], ["", ""])


def test_globs_are_sorted_lists_keep_their_order_and_no_file_is_read_twice(tmp_path):
    for name in "bac":
        write(tmp_path / f"{name}.csv", f"text,label\n{name},1\n")
    (tmp_path / "folder.csv").mkdir()
    assert read(tmp_path / "*.csv")[0] == ["a", "b", "c"]
    names = [f"{tmp_path}/c.csv", f"{tmp_path}/[ac].csv", f"{tmp_path}/b.csv"]
    assert dataset.read_rows(names, "text", "label")[0] == ["c", "a", "b"]
    write(tmp_path / "d[1].csv", "text,label\nd,1\n")
    assert read(tmp_path / "d[1].csv")[0] == ["d"]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.csv", "", ["a.csv is empty", "Give a file with rows"]),
        ("a.csv", b"\xef\xbb\xbf", ["a.csv is empty"]),
        ("a.jsonl", "\n \n", ["a.jsonl is empty"]),
        ("a.csv.gz", b"", ["a.csv.gz is empty"]),
        ("a.csv", "text,label\n\n", ["a.csv has no rows", "Add rows"]),
        (
            "a.csv",
            "body,label\nx,y\n",
            ["a.csv: there is no column 'text'; it has 'body', 'label'", "data.text_column"],
        ),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n{"text": "x"}',
            ["a.jsonl, line 2: there is no column 'label'; it has 'text'"],
        ),
        ("a.csv", "x" * 5000 + ",1\n", ["it has '" + "x" * 60 + "…', '1'. Set"]),
        ("a.csv", "text,text,label\nx,y,z\n", ["a.csv: column 'text' occurs more than once", "Rename"]),
        ("a.jsonl", '{"text": "x", "text": "y", "label": 1}', ["a.jsonl, line 1", "a key occurs twice"]),
        (
            "a.csv",
            'text,label\n"1\n2",y\nx, y,z\n',
            ["a.csv, line 4: 3 fields, but the header has 2", "in double quotes"],
        ),
        ("a.tsv", "text\tlabel\nx\ty\n\nz\n", ["a.tsv, line 4: 1 fields, but the header has 2"]),
        ("a.csv", 'text,label\nx,y\n"open,y\nmore,y\n', ["a.csv, line 3: unexpected end of data", "must end with one"]),
        ("a.csv", 'text,label\n"so" it is,y\n', ["a.csv, line 2:", 'doubled ("")']),
        ("a.csv", b"text,label\nx,y\ncaf\xe9,y\n", ["a.csv, line 3: not valid UTF-8 at byte 18 of the file", "iconv"]),
        ("a.csv", b"\xef\xbb\xbftext,label\n\xff,y\n", ["a.csv, line 2: not valid UTF-8 at byte 14 of the file"]),
        ("a.csv", "text,label\nx,y\n".encode("utf-16"), ["a.csv, line 1: not valid UTF-8 at byte 0"]),
        ("a.jsonl", b'{"text": "\xe9"}\n', ["a.jsonl, line 1: not valid UTF-8 at byte 10"]),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n{"text": ',
            ["a.jsonl, line 2: not valid JSON", "one JSON object per line"],
        ),
        ("a.jsonl", '["x", 1]\n', ["a.jsonl, line 1: not a JSON object", 'Received: ["x", 1]']),
        ("a.jsonl", "[" * 100_000, ["a.jsonl, line 1: not valid JSON"]),
        ("a.jsonl", '{"text": ["x"], "label": 1}', ["a.jsonl, line 1: column 'text' must hold text", "(list)"]),
        ("a.jsonl", '{"text": "x", "label": {}}', ["a.jsonl, line 1: column 'label' must hold text", "(dict)"]),
        ("a.csv", "text,label\nx,y\nz, \n", ["a.csv, line 3: column 'label' has no label", "remove the row"]),
        ("a.jsonl", '{"text": "x", "label": null}', ["a.jsonl, line 1: column 'label' has no label"]),
        ("a.txt", "x", ["a.txt has an unknown suffix", ".jsonl.gz, .parquet"]),
        ("a.parquet.gz", "x", ["a.parquet.gz has an unknown suffix"]),
        ("a.csv.gz", _gzipped(CSV)[:-12], ["a.csv.gz, after line", "Write or copy the file again"]),
        ("a.csv.gz", CSV, ["a.csv.gz, after line 0: cannot read on (Not a gzipped file"]),
        ("a.csv.gz", _gzipped(CSV)[:12] + b"\xff" * 40, ["a.csv.gz, after line 0: cannot read on"]),
    ],
)
def test_errors_name_file_place_and_remedy(tmp_path, name, content, parts):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as e:
        read(path)
    assert str(e.value).startswith(str(tmp_path)) and "\n" not in str(e.value)
    for part in parts:
        assert part in str(e.value)


def test_parquet_errors(tmp_path):
    broken = write(tmp_path / "broken.parquet", b"PAR1" + b"x" * 100)
    half = write_parquet(tmp_path / "half.parquet", text=["x"] * 1000, label=["y"] * 1000)
    (tmp_path / "half.parquet").write_bytes((tmp_path / "half.parquet").read_bytes()[:-300])
    no_column = write_parquet(tmp_path / "column.parquet", body=["x"], label=["y"])
    null = write_parquet(tmp_path / "null.parquet", text=["x", "y"], label=["a", None])
    binary = write_parquet(tmp_path / "binary.parquet", text=[b"x"], label=["a"])
    no_rows = write_parquet(tmp_path / "rows.parquet", text=[], label=[])
    for path, message in [
        (broken, "is not a readable parquet file"),
        (half, "is not a readable parquet file"),
        (no_column, "there is no column 'text'; it has 'body', 'label'"),
        (null, "null.parquet, row 2: column 'label' has no label"),
        (binary, "row 1: column 'text' must hold text or a number"),
        (no_rows, "rows.parquet has no rows"),
    ]:
        with pytest.raises(DataError) as e:
            read(path)
        assert message in str(e.value) and path in str(e.value) and "\n" not in str(e.value)


def test_parquet_with_invalid_utf8_or_two_equal_columns(tmp_path):
    labels = pyarrow.array(["a"])
    invalid = pyarrow.array([b"\xff"]).view(pyarrow.string())
    for names, arrays, message in [
        (["text", "label"], [invalid, labels], "after row 0: a string is not valid UTF-8"),
        (["text", "text", "label"], [labels, labels, labels], "column 'text' occurs more than once"),
    ]:
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names=names), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=f"a.parquet.*{message}"):
            read(tmp_path / "a.parquet")


def test_files_that_are_not_there(tmp_path, monkeypatch):
    (tmp_path / "folder.csv").mkdir()
    for name, message in [
        ("absent.csv", "cannot read .*absent.csv: No such file or directory. .*Relative paths"),
        ("*.jsonl", r"\*.jsonl matches no file. Check the pattern"),
        ("folder.csv", "cannot read .*folder.csv: Is a directory"),
    ]:
        with pytest.raises(DataError, match=message):
            read(tmp_path / name)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "a.csv", CSV)
    monkeypatch.setattr(reading, "open", refuse, raising=False)  # tests may run as root, who may read everything
    with pytest.raises(DataError, match="cannot read .*a.csv: Permission denied"):
        read(path)
