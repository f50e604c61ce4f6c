"""Tenant kinds: what a tenant's names and bytes are, behind one protocol.

    kind.py        the protocol: names, bytes, life; a kind that refuses everything it does not bring
    registry.py    the kinds there are: one line each
    catalogued.py  a kind whose names are rows of the catalog
    mounted.py     the kinds of one mount: who answers for an inode or a handle
    opens.py       the open files of one mount, by handle

`fs/` routes by inode and by handle, and knows no kind by name. A kind is one folder of the engine and one line in
`registry.py`.
"""
