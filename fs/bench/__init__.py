"""`aof2 bench mount`, `names` and `small`: the mount against the local disk and other filesystems on the same machine.

A run is `mount.py` with `rows.py`, `names.py` with `tree.py`, or `small.py` with `smallrows.py`; `venue.py` is where it
takes place, `race.py` and `verdict.py` how it is timed and judged; `contestants.py`, `peers.py`, `juicefs.py` and
`subject.py` are who takes part, `field.py` in which role; `work.py`, `nameloops.py` and `fio.py` do the timed work, in
processes of their own with deadlines (`process.py`). `formats.py` and `tiers.py` measure without a mount.
"""
