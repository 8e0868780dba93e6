-- KEYS claim; ARGV attempt, replica. Returns the next attempt, now queued, or nil if the replica does not own the claim.
local claim = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'owner')
if claim[1] ~= ARGV[1] or claim[2] ~= 'running' or claim[3] ~= ARGV[2] then return false end
redis.call('HSET', KEYS[1], 'state', 'queued')
redis.call('HDEL', KEYS[1], 'owner')
unpin(KEYS[1])
return redis.call('HINCRBY', KEYS[1], 'attempt', 1)
