"""Records derived from other records by field name; missing fields raise an error."""

from __future__ import annotations

from partita.diagnosis.records import VariantRecord
from partita.observations.facts import ProbeRun, Substitution
from partita.observations.records import RemedyRecord, remedy_records
from partita.remedies import Remedy


def test_copy_of_copies_shared_fields_and_ignores_others():
    given = Substitution("float16", "float32")
    trial = ProbeRun("type", "float16 in place of float32", "supported", "", cached=True, substitution=given)
    changed = VariantRecord.copy_of(trial, after="float64", outcome="rejected")
    assert (changed.factor, changed.after, changed.outcome) == ("type", "float64", "rejected")
    assert VariantRecord.copy_of(trial).model_dump() == {
        "factor": "type",
        "change": "float16 in place of float32",
        "outcome": "supported",
        "message": "",
        "cached": True,
        "after": "float16",
        "before": "float32",
        "neg_added": False,
    }


def test_remedy_and_alternative_become_records():
    remedy = Remedy("add cpu", options=("--provider", "a,cpu"), alternative=Remedy("run it", command=("partita",)))
    assert remedy_records(remedy) == (
        RemedyRecord(text="add cpu", options=("--provider", "a,cpu")),
        RemedyRecord(text="run it", command=("partita",)),
    )
