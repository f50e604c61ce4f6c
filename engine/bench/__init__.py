"""Benchmarks: what this machine does, as ratios against baselines measured in the same run."""
