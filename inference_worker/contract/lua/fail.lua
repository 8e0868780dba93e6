-- KEYS claim, usage stream; ARGV attempt, usage event (outcome failed). Returns 1 if the execution has failed, by this
-- call or before, else its state: it ended otherwise, or a newer attempt runs. With ARGV[3], a completed execution is
-- unpinned too, because its usage will be reversed.
local claim = redis.call('HMGET', KEYS[1], 'attempt', 'state')
if claim[2] == 'failed' then return 1 end
if not claim[2] then return 'gone' end
if claim[1] == ARGV[1] and claim[2] == 'done' and ARGV[3] then unpin(KEYS[1]) end
if claim[1] ~= ARGV[1] or (claim[2] ~= 'running' and claim[2] ~= 'queued') then return claim[2] end
redis.call('HSET', KEYS[1], 'state', 'failed')
unpin(KEYS[1])
redis.call('XADD', KEYS[2], '*', 'e', ARGV[2])
return 1
