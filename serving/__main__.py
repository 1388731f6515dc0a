"""Command line of the services: `python -m serving predict`, `batch` and `tf-config`."""

import argparse
import csv
import json
import os
import signal
import sys
import traceback
from itertools import islice
from pathlib import Path

from pipeline.contract import ONNX_FILES, versions
from pipeline.errors import DataError, JobError, PipelineError
from serving import server_config
from serving.onnx_classifier import OnnxClassifier

_CHUNK_BYTES = 1 << 18  # text held at a time when lines are read
_CHUNK_TEXTS = 1024  # texts held at a time when records are read

_to_json = json.JSONEncoder(ensure_ascii=False).encode


def main(argv=None):
    """Runs one command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 0 done, 2 usage, 3 bad input data, 1 anything else.
    """
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # through every `finally`
    try:
        args.run(args)
        return 0
    except BrokenPipeError:  # the reader of our output has seen enough, e.g. `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as e:
        if args.debug:
            traceback.print_exc()
        elif isinstance(e, PipelineError):
            _print_error(e)
        elif isinstance(e, KeyboardInterrupt):
            _print_error("interrupted")
        else:
            _print_error(f"{type(e).__name__}: {e} (--debug shows where)")
        return getattr(e, "exit_code", 1)


def _predict(args):
    classifier = _load(args)
    # Bytes of arguments that are not UTF-8 come as lone surrogates; they are treated like those of stdin.
    given = [_decode(os.fsencode(text)) for text in args.text]
    _answer(classifier, [given] if given else _line_chunks(sys.stdin.buffer), sys.stdout.buffer)


def _batch(args):
    source, target = Path(args.input), Path(args.output).resolve()
    if source.suffix not in (".csv", ".jsonl", ".txt"):
        raise JobError(f"--input must end in .csv, .jsonl or .txt. Received: --input {source}")
    if not source.is_file():
        raise JobError(f"there is no file {source}. Give --input the path of a file.")
    if not target.parent.is_dir() or (target.exists() and not target.is_file()):
        raise JobError(f"cannot write a file {target}. Give --output a path in an existing directory.")
    if target.exists() and target.samefile(source):
        raise JobError(f"--output must not be the input file, which it would replace. Received: --output {target}")
    classifier = _load(args)
    staged = target.with_name(f".staged-{target.name}-{os.getpid()}")
    try:
        with open(staged, "wb") as out:
            _answer(classifier, _file_chunks(source, args.text_column), out)
        os.replace(staged, target)
    finally:
        staged.unlink(missing_ok=True)


def _tf_config(args):
    if not 1 <= args.cores <= 4096:
        raise JobError(f"--cores must be in 1 to 4096. Received: --cores {args.cores}")
    models = server_config.find_models(args.base_path, args.name, _labels(args), args.server_base_path)
    for directory in (Path(args.base_path) / model.name for model in models):
        if not versions(directory):
            _print_warning(f"{directory} has no version yet; the server opens its ports once each model has one")
    target = Path(args.output).absolute()
    flags = server_config.flags(args.server_config_dir or target, args.cores, batching=args.gpu)
    command = server_config.command(flags)
    server_config.write(target, {**server_config.files(models), server_config.COMMAND: command})
    print(command, end="")


def _labels(args):
    """Returns model name -> {label: version} of `--stable` and `--canary`."""
    labels = {}
    for label in ("stable", "canary"):
        for given in getattr(args, label):
            name, _, version = given.rpartition("=")
            name = name or (args.name[0] if len(args.name) == 1 else "")
            if not name or not version.isdecimal():
                raise JobError(
                    f"--{label} takes NAME=VERSION, or VERSION after one --name. Received: --{label} {given}"
                )
            labels.setdefault(name, {})[label] = int(version)
    return labels


def _load(args):
    return OnnxClassifier.load(args.model, precision=args.precision, threads=args.threads)


def _answer(classifier, chunks, out):
    """Writes one JSON line per text, and flushes after every chunk."""
    for texts in chunks:
        for text, prediction in zip(texts, classifier.predict(texts), strict=True):
            line = _to_json(
                {
                    "text": text,
                    "label": prediction.label,
                    "confidence": prediction.confidence,
                    "probabilities": prediction.probabilities,
                }
            )
            # A lone surrogate has no UTF-8 form; backslashreplace writes JSON's own escape for it.
            out.write(line.encode("utf-8", "backslashreplace") + b"\n")
        out.flush()


def _line_chunks(stream):
    """Yields lists of lines as they arrive: a slow pipe is answered line by line, a fast one in large chunks."""
    rest = b""
    while data := stream.read1(_CHUNK_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield [_decode(line.removesuffix(b"\r")) for line in lines]
    if rest:
        yield [_decode(rest)]


def _file_chunks(path, column):
    """Yields lists of texts of a .txt, .csv or .jsonl file."""
    read = {".csv": _csv_texts, ".jsonl": _jsonl_texts, ".txt": _txt_texts}[path.suffix]
    try:
        with open(path, encoding="utf-8-sig", newline="") as f:
            texts = read(f, path, column)
            while chunk := list(islice(texts, _CHUNK_TEXTS)):
                yield chunk
    except UnicodeDecodeError as e:
        raise DataError(
            f"{path}: not valid UTF-8 ({e.reason}). Convert it, e.g. iconv -f WINDOWS-1252 -t UTF-8."
        ) from e


def _txt_texts(f, path, column):
    for line in f:
        yield line.rstrip("\r\n")


def _csv_texts(f, path, column):
    csv.field_size_limit(2**31 - 1)  # the default refuses texts above 128 KiB
    reader = csv.DictReader(f, strict=True)
    try:
        if column not in (reader.fieldnames or []):
            raise DataError(
                f"{path} has no column {column!r}; it has {', '.join(reader.fieldnames or []) or 'none'}. "
                "Name the right one with --text-column."
            )
        for row in reader:
            if None in row or None in row.values():
                raise DataError(
                    f"{path}, line {reader.line_num}: the row has more or fewer fields than the header. Complete it, "
                    "or quote fields that hold a comma."
                )
            yield row[column]
    except csv.Error as e:
        raise DataError(f"{path}, line {reader.line_num}: {e}.") from e


def _jsonl_texts(f, path, column):
    for number, line in enumerate(f, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[column]
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise DataError(
                f"{path}, line {number}: must be a JSON object with the key {column!r}. Received: {line.strip()[:80]}"
            ) from e
        if not isinstance(text, str):
            raise DataError(f"{path}, line {number}: {column!r} must be a string. Received: {column}={text!r:.80}")
        yield text


def _decode(data):
    return data.decode("utf-8", "replace")


def _print_error(message):
    print("error:", " ".join(str(message).splitlines()), file=sys.stderr)


def _print_warning(message):
    print("warning:", message, file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        _print_error(f"{message}. See {self.prog} --help.")
        raise SystemExit(JobError.exit_code)


def _parser():
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    classify = argparse.ArgumentParser(add_help=False, parents=[common])
    classify.add_argument("--model", required=True, metavar="DIR", help="a published version, e.g. models/reviews/1")
    classify.add_argument("--precision", default="float32", choices=list(ONNX_FILES), help="default: float32")
    classify.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: one per core")

    about = "Classify texts with a published version, and configure a server for it."
    parser = _Parser(prog="python -m serving", description=about)
    commands = parser.add_subparsers(required=True, metavar="predict | batch | tf-config")

    def add(name, run, summary, example, parent=classify):
        about = {
            "help": summary,
            "description": summary[0].upper() + summary[1:] + ".",
            "epilog": f"example:\n{example}",
        }
        formatter = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, parents=[parent], formatter_class=formatter, **about)
        command.set_defaults(run=run)
        return command

    example = """\
  python -m serving predict --model models/reviews/1 'A wonderful film.'
  cat reviews.txt | python -m serving predict --model models/reviews/1"""
    summary = "print one line of JSON per text: text, label, confidence, probabilities"
    predict = add("predict", _predict, summary, example)
    predict.add_argument("text", nargs="*", metavar="TEXT", help="default: the lines of standard input")

    example = "  python -m serving batch --model models/reviews/1 --input reviews.csv --output labels.jsonl"
    batch = add("batch", _batch, "classify the texts of a file into a file of JSON lines, in the same order", example)
    batch.add_argument("--input", required=True, metavar="F", help=".csv, .jsonl, or .txt with a text per line; UTF-8")
    batch.add_argument("--output", required=True, metavar="F", help="appears when complete; replaces an existing file")
    batch.add_argument("--text-column", default="text", metavar="NAME", help="of .csv or .jsonl; default: text")

    example = """\
  python -m serving tf-config --base-path models --output tf-serving
  python -m serving tf-config --base-path models --name reviews --stable 7 --canary 8 --output tf-serving"""
    summary = "write TensorFlow Serving's configuration and print the command that starts it"
    config = add("tf-config", _tf_config, summary, example, parent=common)
    config.add_argument("--base-path", required=True, metavar="DIR", help="publish.base_path of the jobs")
    config.add_argument("--name", action="append", default=[], metavar="M", help="repeatable; default: all there are")
    config.add_argument("--output", default="tf-serving", metavar="DIR", help="default: tf-serving")
    for option, what in (("base-path", "--base-path"), ("config-dir", "--output")):
        about = f"where the server finds {what}, e.g. in its container; default: there"
        config.add_argument(f"--server-{option}", default="", metavar="DIR", help=about)
    for label in ("stable", "canary"):
        about = f"the version labelled {label!r}, so that clients can ask for it by that name; repeatable"
        config.add_argument(f"--{label}", action="append", default=[], metavar="[M=]N", help=about)
    here = server_config.available_cores()
    config.add_argument("--cores", type=int, default=here, metavar="N", help="of the server; default: as many as here")
    config.add_argument("--gpu", action="store_true", help="put requests together: see batching.config before")
    return parser


if __name__ == "__main__":
    sys.exit(main())
