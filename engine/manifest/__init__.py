"""The manifest log: every tier transition of a stream, appended, checksummed, replayed.

Read in this order: `format` and `payloads` (bytes), `chunk` and `writer` (how they get on disk), `reader` (how they
come back), `index` (what they mean), `snapshot`, `retention`, `upload` (how the log stays small and safe), `shadow`
(the JSON copy it is compared with), `examine` and `check` (reading a damaged folder, and saying what is wrong with it).
"""
