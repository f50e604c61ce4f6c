"""The hash-chained audit log (ENC/ASL-LOG/1): what was sealed, published, hidden and anchored, provably and in order.

format.py the bytes · commit.py whole batches · source.py, damage.py, reader.py replay · writer.py append ·
ranges.py the remote pieces · state.py what the records add up to.
"""
