"""The remote tier: one interface, S3 or a directory behind it.

store.py the interface · s3.py, directory.py the backends · resilience.py deadlines, retries, breaker · keys.py names ·
fence.py one writer a volume · limiter.py cold scans · source.py bytes in and out.
"""
