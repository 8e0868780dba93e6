-- KEYS record, response; ARGV request hash, call ID, request ID, lease in ms, record TTL in seconds.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local stored = redis.call('HMGET', KEYS[1], 'sent', 'lease', 'done', 'request')
if stored[1] and stored[1] ~= ARGV[1] then return {'other'} end
if stored[3] then return {'done', redis.call('GET', KEYS[2])} end
if stored[1] and tonumber(stored[2]) > now then return {'running'} end
redis.call('HSET', KEYS[1], 'sent', ARGV[1], 'owner', ARGV[2], 'lease', now + ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
if stored[1] then return {'left', stored[4]} end
redis.call('HSET', KEYS[1], 'request', ARGV[3])
return {'new'}
