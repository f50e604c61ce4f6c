"""Verify: log ↔ local ↔ remote, by content. The command, the tests and the background scrub share these functions.

findings.py what is said · truth.py, probe.py rows from the logs, and the catalog compared with them · log.py the logs,
and that every eviction followed its upload · rows.py objects, chunks, blobs, counters · tiers.py the folded tiers ·
blocks.py, local.py bytes on this disk · remote.py blobs and the log's copies · audit.py the audit logs · run.py all of
it · openvolume.py, repair.py, mendlogs.py, logcopies.py what is safe to mend · scrub.py the same in the background.
"""
