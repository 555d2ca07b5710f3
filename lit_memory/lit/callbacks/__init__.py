"""What a run does besides Lightning: its curriculum, its guards, its seeds, its progress and its clock."""
