-- KEYS claim, usage stream, gateway stream, event log; ARGV attempt, usage event, batch for the gateway, retention in
-- seconds, events for the log. Returns the usage event's stream id, or nil if another attempt or a failure was first.
-- If the broker has lost the claim, the usage is still written: the settler counts each execution once.
local claim = redis.call('HMGET', KEYS[1], 'attempt', 'state')
if claim[2] and (claim[1] ~= ARGV[1] or claim[2] ~= 'running') then return false end
local id = redis.call('XADD', KEYS[2], '*', 'e', ARGV[2])
if claim[2] then redis.call('HSET', KEYS[1], 'state', 'done') end
for i = 5, #ARGV do redis.call('RPUSH', KEYS[4], ARGV[i]) end
redis.call('EXPIRE', KEYS[4], ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('XADD', KEYS[3], 'NOMKSTREAM', 'MAXLEN', '~', 10000, '*', 'e', ARGV[3])
return id
