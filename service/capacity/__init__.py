"""What fits on a machine: a formula from the model's own files, and the engine's report to hold it against."""
