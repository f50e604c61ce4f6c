"""What an unmount leaves behind, read from state_dir once the daemon has ended, whatever ended it: files that only this
machine has, and the part of the log that the remote does not have.

Owner: the command. A crash leaves nothing.
"""

from __future__ import annotations

from aof2.engine.catalog.store import View
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.inspect.left import left_here
from aof2.engine.inspect.rows import MANIFEST_DIR, NoVolumeError, open_rows, tenant_names
from aof2.engine.replicate.tail import positions_of
from aof2.engine.settings import Settings
from aof2.engine.units import format_size


def left_behind(settings: Settings) -> tuple[str, bool]:
    """What is left and where it stays, "" when nothing is; and whether some of it is not even sealed."""
    state_dir = settings.volume.state_dir
    try:
        with open_rows(state_dir) as rows, rows.view() as view:
            files, unsealed = _files(view, settings)
            log = _log(view, settings)
    except NoVolumeError:
        return "", False
    except (Aof2Error, OSError) as e:
        return f"what is left in {state_dir} cannot be told: {e}", True
    if not files and not log:
        return "", False
    what = "; and ".join(filter(None, (files, log)))
    return f"{what}. They stay in {state_dir} and are uploaded after the next mount", unsealed


def _files(view: View, settings: Settings) -> tuple[str, bool]:
    left = left_here(view, settings.volume.state_dir)
    if not left:
        return "", False
    unsealed = f" ({left.unsealed} of them not sealed)" if left.unsealed else ""
    what = f"{left.files} file(s){unsealed}, {format_size(left.bytes)}, are not in the remote: {left.names()}"
    return what, bool(left.unsealed)


def _log(view: View, settings: Settings) -> str:
    lags = positions_of(Env(), view, settings.volume.state_dir / MANIFEST_DIR).lags(tenant_names(view))
    records = sum(one.lag_records for one in lags)
    if not records:
        return ""
    names = ", ".join(one.tenant or "the volume's own" for one in lags if one.lag_records)
    return f"{records} record(s) of the log ({names}) are not in the remote"
