"""The log on the remote: getting it there, keeping it right, and making a volume out of it again.

listing.py what is there, read and verified · claim.py who may write · stream.py one stream's uploads, blocking ·
uploader.py LogReplicator, the component that runs them · audit.py the audit log, derived and uploaded ·
reconcile.py log against listing · follow.py a second state folder fed from the remote · restore.py a working state
folder on an empty machine, lost.py what it could not find.
"""
