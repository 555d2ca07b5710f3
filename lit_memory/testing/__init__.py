"""Checks of a model or a task, those that our own pass: ``check_model(MyModel)``, ``check_task(MyTask, length=8)``.

Every check raises AssertionError, in one line that says what is wrong. Our tests call the same checks one by one, on
all that is registered.
"""

from lit_memory.testing.models import check_model
from lit_memory.testing.tasks import check_task

__all__ = ["check_model", "check_task"]
