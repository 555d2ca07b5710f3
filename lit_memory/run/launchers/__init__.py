"""Where runs are started: this machine, a Slurm cluster, a Ray cluster."""
