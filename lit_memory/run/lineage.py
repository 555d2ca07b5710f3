"""What a run reads and what it makes, as MLflow links them: its data sets and its model. Does not import MLflow;
``tracking.Tracker`` gives it the client and the classes.

Both links are made as often as they are asked for, and are there once: a process may die between any two calls.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from lit_memory.plan.runspec import RunSpec
from lit_memory.run import checkpoint
from lit_memory.run.search import TAG

SPLITS = {"train": "training", "test": "evaluation"}
"""Split -> what MLflow's pages call its use."""
LONGEST_PARAMETER = 500
"""Characters that MLflow takes as a parameter of a model."""
WEIGHTS = f"{TAG}weights"
"""Tag of a model: its checkpoint, below the command's root."""


class Lineage:
    """Links runs to data sets and models."""

    def __init__(self, client: Any, entities: Any, errors: tuple[type[Exception], ...]) -> None:
        """client: of MLflow. entities: MLflow's module of classes. errors: what the client raises."""
        self.client, self.entities, self.errors = client, entities, errors

    def link_data(self, run_id: str, spec: RunSpec) -> None:
        """Link the data sets of a run: the task's section, from which every sample of a split follows with the seed.

        Runs with the same task have the same data sets, so that MLflow can search for them.
        """
        splits = SPLITS if spec.stages else {"test": SPLITS["test"]}
        files, inputs = {name: source["digest"] for name, source in spec.files.items()}, []
        for split, use in splits.items():
            stages = [stage["task"] for stage in spec.stages] if split == "train" else []
            content = {"task": spec.task, "split": split, "stages": stages} | ({"files": files} if files else {})
            source = json.dumps(content, sort_keys=True)
            digest = hashlib.sha256(source.encode()).hexdigest()[:8]
            data = self.entities.Dataset(f"{spec.task['name']} {split}", digest, "lit_memory", source)
            inputs.append(self.entities.DatasetInput(data, [self.entities.InputTag("mlflow.data.context", use)]))
        try:
            self.client.log_inputs(run_id, inputs)
        except self.errors:  # another run has made the same data set in this moment; now it is there
            self.client.log_inputs(run_id, inputs)

    def link_model(self, run_id: str, spec: RunSpec, folder: Path) -> None:
        """Link the model that a run has trained, with the results of its test. folder: of the run."""
        if not spec.stages:
            return
        run, saved = self.client.get_run(run_id), checkpoint.saved(folder)
        weights = saved[0].relative_to(folder.parents[1]).as_posix() if saved else "deleted"
        experiment_id, tags = run.info.experiment_id, {f"{TAG}key": spec.key, WEIGHTS: weights}
        found = self.client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'")
        if found:
            model = found[0]
        else:
            name = re.sub(r"\W+", "-", f"{spec.arm} {spec.point} s{spec.seed}")
            params = {name: str(value)[:LONGEST_PARAMETER] for name, value in spec.model.items()}
            model = self.client.create_logged_model(experiment_id, name, run_id, tags, params, spec.model["name"])
        names = [name for name in run.data.metrics if name.startswith("result/")]
        rows = [row for name in names for row in self.client.get_metric_history(run_id, name)]
        # with the times that the store has: it knows a row by them, and another root may have sent these
        results = [self.entities.Metric(m.key, m.value, m.timestamp, m.step, model_id=model.model_id) for m in rows]
        self.client.log_batch(run_id, results)
        if not run.outputs.model_outputs:
            steps = sum(stage["steps"] for stage in spec.stages)
            self.client.log_outputs(run_id, [self.entities.LoggedModelOutput(model.model_id, steps)])
        self.client.finalize_logged_model(model.model_id, "READY")
