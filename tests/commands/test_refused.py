"""Command lines that are refused: one line on stderr that names what is wrong, the exit code, and no output."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.cli import run
from partita.partition_reports import storage
from tests.conftest import TinyCheckpoint
from tests.partition_reports.report_changes import mixed
from tests.test_outputs import write_model

CASES = """
bench package -e cpu
    2 CPU :: twice
    2 -e gpuu :: unknown provider 'gpuu'
    2 -e '' :: --provider is empty
    2 --rounds 0 :: --rounds is 0
    2 --max-new-tokens 1 :: --max-new-tokens is 1
    2 --prefill-chunk 0 :: --prefill-chunk is 0
    2 --threads 0 :: --threads is 0
    2 --timeout nan :: --timeout is nan
    2 --baseline webgpu :: --baseline webgpu: not among the measured chains: cpu
    2 --provider-option cuda.device_id=0 :: cuda
    1 --against ./absent :: no such file or folder
    2 --against package :: is listed twice
    2 --token-ids :: --token-ids needs --prompt
    2 --prompt a --prompt-tokens 4 :: set one of them
    2 --prompt 1,x --token-ids :: not a list of token ids
    1 --prompt 1,9999 --token-ids :: token id 9999
    1 --prompt '' :: the prompt is empty
    1 --prompt-tokens 60 :: exceed the cache length of
run
    1 absent/from/here hi :: no such file or folder, and not a hub id
    1 ./absent hi :: partita: ./absent: no such file or folder
    1 absent/ hi :: partita: absent/: no such file or folder
    2 '' :: MODEL
    2 checkpoint --report r.json :: are only for a prompt
    2 checkpoint hi -e gpu9 :: gpu9
    2 checkpoint hi --precision fp3 :: fp3
    2 checkpoint 'not ids' --token-ids :: is not a list of token ids
    1 checkpoint/config.json hi :: a file of a checkpoint, not a package
    2 checkpoint hi --revision v1 :: --revision v1 is only for models of the hub
    1 rows.jsonl hi :: a file; a package is a folder
    1 reports hi :: not a Partita package
    1 ../owner/name@main hi :: not a hub id
export checkpoint out --max-length 64
    2 --target cpu,cuda :: --target cpu,cuda: several targets need --format ort-package
    2 --format ort-package :: --format ort-package needs --target
    2 --format ort-package --target cpu,cpu :: cpu
    2 --target nosuchprovider :: --target: unknown provider 'nosuchprovider'
    2 --target '' :: --target is empty
    2 --provider-library mine=/nosuch.so --target mine :: /nosuch.so
    2 --provider-library mine=/nosuch.so :: --provider-library needs --target
    2 --attention gqa --provider-option cuda.device_id=0 :: --provider-option needs --target
    2 --attention gqa --target-default :: --target-default needs --target
    2 --target cpu --provider-option cuda.device_id=0 :: cuda
    2 --target cpu --provider-option cpu.nosuchoption=1 :: nosuchoption
    2 --attention nosuchlowering :: nosuchlowering
    2 --target cpu --attention onnx24 --opset 20 :: --opset 20
    2 --opset 17 :: --opset 17
chat package -e cpu
    2 < /nothing :: /nothing is not a command
    2 < /save :: /save: give a file
    2 < /report :: nothing has been generated yet
    2 --resume none.json < hi :: --resume none.json: No such file
    2 < /save a\\0b :: /save: the name of the conversation contains a NUL byte
    2 < /save ~nobody-of-this-name/x :: /save ~nobody-of-this-name/x:
    1 < /save {long} :: name too long
    1 < {words} :: the cache length is 64
generate package -e cpu
    2 :: no prompt
    1 '' :: the prompt is empty
    1 '{words}' :: the cache length is 64
    2 'one two' --token-ids :: not a list of token ids
    1 1,9999 --token-ids :: token id 9999 at position 1
    1 1,-3 --token-ids :: token id -3
    2 a --temperature nan :: temperature
    2 a --temperature 1e-4 :: --temperature is 0.0001; it must be 0 (greedy) or from 0.001 to 100
    2 a --repetition-penalty 0 :: --repetition-penalty is 0.0; it must be from 0.01 to 100 (1: off)
    2 a --stop '' :: --stop is empty
    2 a --stop {long} :: --stop has 5,000 characters; the maximum is 4,096
    2 a --probe-seconds -1 :: --probe-seconds is -1
    2 a b --save-prefix f :: --save-prefix stores one text
    2 a --chat --save-prefix f :: omit --chat
    2 a --save-prefix f --report r.json :: omit --report
    2 a --save-prefix f --max-copies 0 :: omit --max-copies
    2 a --save-prefix f -n 5 --seed 1 :: --seed
    2 a --system b --prefix f :: omit --system
    1 '' --save-prefix f :: the prompt is empty
    1 'a b c d e f g h' --save-prefix /dev/full :: /dev/full: cannot write the prefix: No space left
    2 -i rows.jsonl :: --output
    2 1 -o mine.jsonl :: --input
generate package -e cpu -i rows.jsonl
    2 -o mine.jsonl :: exists already
    2 -o rows.jsonl :: the same file as
    2 -o package/out.jsonl :: inside
    2 -i in.csv -o o.jsonl :: must end in one of
    2 -i gone.jsonl -o o.jsonl :: no such file
    2 -o o.jsonl -p 1 :: use one of them
    2 -o o.jsonl --report o.jsonl :: which this command writes as well; name another
    2 -o o.jsonl --report ./o.jsonl.partial :: which this command writes as well; name another
    2 -o o.jsonl --workers 2 :: give its address with --address
    2 -o o.jsonl --address nowhere :: use auto, local or HOST:PORT
    2 -o o.jsonl --address auto --workers 0 :: must be between 1
    2 -o o.jsonl --address auto --max-cpu-nodes 0 :: --address cannot be combined with
    2 -o o.jsonl --address auto --report r.json :: --address cannot be combined with
    2 -o o.jsonl --address local --prefix h :: --address cannot be combined with
place cut.onnx
    1 -e cpu :: its weights file 'cut.onnx.data' is truncated: it has 5 bytes, but the graph reads up to byte 16
serve --port 0 -e cpu
    1 /absent :: /absent: no such file or folder
    3 package -e coreml :: coreml
    2 package --host no.such.host.invalid :: --host no.such.host.invalid
    2 package --port 70000 :: between 1 and 65535
    2 package --max-body much :: much
    2 package --timeout 0 :: --timeout is 0
    2 package --api-key '' :: --api-key
    2 package --allowed-origin app.example :: --allowed-origin app.example
    2 package --allowed-origin https://app.example/page :: write scheme, host and port
    2 package package :: two models are named package
    2 package package --name a :: --name is given 1 times for 2 models
    2 package --prefill-chunk 0 :: --prefill-chunk is 0
report
    2 check reports/mixed.json :: nothing to check
    2 check reports/mixed.json --max-copies -1 :: must be 0 or more
    2 check reports/mixed.json --min-tokens-per-second nan :: must be a number
    2 check reports/mixed.json --max-unexplained -2 :: must be 0 or more
    2 check reports/mixed.json --require providr=webgpu,share>=1 :: did you mean 'provider'
    2 check reports/mixed.json --require provider=webpgu,share>=1 :: did you mean 'webgpu'
    2 check reports/mixed.json --require provider=gpu,share>=1 :: did you mean 'cuda' or 'webgpu'? known providers:
    2 check reports/mixed.json --require '' :: is not FIELD OP VALUE
    2 diff - - :: both reports are read from stdin
    2 check - - :: both reports are read from stdin
    2 check - --baseline - :: both reports are read from stdin
support
    2 Relux -e cpu :: operator 'Relux' is unknown
    2 -e cpu :: --all
    2 Relu -e cpu,webgpu :: name one provider
"""
"""The beginning of command lines; below it, of each: exit code, further words, stdin after <, and part of the error."""
FILLED = {"long": "x" * 5000, "words": "x y z " * 40}


def cases() -> Iterator[Any]:
    """Command line, stdin, exit code and part of the error."""
    for line in CASES.strip().splitlines():
        if not line.startswith(" "):
            begin = line
            continue
        given, _, said = line.strip().partition("::")
        code, _, more = given.partition(" ")
        words, _, typed = f"{begin} {more}".partition("< ")
        yield pytest.param(words, typed.strip(), int(code), said.strip(), id=f"{words.strip()} {typed}".strip())


@pytest.fixture(scope="module")
def place(package: Path, tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the command lines name."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "package").symlink_to(package)
    (folder / "checkpoint").symlink_to(tiny_checkpoint("llama"))
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "mine.jsonl").write_text("mine\n")
    (folder / "reports").mkdir()
    storage.write(mixed(), folder / "reports" / "mixed.json")
    write_model(folder / "cut.onnx")
    os.truncate(folder / "cut.onnx.data", 5)
    return folder


@pytest.mark.parametrize(("words", "typed", "code", "said"), list(cases()))
def test_wrong_command_line_is_refused_with_single_line(words, typed, code, said, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    text = f"{typed}\n".format(**FILLED).replace("\\0", "\0")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    before = {path: path.read_bytes() for path in place.iterdir() if path.is_file()}
    assert run(shlex.split(words.format(**FILLED))) == code
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("partita: ")]
    assert out == "" and said in line and "Traceback" not in err
    assert {path: path.read_bytes() for path in place.iterdir() if path.is_file()} == before
    assert (place / "mine.jsonl").read_text() == "mine\n"
