"""What an addition touches, shown by adding one: the files named here, no others, and a user meets it everywhere.

Views, lowerings, exporters and passes have such a test of their own, in the tests of their rooms.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from tests.copies import Copy, copy_of_partita

PROVIDER = '''"""A provider that this test adds."""

from partita.observations.log_pattern import LogPattern
from partita.providers.base import Option, Provider
from partita.remedies import Remedy

PROVIDER = Provider(
    name="lunar",
    ort_name="LunarExecutionProvider",
    aliases=("moon",),
    wheels=("onnxruntime-lunar",),
    device_memory="Lunar",
    preferred_attention="primitives",
    options=(Option("crater", "str", "Tycho", "which crater to compute in"),),
    node_patterns=(
        LogPattern("no_kernel_op", r"lunar has no kernel for (?P<node>\\S+)"),{more}
    ),
    start_patterns=(LogPattern("device_missing", r"(?P<why>no moon in sight)"),),
    remedies={{"not_in_build": Remedy("wait for it"), "device_missing": Remedy("wait for the night")}},
)
'''
MODEL = (
    '<ir_version: 10, opset_import: ["" : 21]>\n'
    "g (float[2,4] x) => (float[2,4] y) {\n  [a] h = Relu(x)\n  [b] y = Elu<alpha=3.0>(h)\n}"
)
ROW = """    Reason(
        code="{code}",
        title="{title}",
        condition="the provider leaves such nodes alone",
        needs="its word, or an experiment",
        remedy="try again later",
        {fields}
    ),
"""
EXAMPLE = """    "{code}": Context(
        node="a",
        op_type="Elu",
        skipped=ChainEntry(provider="LunarExecutionProvider", status="active"),
        {example},
    ),
"""
TABLE, CODES = "partita/diagnosis/reasons/table.py", "partita/observations/codes.py"
EXAMPLES = "tests/diagnosis/reason_examples.py"


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    onnx.save(parser.parse_model(MODEL), tmp_path / "m.onnx")
    return copy_of_partita(tmp_path)


def test_a_provider_is_one_file(copy: Copy) -> None:
    copy.add("partita/providers/lunar.py", PROVIDER.format(more=""))
    found = copy.ask(
        """
from partita.commands import completion
from partita.providers.resolve import known_providers
from partita.providers.start import explain

place = ("place", "m.onnx", "--probe-seconds", 0, "--provider")
answer(
    completed=completion.chains("lun"),
    options=completion.provider_options("lunar."),
    placed=told(*place, "moon,cpu", "--report", "run.json", "--provider-option", "lunar.crater=Tycho"),
    explained=told("report", "explain", "run.json", "b"),
    shown=told("report", "show", "run.json", "--full"),
    checked=told("report", "check", "run.json", "--require", "provider=lunar,nodes>=1"),
    alone=told(*place, "lunar"),
    misspelt=told(*place, "lumar"),
    misused=told(*place, "lunar,cpu", "--provider-option", "lunar.creater=Tycho"),
    started=explain(known_providers()["lunar"], ["E: no moon in sight tonight"]).reason,
    providers=told("providers", "--json"),
)
"""
    )
    assert any("lunar" in str(entry) for entry in found["completed"])
    assert any("lunar.crater" in str(entry) for entry in found["options"])
    assert found["placed"]["code"] == 0, found["placed"]
    assert "is not used: not_in_build" in found["placed"]["err"] and "wait for it" in found["placed"]["err"]
    assert "not_in_build" in found["explained"]["out"] and "wait for it" in found["explained"]["out"]
    assert "lunar" in found["shown"]["out"].lower()
    assert found["checked"]["code"] == 5
    assert found["alone"]["code"] == 3 and "not_in_build" in found["alone"]["err"]
    assert found["misspelt"]["code"] == 2 and "lunar" in found["misspelt"]["err"]
    assert found["misused"]["code"] == 2 and "crater" in found["misused"]["err"]
    assert found["started"] == "device_missing"
    assert '"lunar"' in found["providers"]["out"]
    assert copy.touched == ["partita/providers/lunar.py"]


def add_reason(
    copy: Copy, code: str, title: str, *, fields: str = "", example: str, before: str = "not_claimed"
) -> None:
    """Its row, its code and its example; its place in the table is its rank."""
    row = '    Reason(\n        code="{}",\n'
    copy.edit(TABLE, row.format(before), ROW.format(code=code, title=title, fields=fields) + row.format(before))
    copy.edit(CODES, f'    "{before}",\n', f'    "{code}",\n    "{before}",\n')
    start = "EXAMPLES: dict[ReasonCode, Context] = {\n"
    copy.edit(EXAMPLES, start, start + EXAMPLE.format(code=code, example=example))


def test_a_reason_that_is_logged_is_a_row_a_code_and_an_example(copy: Copy) -> None:
    """And whoever logs it has the pattern: here a provider that is added, too."""
    pattern = '\n        LogPattern("new_moon", r"it is too dark for (?P<node>\\S+): (?P<why>.+)"),'
    copy.add("partita/providers/lunar.py", PROVIDER.format(more=pattern))
    add_reason(
        copy,
        "new_moon",
        "Too dark",
        example='log=("it is too dark for a: new moon",), '
        'patterns=(LogPattern("new_moon", r"it is too dark for (?P<node>\\S+): (?P<why>.+)"),)',
    )
    found = copy.ask(
        """
from pathlib import Path
from partita.observations.records import ChainEntry
from partita.partition_reports import storage
from partita.providers.resolve import known_providers
from tests.partition_reports.samples import CPU_CHAIN, GPU_CHAIN, mixed_session, report_of, run_facts
from tools.published import reasons_text

lunar = known_providers()["lunar"]
log = ("[I:onnxruntime:, lunar.cc:1 GetCapability] it is too dark for model.rotary_emb/Gather: new moon",)
session = mixed_session(log=log).with_provider(lunar.ort_name, patterns=lunar.node_patterns)
chain = (ChainEntry(provider=lunar.ort_name, status="active"), *GPU_CHAIN)
storage.write(report_of(run_facts(session), chain), Path("run.json"))
answer(
    explained=told("report", "explain", "run.json", "rotary_emb/Gather"),
    shown=told("report", "show", "run.json", "--full"),
    page=told("report", "html", "run.json", "--out", "-"),
    checked=told("report", "check", "run.json", "--require", "reason=new_moon,nodes=0"),
    unknown=told("report", "check", "run.json", "--require", "reason=new_mon,nodes=0"),
    documented=reasons_text(),
)
"""
    )
    for shown in ("explained", "shown", "page"):
        assert found[shown]["code"] == 0 and "new_moon" in found[shown]["out"], (shown, found[shown])
    assert "too dark for model.rotary_emb/Gather: new moon" in found["explained"]["out"]
    assert "try again later" in found["explained"]["out"] and "Too dark (new_moon)" in found["shown"]["out"]
    assert (found["checked"]["code"], found["unknown"]["code"]) == (5, 2)
    assert "## new_moon" in found["documented"] and "cpu_preferred new_moon" in found["documented"]
    assert copy.touched[1:] == [TABLE, CODES, EXAMPLES]


def test_a_reason_for_which_a_provider_does_not_start_is_a_row_a_code_and_an_example(copy: Copy) -> None:
    """The row of the provider-level reasons takes it in; without a remedy of its own, the general one is given."""
    add_reason(copy, "full_moon", "Too bright", example="log=()", before="library_missing")
    active = 'skipped=ChainEntry(provider="LunarExecutionProvider", status="active"),\n        log=()'
    unavailable = 'status="unavailable", reason="full_moon", evidence="too bright", remedy="wait"'
    copy.edit(EXAMPLES, active, f'skipped=ChainEntry(provider="LunarExecutionProvider", {unavailable})')
    pattern = (
        'LogPattern("full_moon", r"(?P<why>too bright)"), LogPattern("device_missing", r"(?P<why>no moon in sight)")'
    )
    provider = PROVIDER.format(more="").replace('LogPattern("device_missing", r"(?P<why>no moon in sight)")', pattern)
    copy.add("partita/providers/lunar.py", provider)
    found = copy.ask(
        """
from partita.diagnosis.precedence import explain as reason_of
from partita.providers.resolve import known_providers
from partita.providers.start import explain
from tests.diagnosis.reason_examples import EXAMPLES
from tools.published import reasons_text

failure = explain(known_providers()["lunar"], ["E: it is too bright here"])
answer(
    reason=failure.reason,
    remedy=str(failure.remedy),
    explained=reason_of(EXAMPLES["full_moon"])[0].code,
    documented=reasons_text(),
)
"""
    )
    assert (found["reason"], found["explained"]) == ("full_moon", "full_moon")
    assert "partita providers" in found["remedy"] and "## full_moon" in found["documented"]


COMBINED = "(last_static_shape, other_types, reduced_versions)"
LAST_FACTOR = '        "input": other_inputs,\n    }\n'
FACTOR = '''        "input": other_inputs,
        "alpha": other_alpha,
    }


def other_alpha(variant: Variant) -> Iterator[Variation]:
    """A factor that this test adds: an alpha of 2."""
    import onnx

    for attribute in variant.node.attribute:
        if attribute.name == "alpha" and attribute.f != 2:
            change = Change(attributes={"alpha": onnx.helper.make_attribute("alpha", 2.0)})
            yield from variations(variant, "alpha", change, "alpha=2")
'''
# The provider of the script takes an Elu when its alpha is TAKEN and, where FIXED says so, its type is float16.
PROBED = """
import onnx
from pathlib import Path
from partita.observations.facts import AssignedNode
from partita.partition_reports import storage
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.chain.open_chain import chain_entry
from partita.runtime.place.onnx_model import read_onnx
from partita.runtime.lab import probes as engine
from partita.runtime.lab.laboratory import ModelOutcome, Cache, Lab
from tests.partition_reports.samples import event, report_of, run_facts, session_facts, windows

class Scripted(Lab):
    def try_all(self, models, *, one_node=True):
        return [ModelOutcome(*(("supported", "") if self.takes(m) else ("rejected", "no kernel"))) for m in models]

    def takes(self, model):
        (node,) = [node for node in model.graph.node if node.op_type == "Elu"]
        half = model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
        return [entry.f for entry in node.attribute] == [2.0] and (half or not ALSO_HALF)

def report(name):
    cpu, qnn = "CPUExecutionProvider", "QNNExecutionProvider"
    on = {"a": qnn, "b": cpu}
    model = read_onnx(Path("m.onnx"))
    session = session_facts(
        file="m.onnx", phases=("run",), graph=model.nodes, plan=(("a", "b"),), registered=(qnn, cpu),
        assigned=tuple(AssignedNode(n.name, n.op_type, "", on[n.name], i) for i, n in enumerate(model.nodes)),
        events=tuple(event(0, i, n.name, n.op_type, on[n.name]) for i, n in enumerate(model.nodes)),
        runs=windows("run"),
    )
    chain = (Resolution(known_providers()["qnn"], "active"), Resolution(known_providers()["cpu"], "active"))
    facts, _ = engine.probe_run(run_facts(session), chain, {"m.onnx": model}, {"m.onnx": {"x": (2, 4)}}, 60.0)
    storage.write(report_of(facts, tuple(map(chain_entry, chain))), Path(name))

engine.Lab, engine.cache_for = Scripted, lambda _: Cache(None)
ALSO_HALF = False
report("one.json")
ALSO_HALF = True
report("two.json")
"""


def test_a_reason_that_experiments_show_is_a_row_a_code_an_example_and_a_factor(copy: Copy) -> None:
    add_reason(
        copy,
        "alpha_is_not_two",
        "Another alpha",
        fields='factors=("alpha",),',
        example="log=(), "
        'probe=NodeProbe("a", (ProbeRun("as_is", "", "rejected", ""), ProbeRun("alpha", "alpha=2", "supported", "")))',
    )
    copy.edit("partita/runtime/lab/factors.py", LAST_FACTOR, FACTOR)
    copy.edit("partita/runtime/lab/factors.py", COMBINED, COMBINED.replace(")", ", other_alpha)"))
    found = copy.ask(
        PROBED
        + """
from tools.published import reasons_text

answer(
    one=told("report", "explain", "one.json", "b"),
    two=told("report", "explain", "two.json", "b"),
    shown=told("report", "show", "one.json"),
    documented=reasons_text(),
)
"""
    )
    one, two = found["one"]["out"], found["two"]["out"]
    assert "alpha_is_not_two" in one and "with alpha=2 the provider supports this node" in one, found["one"]
    assert "try again later" in one
    assert "with float16 in place of float32 and alpha=2" in two, "it is combined with the factors that were there"
    assert "no_kernel_type" in two, "of which the first row decides"
    assert "Another alpha (alpha_is_not_two)" in found["shown"]["out"]
    assert "## alpha_is_not_two" in found["documented"]
    assert list(dict.fromkeys(copy.touched)) == [TABLE, CODES, EXAMPLES, "partita/runtime/lab/factors.py"]
