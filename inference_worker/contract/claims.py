"""The claim record: the owner and the state of an execution, changed by compare-and-set in the broker.

`millrace:claim:<request>:<execution>` is a hash with these fields:

- `attempt`, `owner` (replica), `gateway`, `tenant` and `job` (msgpack).
- `state`: queued, running, done, failed or cancelled.
- `form`: what another gateway needs to write the same stream.
- `pinned`: the pins that the execution made (see shared_pins.py).

Each change is one script, which does nothing unless the record is in the expected state. So repeated or late wakeups,
ends and failures have no effect, and neither have those of a replica that was considered lost. The script that ends an
execution also writes its usage event, so that both happen atomically.
"""

from __future__ import annotations

from pathlib import Path

from inference_worker.contract.messages import GATEWAY_STREAM_LENGTH, gateway_stream
from inference_worker.contract.script_files import read_script

_LUA = Path(__file__).parent / "lua"
CLAIM = read_script(_LUA / "claim.lua", gateway_stream=gateway_stream(""), stream_length=GATEWAY_STREAM_LENGTH)
_UNPIN = read_script(_LUA / "unpin.lua")
ABANDON = _UNPIN + read_script(_LUA / "abandon.lua")
FINISH = read_script(_LUA / "finish.lua")
FAIL = _UNPIN + read_script(_LUA / "fail.lua")
CANCEL = read_script(_LUA / "cancel.lua")
WITHDRAW = read_script(_LUA / "withdraw.lua")
