"""The registry of tasks. Names are strings, so that a wrong name in a YAML fails before torch is imported.

A task file holds one class with its configuration as the attribute ``Config``; it is built as
``Task(Task.Config(...))`` and offers what ``tasks/base.py`` describes.
"""

TASKS = {
    "algorithmic": "lit_memory.tasks.algorithmic:Algorithmic",
    "associative_retrieval": "lit_memory.tasks.associative_retrieval:AssociativeRetrieval",
    "babilong": "lit_memory.tasks.babilong:BABILong",
    "needle": "lit_memory.tasks.needle:Needle",
    "memreasoner": "lit_memory.tasks.memreasoner:BabiEpisodes",
    "variable_tracking": "lit_memory.tasks.variable_tracking:VariableTracking",
    "passkey": "lit_memory.tasks.passkey:Passkey",
    "dna": "lit_memory.tasks.dna:DNA",
    "language_modeling": "lit_memory.tasks.language_modeling:LanguageModeling",
    "quadratic": "lit_memory.tasks.quadratic:Quadratic",
    "time_series": "lit_memory.tasks.time_series:TimeSeries",
}
