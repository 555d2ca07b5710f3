"""Models that read lines into an episodic memory: Larimar and MemReasoner."""
