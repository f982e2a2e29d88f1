"""What ONNX Runtime notes of parallel loops for a profile, and goes on noting when the profile is long written.

While a session is profiled, it has its thread pool note the block size of every parallel loop before a node runs, and
takes the notes away after it (`ThreadPoolProfiler` in onnxruntime/core/common/threadpool.cc). Nothing ever switches
that off again. After the profile each loop adds 8 bytes to a list of the thread that runs the session, and nobody takes
them away: a server grew by 1.9 KB with every request. The list is of the thread, whatever session the loops were of,
so any node that is profiled in it empties it. That is done here now and then, with a session of one node.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnxruntime as ort

from partita.files import temporary_directory
from partita.observations.names import CPU
from partita.runtime.ort.buffers import NATIVE_ERRORS, host_buffer, keeper_model

EVERY = 1024
"""Runs of one thread. Some hundreds of loops a run make 2 MiB of them; what follows takes about a millisecond."""
FATAL = 4


class _Thread(threading.local):
    """What is known of the thread that asks."""

    runs = 0
    """Of sessions that were profiled once, since the notes were last taken away."""
    failed = False
    """A run has failed. A loop that did not come to its end is noted as begun, and ONNX Runtime ends the process when
    notes with such a loop are taken away.
    """


_here = _Thread()


def ran() -> None:
    """A run of a session that was profiled once has ended in this thread."""
    _here.runs += 1
    if _here.runs >= EVERY:
        _here.runs = 0
        if not _here.failed:
            take_away()


def failed() -> None:
    """A run of such a session has failed in this thread."""
    _here.failed = True


def take_away() -> None:
    """Empty the list of this thread. What goes wrong is no error of anybody's run: memory is what it costs."""
    with suppress(OSError, *NATIVE_ERRORS), temporary_directory() as folder:
        native = ort.InferenceSession(keeper_model("float32", 1), _options(Path(folder)), providers=[CPU])
        binding, buffer = native.io_binding(), host_buffer((1,), "float32")
        binding.bind_ortvalue_input("x", buffer.value)
        binding.bind_ortvalue_output("y", buffer.value)
        native.run_with_iobinding(binding)
        native.end_profiling()


def _options(folder: Path) -> Any:
    """A session with a profile and a thread pool: notes are taken away by way of a pool."""
    options = ort.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "loops")
    return options
