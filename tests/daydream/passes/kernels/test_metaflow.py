"""MetaFlow's policies: layers removed and scaled."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Phase
from daydream.graph.simulate import simulate
from daydream.passes.kernels.metaflow import metaflow
from hal.support.errors import InputError
from tests.daydream.graphs import graph, launched, pairs


def two_branches():
    """conv 10, conv 20, relu 4 and fc 6 µs: 41 µs with the first launch."""
    rows = [*launched("a", 10, layer="branch1.conv"), *launched("b", 20, layer="branch2.conv")]
    rows += [*launched("c", 4, layer="relu", phase=Phase.BACKWARD), *launched("d", 6, layer="fc")]
    return graph(rows, pairs(4))


def policy(tmp_path, text):
    path = tmp_path / "policy.json"
    path.write_text(text)
    return str(path)


def test_layers_are_removed_and_scaled(tmp_path):
    rules = '[{"remove": "branch1"}, {"scale": "BRANCH2", "factor": 1.5}, {"remove": "relu"}]'
    outcome = metaflow(two_branches(), policy=policy(tmp_path, rules))
    # 1 + 20 * 1.5 + 6.
    assert simulate(two_branches()).makespan_us == 41
    assert simulate(outcome.graph).makespan_us == 37
    assert len(outcome.graph) == 4
    assert outcome.notes[:2] == (
        "removed layers like 'branch1': 1 GPU tasks of 0.010 ms",
        "scaled layers like 'BRANCH2' by 1.5: 1 GPU tasks of 0.020 ms",
    )


def test_factors_of_several_entries_multiply(tmp_path):
    rules = '[{"scale": "conv", "factor": 0.5}, {"scale": "branch1", "factor": 0.5}]'
    after = metaflow(two_branches(), policy=policy(tmp_path, rules), host="launch").graph
    assert after.duration_us[1::2].tolist() == [2.5, 10, 4, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: "),
        ("[]", 'is no list of entries; write [{"remove": "layer"}, ...]'),
        ('{"remove": "a"}', "is no list of entries"),
        ("[7]", "[0]: Expected `object`, got `int`"),
        ('[{"remove": "fc"}, {"drop": "relu"}]', "[1]: Object contains unknown field `drop`"),
        ('[{"scale": "fc", "factor": "half"}]', "[0]: Expected `float | null`, got `str`"),
        ('[{"remove": "fc", "scale": "relu"}]', "[0]: needs either remove or scale"),
        ("[{}]", "[0]: needs either remove or scale"),
        ('[{"scale": "fc"}]', "[0].factor: goes with scale"),
        ('[{"remove": "fc", "factor": 2}]', "[0].factor: goes with scale"),
        ('[{"scale": "fc", "factor": -1}]', "[0].factor: -1 is out of range"),
        ('[{"remove": "("}]', "[0]: '(' is no regular expression"),
        ('[{"remove": "attention"}]', "[0]: 'attention' fits no layer; choose among layers such as branch1.conv, "),
    ],
)
def test_a_bad_entry_is_named(tmp_path, text, message):
    path = policy(tmp_path, text)
    with pytest.raises(InputError) as caught:
        metaflow(two_branches(), policy=path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"^policy: .*No such file"):
        metaflow(two_branches(), policy=str(tmp_path / "none.json"))
