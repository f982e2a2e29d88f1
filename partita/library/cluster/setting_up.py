"""Between a command and a cluster: is Ray there, does the address answer, is it of this Python, do workers start."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from partita.errors import InstallationError, ProviderError, UsageError
from partita.extras import explain
from partita.library.cluster.options import AUTO, LOCAL, Deal, Means, Share
from partita.remedies import Remedy
from partita.runtime.ort.native_log import captured_output
from partita.spelling import spelled

START = Remedy(
    "start one",
    ("ray", "start", "--head"),
    otherwise=Remedy("have one started for this run", options=("--address", "local")),
)
SAME = Remedy("run the command with the Python and the ray that the cluster was started with")
START_SECONDS = 120.0
"""How long a first worker of a kind may take to start; a machine that has to be added takes longer."""
LIVE_SECONDS = 10.0
"""How long an address may take to answer."""
HEAD_SECONDS = 20.0
"""How long the head of a cluster may take to say which cluster it is."""
ADDRESS_VARIABLE = "RAY_ADDRESS"
HEADER, SETTINGS = 9, b"\4"
"""Bytes before each frame of HTTP/2, and the fourth of them in the first frame that either side sends."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + b"\0\0\0\0\0"
"""What a client says first, with no settings of its own."""
PASSED_ON = ("PYTHONPATH", "ORT_DISABLE_TELEMETRY", "HF_HOME")
"""Variables of the command that its workers get as well."""
QUIET = {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""What Ray says of itself on stderr is in its own log files, too."""


def import_ray() -> Any:
    """Ray, with what reads and writes blocks. Raises InstallationError."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise explain(error) or error from error
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    return ray


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster for as long as the block runs. Raises InstallationError, UsageError."""
    ray = import_ray()
    # A cluster for this run alone has to be asked for by name: without one Ray joins another where it finds one.
    given: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": False}
    if address == LOCAL:
        given["include_dashboard"] = False
    else:
        given["address"] = _found(address)
    try:
        with captured_output(), _own_handler(signal.SIGTERM):  # it announces that it is to be quiet
            ray.init(**given)
    except Exception as error:
        raise _not_connected(address, error) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _own_handler(number: int) -> Iterator[None]:
    """What a signal does stays as it is: Ray puts a handler of its own in the place of ours, and never back."""
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


def _found(address: str) -> str:
    """HOST:PORT of the cluster that is meant, where something answers as Ray does. Raises UsageError: Ray itself would
    try for minutes, also at an address that an environment variable has, or that a cluster has left behind.
    """
    if address != AUTO:
        _knock(address, spelled("address", address))
        return address
    named = os.environ.get(ADDRESS_VARIABLE)
    written = f"{spelled('address', AUTO)}: {ADDRESS_VARIABLE} is {named}"
    if named and not re.fullmatch(r"[^\s:/]+:\d{1,5}", named):
        raise UsageError(f"{written}, and it has to be HOST:PORT, as `ray start` prints it, or not to be set")
    if named:
        _knock(named, written)
        return named
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found = canonicalize_bootstrap_address(AUTO)
    except ConnectionError as error:
        raise _not_connected(AUTO, error) from error
    if found is None:
        raise _not_connected(AUTO, ConnectionError("there is none"))
    _knock(found, f"{spelled('address', AUTO)}: the cluster that was started last on this machine was at {found}")
    return found


def _knock(address: str, written: str) -> None:
    """Raise UsageError where nothing listens at HOST:PORT, or something that is not as a cluster is. `written` is how
    the address was given.
    """
    host, _, port = address.rpartition(":")
    try:
        said = _answer_of(host, int(port))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{written}: no cluster answers there ({why})", remedy=START) from error
    if said is not None and said[3:4] != SETTINGS:
        raise UsageError(f"{written}: what listens there is no cluster of Ray", remedy=START)
    _greet(address, written)


def _greet(address: str, written: str) -> None:
    """Raise UsageError where what speaks as a cluster does is none, or is stuck: `ray.init` would wait for minutes, and
    cannot be told to give up. Ray's own client waits longer than `HEAD_SECONDS`, in a thread that nobody waits for.
    """
    raised: list[Exception] = []

    def greet() -> None:
        try:
            _ask_head(address)
        except Exception as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=greet, name="partita-head", daemon=True)
    with captured_output():  # it writes what it fails at
        thread.start()
        thread.join(HEAD_SECONDS)
    if thread.is_alive():
        why = f"it did not say within {HEAD_SECONDS:g} s which cluster it is"
        raise UsageError(f"{written}: no cluster answers there ({why})", remedy=START)
    for error in raised:
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"{written}: no cluster answers there ({said})", remedy=START) from error


def _ask_head(address: str) -> None:
    """Have the head of a cluster say which one it is. Raises what Ray does."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

    GcsClient(address=address)


def _answer_of(host: str, port: int) -> bytes | None:
    """The first bytes that are said there to one who speaks HTTP/2, as Ray's gRPC does; None where it was not asked,
    because lines are encrypted. Raises OSError, in `LIVE_SECONDS` at the latest.
    """
    deadline = time.monotonic() + LIVE_SECONDS
    with socket.create_connection((host, port), timeout=LIVE_SECONDS) as line:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return None
        line.sendall(GREETING)
        said = b""
        while len(said) < HEADER:
            line.settimeout(max(0.01, deadline - time.monotonic()))
            more = line.recv(HEADER - len(said))
            if not more:
                break
            said += more
        return said


def _not_connected(address: str, error: Exception) -> Exception:
    """Why there is no cluster."""
    said = " ".join(str(error).split())
    written = spelled("address", address)
    if "ersion mismatch" in said:
        return UsageError(f"{written}: the cluster is of another Python or Ray: {_versions(said)}", remedy=SAME)
    if address == AUTO and not os.environ.get(ADDRESS_VARIABLE):
        return UsageError(f"{written}: no cluster runs on this machine", remedy=START)
    if address == LOCAL:
        return InstallationError(f"{written}: Ray does not start: {said[:300]}")
    return UsageError(f"{written}: no cluster answers there ({said[:200]})", remedy=START)


def _versions(said: str) -> str:
    """What both have, of a message that goes over many lines."""
    found = re.search(r"cluster was started with:(.*?)This process.*?with:(.*?)(?:$|\. )", said)
    return said[:300] if found is None else f"it has {found[1].strip()}, and the command {found[2].strip()[:60]}"


def means_of(ray: Any) -> Means:
    """What the cluster has."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    cpus = [float(node["Resources"].get("CPU", 0)) for node in alive]
    return Means(dict(ray.cluster_resources()), tuple(cpus))


def variables() -> dict[str, str]:
    """Variables of the environment that workers get."""
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}


def deal_of(given: Sequence[Share]) -> Deal:
    """How workers are started."""
    return Deal(given, variables(), sys.executable)


def check_kinds(ray: Any, deal: Deal, given: Sequence[Share]) -> None:
    """Start a process of each kind, and ask what it is: an interpreter that is not there, or is another Python, shows
    as a worker that never starts, which Ray waits for. Raises UsageError.
    """
    asked = {}
    for share in given:
        needs = {"resources": {share.resource: 0.001}} if share.resource else {}
        environment = deal.environment(share)
        probe = ray.remote(num_cpus=0, max_retries=0, runtime_env=environment, **needs)(_probe())
        asked[probe.remote()] = environment["py_executable"]
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=START_SECONDS)
    for reference in late:
        raise UsageError(
            f"no worker starts with {asked[reference]} within {START_SECONDS:g} s: it has to be Python {_minor()} with "
            f"ray {ray.__version__} at that path on the machines of the cluster, and these need room for it"
        )
    for reference in done:
        try:
            found = ray.get(reference)
        except Exception as error:
            said = " ".join(str(error).split())
            raise UsageError(
                f"no worker starts with {asked[reference]} ({said[:300]}); it has to be a Python {_minor()} with ray "
                f"{ray.__version__} at that path on the machines of the cluster"
            ) from error
        _check_probe(found, asked[reference])


def _check_probe(found: Mapping[str, str], python: str) -> None:
    """Raise UsageError where the Partita of a worker is missing, or another than this."""
    from partita import __version__

    there = found["partita"]
    if there == __version__:
        return
    said = f"has Partita {there}" if there else f"has no Partita ({found['why']})"
    raise UsageError(
        f"{python} on {found['host']} {said}, and the command is of {__version__}; install the same version there, "
        "with the extra ray and the wheel of ONNX Runtime that its provider needs"
    )


def _probe() -> Any:
    """A function that needs nothing of Partita to be sent: it travels as code, not as a name."""
    code = compile(PROBE, "<probe>", "exec")
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(code, space)
    return space["probe"]


PROBE = """
def probe():
    import socket
    try:
        import partita
        return {"host": socket.gethostname(), "partita": partita.__version__, "why": ""}
    except Exception as error:
        return {"host": socket.gethostname(), "partita": "", "why": str(error)}
"""


def _minor() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def run_error(told: str) -> ProviderError:
    """What ended the run where no worker could say it."""
    return ProviderError(f"the cluster gave up: {' '.join(told.split())[:400]}")
