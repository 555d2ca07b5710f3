"""Plans of the tiny experiment with changes, for the tests of ``lit_memory.plan``."""

import copy

from lit_memory.plan.experiment import parse


def change(tree, edits):
    """``tree`` with values at "a/b/c" set, or deleted where the value is ``...``."""
    tree = copy.deepcopy(tree)
    for path, value in edits.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return tree


def plan(tree, edits=None, overrides=(), scale=None):
    return parse(change(tree, edits or {}), "tiny.yaml").at(scale).plan(overrides)


def check_message(message, expected, path="tiny.yaml"):
    """One line that starts with ``expected`` up to the first "…" and has its other parts in this order."""
    text, first, *rest = str(message).replace(str(path), "FILE"), *expected.split("…")
    assert text.startswith(first.strip()) and "\n" not in text and "Error" not in text, text
    for part in rest:
        assert part.strip() in text
        text = text.partition(part.strip())[2]
