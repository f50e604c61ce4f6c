"""How the `aof2` command talks to a running daemon: `state_dir/control.sock`, lines of JSON.

protocol.py what goes over the socket · client.py the command's end · server.py the daemon's end, one task a client ·
verbs.py what the daemon can be asked for · walk.py paths to files, a page at a time · durable.py seal, upload, wait ·
move.py warm, evict, pin · views.py what `.aof2/` in the mount shows · mounted.py what a daemon hands to all of them.
"""
