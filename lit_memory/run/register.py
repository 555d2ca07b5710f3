"""What all processes that share a store must agree on: entries that are written once, and marks that change.

MLflow knows no locks, but two things succeed for one of several processes only: a parameter of a run keeps its first
value, and the names of experiments are unique. Entries are parameters and marks are tags of runs in an MLflow
experiment of their own, ``NAME``. Its first run, the index, has one parameter for every other run, a page; an entry is
on the page of the first two characters of its name. So no process reads all entries to know one.
"""

from typing import Any
from uuid import uuid4

from lit_memory.run.search import pages

NAME = "lit-memory leases"
INDEX = "lit.index"
"""Tag of the experiment: the id of the index."""
NOTE = {"mlflow.note.content": "Which process trains which run, written by lit-memory (docs/reliability.md)."}


class Register:
    """The entries and marks of a store."""

    def __init__(self, client: Any, error: tuple[type[Exception], ...], artifacts: str) -> None:
        """client: of MLflow. error: what it raises where the store refuses or is away. artifacts: where the
        experiment would have them; it has none."""
        self.client, self.Error, self.artifacts = client, error, artifacts
        self.pages: dict[str, str] = {}
        """First characters of a name -> id of the page."""

    def settle(self, name: str, value: str) -> str:
        """Write an entry unless it is there; returns its value, which is the same for all processes for ever."""
        return self._settle(self._page(name), name, value)

    def mark(self, name: str, value: str) -> None:
        """Set the mark beside an entry."""
        try:
            self.client.set_tag(self._page(name), name, value)
        except self.Error:
            self.pages.clear()  # whoever deleted the page may have done so in MLflow's pages: it is restored next time
            raise

    def page(self, name: str) -> tuple[dict[str, str], dict[str, str]]:
        """The entries and the marks on the page of a name."""
        data = self.client.get_run(self._page(name)).data
        return data.params, data.tags

    def read(self) -> tuple[dict[str, str], dict[str, str]]:
        """All entries and all marks; creates nothing."""
        entries: dict[str, str] = {}
        marks: dict[str, str] = {}
        experiment = self.client.get_experiment_by_name(NAME)
        if experiment is not None:
            for run in pages(self.client.search_runs, [experiment.experiment_id]):
                entries |= run.data.params
                marks |= run.data.tags
        return entries, marks

    def _settle(self, run_id: str, name: str, value: str) -> str:
        try:
            self.client.log_param(run_id, name, value)
        except self.Error:
            found = self.client.get_run(run_id).data.params.get(name)
            if found is None:
                raise
            return found
        return value

    def _page(self, name: str) -> str:
        """Id of the page of a name, created where it does not exist."""
        letters = name[:2]
        if letters not in self.pages:
            experiment = self._experiment()
            index = experiment.tags[INDEX]
            found = self._restored(index).data.params.get(letters)
            if found is None:
                own = self._run(experiment.experiment_id, letters)
                found = self._settle(index, letters, own)
                if found != own:
                    self.client.delete_run(own)
            self.pages[letters] = self._restored(found).info.run_id
        return self.pages[letters]

    def _experiment(self) -> Any:
        """The experiment of the register. It is made under another name and gets its own when it is complete, so that
        there is one, and a whole one."""
        found = self.client.get_experiment_by_name(NAME)
        if found is None:
            draft = self.client.create_experiment(f"{NAME} {uuid4().hex}", self.artifacts, NOTE)
            self.client.set_experiment_tag(draft, INDEX, self._run(draft, "index"))
            try:
                self.client.rename_experiment(draft, NAME)
            except self.Error:  # another process was faster
                self.client.delete_experiment(draft)
                if self.client.get_experiment_by_name(NAME) is None:
                    raise
            found = self.client.get_experiment_by_name(NAME)
        if found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        return found

    def _run(self, experiment_id: str, name: str) -> str:
        run_id = self.client.create_run(experiment_id, run_name=name).info.run_id
        self.client.update_run(run_id, status="FINISHED")
        return run_id

    def _restored(self, run_id: str) -> Any:
        """A run that may have been deleted in MLflow's pages."""
        run = self.client.get_run(run_id)
        if run.info.lifecycle_stage == "deleted":
            self.client.restore_run(run_id)
        return run


class Checked:
    """A client of MLflow that calls ``check`` before every call."""

    def __init__(self, client: Any, check: Any) -> None:
        self._client, self._check = client, check

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is not filled yet
            raise AttributeError(name)
        self._check()
        return getattr(self._client, name)
