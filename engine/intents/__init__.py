"""Intents: changes of names that were answered before the catalog has them; one log a tenant, in one order.

`format.py` is the record, `log.py` a tenant's log while it is mounted, `mounted.py` those of a mount, `fold.py` what a
record does to rows, `recover.py` what is done with logs that a crash left.
"""
