"""Chat templates, rendered in a child process with limits of time and memory.

A template is code of the checkpoint. The sandbox of jinja2 denies it files and other code, but limits neither time nor
memory. This file is also the program of the child: JSON lines in, JSON lines out.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.errors import GenerationError
from partita.files import temporary_directory
from partita.observations.text_format import human_bytes
from partita.runtime.chat import Message, rendered
from partita.runtime.process.live_child import ChildLostError, LiveChild
from partita.signals import held

START_SECONDS, RENDER_SECONDS = 60.0, 10.0
MEMORY_BYTES = 512 << 20
"""For a template, beyond what the process has before."""
LONGEST_TEMPLATE = 1 << 20
NO_MEMORY = 3
"""Exit code of a child whose template needed more."""


class Renderer:
    """The child process, started when it is needed and again after a template had to be stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: LiveChild | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._is_ready = False

    def start(self) -> LiveChild:
        """Start the process, unless it runs; it gets ready meanwhile."""
        if self._child is None or self._child.process.poll() is not None:
            self.close()
            with held():
                self._folder = temporary_directory()
                self._child = LiveChild(__name__, Path(self._folder.name) / "child")
        return self._child

    def render(self, template: str, names: Mapping[str, Any], messages: Sequence[Message], most: int) -> str | int:
        """What the template makes of the messages; the size of a text of more than `most` characters.

        `names`: special tokens. Raises GenerationError for messages that the template rejects or leaves out, and for a
        template beyond the limits.
        """
        if len(template) > LONGEST_TEMPLATE:
            raise GenerationError(f"the chat template has more than {LONGEST_TEMPLATE:,} characters")
        question = {"template": template, "names": names, "messages": messages, "most": most}
        with self._lock:
            try:
                child = self.start()
                if not self._is_ready:
                    child.ask({}, START_SECONDS)
                    self._is_ready = True
                answer = child.ask(question, RENDER_SECONDS)
            except ChildLostError as error:
                raise GenerationError(self._why(child, error)) from error
            except BaseException:  # the answer to a question that was interrupted is not that to the next one
                self.close()
                raise
        if "error" in answer:
            raise GenerationError(str(answer["error"]))
        return answer["length"] if "length" in answer else str(answer["text"])

    def _why(self, child: LiveChild, error: ChildLostError) -> str:
        """Why there is no answer, in words."""
        if not self._is_ready:
            return f"the process that renders chat templates {error}"
        if child.late:
            return f"the chat template takes more than {RENDER_SECONDS:g} s for these messages"
        if child.process.returncode == NO_MEMORY:
            return f"the chat template needs more than {human_bytes(MEMORY_BYTES)} for these messages"
        return f"the process that rendered the chat template {error}"

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
        if self._folder is not None:
            self._folder.cleanup()
        self._child, self._folder, self._is_ready = None, None, False


RENDERER = Renderer()
atexit.register(RENDERER.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RENDERER.__init__)  # type: ignore[misc]  # the process is the parent's


def main() -> None:
    """Answer one question a line until stdin ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    for line in sys.stdin:
        if hasattr(signal, "alarm"):
            signal.alarm(int(2 * RENDER_SECONDS))  # ends this process if its parent is gone
        question = json.loads(line)
        try:
            answer = _answer(question, render_jinja_template) if question else {}
        except MemoryError:
            os._exit(NO_MEMORY)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
        if hasattr(signal, "alarm"):
            signal.alarm(0)


def _answer(question: Mapping[str, Any], render_template: Any) -> dict[str, Any]:
    def render(messages: Sequence[Message]) -> str:
        try:
            texts, _ = render_template(
                [messages], chat_template=question["template"], add_generation_prompt=True, **question["names"]
            )
        except MemoryError:
            os._exit(NO_MEMORY)
        return str(texts[0])

    try:
        text = rendered(render, question["messages"])
    except GenerationError as error:
        return {"error": str(error)}
    return {"text": text} if len(text) <= question["most"] else {"length": len(text)}


def _limit_memory() -> None:
    """Limit this process to what it has and `MEMORY_BYTES` more, where the system can."""
    try:
        import resource

        import psutil
    except ImportError:
        return
    what = resource.RLIMIT_AS if sys.platform == "linux" else resource.RLIMIT_DATA
    limit = int(psutil.Process().memory_info().vms) + MEMORY_BYTES
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit, hard) if hard == resource.RLIM_INFINITY else (min(limit, hard), hard))


if __name__ == "__main__":
    main()
