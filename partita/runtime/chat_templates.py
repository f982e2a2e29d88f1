"""Chat templates, rendered in a worker process with limits of time and memory.

A template is code of the checkpoint. The sandbox of jinja2 denies it files and other code, but limits neither time nor
memory.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from partita.errors import GenerationError
from partita.observations.text_format import human_bytes
from partita.runtime.chat import Message, rendered
from partita.runtime.worker.child import Channel, serve
from partita.runtime.worker.parent import Worker, WorkerLostError

START_SECONDS, RENDER_SECONDS = 60.0, 10.0
MEMORY_BYTES = 512 << 20
"""For a template, beyond what the process has before."""
LONGEST_TEMPLATE = 1 << 20


class Renderer:
    """The worker process of templates: started when it is needed, and again when it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.worker: Worker | None = None

    def start(self) -> None:
        """Start the process, unless it runs; it gets ready meanwhile."""
        with self._lock:
            self._running()

    def render(self, *question: Any) -> str | int:
        """The answer of `_render`. Raises what it raises, and WorkerLostError."""
        with self._lock:
            try:
                self._running().call("ready", timeout=START_SECONDS)
            except WorkerLostError:  # it ended since the last conversation
                self._running().call("ready", timeout=START_SECONDS)
            worker = self._running()
            try:
                answer: str | int = worker.call("render", *question, timeout=RENDER_SECONDS)
            except KeyboardInterrupt:
                worker.kill()
                raise
            return answer

    def _running(self) -> Worker:
        if self.worker is not None and self.worker.lost is not None:
            self.worker.kill()
            self.worker = None
        if self.worker is None:
            self.worker = Worker(__name__)
        return self.worker


@lru_cache
def renderer(process: int) -> Renderer:
    """The renderer of this process, given by its id: a fork does not share it."""
    return Renderer()


def start() -> None:
    """Start the process that renders templates, unless it runs."""
    renderer(os.getpid()).start()


def render(template: str, names: Mapping[str, str], messages: Sequence[Message], most: int) -> str | int:
    """What the template makes of the messages; the size of a text of more than `most` characters.

    `names`: special tokens. Raises GenerationError for messages that the template rejects or leaves out, and for a
    template beyond the limits.
    """
    if len(template) > LONGEST_TEMPLATE:
        raise GenerationError(f"the chat template has more than {LONGEST_TEMPLATE:,} characters")
    try:
        return renderer(os.getpid()).render(template, dict(names), list(messages), most)
    except WorkerLostError as lost:
        raise GenerationError(f"the chat template was stopped: the process that renders it {lost.how}") from lost


def run(channel: Channel) -> None:
    """The worker: render templates."""
    from transformers.utils import chat_template_utils

    render_template: Any = chat_template_utils.render_jinja_template
    _limit_memory()

    def answer(template: str, names: Mapping[str, str], messages: Sequence[Message], most: int) -> str | int:
        def render_once(messages: Sequence[Message]) -> str:
            try:
                texts, _ = render_template([messages], chat_template=template, add_generation_prompt=True, **names)
            except MemoryError as error:  # `rendered` would go on with what is an Exception
                raise SystemExit from error
            return str(texts[0])

        try:
            text = rendered(render_once, messages)
        except (MemoryError, SystemExit):
            limit = human_bytes(MEMORY_BYTES)
            raise GenerationError(f"the chat template needs more than {limit} of memory") from None
        return text if len(text) <= most else len(text)

    serve(channel, {"ready": lambda: None, "render": answer})


def _limit_memory() -> None:
    """Limit this process to what it has and `MEMORY_BYTES` more, where the system can."""
    if sys.platform == "win32":
        return
    import resource

    import psutil

    what = resource.RLIMIT_AS if sys.platform == "linux" else resource.RLIMIT_DATA
    limit, hard = int(psutil.Process().memory_info().vms) + MEMORY_BYTES, resource.getrlimit(what)[1]
    resource.setrlimit(what, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
