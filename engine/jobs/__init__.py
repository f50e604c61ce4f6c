"""Durable work: a queue in the catalog, a runner, and one executor a job type.

Read in this order: `queue` (what a job is and how its state changes), `worker` (who runs it), then `checkpoint`,
`verify`, `download`, `prune` (what is done), `service` (what the volume opens and calls).
"""
