"""What a job costs before it runs: formulas, measurement, and what would fit a budget."""
