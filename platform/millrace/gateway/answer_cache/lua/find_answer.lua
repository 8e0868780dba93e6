-- KEYS: answer, flight. ARGV: leader, milliseconds. Returns {answer, leader}: the cached answer, or else the leader of
-- its flight, which is the given one if there was none.
local answer = redis.call('GET', KEYS[1])
if answer then return {answer, ''} end
if ARGV[1] == '' then return {'', ''} end
local leader = redis.call('SET', KEYS[2], ARGV[1], 'NX', 'GET', 'PX', ARGV[2])
return {'', leader or ARGV[1]}
