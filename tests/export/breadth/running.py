"""Every model type in a process of its own, with a time limit: a crash or a hang of one is a result, and no more.

The processes are forked from a server that has the heavy libraries loaded, which saves their import each time. ONNX
Runtime is not among them: its threads would not survive the fork.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection

from tests.export.breadth.records import Outcome

PRELOADED = ["torch", "transformers", "onnxscript", "partita.export.pipeline", "tests.export.breadth.outcomes"]
LIMIT_SECONDS = 300.0
"""For one outcome; a tiny export takes some ten seconds."""


def run(
    types: Sequence[str], lowerings: Sequence[str], *, jobs: int = 1, limit_seconds: float = LIMIT_SECONDS
) -> Iterator[Outcome]:
    """The outcomes of every type, those of a type together, in the order in which the types end."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with ThreadPoolExecutor(jobs) as pool:
        pending = [pool.submit(run_type, model_type, lowerings, limit_seconds) for model_type in types]
        try:
            for future in as_completed(pending):
                yield from future.result()
        finally:
            for future in pending:
                future.cancel()


def run_type(model_type: str, lowerings: Sequence[str], limit_seconds: float) -> list[Outcome]:
    """The outcomes of one type; after a crash or a hang the lowerings that are left get a new process."""
    found: list[Outcome] = []
    while left := list(lowerings[len(found) :]):
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sender, model_type, left), daemon=True)
        process.start()
        sender.close()
        try:
            for name in left:
                if not receiver.poll(limit_seconds):
                    process.kill()
                    reason = f"no end after {limit_seconds:.0f} s"
                    found.append(Outcome(model_type, name, "hung", reason=reason, seconds=limit_seconds))
                    break
                found.append(receiver.recv())
        except EOFError:
            process.join()
            reason = f"the process ended with code {process.exitcode}"
            found.append(Outcome(model_type, lowerings[len(found)], "crashed", reason=reason))
        process.join()
        receiver.close()
    return found


def _child(sender: Connection, model_type: str, lowerings: list[str]) -> None:
    """Send one outcome after the other, computed with one thread. What libraries print is discarded."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    import torch

    from tests.export.breadth.outcomes import outcomes

    torch.set_num_threads(1)
    for outcome in outcomes(model_type, lowerings):
        sender.send(outcome)
    sender.close()
