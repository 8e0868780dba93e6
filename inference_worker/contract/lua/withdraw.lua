-- KEYS claim, usage stream; ARGV usage event of an execution that never started. Cancels a queued execution. Returns 1
-- if it was queued, else 0.
if redis.call('HGET', KEYS[1], 'state') ~= 'queued' then return 0 end
redis.call('HSET', KEYS[1], 'state', 'cancelled')
redis.call('XADD', KEYS[2], '*', 'e', ARGV[1])
return 1
