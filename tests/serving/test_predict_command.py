import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from serving import __main__ as command
from tests.serving.tiny import LABELS, TEXTS, Tiny

ROOT = Path(__file__).parents[2]
ATOL = 1e-5


@pytest.fixture(scope="module")
def tiny():
    return Tiny.build()


@pytest.fixture(scope="module")
def version_dir(tiny, tmp_path_factory):
    return tiny.write_version(tmp_path_factory.mktemp("models") / "tiny" / "3", precisions=["float32"])


def _start(*args, **kwargs):
    args = [os.fsencode(a) if isinstance(a, str | Path) else a for a in args]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "serving", *args], cwd=ROOT, **pipes | kwargs)


def _call(*args, stdin=b""):
    """Returns exit code, stdout and stderr of a real process."""
    process = _start(*args)
    out, err = process.communicate(stdin, timeout=60)
    return process.returncode, out, err.decode()


def _check(output, texts, tiny):
    answers = [json.loads(line) for line in output.splitlines()]
    assert [a["text"] for a in answers] == texts
    expected = tiny.expected_probabilities(texts)
    assert [a["label"] for a in answers] == [LABELS[i] for i in expected.argmax(axis=1)]
    got = [[a["probabilities"][label] for label in LABELS] for a in answers]
    np.testing.assert_allclose(got, expected, rtol=0, atol=ATOL)
    assert [a["confidence"] for a in answers] == [max(a["probabilities"].values()) for a in answers]


def test_texts_as_arguments(version_dir, tiny):
    code, out, err = _call("predict", "--model", version_dir, "--threads", "1", *TEXTS, b"caf\xe9")
    assert (code, err) == (0, "")
    _check(out, [*TEXTS, "caf\ufffd"], tiny)


def test_lines_of_standard_input(version_dir, tiny):
    lines = "good\r\n\n这部电影\nlast line without an end".encode() + b" \xff\xed\xa0\x80"
    code, out, err = _call("predict", "--model", version_dir, stdin=lines)
    assert (code, err) == (0, "")
    _check(out, ["good", "", "这部电影", "last line without an end \ufffd\ufffd\ufffd\ufffd"], tiny)


def test_no_input_gives_no_output(version_dir):
    assert _call("predict", "--model", version_dir) == (0, b"", "")


def test_answers_come_while_the_input_is_still_open(version_dir):
    process = _start("predict", "--model", version_dir)
    try:
        for text in ("good", "bad"):
            process.stdin.write(f"{text}\n".encode())
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["text"] == text
    finally:
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_closed_reader_ends_it_quietly(version_dir):
    process = _start("predict", "--model", version_dir)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(b"good\n" * 100_000, timeout=60)
    assert (process.returncode, err) == (1, b"")


def test_chunks_are_bounded(monkeypatch):
    read, write = os.pipe()
    lines = [f"line {i}" * 50 for i in range(100)]
    os.write(write, "\n".join(lines).encode())
    os.close(write)
    monkeypatch.setattr(command, "_CHUNK_BYTES", 1000)
    with open(read, "rb") as stream:
        chunks = list(command._line_chunks(stream))
    assert [line for chunk in chunks for line in chunk] == lines
    assert max(map(len, chunks)) <= 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.txt", 'good film\r\nbad, "film"\n\n很好'),
        ("in.csv", '\ufeffid,body\n1,good film\n2,"bad, ""film"""\n3,\n4,很好\n'),
        (
            "in.jsonl",
            '{"body": "good film"}\n{"body": "bad, \\"film\\""}\n\n{"id": 1, "body": ""}\n{"body": "\\u5f88好"}',
        ),
    ],
)
def test_batch(version_dir, tiny, tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode())
    files = "--input", tmp_path / name, "--output", tmp_path / "out.jsonl"
    assert _call("batch", "--model", version_dir, *files, "--text-column", "body") == (0, b"", "")
    _check((tmp_path / "out.jsonl").read_bytes(), ["good film", 'bad, "film"', "", "很好"], tiny)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "out.jsonl"])


def _main(capfd, *args):
    """Runs the command in this process, which is quicker; returns exit code and stderr."""
    try:
        code = command.main([str(a) for a in args])
    except SystemExit as e:
        code = e.code
    out, err = capfd.readouterr()
    assert out == ""
    return code, err


def test_batch_of_many_and_long_rows(version_dir, tmp_path, capfd):
    texts = [f"good {i}" for i in range(2500)] + ["bad " * 50_000, "line\nbreak"]
    (tmp_path / "in.csv").write_text("text\n" + "\n".join(f'"{text}"' for text in texts), encoding="utf-8")
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    assert _main(capfd, "batch", "--model", version_dir, "--input", tmp_path / "in.csv", "--output", out) == (0, "")
    assert [json.loads(line)["text"] for line in out.read_text(encoding="utf-8").splitlines()] == texts


def test_a_lone_surrogate_comes_back_as_it_was(version_dir, tmp_path, capfd):
    (tmp_path / "in.jsonl").write_text('{"text": "good \\ud800"}')
    out = tmp_path / "out.jsonl"
    assert _main(capfd, "batch", "--model", version_dir, "--input", tmp_path / "in.jsonl", "--output", out) == (0, "")
    assert json.loads(out.read_bytes())["text"] == "good \ud800"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.csv", "id,body\n1,good\n", "no column 'text'; it has id, body. Name the right one"),
        ("in.csv", "", "no column 'text'; it has none"),
        ("in.csv", "id,text\n1,good\n2\n", "in.csv, line 3: the row has more or fewer fields than the header"),
        ("in.csv", "id,text\n1,good, or not\n", "in.csv, line 2: the row has more or fewer fields than the header"),
        ("in.csv", 'id,text\n1,"good\n2,bad\n', "in.csv, line"),
        ("in.jsonl", "[" * 100_000, "in.jsonl, line 1: must be a JSON object"),
        ("in.jsonl", '{"text": "good"}\n{"text": 5}\n', "in.jsonl, line 2: 'text' must be a string. Received: text=5"),
        ("in.jsonl", '{"text": "good"}\n\n["text"]\n', "in.jsonl, line 3: must be a JSON object with the key 'text'"),
        ("in.jsonl", '{"text": "good"', "in.jsonl, line 1: must be a JSON object"),
    ],
)
def test_bad_rows_are_named_and_leave_no_output(version_dir, tmp_path, capfd, name, content, message):
    (tmp_path / name).write_text(content)
    out = tmp_path / "out.jsonl"
    code, err = _main(capfd, "batch", "--model", version_dir, "--input", tmp_path / name, "--output", out)
    assert code == 3
    assert message in err
    assert err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "required"),
        (("predict", "good"), "--model"),
        (("predict", "--model", "{model}", "--precision", "int4", "good"), "invalid choice: 'int4'"),
        (("predict", "--model", "{model}", "--threads", "0", "good"), "threads=0"),
        (("batch", "--model", "{model}", "--input", "{tmp}/none.csv", "--output", "{tmp}/o"), "no file"),
        (("batch", "--model", "{model}", "--input", "{tmp}/in.pdf", "--output", "{tmp}/o"), ".csv, .jsonl or .txt"),
        (("batch", "--model", "{model}", "--input", "{tmp}/in.txt", "--output", "{tmp}/no/o"), "cannot write"),
        (("batch", "--model", "{model}", "--input", "{tmp}/in.txt", "--output", "{tmp}"), "cannot write"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(version_dir, tmp_path, capfd, args, message):
    (tmp_path / "in.txt").write_text("good")
    code, err = _main(capfd, *(a.format(model=version_dir, tmp=tmp_path) for a in args))
    assert code == 2
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "{tmp}/none"), "is not a version directory"),
        (("--model", "{model}", "--precision", "int8"), "exported: float32"),
    ],
)
def test_errors_of_the_version_keep_their_exit_code(version_dir, tmp_path, capfd, args, message):
    code, err = _main(capfd, "predict", *(a.format(model=version_dir, tmp=tmp_path) for a in args), "good")
    assert code == 1
    assert message in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path, capfd):
    code, err = _main(capfd, "predict", "--debug", "--model", tmp_path, "good")
    assert code == 1
    assert "Traceback" in err


def test_an_unexpected_error_is_one_line(version_dir, capfd, monkeypatch):
    monkeypatch.setattr(command, "_answer", lambda *_: 1 / 0)
    code, err = _main(capfd, "predict", "--model", version_dir, "good")
    assert (code, err) == (1, "error: ZeroDivisionError: division by zero (--debug shows where)\n")


def test_ctrl_c_is_one_line_and_leaves_no_output(version_dir, tmp_path, capfd, monkeypatch):
    def answer(classifier, chunks, out):
        out.write(b"first")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_answer", answer)
    (tmp_path / "in.txt").write_text("good")
    files = "--input", tmp_path / "in.txt", "--output", tmp_path / "out.jsonl"
    assert _main(capfd, "batch", "--model", version_dir, *files) == (1, "error: interrupted\n")
    assert [p.name for p in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.parametrize("name", ["predict", "batch"])
def test_help_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as e:
        command.main([name, "--help"])
    assert e.value.code == 0
    assert f"python -m serving {name} --model models/reviews/1" in capsys.readouterr().out


def test_batch_refuses_other_encodings_and_its_own_input(version_dir, tmp_path, capfd):
    source, out = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_bytes("text\ncaf\u00e9\n".encode("latin-1"))
    code, err = _main(capfd, "batch", "--model", version_dir, "--input", source, "--output", out)
    assert (code, "not valid UTF-8" in err, out.exists()) == (3, True, False)
    source.write_text("text\ngood\n")
    code, err = _main(capfd, "batch", "--model", version_dir, "--input", source, "--output", source)
    assert (code, "--output must not be the input file" in err) == (2, True)
    assert source.read_text() == "text\ngood\n"
