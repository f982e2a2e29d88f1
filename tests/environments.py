"""Pytest plugin: the contract tests of every environment as items of one session.

Only one ONNX Runtime wheel fits in an environment, so a contract test of another one cannot run in this process. All of
them are collected here, because their parameters come from `tests/contract/expectations.py` and not from what is
installed. A test of this environment runs as usual. The tests of another one run in a single pytest of that
environment's Python, a child, which writes its reports as JSON lines; they become the reports of the items here. So
counts, `-k`, `-x`, node ids and the failure texts are those of one session. With a second core the children run beside
the tests of this process, one child after the other. With `--share`, as `make test` has it, a last child then runs
files of the main suite from the end, while this process goes on from the front: each takes a file that the other has
not begun, until they meet.

    pytest                                            all environments; one that is not there is skipped, and counted
    pytest --environments="main webgpu"               these two
    pytest "tests/contract/test_place.py" -k openvino    one of them
    .venvs/webgpu/bin/python -m pytest tests/contract --inside webgpu    without the main environment
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from _pytest.terminal import TerminalReporter

from tests.contract.expectations import ENVIRONMENTS, MAIN, Environment, selected_by_default
from tests.contract.packages import can_export, ensure_packages

MARK = "environment"
POLL_SECONDS = 0.05
ENVIRONMENT_SECONDS = 1500
"""Longest time without a report of a child that is waited for."""
BESIDE = Environment("beside", "beside")
"""No other environment, but another process of this Python: files of the main suite, for the second core."""
KNOWN = {**ENVIRONMENTS, BESIDE.name: BESIDE}
LEAST_SHARED = 40
"""Fewer tests are not worth another process, which imports everything anew."""
TAIL_LINES = 15
RUNTIME_WHEELS = ("onnxruntime", "onnxruntime-", "onnxruntime_")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("environments")
    group.addoption("--environments", metavar="NAMES", help="environments whose contract tests run; default: all")
    group.addoption("--venvs", metavar="DIR", default=".venvs", help="where their virtual environments are")
    group.addoption("--inside", metavar="NAME", default=MAIN, help="the environment that this Python belongs to")
    group.addoption("--packages", metavar="DIR", help="packages of the contract tests; default: export them")
    group.addoption("--share", action="store_true", help="let a second core that is idle take test files")
    group.addoption("--claims", metavar="DIR", help="run only test files that no other process has claimed there")
    group.addoption("--report-lines", metavar="FILE", help="append each test report to this file, as a line of JSON")


def pytest_configure(config: pytest.Config) -> None:
    names = chosen(config)
    unknown = [name for name in (*names, config.getoption("--inside")) if name not in KNOWN]
    if unknown:
        raise pytest.UsageError(f"unknown environment {unknown[0]!r}; there are: {', '.join(ENVIRONMENTS)}")
    absent_files = [
        f"environment {name} needs {KNOWN[name].file}, which is not there: {KNOWN[name].why}"
        for name in names
        if KNOWN[name].file and not Path(KNOWN[name].file).exists()
    ]
    if absent_files:
        raise pytest.UsageError(absent_files[0])
    if path := config.getoption("--report-lines"):
        config.pluginmanager.register(Writer(config, Path(path)))
    if folder := config.getoption("--claims"):
        config.pluginmanager.register(Beside(Claims(Path(folder))))
    if config.getoption("--inside") == MAIN:
        config.pluginmanager.register(Orchestra(config), "environments-orchestra")


def chosen(config: pytest.Config) -> tuple[str, ...]:
    """Names of the environments that were asked for."""
    asked = config.getoption("--environments")
    return selected_by_default() if asked is None else tuple(asked.replace(",", " ").split())


def environment_of(item: pytest.Item) -> Environment | None:
    """The environment that a contract test belongs to; None for every test of the main suite that runs here."""
    mark = item.get_closest_marker(MARK)
    return None if mark is None else KNOWN[mark.args[0]]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out environments that were not asked for; those of other Pythons come last, one after the other."""
    inside, wanted = config.getoption("--inside"), chosen(config)
    order = {name: position for position, name in enumerate(KNOWN)}
    kept: list[tuple[int, pytest.Item]] = []
    omitted: list[pytest.Item] = []
    for item in items:
        environment = environment_of(item)
        if environment is None:
            kept.append((-1, item))
        elif environment.name in wanted and (environment.python_of == inside or inside == MAIN):
            if environment.python_of != inside:  # it waits for its turn in a child, where each has its own limit
                item.add_marker(pytest.mark.timeout(0))
            kept.append((-1 if environment.python_of == inside else order[environment.name], item))
        else:
            omitted.append(item)
    if omitted:
        config.hook.pytest_deselected(items=omitted)
    items[:] = [item for _, item in sorted(kept, key=lambda entry: entry[0])]  # sorted() keeps the order of equals


@pytest.fixture(scope="session")
def packages(request: pytest.FixtureRequest) -> Path:
    """Folder of the exported packages, see `tests/contract/packages.py`."""
    from tests.conftest import require

    given = request.config.getoption("--packages")
    folder = request.config.rootpath / "build" / "contract"
    if given is None and can_export():
        return ensure_packages(folder)
    if given is None:  # by hand in another environment: what the main one left
        given = max(folder.glob("packages-*"), key=lambda path: path.stat().st_mtime, default=folder / "not-exported")
    require("the exported packages (in the main environment: make test)", Path(given).is_dir())
    return Path(given)


def runtime_wheels() -> str:
    """Name and version of every installed wheel of ONNX Runtime, and of the provider libraries beside it."""
    found = {
        f"{distribution.metadata['Name'].lower()} {distribution.version}"
        for distribution in importlib.metadata.distributions()
        if (distribution.metadata["Name"] or "").lower().startswith(RUNTIME_WHEELS)
    }
    return ", ".join(sorted(found)) or "no ONNX Runtime"


class Writer:
    """In the child: every report as a line of JSON, written at once, so that a crash loses none."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config, self.path = config, path
        self.write({"wheels": runtime_wheels()})

    def write(self, value: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.write(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


class Claims:
    """Who runs which test file: the process that first made the file's mark in a folder known to both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ours: dict[Path, bool] = {}

    def take(self, path: Path) -> bool:
        """Whether this process runs the tests of a file. It asks before the test before it begins: pytest ends the
        fixtures of that one by what the next one needs.
        """
        if path not in self.ours:
            try:
                (self.folder / hashlib.sha256(str(path).encode()).hexdigest()).touch(exist_ok=False)
                self.ours[path] = True
            except FileExistsError:
                self.ours[path] = False
        return self.ours[path]


class Beside:
    """In the child that shares files with the main session: leaves out those that are taken."""

    def __init__(self, claims: Claims) -> None:
        self.claims, self.reached = claims, 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        self.leave_out(session, 0)
        self.leave_out(session, 1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.reached += 1
        self.leave_out(item.session, self.reached + 1)

    def leave_out(self, session: pytest.Session, position: int) -> None:
        """Let a test of a file of ours come at this position, if there is one."""
        while position < len(session.items) and not self.claims.take(path := session.items[position].path):
            session.items[position:] = [item for item in session.items[position:] if item.path != path]


class Orchestra:
    """In the main session: runs the children and hands their reports on."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.children: dict[str, Child | str] = {}
        """Per environment its child, or the reason why there is none."""
        self.outcomes: dict[str, Counter[str]] = {}
        """Per environment, the tests by outcome."""
        self.seconds: dict[str, float] = {}
        self.names: dict[str, str] = {}
        """Node id of each test that runs elsewhere or is of an environment -> its environment."""
        self.claims: Claims | None = None
        """Where a child claims files of this process."""
        self.reached = 0
        """Position of the test that runs now."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = {item.nodeid: found.name for item in session.items if (found := environment_of(item))}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Literal[True] | None:
        self.reached += 1
        if (os.cpu_count() or 1) > 1:
            self.start_ahead(item.session)
        environment = KNOWN.get(self.names.get(item.nodeid, ""))
        if environment is None or environment.python_of == MAIN:
            return None
        if environment.name not in self.children:
            self.children[environment.name] = self.start(environment, item.session)
        child = self.children[environment.name]
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in [absent(item, child)] if isinstance(child, str) else child.reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def start_ahead(self, session: pytest.Session) -> None:
        """Start the next child that there is work for, unless one runs; the last one shares files with this process."""
        if self.claims:
            self.pass_over(session, self.claims)
            return
        if any(isinstance(child, Child) and child.process.poll() is None for child in self.children.values()):
            return
        for name in dict.fromkeys(self.names.values()):  # in the order of the items
            if name not in self.children and KNOWN[name].python_of != MAIN:
                self.children[name] = self.start(KNOWN[name], session)
                return
        if self.config.getoption("--share"):
            self.share(session)

    def share(self, session: pytest.Session) -> None:
        """Let a process beside this one claim the files that are not begun, from the last to the first."""
        begun = {item.path for item in session.items[self.reached - 1 : self.reached + 1]}  # and pytest's next one
        files: dict[Path, list[pytest.Item]] = {}
        for item in session.items[self.reached :]:
            if item.nodeid not in self.names and item.path not in begun:
                files.setdefault(item.path, []).append(item)
        items = [item for path in reversed(files) for item in files[path]]
        if len(items) < LEAST_SHARED:
            return
        self.claims = Claims(Path(tempfile.mkdtemp(prefix="claims-", dir=self.folder())))
        for path in begun:
            self.claims.take(path)
        options = "--claims", str(self.claims.folder)
        self.children[BESIDE.name] = self.launch(BESIDE, Path(sys.executable), items, *options)

    def pass_over(self, session: pytest.Session, claims: Claims) -> None:
        """Put the tests of files that the child has claimed to the end, where its reports are waited for."""
        while self.reached + 1 < len(session.items):
            rest = session.items[self.reached + 1 :]
            if rest[0].nodeid in self.names or claims.take(rest[0].path):
                return
            theirs = {item for item in rest if item.path == rest[0].path and item.nodeid not in self.names}
            for item in theirs:
                self.names[item.nodeid] = BESIDE.name
                item.add_marker(pytest.mark.timeout(0))
            session.items[self.reached + 1 :] = sorted(rest, key=lambda item: item in theirs)

    def start(self, environment: Environment, session: pytest.Session) -> Child | str:
        """Start the child of an environment on all of its tests, or say why that cannot be done."""
        venvs = self.config.rootpath / self.config.getoption("--venvs")
        python = venvs / environment.name / "bin" / "python"
        if not (venvs / environment.name / ".installed").is_file():
            failed = venvs / f"{environment.name}.failed"
            detail = f" ({failed.read_text(encoding='utf-8').strip()})" if failed.is_file() else ""
            return f"environment {environment.name} is not installed{detail}; run: make env-{environment.name}"
        items = [item for item in session.items if self.names.get(item.nodeid) == environment.name]
        return self.launch(environment, python, items)

    def launch(self, environment: Environment, python: Path, items: list[pytest.Item], *options: str) -> Child | str:
        """Start a child on these tests, with the packages that one of them may need."""
        folder = self.folder()
        given = self.config.getoption("--packages")
        packages = Path(given) if given else folder / "not-exported"
        if not given and can_export() and any("packages" in getattr(item, "fixturenames", ()) for item in items):
            try:
                packages = ensure_packages(folder)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                return f"environment {environment.name} got no packages: {error}"
        ids = [item.nodeid for item in items]
        return Child(environment, python, folder, ids, self.config, "--packages", str(packages), *options)

    def folder(self) -> Path:
        """Where packages and the files of children are."""
        folder = self.config.rootpath / "build" / "contract"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count. A test is what its call was, unless setup or teardown did not pass."""
        name = self.names.get(report.nodeid, "main suite")
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        outcomes = self.outcomes.setdefault(name, Counter())
        outcomes[report.outcome] += report.when == "call" or report.outcome != "passed"

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """One line per environment: its wheels, and how its tests ended."""
        if not self.outcomes:
            return
        terminalreporter.section("environments")
        for name, outcomes in self.outcomes.items():
            child = self.children.get(name)
            wheels = child.wheels if isinstance(child, Child) else "-" if isinstance(child, str) else runtime_wheels()
            counts = ", ".join(f"{outcomes[each]} {each}" for each in ("passed", "failed", "skipped"))
            terminalreporter.write_line(f"{name} ({wheels}): {counts}, {self.seconds[name]:.0f} s")

    def pytest_sessionfinish(self) -> None:
        for child in self.children.values():
            if isinstance(child, Child):
                child.close()
        if self.claims:
            shutil.rmtree(self.claims.folder, ignore_errors=True)


def absent(item: pytest.Item, reason: str) -> pytest.TestReport:
    """The report of a test whose environment is not there: skipped, or failed where everything is required."""
    if os.environ.get("PARTITA_REQUIRE_ALL") == "1":
        return failed(item, f"{reason} (PARTITA_REQUIRE_ALL=1 allows no skips)")
    skipped = (str(Path(__file__)), 1, f"Skipped: {reason}")
    return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "skipped", skipped, "setup")


def failed(item: pytest.Item, reason: str) -> pytest.TestReport:
    """The report of a test that did not come to its end."""
    return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", reason, "call")


class Child:
    """One pytest in the Python of another environment."""

    def __init__(
        self, environment: Environment, python: Path, folder: Path, ids: list[str], config: pytest.Config, *options: str
    ) -> None:
        self.environment, self.config = environment, config
        self.wheels = "?"
        own = folder / f"{environment.name}-{os.getpid()}"  # two sessions may run in one checkout
        self.log, self.lines, self.ids = own.with_suffix(".log"), own.with_suffix(".reports"), own.with_suffix(".ids")
        self.ids.write_text("\n".join(ids) + "\n", encoding="utf-8")
        self.lines.write_text("", encoding="utf-8")
        self._waiting: dict[str, list[pytest.TestReport]] = {}
        self._complete: set[str] = set()
        self._read = 0
        self._deadline = time.monotonic() + ENVIRONMENT_SECONDS
        command = [str(python), "-m", "pytest", f"@{self.ids}", "--inside", environment.python_of, *options]
        command += ["--environments", environment.python_of, "--report-lines", str(self.lines)]
        command += ["--rootdir", str(config.rootpath), "-c", str(config.inipath), "-p", "no:cacheprovider"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--color=no"],
                cwd=config.rootpath,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """Wait for the test to end in the child, and give its reports; a failed one when the child ends first."""
        while item.nodeid not in self._complete:
            ended = self.process.poll() is not None
            self._read_lines()
            if item.nodeid in self._complete:
                break
            if ended or time.monotonic() > self._deadline:
                yield self._lost(item)
                return
            time.sleep(POLL_SECONDS)
        yield from self._waiting.pop(item.nodeid)

    def _read_lines(self) -> None:
        with self.lines.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        if whole:
            self._deadline = time.monotonic() + ENVIRONMENT_SECONDS
        self._read += len(whole)
        for line in whole.splitlines():
            data = json.loads(line)
            if "wheels" in data:
                self.wheels = data["wheels"]
                continue
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
            if isinstance(report.longrepr, list):  # where and why it was skipped: JSON has no tuples
                report.longrepr = tuple(report.longrepr)
            self._waiting.setdefault(report.nodeid, []).append(report)
            if report.when == "teardown":
                self._complete.add(report.nodeid)

    def _lost(self, item: pytest.Item) -> pytest.TestReport:
        code = self.process.poll()
        how = f"ended with exit code {code}" if code is not None else f"gave no report for {ENVIRONMENT_SECONDS} s"
        self.stop()
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
        lost = f"the pytest of environment {self.environment.name} {how} before this test did; {self.log} ends with:"
        return failed(item, f"{lost}\n{tail}")

    def stop(self) -> None:
        """End the child if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def close(self) -> None:
        """End the child and remove its files, but for its output, which stays as build/contract/NAME.log."""
        self.stop()
        for path in (self.lines, self.ids):
            path.unlink(missing_ok=True)
        self.log = self.log.replace(self.log.with_name(f"{self.environment.name}.log"))
