"""What an unmount leaves behind, read from state_dir once the daemon has ended.

Owner: the command. A crash leaves nothing.
"""

from __future__ import annotations

from aof2.engine.env import Env
from aof2.engine.inspect.rows import MANIFEST_DIR, open_rows, tenant_names
from aof2.engine.replicate.tail import positions_of
from aof2.engine.settings import Settings


def not_replicated(settings: Settings) -> str:
    """What of the log the remote does not have, now that the daemon has ended; "" when it has all."""
    state_dir = settings.volume.state_dir
    with open_rows(state_dir) as rows, rows.view() as view:
        lags = positions_of(Env(), view, state_dir / MANIFEST_DIR).lags(tenant_names(view))
    records = sum(one.lag_records for one in lags)
    if not records:
        return ""
    names = ", ".join(one.tenant or "the volume's own" for one in lags if one.lag_records)
    stays = f"they stay in {state_dir} and are uploaded after the next mount"
    return f"{records} record(s) of the log ({names}) are not in the remote; {stays}"
