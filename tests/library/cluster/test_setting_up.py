"""A cluster or a worker of another version is one line that names both. No Ray."""

from __future__ import annotations

import pytest

from partita import __version__
from partita.errors import UsageError
from partita.library.cluster.setting_up import _check_probe, _not_connected

MISMATCH = (
    "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.12.1\n"
    "This process on node 1.2.3.4 was started with:\n    Ray: 2.60.0\n    Python: 3.11.9\n"
)


def test_a_cluster_of_another_python_is_named_with_that_of_the_command():
    error = _not_connected("auto", RuntimeError(MISMATCH))
    assert isinstance(error, UsageError) and "\n" not in str(error)
    assert "Python: 3.12.1" in str(error) and "Python: 3.11.9" in str(error)


@pytest.mark.parametrize(("there", "said"), [("0.0.0", "has Partita 0.0.0"), ("", "has no Partita")])
def test_a_worker_of_another_partita_is_refused(there, said):
    with pytest.raises(UsageError, match=f"/env/python on host {said}.*{__version__}"):
        _check_probe({"host": "host", "partita": there, "why": "No module named 'partita'"}, "/env/python")


def test_a_worker_of_the_same_partita_is_taken():
    _check_probe({"host": "host", "partita": __version__, "why": ""}, "/env/python")
