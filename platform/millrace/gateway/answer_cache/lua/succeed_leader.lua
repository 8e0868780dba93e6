-- KEYS: flight. ARGV: leader that failed, its successor, milliseconds. Returns the leader after that.
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then return leader end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return ARGV[2]
