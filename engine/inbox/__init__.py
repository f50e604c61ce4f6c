"""The inbox: the way into a volume for machines that do not mount it as its writer. It is made of the remote alone.

    format.py    the objects: door, commit, answers
    stage.py     a deliverer's blobs and packs, under one attempt
    records.py   records, staged as segments
    job.py       a deliverer's job: opened, committed, waited for
    check.py     the writer's look at what was delivered
    intake.py    the writer's task: look, check, publish, answer
    sweep.py     what goes: attempts that were not committed, answers that are old

A deliverer knows the remote's settings and a tenant's name; a Python program uses `open_inbox`:

    with open_inbox(RemoteSettings(url="s3://bucket/volume"), "default") as inbox:
        job = inbox.open_job("report-2026-11-18", to="reports/today")
        job.put("a.csv", b"1,2\\n")
        done = job.commit().wait()

What is published is the kinds': `files/arriving.py`, `append/arriving.py`.
"""

from aof2.engine.inbox.format import RefusedError
from aof2.engine.inbox.job import Inbox, Job, NotTakenInError, open_inbox

__all__ = ["Inbox", "Job", "NotTakenInError", "RefusedError", "open_inbox"]
