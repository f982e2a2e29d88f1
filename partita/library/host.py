"""The process of a `RemoteEngine`: `python -m partita.library.host`, a question per line in, an answer per line out.

It may crash or hang: the parent reads that as a finding. It ends without unloading native libraries, some of which
crash then: when it is told to, or when its stdin ends without that. Its parent is gone then, however that was ended,
and what this process does and the folder of both go, too.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from partita.library.crossing import FAREWELL, told
from partita.spelling import read_by

if TYPE_CHECKING:
    from partita.library.local import LocalEngine

_ENDING = threading.Lock()


def main() -> None:
    """Answer questions until there are no more."""
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native code and ONNX Runtime's Python print to stdout
    questions: queue.Queue[str | None] = queue.Queue()
    folder = Path(sys.argv[1])
    threading.Thread(target=_listen, args=(questions, folder), daemon=True).start()
    host = Host()
    with read_by("python"):
        while (line := questions.get()) is not None:
            question = json.loads(line)
            answer = json.dumps({"number": question["number"], **_answer(host, question)})
            try:
                out.write(answer + "\n")
                out.flush()
            except OSError:  # nobody reads: the parent is gone, and that may be seen before the end of stdin
                _end_alone(folder)
    os._exit(0)


def _listen(questions: queue.Queue[str | None], folder: Path) -> None:
    """Pass questions on until the farewell, which is None. Without one, end at once, whatever is being done, and remove
    the folder: nobody else will.
    """
    for line in sys.stdin:
        if line == FAREWELL:
            questions.put(None)
            return
        questions.put(line)
    _end_alone(folder)


def _end_alone(folder: Path) -> NoReturn:
    """Remove the folder and end. Whoever comes second waits for it: two that remove one folder leave parts of it."""
    with _ENDING:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _answer(host: Host, question: dict[str, Any]) -> dict[str, Any]:
    """The answer, or an error as data."""
    asked: dict[str, Callable[[dict[str, Any]], Any]] = {
        "load": host.load,
        "begin": host.begin,
        "open": host.open,
        "join": host.join,
        "leave": host.leave,
        "halt": host.halt,
        "extend": host.extend,
        "rewind": host.rewind,
        "step": host.step,
        "save_prefix": host.save_prefix,
        "report": host.report,
        "verify": host.verify,
        "evaluate": host.evaluate,
    }
    try:
        return {"result": asked[question["what"]](question["given"])}
    except Exception as error:  # noqa: BLE001 - the parent must hear of it; nobody else reads a traceback here
        return {"error": told(error)}


class Host:
    """The package, open on its chain."""

    engine: LocalEngine

    def load(self, given: dict[str, Any]) -> Any:
        """Open the package."""
        from partita.foreign.folder import choice_of, open_folder
        from partita.library.chain import chain_options, read_chain_options
        from partita.library.local import LocalEngine
        from partita.library.remote import OPENED

        where, folder = chain_options(given["where"]), Path(given["package"])
        target = read_chain_options(where)
        choice = choice_of(given["choice"])
        manifest = open_folder(folder, choice)
        self.engine = LocalEngine(
            folder, manifest, target, threads=where.threads, observe=given["observe"], choice=choice
        )
        return OPENED.dump_python(self.engine.opened, mode="json")

    def begin(self, given: dict[str, Any]) -> Any:
        """Start a generation in the child; see `Begun`."""
        from partita.library.remote import BEGUN, REQUESTS

        return BEGUN.dump_python(self.engine.begin(REQUESTS.validate_python(given)), mode="json")

    def open(self, given: dict[str, Any]) -> Any:
        """Start a generation in the child whose rows are free; see `Begun`."""
        from partita.library.remote import BEGUN
        from partita.library.speculation import Speculation

        guessing = Speculation(**given["speculation"])
        begun = self.engine.open(given["prefill_chunk"], given["adapter"], guessing, given["prefix"])
        return BEGUN.dump_python(begun, mode="json")

    def join(self, given: dict[str, Any]) -> Any:
        """Give a request a row."""
        from partita.library.remote import ROWS

        return self.engine.join(given["number"], ROWS.validate_python(given["request"]))

    def leave(self, given: dict[str, Any]) -> Any:
        """Free a row."""
        self.engine.leave(given["number"], given["row"])

    def halt(self, given: dict[str, Any]) -> Any:
        """End a row where it is."""
        self.engine.halt(given["number"], given["row"])

    def extend(self, given: dict[str, Any]) -> Any:
        """Give a row more tokens to read."""
        from partita.library.remote import SAMPLINGS

        sampling = SAMPLINGS.validate_python(given["sampling"])
        self.engine.extend(given["number"], given["row"], given["tokens"], sampling)

    def rewind(self, given: dict[str, Any]) -> Any:
        """Take a row back."""
        return self.engine.rewind(given["number"], given["row"], given["tokens"])

    def step(self, given: dict[str, Any]) -> Any:
        """Let the child make its next step, and wait for it."""
        from partita.library.remote import STEPS

        step = self.engine.step(given["number"])
        return None if step is None else STEPS.dump_python(step, mode="json")

    def save_prefix(self, given: dict[str, Any]) -> Any:
        """Read a prefix, and write the file."""
        from partita.library.remote import PREFIXES, SAVED

        return SAVED.dump_python(self.engine.save_prefix(PREFIXES.validate_python(given)), mode="json")

    def report(self, given: dict[str, Any]) -> Any:
        """Let the child write the report of what has run so far."""
        from partita.library.remote import REPORTS

        return self.engine.report(REPORTS.validate_python(given)).model_dump(mode="json", by_alias=True)

    def verify(self, given: dict[str, Any]) -> Any:
        """Replay the known answer."""
        return self.engine.verify(given["reference"]).model_dump(mode="json")

    def evaluate(self, given: dict[str, Any]) -> Any:
        """Measure the quality of the package."""
        return asdict(self.engine.evaluate())


if __name__ == "__main__":
    main()
