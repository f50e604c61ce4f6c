# Sets up a world where nobody may use /dev/fuse, in the mount namespace it is started in, and runs as_nobody.py there.
set -eu
folder=$1
command -v fusermount3 >/dev/null || { echo "no fusermount3"; exit 77; }
command -v setpriv >/dev/null || { echo "no setpriv"; exit 77; }
mknod -m 666 "$folder/fuse" c 10 229 || { echo "cannot make device nodes"; exit 77; }
mount --bind "$folder/fuse" /dev/fuse
head -c 0 /dev/fuse || { echo "the device cannot be opened there"; exit 77; }
cat >"$folder/channel" <<SH
#!/bin/sh
exec setpriv --reuid=65534 --regid=65534 --clear-groups $PWD/native/aof2-channel "\$@"
SH
chmod 755 "$folder/channel"
exec "$PYTHON" -m tests.channel.as_nobody "$folder"
