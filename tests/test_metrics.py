"""Names of metrics: one format, one parser."""

import itertools

import pytest

from lit_memory.util.metrics import MetricName

NAMES = ["loss", "exact_match", "M_norm.0", "hop1_support", "string_match_all", "a b", "answer-loss"]
CONDITIONS = [None, 0, 2, 10**20, 0.5, 1e-05, 2.5e30, -3, -0.25]
WRITTEN = {
    "loss": MetricName("loss"),
    "valid/loss": MetricName("loss", "valid"),
    "test/loss@2": MetricName("loss", "test", 2),
    "test/segment_loss[3]@0.5": MetricName("segment_loss", "test", 0.5, 3),
    "segment_loss[12]": MetricName("segment_loss", place=12),
    "test/M_norm.0@1e-05": MetricName("M_norm.0", "test", 1e-05),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_the_form(text):
    assert str(WRITTEN[text]) == text and MetricName.parse(text) == WRITTEN[text]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, condition):
    for split, place in itertools.product(["", "train", "valid", "test"], [None, 0, 7, 123456]):
        metric = MetricName(name, split, condition, place)
        again = MetricName.parse(str(metric))
        assert again == metric and type(again.condition) is type(condition)


@pytest.mark.parametrize(
    "text",
    ["", "epoch", "@2", "[3]", "loss@x", "loss[x]", "loss[1", "test/loss@", "loss@2[3]", "a/b/c", "loss@1.", "/"],
)
def test_any_text_survives(text):
    """Other callbacks log names of their own."""
    assert str(MetricName.parse(text)) == text


def test_what_is_no_condition_belongs_to_the_name():
    assert MetricName.parse("valid/precision@k") == MetricName("precision@k", "valid")
    assert MetricName.parse("valid/f1[macro]") == MetricName("f1[macro]", "valid")
