"""Two trainees at once on a real hub, whose servers are jobs of a real Slurm: `make test-hub`."""
