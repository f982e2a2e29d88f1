"""A child for tests: starts a child of its own, in a session of its own, and waits; with a result once interrupted.

The request: `heeds`, whether it answers when it is interrupted, and `pids`, the file for both process ids.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from partita.orphans import end_with_parent
from partita.runtime.process.children import run_children

end_with_parent()
request = json.load(sys.stdin)
# A test run in the background of a shell hands on SIGINT as ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
if "parent" in request:
    Path(request["pids"]).write_text(f"{request['parent']} {os.getpid()}")
    time.sleep(600)
while True:
    try:
        run_children("tests.runtime.patient_child", [{**request, "parent": os.getpid()}], timeout_seconds=600)
    except KeyboardInterrupt:
        if request["heeds"]:
            sys.stdout.write(json.dumps({"result": {"interrupted": True}}) + "\n")
            break
