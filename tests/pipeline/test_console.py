from pipeline.console import Console


def test_lines_are_shown_as_they_are(capsys):
    console = Console()
    line = "file [bold]:warning:[/] " + "long " * 60 + "1e-3"
    console.note(line)
    console.warn(line)
    console.error("two\nlines,   one shown")
    console.result("result")
    out, err = capsys.readouterr()
    assert out == "result\n"
    assert err == f"{line}\nwarning: {line}\nerror: two lines, one shown\n"
