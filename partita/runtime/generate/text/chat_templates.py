"""Chat templates, rendered in a worker process with time and memory limits.

A template is code from the checkpoint. The sandbox of jinja2 denies access to files and other code, but does not limit
time or memory.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from partita.errors import GenerationError, PackageError
from partita.observations.text_format import human_bytes
from partita.runtime.worker.child import Channel, serve
from partita.runtime.worker.parent import Worker, WorkerLostError
from partita.untrusted_files import read_json_value

Message = dict[str, Any]
"""role and content."""
Render = Callable[[Sequence[Message]], str]
OTHER_NAMES = {"developer": "system", "function": "tool"}
"""New and old names of roles; most templates support one of each pair."""
PROBE = "testmessage"
"""Content that no template contains, quotes or trims."""
MOST_SAID = 400
"""Maximum characters of a template's own error message."""
PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Tokenizer classes of transformers without special tokens of their own."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names that transformers passes to a template."""
OTHER_SOURCES = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
"""Files and folders that transformers reads as well."""


def conversation(prompt: str, system: str | None = None) -> list[Message]:
    """One user message, after a system message if given."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": prompt}]


def as_named_in(template: str, messages: Sequence[Message]) -> list[Message]:
    """The messages with role names that a template uses; most templates treat unknown roles as another role."""
    named = {role: other for role, other in OTHER_NAMES.items() if role not in template}
    return [{**message, "role": named.get(message["role"], message["role"])} for message in messages]


def rendered(render: Render, messages: Sequence[Message]) -> str:
    """The text that `render` makes of messages with string contents, or with content parts if it needs these.

    Raises GenerationError when the template rejects them, or omits a system message.
    """
    from jinja2 import TemplateError

    try:
        text = render(_in_parts(messages) if _needs_parts(render) else list(messages))
    except TemplateError as error:
        raise GenerationError(f"the chat template rejects these messages: {str(error)[:MOST_SAID]}") from error
    except Exception as error:  # a template may raise any exception
        reason = f"{type(error).__name__}: {error}"[:MOST_SAID]
        raise GenerationError(f"the chat template rejects these messages: {reason}") from error
    words = re.findall("[a-z0-9]+", messages[0]["content"].casefold())  # a template may quote other characters
    if messages[0]["role"] in ("system", "developer") and max(words, key=len, default="") not in text.casefold():
        raise GenerationError("the chat template omits the content of the system message")
    return text


def _needs_parts(render: Render) -> bool:
    """Whether a template supports content parts, and rejects or omits string contents."""
    probe = [{"role": "user", "content": PROBE}]

    def includes(messages: list[Message]) -> bool:
        try:
            return PROBE in render(messages).casefold()
        except Exception:  # noqa: BLE001 - a template may raise any exception
            return False

    return not includes(probe) and includes(_in_parts(probe))


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def has_template(folder: Path) -> bool:
    """Whether the tokenizer folder has a chat template. Raises PackageError for a damaged configuration."""
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    try:
        config = read_json_value(path) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise PackageError(f"damaged ({error})", path=path) from error
    return isinstance(config, dict) and bool(config.get("chat_template"))


def plain_template(folder: Path) -> tuple[str, dict[str, str]] | None:
    """The chat template and the special tokens by name, as transformers reads them, without loading transformers.

    None where transformers would add to them: a tokenizer class with defaults of its own, more files, damaged files.
    """
    file = folder / "chat_template.jinja"
    if any((folder / name).exists() for name in OTHER_SOURCES):
        return None
    try:
        config = read_json_value(folder / "tokenizer_config.json")
        if config["tokenizer_class"] not in PLAIN_CLASSES or (file.exists() and file.stat().st_size > LONGEST_TEMPLATE):
            return None
        template = file.read_text(encoding="utf-8") if file.exists() else config["chat_template"]
        given = {name: config[name] for name in SPECIAL_TOKENS if config.get(name) is not None}
        names = {name: token["content"] if isinstance(token, dict) else token for name, token in given.items()}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (template, names) if all(isinstance(text, str) for text in (template, *names.values())) else None


START_SECONDS, RENDER_SECONDS = 60.0, 10.0
MEMORY_BYTES = 512 << 20
"""Memory limit of a template in bytes, beyond the use of the idle process."""
LONGEST_TEMPLATE = 1 << 20


class Renderer:
    """The worker process of templates, started at first use and restarted if it ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.worker: Worker | None = None

    def start(self) -> None:
        """Start the process in the background unless it is running."""
        with self._lock:
            self._running()

    def render(self, *question: Any) -> str | int:
        """The result of `_render` in the worker. Raises its exceptions, and WorkerLostError."""
        with self._lock:
            try:
                self._running().call("ready", timeout=START_SECONDS)
            except WorkerLostError:  # it ended since the last conversation
                self._running().call("ready", timeout=START_SECONDS)
            try:
                answer: str | int = self._running().call("render", *question, timeout=RENDER_SECONDS)
            except KeyboardInterrupt:
                self._running().kill()
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
    """The renderer of this process id; a forked process gets its own."""
    return Renderer()


def start() -> None:
    """Start the process that renders templates unless it is running."""
    renderer(os.getpid()).start()


def render(template: str, names: Mapping[str, str], messages: Sequence[Message], most: int) -> str | int:
    """The rendered text, or its size if it has more than `most` characters.

    `names`: special tokens. Raises GenerationError for messages that the template rejects or omits, and for a template
    that exceeds the limits.
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
            except MemoryError as error:  # `rendered` would treat it as an error of the template
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
    """Limit the memory of this process to its current use plus `MEMORY_BYTES`, if the system supports it."""
    if sys.platform == "win32":
        return
    import resource

    import psutil

    what = resource.RLIMIT_AS if sys.platform == "linux" else resource.RLIMIT_DATA
    limit, hard = int(psutil.Process().memory_info().vms) + MEMORY_BYTES, resource.getrlimit(what)[1]
    resource.setrlimit(what, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
