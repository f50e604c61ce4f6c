"""`aof2 bench mount`: the mount against the local disk and other filesystems over the same S3 server.

`mount.py` is the run, `rows.py` what is measured, `race.py` and `verdict.py` how it is timed and judged;
`contestants.py`, `peers.py` and `subject.py` are who takes part; `work.py` and `fio.py` do the timed work, in processes
of their own with deadlines (`process.py`).
"""
