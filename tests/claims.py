"""Two processes share the test files of a session: see `tests/environments.py`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest


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
