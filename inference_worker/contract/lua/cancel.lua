-- KEYS claim, usage stream; ARGV usage event of an execution that never started. Returns the replica to notify and its
-- attempt. If no replica runs it, cancels it without usage and returns nil: the event releases its reservation.
local claim = redis.call('HMGET', KEYS[1], 'state', 'owner', 'attempt')
if claim[1] == 'queued' then
    redis.call('HSET', KEYS[1], 'state', 'cancelled')
    redis.call('XADD', KEYS[2], '*', 'e', ARGV[1])
end
if claim[1] ~= 'running' then return false end
redis.call('HSET', KEYS[1], 'cancel', 1)
return {claim[2], claim[3]}
