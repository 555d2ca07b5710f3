"""Names of metrics: one format, one parser."""

import itertools

import pytest
from mlflow.utils.validation import _validate_metric_name

from lit_memory.util.metrics import MetricName, named_at

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


@pytest.mark.parametrize(
    ("x", "shown"), [(0, "0"), (500, "500"), (1048576, "1048576"), (5e7, "50000000"), (0.5, "0.5"), (1e-6, "1e-06")]
)
def test_names_of_numbers_of_a_test(x, shown):
    """MLflow takes them, at a million tokens as well: what it refuses waits on disk, and the report with it."""
    name = named_at("result/recall", x)
    assert name == f"result/recall at {shown}" and _validate_metric_name(name) is None
