"""Looking at a volume without opening it: rows without the writer's lock, paths, status, tier history.

rows.py the catalog read-only, or rebuilt from the logs · paths.py names to objects · status.py what there is now ·
why.py what happened · receipt.py since which place in the log a file is durable.
Nothing here writes below state_dir; all of it works while a daemon runs.
"""
