"""Conclusions from probes that declare output shapes or add another provider option to a change."""

from __future__ import annotations

from partita.diagnosis.probe_conclusions import conclusions
from partita.diagnosis.reasons import explain
from tests.diagnosis.test_probe_conclusions import LEFT, changed, probe
from tests.diagnosis.test_reasons import context


def test_shape_declaration_is_cause_only_if_no_other_change_helps():
    declared = changed("output_shape", "supported", "the declared output sizes [2,9]")
    by_constant = changed("input", "supported", "input shape as a constant")
    (alone,) = conclusions(probe(LEFT, declared))
    assert alone.factors == ("output_shape",)
    (both,) = conclusions(probe(LEFT, declared, by_constant))
    assert both.factors == ("input",)


def test_shape_declaration_has_its_own_remedy():
    declared = changed("output_shape", "supported", "the declared output sizes [2,9]")
    fixed = changed("static_shape", "supported", "all sizes fixed")
    remedies = []
    for trial in (declared, fixed):
        reason, finding = explain(context(probe=probe(LEFT, trial)))
        assert reason.code == "dynamic_shape"
        remedies.append(finding.remedy)
    assert "declare them in the file" in (remedies[0] or "") and remedies[1] is None


def test_variants_with_another_option_count_as_same_variant():
    forms = [
        changed("other_form", "rejected", "T float32"),
        changed("other_form", "rejected", "T float32; a=1", "option"),
    ]
    assert conclusions(probe(LEFT, *forms))[0].evidence.endswith("it supports none of 1 other node of this operator")
    taken = changed("other_form", "supported", "T float32; a=1", "option")
    (shown,) = conclusions(probe(LEFT, forms[0], taken))
    assert shown.inferred and shown.evidence.startswith(
        "the provider supports other nodes of this operator (e.g. T float"
    )
