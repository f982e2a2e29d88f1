"""Chat templates, rendered in a child process with limits of time and memory.

A template is code of the checkpoint. The sandbox of jinja2 denies it files and other code, but limits neither time nor
memory. This file is also the program of the child: JSON lines in, JSON lines out.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from partita.errors import GenerationError
from partita.observations.text_format import human_bytes
from partita.runtime.chat import Message, rendered
from partita.runtime.probes.process import ProbeProcess

START_SECONDS, RENDER_SECONDS = 60.0, 10.0
MEMORY_BYTES = 512 << 20
"""For a template, beyond what the process has before."""
LONGEST_TEMPLATE = 1 << 20


@lru_cache
def _process(pid: int) -> tuple[threading.Lock, ProbeProcess]:
    """The child of this process, which a fork of it does not share."""
    return threading.Lock(), ProbeProcess(__name__, os.environ)


def start() -> None:
    """Start the child process, unless it runs; it gets ready meanwhile."""
    lock, process = _process(os.getpid())
    with lock:
        if not process.running:
            process.start()


def render(template: str, names: Mapping[str, str], messages: Sequence[Message], most: int) -> str | int:
    """What the template makes of the messages; the size of a text of more than `most` characters.

    `names`: special tokens. Raises GenerationError for messages that the template rejects or leaves out, and for a
    template beyond the limits.
    """
    if len(template) > LONGEST_TEMPLATE:
        raise GenerationError(f"the chat template has more than {LONGEST_TEMPLATE:,} characters")
    lock, process = _process(os.getpid())
    with lock:
        outcome = process.ask({}, START_SECONDS)
        if outcome.result is None:  # it ended since the last conversation; a new one is started
            outcome = process.ask({}, START_SECONDS)
        if outcome.result is not None:
            question = {"template": template, "names": names, "messages": messages, "most": most}
            outcome = process.ask(question, RENDER_SECONDS)
    if outcome.result is None:
        raise GenerationError(f"the chat template was stopped: the process that renders it {outcome.ended}")
    if "error" in outcome.result:
        raise GenerationError(str(outcome.result["error"]))
    return int(outcome.result["length"]) if "length" in outcome.result else str(outcome.result["text"])


def main() -> None:
    """Answer one question a line until stdin ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    for line in sys.stdin:
        faulthandler.dump_traceback_later(2 * RENDER_SECONDS, exit=True)  # its parent may be gone
        try:
            question = json.loads(line)
            answer = _answer(question, render_jinja_template) if question else {}
        except (MemoryError, SystemExit):
            answer = {"error": f"the chat template needs more than {human_bytes(MEMORY_BYTES)} of memory"}
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
        faulthandler.cancel_dump_traceback_later()


def _answer(question: Mapping[str, Any], render_template: Any) -> dict[str, Any]:
    def render(messages: Sequence[Message]) -> str:
        try:
            texts, _ = render_template(
                [messages], chat_template=question["template"], add_generation_prompt=True, **question["names"]
            )
        except MemoryError as error:  # `rendered` would go on with what is an Exception
            raise SystemExit from error
        return str(texts[0])

    try:
        text = rendered(render, question["messages"])
    except GenerationError as error:
        return {"error": str(error)}
    return {"text": text} if len(text) <= question["most"] else {"length": len(text)}


def _limit_memory() -> None:
    """Limit this process to what it has and `MEMORY_BYTES` more, where the system can."""
    if sys.platform == "win32":
        return
    import resource

    import psutil

    what = resource.RLIMIT_AS if sys.platform == "linux" else resource.RLIMIT_DATA
    limit, hard = int(psutil.Process().memory_info().vms) + MEMORY_BYTES, resource.getrlimit(what)[1]
    resource.setrlimit(what, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
