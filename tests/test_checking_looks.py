"""Looks, sketches, and the nearest known mistake."""

import json
import re

import pytest
import torch

from dlojz_tp.authoring import records
from dlojz_tp.judging.checking import mistakes
from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, one_of, same, tried, within
from dlojz_tp.judging.checking.verdicts import verdict_of
from dlojz_tp.judging.grading import command
from dlojz_tp.judging.probes.shared_looks import judged_on_ranks
from dlojz_tp.works import source

HINTS = {
    "unit-form": "A vector.",
    "wrong-unit": "Not of length {size}.",
    "squared-length": "Take the root.",
    "held": "!",
}
INPUT = torch.arange(1.0, 41.0)
TRUTH = INPUT / INPUT.norm()
LOOKS = [
    Look("a vector", "form", "float32 (40,)", "unit-form"),
    Value("of length one", "values", TRUTH, "wrong-unit", fields=lambda seen, due: {"size": 1, "got": "other"}),
]


def observe(answer):
    got = answer(INPUT.clone())
    return {"form": form(got), "values": got}


def verdict(answer, known=(), looks=LOOKS):
    def check(answer):
        yield from judged(looks, observe, answer)

    return verdict_of(check, (answer,), number=1, title="Unit", hints=HINTS, known=known)


def recorded(slug, answer):
    return {"slug": slug, "look": "of length one", "at": None, "seen": mistakes.sketch(answer(INPUT))}


def test_a_right_answer_passes_with_each_claim_said_once():
    assert verdict(lambda x: x / x.norm()).seen == ("a vector", "of length one")


def test_a_look_has_its_own_hint():
    found = verdict(lambda x: x[:2])
    assert (found.slug, found.failed, found.seen, found.evidence) == ("unit-form", "a vector", (), {})
    assert verdict(lambda x: None).slug == "nothing-returned"


def test_of_a_yes_or_no_the_verdict_shows_the_hint_alone():
    found = verdict(lambda x: -x, looks=[Look("positive", lambda o: bool((o["values"] > 0).all()), True, "held")])
    assert (found.slug, found.expected, found.got) == ("held", "", "")


def test_a_value_has_the_hint_of_the_nearest_known_mistake_in_any_design():
    known = [recorded("squared-length", lambda x: x / x.dot(x)), recorded("held", lambda x: x)]
    found = verdict(lambda x: x * (1.03 / (x * x).sum()), known)
    assert (found.slug, found.got, found.failed) == ("squared-length", "other", "of length one")
    assert [slug for slug, _ in found.near] == ["squared-length", "held"]
    assert found.near[0][1] < 0.01 < 1 < found.near[1][1]


def test_where_no_mistake_is_near_the_look_has_the_hint():
    known = [recorded("squared-length", lambda x: x / x.dot(x))]
    found = verdict(lambda x: -x, known)
    assert (found.slug, found.hint) == ("wrong-unit", "Not of length 1.")
    assert verdict(lambda x: x, [known[0] | {"look": "another"}]).slug == "wrong-unit"
    assert verdict(lambda x: x, [known[0] | {"at": 2}]).near == ()


def test_an_observation_over_ranks_is_a_list():
    ranks = [{"sent": 3, "values": torch.ones(2)}, {"sent": 4, "values": torch.zeros(2)}]
    looks = [
        Look("sends", "sent", 4, "held", holds=at_most),
        Look("", "sent", lambda size: [3, 3 * size - 2], "held"),
        Value("", "values", lambda size: [torch.ones(2), torch.zeros(2)], "held"),
    ]
    assert list(judged(looks, lambda: ranks, at=2)) == ["sends", "sends", "sends", "sends"]
    looks[2] = Value("", "values", [torch.ones(2), torch.ones(2)], lambda seen, due: "wrong-unit")
    with pytest.raises(Exception, match="wrong-unit") as raised:
        list(judged(looks, lambda: ranks, at=2, where="2 ranks"))
    assert raised.value.evidence["look"] == "sends 2"
    assert raised.value.evidence["seen"] == {"n": 4, "sums": [1, 1, 0, 0]}
    assert (raised.value.where, raised.value.evidence["at"]) == ("2 ranks", 2)


def test_an_observation_in_parts_is_made_as_far_as_looks_need_it():
    made = []

    def observe(answer):
        for name in ("a", "b", "c"):
            made.append(name)
            yield {name: answer}

    looks = [Look("one", "a", 1, "held"), Look("two", lambda o: o["b"] + o["a"], 2, "held")]
    assert list(judged(looks, observe, 1)) == ["one", "one", "two"]
    assert made == ["a", "b"]
    with pytest.raises(KeyError):
        list(judged([Look("four", "d", 1, "held")], observe, 1))


def test_a_sketch_keeps_distances():
    one, other = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1))
    far = mistakes.distance(mistakes.sketch(one), mistakes.sketch(other))
    assert far == pytest.approx(4 * (one - other).norm().item() / 5000**0.5, rel=0.4)  # 4 = √16 sums
    assert mistakes.distance(mistakes.sketch(one), mistakes.sketch(one * (1 + 1e-7))) < 1e-4
    assert mistakes.distance(mistakes.sketch(one), mistakes.sketch(one[1:])) == float("inf")


def test_a_sketch_is_the_same_on_every_machine():
    sums = mistakes.sketch(torch.arange(20))["sums"]
    assert sums[:4] == pytest.approx(SUMS, rel=1e-5)


SUMS = [-16.0997, -11.6276, 4.02492, 4.47214]


def test_a_sketch_takes_words_and_what_is_not_finite():
    assert mistakes.sketch({"b": "hung", "a": 1}) == {"words": "{'b': 'hung', 'a': 1}"}
    assert mistakes.sketch({"b": [2.0, True], "a": torch.tensor(torch.nan)}) == {"n": 3, "sums": [1e6, 2, 1]}
    assert mistakes.distance(mistakes.sketch("hung"), mistakes.sketch("hung")) == 0
    assert mistakes.distance(mistakes.sketch(None), mistakes.sketch(1)) == float("inf")
    assert json.loads(json.dumps(mistakes.sketch([]))) == {"n": 0, "sums": []}


def test_what_a_look_may_compare():
    assert same([1, "a", torch.ones(2)], (1, "a", torch.ones(2) + 1e-7))
    assert not same([1], [1, 2])
    assert not same("a", "b")
    assert within(0.1)(torch.ones(2) * 1.05, torch.ones(2))
    assert at_most([1, 2], 2)
    assert not at_most([1, 3], 2)
    assert one_of("int64", ["int64", "int32"])
    assert not one_of(["int64", "bool"], ["int64", "int32"])
    assert tried(int, "3") == 3
    assert tried(int, "x").startswith("ValueError: invalid literal")
    assert form((torch.zeros(2, 3), None, "x")) == ["float32 (2, 3)", None, "str"]


def test_a_record_that_still_holds_is_left_as_it_is():
    first = verdict(lambda x: x / x.dot(x))
    old = [records.record("squared-length", first, [])]
    again = verdict(lambda x: (1 + 1e-4) * x / x.dot(x))
    assert records.record("squared-length", again, old) is old[0]
    assert records.record("squared-length", verdict(lambda x: x), old) != old[0]
    assert records.record("unit-form", verdict(lambda x: x[:2]), old) is None


def test_a_verdict_can_be_explained():
    known = [recorded("squared-length", lambda x: x / x.dot(x))]
    text = command.table([verdict(lambda x: x / x.dot(x), known)], explain=True)
    assert "squared-length: at “of length one”; nearest known mistakes: squared-length 0.00" in text
    assert "the check's own hint" in command.explained(verdict(lambda x: x[:2]))


def test_the_example_in_contributing_can_be_copied():
    text = (source.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = re.search(r'```python\n("""Balise 1.*?)```', text, re.DOTALL)[1]
    assert len(code.splitlines()) <= 40
    namespace = {}
    exec(code, namespace)
    answers = {
        "": lambda x: x * (x * x).sum().rsqrt(),
        "wrong-unit": lambda x: x / (x * x).sum(),
        "unit-form": lambda x: x.double(),
        "unit-waits": lambda x: x / x.norm().item(),
    }
    hints = dict.fromkeys(answers, "{got}")
    found = [
        verdict_of(namespace["balise_1"], (one,), number=1, title="", hints=hints).slug for one in answers.values()
    ]
    assert found == list(answers)


def test_over_ranks_an_observation_has_no_parts():
    def observe(answer):
        yield {"values": answer}

    with pytest.raises(TypeError, match="observe yields parts: over ranks it returns one dictionary"):
        list(judged_on_ranks([Look("all", "values", 1, "wrong")], observe, 1))
