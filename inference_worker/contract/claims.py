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

from inference_worker.contract.messages import GATEWAY_STREAM_LENGTH, gateway_stream

# KEYS claim; ARGV attempt, replica, call id, batch for the gateway. Returns the job and the number of its tenant's
# pins, or nil if the attempt is not queued (any more). The batch reports the claim. After a lost response, a retry with
# the same call id returns the same result.
CLAIM = f"""
local claim = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'owner', 'claimed_by', 'tenant', 'job', 'gateway')
if claim[1] ~= ARGV[1] then return false end
local again = claim[2] == 'running' and claim[3] == ARGV[2] and ARGV[3] and claim[4] == ARGV[3]
if claim[2] ~= 'queued' and not again then return false end
redis.call('HSET', KEYS[1], 'state', 'running', 'owner', ARGV[2], 'claimed_by', ARGV[3] or '')
if ARGV[4] and claim[7] then
    local stream = '{gateway_stream("")}' .. claim[7]
    redis.call('XADD', stream, 'NOMKSTREAM', 'MAXLEN', '~', {GATEWAY_STREAM_LENGTH}, '*', 'e', ARGV[4])
end
return {{claim[6], redis.call('ZCARD', 'millrace:pins:' .. (claim[5] or ''))}}
"""

# The execution is not billed, so its pins are removed, except those that another execution has refreshed since.
_UNPIN = """
local function unpin(claim)
    local made = redis.call('HMGET', claim, 'pinned', 'tenant')
    if not made[1] then return end
    redis.call('HDEL', claim, 'pinned')
    local key, pins = 'millrace:pins:' .. made[2], cmsgpack.unpack(made[1])
    for i = 1, #pins, 2 do
        if tonumber(redis.call('ZSCORE', key, pins[i])) == pins[i + 1] then redis.call('ZREM', key, pins[i]) end
    end
end
"""

# KEYS claim; ARGV attempt, replica. Returns the next attempt, now queued, or nil if the replica does not own the claim.
ABANDON = (
    _UNPIN
    + """
local claim = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'owner')
if claim[1] ~= ARGV[1] or claim[2] ~= 'running' or claim[3] ~= ARGV[2] then return false end
redis.call('HSET', KEYS[1], 'state', 'queued')
redis.call('HDEL', KEYS[1], 'owner')
unpin(KEYS[1])
return redis.call('HINCRBY', KEYS[1], 'attempt', 1)
"""
)

# KEYS claim, usage stream, gateway stream, event log; ARGV attempt, usage event, batch for the gateway, retention in
# seconds, events for the log. Returns the usage event's stream id, or nil if another attempt or a failure was first.
# If the broker has lost the claim, the usage is still written: the settler counts each execution once.
FINISH = """
local claim = redis.call('HMGET', KEYS[1], 'attempt', 'state')
if claim[2] and (claim[1] ~= ARGV[1] or claim[2] ~= 'running') then return false end
local id = redis.call('XADD', KEYS[2], '*', 'e', ARGV[2])
if claim[2] then redis.call('HSET', KEYS[1], 'state', 'done') end
for i = 5, #ARGV do redis.call('RPUSH', KEYS[4], ARGV[i]) end
redis.call('EXPIRE', KEYS[4], ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('XADD', KEYS[3], 'NOMKSTREAM', 'MAXLEN', '~', 10000, '*', 'e', ARGV[3])
return id
"""

# KEYS claim, usage stream; ARGV attempt, usage event (outcome failed). Returns 1 if the execution has failed, by this
# call or before, else its state: it ended otherwise, or a newer attempt runs. With ARGV[3], a completed execution is
# unpinned too, because its usage will be reversed.
FAIL = (
    _UNPIN
    + """
local claim = redis.call('HMGET', KEYS[1], 'attempt', 'state')
if claim[2] == 'failed' then return 1 end
if not claim[2] then return 'gone' end
if claim[1] == ARGV[1] and claim[2] == 'done' and ARGV[3] then unpin(KEYS[1]) end
if claim[1] ~= ARGV[1] or (claim[2] ~= 'running' and claim[2] ~= 'queued') then return claim[2] end
redis.call('HSET', KEYS[1], 'state', 'failed')
unpin(KEYS[1])
redis.call('XADD', KEYS[2], '*', 'e', ARGV[2])
return 1
"""
)

# KEYS claim, usage stream; ARGV usage event of an execution that never started. Returns the replica to notify and its
# attempt. If no replica runs it, cancels it without usage and returns nil: the event releases its reservation.
CANCEL = """
local claim = redis.call('HMGET', KEYS[1], 'state', 'owner', 'attempt')
if claim[1] == 'queued' then
    redis.call('HSET', KEYS[1], 'state', 'cancelled')
    redis.call('XADD', KEYS[2], '*', 'e', ARGV[1])
end
if claim[1] ~= 'running' then return false end
redis.call('HSET', KEYS[1], 'cancel', 1)
return {claim[2], claim[3]}
"""

# KEYS claim, usage stream; ARGV usage event of an execution that never started. Cancels a queued execution. Returns 1
# if it was queued, else 0.
WITHDRAW = """
if redis.call('HGET', KEYS[1], 'state') ~= 'queued' then return 0 end
redis.call('HSET', KEYS[1], 'state', 'cancelled')
redis.call('XADD', KEYS[2], '*', 'e', ARGV[1])
return 1
"""
